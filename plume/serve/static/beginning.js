// The first screen is never empty: a text that suits the model and, for an English GPT, one question about it.

import { unpack } from './draw.js';
import { joined, words } from './parts.js';

const SPAN = 24; // tokens of a head's small picture that are not merged

// what a model generates from its start token: words that suit it
export async function ownWords(api, t, model) {
  const body = { model: model.id, max_tokens: 12, temperature: 0.7, top_k: 20, seed: 1 };
  const answer = await api.ask('beginning', '/v1/completions', body).catch(() => null);
  const made = answer?.choices?.[0]?.text.trim().split('\n')[0].trim();
  return made || t('lessonText');
}

// a prompt that suits the model, its own words, or an example for its task
export async function beginning(api, t, model) {
  const { plume } = model;
  const text = plume.prompts[0] ?? (plume.generates ? await ownWords(api, t, model) : plume.pair ? t(`text_${plume.pair}`) : t('lessonText'));
  return { text, pair: plume.pair ? t(`pair_${plume.pair}`) : '' };
}

// the parts of the state that ask what "it" attends to, in the head whose "it" attends to "robot" most
export async function lesson(api, model, input) {
  const state = { view: 'attention', group: 'words', picture: 'arcs' };
  const seen = await api.ask('beginning', '/v1/explain', { model: model.id, input, view: 'heads', start: 0, size: SPAN }).catch(() => null);
  if (!seen) return state;
  const groups = words(seen.starts),
    names = joined(seen.pieces, groups).map((name) => name.trim()),
    [it, robot] = ['it', 'robot'].map((name) => groups[names.indexOf(name)]);
  if (!it || !robot) return state;
  const { data, shape } = unpack(seen.thumbnails),
    [layers, heads, rows, columns] = shape,
    query = it[1] - 1;
  const weight = (i) => data.slice((i * rows + query) * columns + robot[0], (i * rows + query) * columns + robot[1]).reduce((a, b) => a + b, 0);
  const best = Array.from({ length: layers * heads }, (_, i) => i).reduce((a, b) => (weight(b) > weight(a) ? b : a));
  return { ...state, query, layer: Math.floor(best / heads), head: best % heads };
}
