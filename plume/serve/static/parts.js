// What several views share: questions about the inside of a model, rows of tokens, answers to choose from, words from pieces.

import { bar, fixed, h, percent, visible } from './draw.js';
import { explained } from './store.js';

// asks /v1/explain unless the newest answer of this name is to the same question
export function ask(self, name, root, body, take) {
  const { context } = self,
    { state } = context.store,
    question = { ...explained(state, context.model()), ...body };
  self.asked ??= {};
  const asked = JSON.stringify(question);
  if (self.asked[name] === asked) return;
  self.asked[name] = asked;
  context.ask(root, context.question(name), '/v1/explain', question, (answer) => {
    if (self.asked[name] === asked) take(answer);
  });
}

// a row of tokens as buttons, one of them pressed
export function tokenRow({ pieces, start = 0, chosen, pick, label, note }) {
  return h(
    'div',
    { class: 'token-row', role: 'group', 'aria-label': label },
    pieces.map((piece, i) =>
      h(
        'button',
        { type: 'button', 'aria-pressed': i + start === chosen, onclick: () => pick(i + start) },
        visible(piece),
        note ? h('small', {}, note(i + start)) : null,
      ),
    ),
  );
}

// what an answer is called: a token, a label, an end of a span with the token that stands there, or a choice
export function answerName({ t, model, store }, { name, position }, i, piece) {
  const { plume } = model();
  if (plume.head === 'span') return piece === undefined ? t(`span_${name}`) : `${t(`span_${name}`)}: ${visible(piece)}`;
  if (plume.head === 'choose') return store.state.pair.split('\n').filter((line) => line.trim())[i] ?? name;
  return plume.predicts || plume.pair === 'target' ? visible(name) : name;
}

// answers with their probabilities, of which one is explained
export function answerList({ rows, chosen, pick, label }) {
  return h(
    'div',
    { class: 'list answers', role: 'group', 'aria-label': label },
    rows.map(({ index, name, probability, logit }) =>
      h(
        pick ? 'button' : 'div',
        { class: 'row', ...(pick ? { type: 'button', 'aria-pressed': index === chosen, onclick: () => pick(index) } : {}) },
        h('span', { class: 'token', title: name }, name),
        bar(probability ?? 0),
        h('span', { class: 'number' }, probability === null ? fixed(logit, 3) : percent(probability)),
      ),
    ),
  );
}

// the shown part of a long text, and a click that moves it
export function minimap(context) {
  let window = { total: 1, size: 1, start: 0 };
  const box = h('div', {
    class: 'minimap',
    hidden: true,
    onpointerdown: (event) => {
      const { total, size } = window,
        area = box.getBoundingClientRect();
      context.store.set({ start: Math.round(Math.max(0, Math.min(total - size, ((event.clientX - area.left) / area.width) * total - size / 2))) });
    },
  });
  box.append(h('i'));
  box.show = (next) => {
    window = next;
    box.hidden = next.total <= next.size;
    Object.assign(box.firstChild.style, { left: `${(100 * next.start) / next.total}%`, width: `${(100 * next.size) / next.total}%` });
  };
  return box;
}

// ---- words from pieces

// [first, behind the last] of every word
export function words(starts) {
  const found = [];
  starts.forEach((opens, i) => {
    if (opens || !found.length) found.push([i, i + 1]);
    else found.at(-1)[1] = i + 1;
  });
  return found;
}
export const joined = (pieces, groups) => groups.map(([from, to]) => pieces.slice(from, to).join(''));

// attention between words: the mean over the query's pieces of the sum over the key's
export function wordMatrix(data, columns, rowGroups, columnGroups) {
  const result = new Float32Array(rowGroups.length * columnGroups.length);
  rowGroups.forEach(([top, bottom], i) =>
    columnGroups.forEach(([left, right], j) => {
      let sum = 0;
      for (let r = top; r < bottom; r++) for (let c = left; c < right; c++) sum += data[r * columns + c];
      result[i * columnGroups.length + j] = sum / (bottom - top);
    }),
  );
  return result;
}
export const wordSums = (scores, groups) => groups.map(([from, to]) => scores.slice(from, to).reduce((a, b) => a + b, 0));

// which of an encoder-decoder's attentions or stacks: what a question says of it
export function stackOf(state, model) {
  if (!model.plume.pair || model.plume.pair !== 'target') return {};
  if (state.stack === 'encoder') return { stack: 'encoder' };
  return state.stack === 'cross' ? { stack: 'decoder', kind: 'cross' } : { stack: 'decoder' };
}

// every step of a model's walk in order: {id, stack, layer, kind}; layer -1 is before the blocks, the number of layers behind them
export function stepsOf(plume) {
  const two = plume.pair === 'target',
    pre = plume.norm === 'pre';
  const attention = (a, masked) => {
    const inner = ['qkv', 'heads', 'scores', 'scale', ...(masked ? ['mask'] : []), 'softmax', 'sum', 'concat', 'project'];
    return [...(pre ? ['norm'] : []), ...inner, 'add', ...(pre ? [] : ['norm'])].map((name) => `${a}.${name}`);
  };
  const mlp = [...(pre ? ['m.norm'] : []), 'm.up', 'm.act', 'm.down', 'm.add', ...(pre ? [] : ['m.norm'])];
  const stack = (name, layers, causal, cross) => {
    const at = (layer, kind) => ({ id: `${two ? `${name[0]}:` : ''}${layer >= 0 && layer < layers ? `b${layer}.` : ''}${kind}`, stack: two ? name : undefined, layer, kind });
    const block = [...attention('a', causal), ...(cross ? attention('c', false) : []), ...mlp];
    return [
      ...['text', 'tokens', 'embed'].map((kind) => at(-1, kind)),
      ...Array.from({ length: layers }, (_, layer) => block.map((kind) => at(layer, kind))).flat(),
      ...end(name).map((kind) => at(layers, kind)),
    ];
  };
  const end = (name) => {
    if (two && name === 'encoder') return ['memory'];
    const last = { 'next-token': two ? ['logits'] : ['logits', 'sample', 'cache'], 'masked-token': ['logits'], pretraining: ['logits'], bare: ['memory'] };
    return [...(pre ? ['final'] : []), ...(last[plume.head] ?? ['label'])];
  };
  if (two) return [...stack('encoder', plume.layers, false, false), ...stack('decoder', plume.decoder_layers, true, true)];
  return stack(plume.causal ? 'decoder' : 'encoder', plume.layers, plume.causal, false);
}
