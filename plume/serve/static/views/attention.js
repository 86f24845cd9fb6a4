// Attention: all heads small, one large, and for one token every number from its query to the weighted sum.

import { arcs, choice, fixed, h, matrix, paint, percent, press, strip, unpack, visible } from '../draw.js';
import { subject } from '../store.js';

const SORTS = ['layer', 'distance', 'to_previous', 'to_first', 'to_same'],
  SPAN = 64;

export function mount(root, context) {
  const { t, store } = context;
  const sort = h(
    'select',
    { 'aria-label': t('sortBy'), onchange: () => store.set({ sort: sort.value }) },
    SORTS.map((name) => h('option', { value: name }, t(`sort_${name}`))),
  );
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
  ];
  const heads = h('div', { class: 'heads' }),
    title = h('h2'),
    minimap = h('div', { class: 'minimap', hidden: true }, h('i')),
    large = h('div', { class: 'scroll' }),
    steps = h('div');
  root.append(
    h('div', { class: 'controls' }, h('label', {}, t('sortBy'), sort), groups),
    h('div', { class: 'attention' }, h('div', { class: 'heads-wide' }, heads), h('div', {}, title, minimap, large, steps)),
  );
  context.side(h('p', {}, t('introAttention')), h('p', { class: 'muted' }, t('introAttention2')));
  minimap.addEventListener('pointerdown', (event) => {
    const { total, size } = self.window,
      box = minimap.getBoundingClientRect();
    store.set({ start: Math.round(Math.max(0, Math.min(total - size, ((event.clientX - box.left) / box.width) * total - size / 2))) });
  });
  const self = { root, context, sort, groups, heads, title, minimap, large, steps };
  return self;
}

export function update(self, state) {
  const { context } = self,
    model = context.model();
  self.sort.value = state.sort;
  press(self.groups, state);
  if (!state.text) {
    [self.heads, self.title, self.large, self.steps].forEach((part) => part.replaceChildren());
    return;
  }
  const about = { model: model.id, ...subject(state), start: state.start < 0 ? null : state.start, size: SPAN };
  const layer = Math.min(state.layer, model.plume.layers - 1),
    head = Math.min(state.head, model.plume.heads - 1);
  once(self, 'overview', { ...about, view: 'heads' }, (answer) => {
    self.overview = answer;
    context.adopt(answer);
    drawHeads(self);
  });
  once(self, 'matrix', { ...about, view: 'attention', layer, head, mix: state.mix }, (answer) => {
    self.seen = { ...answer, ...unpack(answer.matrix) };
    self.window = answer.window;
    context.report({ count: answer.window.total, context: model.plume.context, ms: answer.ms });
    drawLarge(self);
  });
  if (state.query >= 0 && state.mix === 'head')
    once(self, 'steps', { ...about, view: 'steps', layer, head, query: state.query }, (answer) => {
      self.stepping = answer;
      drawSteps(self);
    });
  if (state.query < 0 || state.mix !== 'head') {
    self.steps.replaceChildren();
    self.asked.steps = '';
  }
  if (self.overview) drawHeads(self);
  if (self.seen) drawLarge(self);
}

export function unmount(self) {
  self.root.replaceChildren();
}

function once(self, name, body, take) {
  self.asked ??= {};
  const asked = JSON.stringify(body);
  if (self.asked[name] === asked) return;
  self.asked[name] = asked;
  self.context.ask(
    name === 'overview' ? self.heads : name === 'matrix' ? self.large : self.steps,
    self.context.question(name),
    '/v1/explain',
    body,
    take,
  );
}

function drawHeads(self) {
  const { context } = self,
    { state } = context.store,
    { properties, thumbnails } = self.overview,
    { t } = context;
  const [layers, heads, n] = thumbnails.shape,
    { data } = self.thumbs?.of === thumbnails ? self.thumbs : (self.thumbs = { of: thumbnails, ...unpack(thumbnails) });
  const all = Array.from({ length: layers * heads }, (_, i) => [Math.floor(i / heads), i % heads]);
  if (state.sort !== 'layer' && properties[state.sort])
    all.sort(([a, b], [c, d]) => properties[state.sort][c][d] - properties[state.sort][a][b]);
  self.heads.style.gridTemplateColumns = `repeat(${Math.min(heads, 12)}, minmax(0, 1fr))`;
  self.heads.replaceChildren(
    ...all.map(([layer, head]) => {
      const from = (layer * heads + head) * n * n;
      const button = h(
        'button',
        {
          type: 'button',
          'aria-pressed': layer === state.layer && head === state.head && state.mix === 'head',
          'aria-label': t('headIs', { layer: layer + 1, head: head + 1 }),
          onclick: () => context.store.set({ layer, head, mix: 'head' }),
        },
        paint(h('canvas'), n, n, (i, j) => data[from + i * n + j] / 255),
      );
      return context.why(button, () => [
        h('h2', {}, t('headIs', { layer: layer + 1, head: head + 1 })),
        ...SORTS.slice(1).map((name) =>
          h(
            'pre',
            {},
            `${t(`sort_${name}`)}  ${name === 'distance' ? fixed(properties[name][layer][head], 1) : percent(properties[name][layer][head])}\n${context.words().propertyWhy[name]}`,
          ),
        ),
      ]);
    }),
  );
}

