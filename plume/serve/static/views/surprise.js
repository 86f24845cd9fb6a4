// Surprise: each token coloured by how unexpected it was; two curves along the text; what had been expected instead.

import { bar, choice, curves, fixed, h, percent, press, visible } from '../draw.js';
import { subject } from '../store.js';

const LIMITS = { rank: [1, 10, 100, 1000], probability: [0.5, 0.1, 0.01, 0.001] };

export function mount(root, context) {
  const { t } = context;
  const group = choice(context, 'colour', [
    ['rank', 'byRank'],
    ['probability', 'byProbability'],
  ]);
  const spans = h('div', { class: 'spans' }),
    legend = h('div', { class: 'legend' }),
    below = h('div', { style: { 'margin-top': '26px' } });
  root.append(h('div', { class: 'controls' }, group), spans, legend, below);
  const intro = () => context.side(h('p', {}, t('introSurprise')), h('p', { class: 'muted' }, t('introSurprise2')));
  intro();
  return { root, context, group, spans, legend, below, intro };
}

export function update(self, state) {
  const { context } = self;
  press([self.group], state);
  if (!context.model().plume.predicts) {
    self.spans.replaceChildren(
      h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aToken'), model: context.model().id })),
    );
    return;
  }
  if (!state.text) {
    self.spans.replaceChildren();
    self.below.replaceChildren();
    self.legend.replaceChildren();
    return;
  }
  const body = { model: context.model().id, ...subject(state) },
    asked = JSON.stringify(body);
  if (asked === self.asked) {
    if (self.answer) draw(self);
    return;
  }
  self.asked = asked;
  context.ask(self.root, context.question('surprise'), '/v1/score', body, (answer) => {
    self.answer = answer;
    context.adopt(answer);
    context.report({ count: answer.tokens.length, context: answer.context, perplexity: answer.perplexity, ms: answer.ms });
    draw(self);
  });
}

export function unmount(self) {
  self.root.replaceChildren();
}

function level(self, i, by) {
  const { rank, probability } = self.answer;
  if (rank[i] < 0) return null;
  const place =
    by === 'rank' ? LIMITS.rank.findIndex((limit) => rank[i] < limit) : LIMITS.probability.findIndex((limit) => probability[i] >= limit);
  return place < 0 ? 4 : place;
}

function draw(self) {
  const { context, answer } = self,
    { t } = context,
    { colour, place } = context.store.state;
  const by = colour === 'probability' ? 'probability' : 'rank';
  self.spans.replaceChildren(
    ...answer.pieces.map((piece, i) => {
      const kind = level(self, i, by);
      const span = h(
        'span',
        {
          class: `mark ${kind === null ? '' : `rank${kind}`} ${i === place ? 'chosen' : ''}`,
          tabindex: 0,
          'data-key': i,
          'data-value': kind,
          onclick: () => context.store.set({ place: i }),
          onkeydown: (event) => {
            if (event.key === 'Enter') context.store.set({ place: i });
          },
        },
        piece,
      );
      return context.why(span, () => about(self, i));
    }),
  );
  const words = by === 'rank' ? 'rank' : 'p';
  self.legend.replaceChildren(...[0, 1, 2, 3, 4].map((i) => h('span', {}, h('i', { class: `rank${i}` }), t(`${words}${i}`))));
  const x = answer.tokens.map((_, i) => i + 1),
    width = Math.min(900, self.root.clientWidth - 48);
  const figure = curves({
    width,
    height: 170,
    title: t('curvesTitle'),
    mark: place >= 0 ? [place + 1] : [],
    label: (v) => (Number.isInteger(v) ? String(v) : ''),
    lines: [
      { x, y: answer.surprisal, kind: 'c0' },
      { x, y: answer.entropy, kind: 'c1' },
    ],
    on: (i) => context.side(...about(self, i)),
  });
  const total = h(
    'div',
    { class: 'legend' },
    h('span', {}, h('i', { class: 'chip c0' }), t('surprisal')),
    h('span', {}, h('i', { class: 'chip c1' }), t('entropy')),
    sum(self, 'perplexity'),
    sum(self, 'bits'),
  );
  self.below.replaceChildren(total, figure);
  if (place >= 0 && place < answer.tokens.length && self.expectedAt !== `${self.asked}${place}`) expect(self, place);
}

function sum(self, word) {
  const { context, answer } = self,
    known = answer.surprisal.filter((x) => x !== null),
    mean = known.reduce((a, b) => a + b, 0) / known.length;
  const element = h('span', { tabindex: 0 }, context.t(word, { x: fixed(word === 'bits' ? answer.bits_per_byte : answer.perplexity, 2) }));
  return context.why(element, () => [
    h('h2', {}, context.t(word, { x: '' })),
    h(
      'pre',
      {},
      word === 'bits'
        ? `Σ ${fixed(mean * known.length, 1)} / ln 2 / ${answer.bytes} B\n= ${fixed(answer.bits_per_byte, 3)}`
        : `exp(${fixed(mean, 3)}) = ${fixed(answer.perplexity, 2)}`,
    ),
    h('p', { class: 'muted' }, context.t(word === 'bits' ? 'surprisalWhy' : 'perplexityWhy')),
  ]);
}

function about(self, i) {
  const { answer } = self,
    { t } = self.context,
    name = visible(answer.pieces[i]);
  if (answer.rank[i] < 0) return [h('h2', {}, name), h('p', {}, t('noExpectation'))];
  return [
    h('h2', { class: 'mono' }, name),
    h(
      'pre',
      {},
      `p = ${percent(answer.probability[i])}\n${t('rankIs', { n: answer.rank[i] + 1 })}\n${t('surprisal')} = −ln p = ${fixed(answer.surprisal[i], 3)}\n${t('entropy')} = ${fixed(answer.entropy[i], 3)}`,
    ),
  ];
}

// what stood at the top of the list when this token came
async function expect(self, i) {
  const { context, answer } = self,
    { t } = context;
  const at = `${self.asked}${i}`;
  self.expectedAt = at;
  if (!context.model().plume.generates || answer.rank[i] < 0) {
    context.side(...about(self, i));
    return;
  }
  const first = Math.max(0, i - answer.context); // a token beyond the context was predicted from what still fits into it
  const before = await context.api
    .ask(context.question('expected'), '/v1/next-tokens', {
      model: context.model().id,
      ...subject({ ids: answer.tokens.slice(first, i).join('.'), text: '' }),
      k: 10,
    })
    .catch(context.fail);
  if (!before || self.answer !== answer || self.expectedAt !== at || !self.spans.isConnected) return;
  const { candidates } = before;
  const rows = candidates.tokens.map((id, k) =>
    h(
      'div',
      { class: 'row' },
      h('span', { class: 'token' }, visible(candidates.pieces[k])),
      bar(candidates.probabilities[k]),
      h('span', { class: 'number' }, percent(candidates.probabilities[k])),
    ),
  );
  context.side(h('h2', {}, t('expected')), h('div', { class: 'list' }, rows), h('p', {}), ...about(self, i));
}
