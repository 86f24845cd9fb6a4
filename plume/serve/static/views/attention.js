// Attention: all heads small, one large, and for one query every number from q to the weighted sum of v.

import { arcs, choice, fixed, h, largest, matrix, paint, percent, press, signedNumber, strip, unpack, visible } from '../draw.js';
import { ask, joined, minimap, stackOf, wordMatrix, words } from '../parts.js';

const SORTS = ['layer', 'distance', 'previous', 'first', 'duplicate', 'induction'],
  SPAN = 64;

export function mount(root, context) {
  const { t, store } = context;
  const sort = h(
    'select',
    { 'aria-label': t('sortBy'), onchange: () => store.set({ sort: sort.value }) },
    SORTS.map((name) => h('option', { value: name }, t(`sort_${name}`))),
  );
  const stacks = choice(context, 'stack', [
    ['encoder', 'encoderSelf'],
    ['', 'decoderSelf'],
    ['cross', 'crossAttention'],
  ]);
  const groups = [
    choice(context, 'mix', [
      ['head', 'one'],
      ['mean', 'mean'],
      ['rollout', 'rollout'],
    ]),
    choice(context, 'picture', [
      ['matrix', 'matrix'],
      ['arcs', 'arcs'],
    ]),
    choice(context, 'group', [
      ['pieces', 'pieces'],
      ['words', 'wholeWords'],
    ]),
    stacks,
  ];
  const heads = h('div', { class: 'heads' }),
    title = h('h2'),
    map = minimap(context),
    large = h('div', { class: 'scroll' }),
    steps = h('div');
  root.append(
    h('div', { class: 'controls' }, h('label', {}, t('sortBy'), sort), groups),
    h('div', { class: 'attention' }, h('div', { class: 'heads-wide' }, heads), h('div', {}, title, map, large, steps)),
  );
  context.side(h('p', {}, t('introAttention')), h('p', { class: 'muted' }, t('introAttention2')));
  return { root, context, sort, groups, stacks, heads, title, map, large, steps };
}

export function update(self, state) {
  const { context } = self,
    model = context.model();
  self.sort.value = state.sort;
  self.stacks.hidden = model.plume.pair !== 'target';
  press(self.groups, state);
  if (!state.text) {
    [self.heads, self.title, self.large, self.steps].forEach((part) => part.replaceChildren());
    return;
  }
  const about = { start: state.start < 0 ? null : state.start, size: SPAN, ...stackOf(state, model) };
  const layers = about.stack === 'decoder' ? model.plume.decoder_layers : model.plume.layers,
    layer = Math.min(state.layer, layers - 1),
    head = Math.min(state.head, model.plume.heads - 1),
    mix = about.kind === 'cross' && state.mix === 'rollout' ? 'mean' : state.mix;
  ask(self, 'overview', self.heads, { ...about, view: 'heads' }, (answer) => {
    self.overview = answer;
    context.adopt(answer);
    drawHeads(self);
  });
  ask(self, 'matrix', self.large, { ...about, view: 'attention', layer, head, mix }, (answer) => {
    self.seen = { ...answer, ...unpack(answer.matrix) };
    context.report({ count: answer.window.total, context: model.plume.context, ms: answer.ms });
    drawLarge(self);
  });
  if (state.query >= 0 && mix === 'head')
    ask(self, 'steps', self.steps, { ...about, view: 'steps', layer, head, query: state.query }, (answer) => {
      self.stepping = answer;
      drawSteps(self);
    });
  else {
    self.steps.replaceChildren();
    self.asked.steps = '';
  }
  if (self.overview) drawHeads(self);
  if (self.seen) drawLarge(self);
}

export function unmount(self) {
  self.root.replaceChildren();
}

function drawHeads(self) {
  const { context } = self,
    { state } = context.store,
    { scores, thumbnails } = self.overview,
    { t } = context;
  const [layers, heads, rows, columns] = thumbnails.shape,
    { data } = self.thumbs?.of === thumbnails ? self.thumbs : (self.thumbs = { of: thumbnails, ...unpack(thumbnails) });
  const all = Array.from({ length: layers * heads }, (_, i) => [Math.floor(i / heads), i % heads]);
  if (state.sort !== 'layer' && scores[state.sort]) all.sort(([a, b], [c, d]) => scores[state.sort][c][d] - scores[state.sort][a][b]);
  self.heads.style.gridTemplateColumns = `repeat(${Math.min(heads, 12)}, minmax(0, 1fr))`;
  self.heads.replaceChildren(
    ...all.map(([layer, head]) => {
      const from = (layer * heads + head) * rows * columns;
      const button = h(
        'button',
        {
          type: 'button',
          'aria-pressed': layer === state.layer && head === state.head && state.mix === 'head',
          'aria-label': t('headIs', { layer: layer + 1, head: head + 1 }),
          onclick: () => context.store.set({ layer, head, mix: 'head' }),
        },
        paint(h('canvas'), rows, columns, (i, j) => data[from + i * columns + j] / 255),
      );
      return context.why(button, () => [
        h('h2', {}, t('headIs', { layer: layer + 1, head: head + 1 })),
        ...SORTS.slice(1).map((name) =>
          h(
            'pre',
            {},
            `${t(`sort_${name}`)}  ${name === 'distance' ? fixed(scores[name][layer][head], 1) : percent(scores[name][layer][head])}\n${context.words().scoreWhy[name]}`,
          ),
        ),
      ]);
    }),
  );
}

