// Layers: what would be predicted after each layer, how long the stream is there, and who moved it towards the answer.

import { bar, fixed, h, onShade, percent, shade, visible } from '../draw.js';
import { ask, minimap } from '../parts.js';

export function mount(root, context) {
  const { t } = context,
    map = minimap(context),
    box = h('div', { class: 'scroll' });
  root.append(map, box);
  const self = { root, context, box, map };
  context.side(
    h('p', {}, t(context.model()?.plume.causal === false ? 'introLayersMasked' : 'introLayers')),
    h('p', { class: 'muted' }, t('introLayers2')),
  );
  return self;
}

export function update(self, state) {
  const { context, box } = self;
  if (!context.model().plume.predicts && context.model().plume.pair !== 'target') {
    box.replaceChildren(h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aToken'), model: context.model().id })));
    return;
  }
  if (!state.text) {
    box.replaceChildren();
    return;
  }
  if (self.answer) draw(self);
  ask(self, 'layers', box, { view: 'layers', start: state.start < 0 ? null : state.start, size: 48 }, (answer) => {
    self.answer = answer;
    context.adopt(answer);
    context.report({ count: answer.window.total, context: context.model().plume.context, ms: answer.ms });
    draw(self);
  });
}

export function unmount(self) {
  self.root.replaceChildren();
}

function draw(self) {
  const { context, answer } = self,
    { t } = context,
    { lens, pieces, window } = answer,
    rows = lens.pieces.length;
  self.map.show(window);
  const head = h(
    'thead',
    {},
    h(
      'tr',
      {},
      h('th', { class: 'side-head' }, t('layers')),
      pieces.map((piece) => h('th', { title: visible(piece) }, visible(piece))),
    ),
  );
  const body = h(
    'tbody',
    {},
    Array.from({ length: rows }, (_, layer) =>
      h(
        'tr',
        {},
        h('th', { class: 'side-head' }, layer === 0 ? t('embedding') : t('layer', { n: layer })),
        pieces.map((_, place) => {
          const p = lens.probabilities[layer][place][0],
            depth = Math.sqrt(p) * 0.95;
          const cell = h(
            'td',
            {
              tabindex: 0,
              style: { background: shade(depth), color: onShade(depth) },
              'data-key': `${layer}/${place}`,
              'data-value': lens.tokens[layer][place][0],
            },
            visible(lens.pieces[layer][place][0]),
          );
          return context.why(cell, () => about(self, layer, place));
        }),
      ),
    ),
  );
  self.box.replaceChildren(h('table', { class: 'grid' }, head, body));
  self.box.scrollLeft = self.box.scrollWidth;
}

function about(self, layer, place) {
  const { answer } = self,
    { t } = self.context,
    { lens, norms, contributions } = answer;
  const top = lens.pieces[layer][place].map((piece, k) =>
    h(
      'div',
      { class: 'row' },
      h('span', { class: 'token' }, visible(piece)),
      bar(lens.probabilities[layer][place][k]),
      h('span', { class: 'number' }, percent(lens.probabilities[layer][place][k])),
    ),
  );
  const title = layer === 0 ? t('afterEmbedding') : t('afterLayer', { n: layer });
  const parts = [
    h('h2', {}, `${title} · ${visible(answer.pieces[place])}`),
    h('div', { class: 'list' }, top),
    h('pre', {}, `‖x‖ = ${fixed(norms[layer][place], 2)}\n${t('norm')}`),
  ];
  const lanes = [[t('embedding'), contributions.embedding[place], layer === 0]];
  contributions.attention.forEach((row, i) => {
    const add = (word, value) => lanes.push([`${t(word)} ${i + 1}`, value, layer === i + 1]);
    add('attentionPart', row[place]);
    if (contributions.cross.length) add('crossPart', contributions.cross[i][place]);
    add('mlpPart', contributions.mlp[i][place]);
  });
  lanes.push([t('normBias'), contributions.bias[place], false], [t('headPart'), contributions.head[place], false]);
  const largest = Math.max(...lanes.map((lane) => Math.abs(lane[1])), 1e-9);
  const lane = ([name, value, here]) => [
    h('span', { class: here ? '' : 'muted' }, name),
    h(
      'span',
      { class: 'lane' },
      h('i', {
        class: value < 0 ? 'minus' : '',
        style: { left: `${value < 0 ? 50 + (50 * value) / largest : 50}%`, width: `${(50 * Math.abs(value)) / largest}%` },
      }),
    ),
    h('span', { class: 'number' }, `${value < 0 ? '−' : '+'}${fixed(Math.abs(value))}`),
  ];
  return [
    ...parts,
    h('h2', {}, t('towards', { token: visible(contributions.pieces[place]) })),
    h('div', { class: 'diverge' }, lanes.flatMap(lane)),
    h('p'),
    h('p', { class: 'muted' }, t('contributionWhy', { x: fixed(contributions.total[place]) })),
  ];
}