function drawLarge(self) {
  const { context, seen } = self,
    { state } = context.store,
    { t } = context,
    { window } = seen;
  self.title.textContent =
    state.mix === 'head'
      ? t('headIs', { layer: seen.layer + 1, head: seen.head + 1 })
      : `${t(state.mix)} · ${t('layerIs', { layer: seen.layer + 1 })}`;
  self.minimap.hidden = window.total <= window.size;
  if (!self.minimap.hidden) {
    Object.assign(self.minimap.firstChild.style, {
      left: `${(100 * window.start) / window.total}%`,
      width: `${(100 * window.size) / window.total}%`,
    });
    self.title.append(
      h('span', { class: 'muted' }, `  ${t('window', { from: window.start + 1, to: window.start + window.size, total: window.total })}`),
    );
  }
  const options = {
    data: seen.data,
    pieces: seen.pieces,
    width: Math.min(760, self.large.clientWidth || 600, Math.max(420, innerHeight - 270)),
    query: state.query < 0 ? -1 : state.query - window.start,
    on: (i, j) => look(self, i, j),
    pick: (i) => context.store.set({ query: i + window.start }),
  };
  self.large.replaceChildren(state.picture === 'arcs' ? arcs(options) : matrix(options));
}

function look(self, i, j) {
  const { data, pieces } = self.seen,
    { t } = self.context,
    n = pieces.length;
  if (i === null && j === undefined) return;
  const list = (title, values) => [
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
            h('span', { class: 'token' }, visible(pieces[k])),
            h('span', { class: 'track' }, h('span', { class: 'fill', style: { width: `${Math.min(100, 100 * w)}%` } })),
            h('span', { class: 'number' }, percent(w)),
          ),
        ),
    ),
  ];
  const parts = [];
  if (i !== null && j !== null)
    parts.push(h('pre', {}, `${visible(pieces[i])} → ${visible(pieces[j])}\n${t('weightWhy')}\n= ${fixed(data[i * n + j], 4)}`));
  if (i !== null) parts.push(...list(t('looksAt', { token: visible(pieces[i]) }), Array.from(data.slice(i * n, (i + 1) * n))));
  if (j !== null)
    parts.push(
      h('p'),
      ...list(
        t('lookedAtBy', { token: visible(pieces[j]) }),
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
    name = (place) => visible(pieces[place - from] ?? '…');
  const largest = (rows) => Math.max(...rows.flat().map(Math.abs));
  const keys = largest(steps.k),
    values = largest(steps.v),
    order = steps.weights
      .map((w, i) => i)
      .sort((a, b) => steps.weights[b] - steps.weights[a])
      .slice(0, 12),
    strong = order[0];
  const line = (i) =>
    h(
      'tr',
      { class: i === strong ? 'strong' : '' },
      h('td', { class: 'mono' }, name(steps.seen[i])),
      h('td', {}, strip(steps.k[i], keys)),
      h('td', { class: 'number' }, fixed(steps.scores[i])),
      h('td', { class: 'number' }, fixed(steps.scaled[i])),
      h('td', { class: 'number' }, percent(steps.weights[i])),
      h('td', {}, strip(steps.v[i], values)),
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
    h('tbody', {}, order.sort((a, b) => a - b).map(line)),
  );
  const ends = h(
    'table',
    {},
    h(
      'tbody',
      {},
      [
        ['q', steps.q],
        ['output', steps.output],
      ].map(([word, vector]) =>
        h(
          'tr',
          {},
          h('td', { class: 'mono' }, t(word)),
          h('td', {}, strip(vector)),
          h(
            'td',
            { class: 'number muted' },
            `${vector
              .slice(0, 4)
              .map((x) => fixed(x))
              .join('  ')} …`,
          ),
        ),
      ),
    ),
  );
  self.steps.replaceChildren(
    h(
      'div',
      { class: 'steps' },
      h('h2', {}, t('stepsTitle', { token: name(steps.query), layer: stepping.layer + 1, head: stepping.head + 1 })),
      h('div', { class: 'scroll' }, ends, table),
    ),
  );
}