// the matrix as it is, or between whole words
function grouped(self) {
  const { seen } = self,
    { state } = self.context.store,
    [, columns] = seen.shape,
    keys = seen.keys ?? seen.pieces;
  if (state.group !== 'words') return { data: seen.data, pieces: seen.pieces, keys, first: (i) => i + seen.window.start };
  const rowGroups = words(seen.starts),
    keyGroups = words(seen.key_starts ?? seen.starts);
  return {
    data: wordMatrix(seen.data, columns, rowGroups, keyGroups),
    pieces: joined(seen.pieces, rowGroups),
    keys: joined(keys, keyGroups),
    first: (i) => rowGroups[i][1] - 1 + seen.window.start, // a word's query is that of its last piece
  };
}

function drawLarge(self) {
  const { context, seen } = self,
    { state } = context.store,
    { t } = context,
    { window } = seen;
  self.title.textContent =
    seen.mix === 'head' ? t('headIs', { layer: seen.layer + 1, head: seen.head + 1 }) : `${t(seen.mix)} · ${t('layerIs', { layer: seen.layer + 1 })}`;
  self.map.show(window);
  if (!self.map.hidden)
    self.title.append(
      h('span', { class: 'muted' }, `  ${t('window', { from: window.start + 1, to: window.start + window.size, total: window.total })}`),
    );
  const shown = grouped(self),
    query = shown.pieces.findIndex((_, i) => shown.first(i) >= state.query);
  const options = {
    ...shown,
    width: Math.min(760, self.large.clientWidth || 600, Math.max(420, innerHeight - 270)),
    query: state.query < window.start ? -1 : query,
    on: (i, j) => inspect(self, shown, i, j),
    pick: (i) => context.store.set({ query: shown.first(i) }),
  };
  self.large.replaceChildren(state.picture === 'arcs' ? arcs(options) : matrix(options));
}

function inspect(self, { data, pieces, keys }, i, j) {
  const { t } = self.context,
    n = keys.length;
  if (i === null && j === undefined) return;
  const list = (title, names, values) => [
    h('h2', {}, title),
    h(
      'div',
      { class: 'list' },
      values
        .map((w, k) => [w, k])
        .sort((a, b) => b[0] - a[0])
        .slice(0, 8)
        .filter(([w]) => w > 0.0005)
        .map(([w, k]) =>
          h(
            'div',
            { class: 'row' },
            h('span', { class: 'token' }, visible(names[k])),
            h('span', { class: 'track' }, h('span', { class: 'fill', style: { width: `${Math.min(100, 100 * w)}%` } })),
            h('span', { class: 'number' }, percent(w)),
          ),
        ),
    ),
  ];
  const parts = [];
  if (i !== null && j !== null) parts.push(h('pre', {}, `${visible(pieces[i])} → ${visible(keys[j])}\n${t('weightWhy')}\n= ${fixed(data[i * n + j], 4)}`));
  if (i !== null) parts.push(...list(t('attendsTo', { token: visible(pieces[i]) }), keys, Array.from(data.slice(i * n, (i + 1) * n))));
  if (j !== null)
    parts.push(
      h('p'),
      ...list(
        t('attendedBy', { token: visible(keys[j]) }),
        pieces,
        pieces.map((_, k) => data[k * n + j]),
      ),
    );
  self.context.side(...parts);
}

function drawSteps(self) {
  const { context, stepping } = self,
    { t } = context,
    { steps, pieces } = stepping,
    from = stepping.window.start,
    keyNames = stepping.keys ?? pieces,
    name = (position) => visible(keyNames[position - (stepping.keys ? 0 : from)] ?? '…'),
    keys = largest(...steps.k),
    values = largest(...steps.v),
    strong = steps.weights.indexOf(Math.max(...steps.weights));
  const line = (i) =>
    h(
      'tr',
      { class: i === strong ? 'strong' : '' },
      h('td', { class: 'mono' }, name(steps.keys[i])),
      h('td', {}, strip(steps.k[i], { top: keys, cell: 3, label: 'k' })),
      h('td', { class: 'number' }, signedNumber(steps.scores[i], 3)),
      h('td', { class: 'number' }, signedNumber(steps.scaled[i], 3)),
      h('td', { class: 'number' }, percent(steps.weights[i])),
      h('td', {}, strip(steps.v[i], { top: values, cell: 3, label: 'v' })),
    );
  const table = h(
    'table',
    {},
    h(
      'thead',
      {},
      h(
        'tr',
        {},
        ['headOf', 'k', 'score', 'scaled', 'softmax', 'v'].map((word) => h('th', {}, t(word, { d: steps.q.length }))),
      ),
    ),
    h(
      'tbody',
      {},
      steps.keys.map((_, i) => line(i)),
    ),
  );
  const ends = [
    ['q', steps.q],
    ['output', steps.output],
  ].map(([word, vector]) => h('tr', {}, h('td', { class: 'mono' }, t(word)), h('td', {}, strip(vector, { cell: 6, label: t(word) }))));
  self.steps.replaceChildren(
    h(
      'div',
      { class: 'steps' },
      h('h2', {}, t('stepsTitle', { token: visible(pieces[steps.query - from] ?? '…'), layer: stepping.layer + 1, head: stepping.head + 1 })),
      h('table', {}, h('tbody', {}, ends)),
      steps.all_keys > steps.keys.length ? h('p', { class: 'muted' }, t('keysCut', { n: steps.keys.length, total: steps.all_keys })) : '',
      h('div', { class: 'scroll' }, table),
    ),
  );
}
