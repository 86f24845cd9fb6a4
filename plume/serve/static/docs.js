// The API page: every endpoint of openapi.json with its fields, and a place to try it.

import { h } from './draw.js';

const schema = await (await fetch('/openapi.json')).json();
const key = sessionStorage.getItem('plume-key'); // the one that the Explorer was given
const headers = { 'content-type': 'application/json', ...(key ? { authorization: `Bearer ${key}` } : {}) };
const models = await fetch('/v1/models', { headers })
  .then((answer) => answer.json())
  .catch(() => null);
const model = models?.data?.[0]?.id ?? 'MODEL';

const EXAMPLES = {
  '/v1/completions': { model, prompt: 'Once upon a time', max_tokens: 20, seed: 1 },
  '/v1/embeddings': { model, input: ['a small text'] },
  '/v1/next-tokens': { model, input: 'Once upon a', k: 5 },
  '/v1/score': { model, input: 'Once upon a time' },
  '/v1/fill-mask': { model, input: 'Once upon a [MASK]', k: 5 },
  '/v1/tokenize': { model, input: 'Once upon a time' },
  '/v1/explain': { model, input: 'Once upon a time', view: 'attention', layer: 0, head: 0 },
  '/v1/classify': { model, input: 'a fine film' },
  '/v1/tag': { model, input: ['Ann', 'lives', 'in', 'Paris'] },
  '/v1/predict': { model, input: [{ text: 'a fine film' }] },
  '/v1/answer': { model, question: 'Where does Ann live?', input: 'Ann lives in Paris.' },
};

const follow = (part) => (part?.$ref ? schema.components.schemas[part.$ref.split('/').pop()] : part);

function kind(part) {
  const real = follow(part);
  if (!real) return '';
  if (real.enum) return real.enum.join(' | ');
  if (real.anyOf) return [...new Set(real.anyOf.map(kind))].filter((name) => name !== 'null').join(' | ');
  return real.type === 'array' ? `[${kind(real.items)}]` : (real.type ?? '');
}

function fields(body) {
  const rows = Object.entries(body.properties ?? {}).map(([name, part]) =>
    h(
      'tr',
      {},
      h('td', {}, h('code', {}, name)),
      h('td', { class: 'muted' }, kind(part)),
      h(
        'td',
        { class: 'muted' },
        body.required?.includes(name) ? 'needed' : part.default === undefined || part.default === null ? '' : String(part.default),
      ),
      h('td', {}, part.description ?? ''),
    ),
  );
  return h('div', { class: 'scroll' }, h('table', {}, h('tbody', {}, rows)));
}

function trial(path, method) {
  const text = h('textarea', { rows: 3, spellcheck: 'false', value: JSON.stringify(EXAMPLES[path], null, 1), 'aria-label': 'body' }),
    answer = h('pre', { hidden: true });
  const run = async () => {
    const reply = await fetch(path, method === 'post' ? { method: 'POST', headers, body: text.value } : { headers });
    const received = await reply.text();
    answer.hidden = false;
    answer.textContent = `${reply.status}\n${received.length > 4000 ? `${received.slice(0, 4000)} …` : received}`;
  };
  return h(
    'div',
    { class: 'trial' },
    method === 'post' ? text : null,
    h('button', { type: 'button', class: 'plain', onclick: run }, 'Try'),
    answer,
  );
}

document.getElementById('docs').append(
  h('p', { class: 'muted' }, schema.info.summary ?? ''),
  ...Object.entries(schema.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => {
      const body = follow(operation.requestBody?.content?.['application/json']?.schema);
      return h(
        'section',
        {},
        h('h2', {}, h('code', {}, `${method.toUpperCase()} ${path}`)),
        h('p', {}, operation.description ?? ''),
        body ? fields(body) : null,
        path.includes('{') || path.includes('events') ? null : trial(path, method),
      );
    }),
  ),
);
