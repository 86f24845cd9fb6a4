// Masks: words are buttons; pressed ones are hidden, and a model that sees both sides says what it would put there.

import { bar, h, percent, visible } from '../draw.js';

export function mount(root, context) {
  const { t } = context,
    words = h('div', { class: 'words' }),
    fills = h('div', { class: 'fills' });
  root.append(words, fills);
  context.side(h('p', {}, t('introMasks')), h('p', { class: 'muted' }, t('introMasks2')));
  return { root, context, words, fills };
}

export function update(self, state) {
  const { context } = self,
    model = context.model();
  if (!model.plume.masks) {
    self.words.replaceChildren(h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aMasked'), model: model.id })));
    self.fills.replaceChildren();
    return;
  }
  if (!state.text) {
    self.words.replaceChildren();
    self.fills.replaceChildren();
    return;
  }
  context.ask(self.root, context.question('cut'), '/v1/tokenize', { model: model.id, input: state.text }, (answer) => {
    self.cut = answer;
    context.report({ count: answer.tokens.length, context: model.plume.context, ms: answer.ms });
    drawWords(self);
    ask(self, model);
  });
}

export function unmount(self) {
  self.root.replaceChildren();
}

const masked = (state) => new Set(state.masked ? state.masked.split('.').map(Number) : []);

// tokens that belong to one word, with the characters they cover
function wordsOf({ starts, spans }, text) {
  const found = [];
  starts.forEach((start, i) => {
    if (start || !found.length) found.push({ places: [i] });
    else found.at(-1).places.push(i);
  });
  const letters = [...text]; // spans count characters, not halves of them
  return found.map(({ places }) => ({
    places,
    from: spans[places[0]][0],
    to: spans[places.at(-1)][1],
    text: letters.slice(spans[places[0]][0], spans[places.at(-1)][1]).join('').trim(),
  }));
}

function drawWords(self) {
  const { store } = self.context,
    chosen = masked(store.state);
  self.all = wordsOf(self.cut, store.state.text);
  self.words.replaceChildren(
    ...self.all.map((word, i) =>
      h(
        'button',
        {
          type: 'button',
          'aria-pressed': chosen.has(i),
          onclick: () => {
            chosen.has(i) ? chosen.delete(i) : chosen.add(i);
            store.set({ masked: [...chosen].sort((a, b) => a - b).join('.') });
          },
        },
        chosen.has(i) ? '▁▁▁' : word.text || visible(self.cut.pieces[word.places[0]]),
      ),
    ),
  );
}

function ask(self, model) {
  const { context } = self,
    { t } = context,
    chosen = [...masked(context.store.state)].filter((i) => i < self.all.length);
  if (!chosen.length) {
    self.fills.replaceChildren(h('p', { class: 'empty' }, t('noMask')));
    return;
  }
  const hidden = new Set(chosen.flatMap((i) => self.all[i].places));
  const tokens = self.cut.tokens.map((id, i) => (hidden.has(i) ? model.plume.mask_id : id));
  context.ask(self.fills, context.question('fill'), '/v1/fill-mask', { model: model.id, input: tokens, k: 10 }, ({ masks }) => {
    const at = new Map(masks.map((mask) => [mask.place, mask.candidates]));
    self.fills.replaceChildren(
      ...chosen.map((i) =>
        h(
          'div',
          {},
          h('h2', {}, t('maskOf', { word: self.all[i].text })),
          self.all[i].places.map((place) => list(self, i, at.get(place))),
        ),
      ),
    );
  });
}

function list(self, word, candidates) {
  const { context } = self;
  return h(
    'div',
    { class: 'list' },
    candidates.pieces.map((piece, k) =>
      context.why(
        h(
          'button',
          { type: 'button', class: 'row', onclick: () => put(self, word, piece) },
          h('span', { class: 'token' }, visible(piece.trim())),
          bar(candidates.probabilities[k]),
          h('span', { class: 'number' }, percent(candidates.probabilities[k])),
        ),
        () => [
          h('h2', { class: 'mono' }, visible(piece)),
          h('pre', {}, `l = ${candidates.logits[k].toFixed(2)}\np = ${percent(candidates.probabilities[k])}`),
          h('p', { class: 'muted' }, context.t('fillWhy')),
        ],
      ),
    ),
  );
}

function put(self, i, piece) {
  const { store } = self.context,
    letters = [...store.state.text],
    { from, to } = self.all[i],
    space = /^\s/.test(letters[from]) ? ' ' : '';
  const chosen = masked(store.state);
  chosen.delete(i);
  store.set(
    { text: letters.slice(0, from).join('') + space + piece.trim() + letters.slice(to).join(''), ids: '', masked: [...chosen].join('.') },
    { push: true },
  );
}
