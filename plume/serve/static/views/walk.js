// Walk: the way of one token through the model, one step a screen, with this model's own numbers.

import { h, unpack, visible } from '../draw.js';
import { ask, stepsOf, tokenRow } from '../parts.js';
import { screens } from './walk_screens.js';

export const STEP_KEYS = ['ArrowLeft', 'ArrowRight', 'PageUp', 'PageDown', 'Home', 'End'];
const SPAN = 64;

export function mount(root, context) {
  const { t } = context;
  const map = h('nav', { class: 'walk-map', 'aria-label': t('walkMap') }),
    title = h('h2', { class: 'walk-title' }),
    sentence = h('p', { class: 'walk-sentence' }),
    formula = h('pre', { class: 'walk-formula' }),
    picture = h('div', { class: 'walk-picture scroll' }),
    tokens = h('div'),
    count = h('span', { class: 'muted number' });
  const button = (sign, word, by) => h('button', { type: 'button', class: 'plain', 'aria-label': t(word), title: t(word), onclick: () => key(self, by) }, sign);
  const controls = h('div', { class: 'walk-controls' }, button('←', 'stepBack', 'ArrowLeft'), button('→', 'stepForward', 'ArrowRight'), count, h('span', { class: 'spacer' }), headPicker());
  function headPicker() {
    const pick = h('select', { 'aria-label': t('head'), onchange: () => context.store.set({ head: Number(pick.value) }) });
    return h('label', { class: 'head-pick' }, t('head'), pick);
  }
  const live = h('div', { class: 'walk-screen', 'aria-live': 'polite' }, title, sentence, formula, picture);
  root.append(h('div', { class: 'walk' }, map, h('div', {}, controls, tokens, live)));
  const self = { root, context, map, title, sentence, formula, picture, tokens, count, live, picker: controls.querySelector('select'), data: new Map() };
  context.side(h('p', {}, t('introWalk')), h('p', { class: 'muted' }, t('introWalk2')), legend(t));
  return self;
}

export function unmount(self) {
  self.root.replaceChildren();
}

export function update(self, state) {
  const { context } = self,
    { plume } = context.model();
  if (!state.text) {
    self.title.textContent = '';
    return;
  }
  self.steps = stepsOf(plume);
  const index = Math.max(
      0,
      self.steps.findIndex((step) => step.id === state.step),
    ),
    step = self.steps[index];
  self.at = index;
  const heads = plume.heads;
  if (self.picker.options.length !== heads)
    self.picker.replaceChildren(...Array.from({ length: heads }, (_, i) => h('option', { value: i }, i + 1)));
  self.picker.value = Math.min(state.head, heads - 1);
  self.count.textContent = context.t('stepOf', { n: index + 1, total: self.steps.length });
  drawMap(self, step, plume);
  const body = {
    view: 'walk',
    layer: step.layer,
    head: Math.min(state.head, heads - 1),
    size: SPAN,
    ...(step.stack ? { stack: step.stack } : {}),
  };
  const fetchAt = (query) =>
    ask(self, 'walk', self.picture, { ...body, query }, (answer) => {
      const total = answer.window.total,
        wanted = placeOf(context.store.state, answer, self.steps[self.at]);
      if (wanted !== answer.query) {
        fetchAt(wanted); // the first answer tells how long the text is, and where the head reads it
        return;
      }
      self.answer = { ...answer, vectors: Object.fromEntries(Object.entries(answer.parts).map(([name, packed]) => [name, unpack(packed)])) };
      context.adopt(answer);
      context.report({ count: total, context: plume.context, ms: answer.ms });
      draw(self, self.steps[self.at]);
    });
  const known = self.answer && self.answer.layer === step.layer && self.answer.stack === (step.stack ?? self.answer.stack);
  fetchAt(known ? placeOf(state, self.answer, step) : Math.max(0, state.query));
  if (known && self.answer.text === state.text && self.answer.head === body.head && self.answer.query === placeOf(state, self.answer, step)) draw(self, step);
}

// the walked token: the chosen one, else the one that the answer is read from
function placeOf(state, answer, step) {
  const total = answer.window.total;
  if (step.kind === 'sample' || step.kind === 'cache') return total - 1;
  return state.query >= 0 ? Math.min(state.query, total - 1) : answer.read_from;
}

export function key(self, pressed) {
  if (!self.steps) return;
  const { steps, at } = self,
    last = steps.length - 1,
    block = (step) => `${step.stack}${step.layer}`;
  let to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[pressed];
  if (pressed === 'PageDown') to = steps.findIndex((step, i) => i > at && block(step) !== block(steps[at]));
  if (pressed === 'PageUp') {
    const before = steps.slice(0, at).findLast((step) => block(step) !== block(steps[at]));
    to = before ? steps.findIndex((step) => block(step) === block(before)) : 0;
  }
  if (to === undefined || to < 0 || to > last || to === at) return;
  self.context.store.set({ step: steps[to].id });
}

function drawMap(self, now, plume) {
  const { t, words, store } = self.context,
    titles = words().walkSteps;
  const groups = [];
  for (const step of self.steps) {
    const last = groups.at(-1);
    if (last && last.stack === step.stack && last.layer === step.layer) last.steps.push(step);
    else groups.push({ stack: step.stack, layer: step.layer, steps: [step] });
  }
  const layers = (stack) => (stack === 'decoder' && plume.pair === 'target' ? plume.decoder_layers : plume.layers);
  const name = ({ stack, layer }) => {
    const word = layer < 0 ? t('walkInput') : layer < layers(stack) ? t('block', { n: layer + 1 }) : t('walkOutput');
    return stack ? `${t(stack)} · ${word}` : word;
  };
  const link = (step, text, current) =>
    h('button', { type: 'button', 'aria-current': current ? 'step' : undefined, onclick: () => store.set({ step: step.id }) }, text);
  self.map.replaceChildren(
    ...groups.map((group) => {
      const open = group.stack === now.stack && group.layer === now.layer;
      return h(
        'div',
        { class: open ? 'open' : '' },
        link(group.steps[0], name(group), false),
        open
          ? h(
              'ol',
              {},
              group.steps.map((step) => h('li', {}, link(step, titles[step.kind][0], step === now))),
            )
          : null,
      );
    }),
  );
  const current = self.map.querySelector('[aria-current=step]');
  if (current) self.map.scrollTop = Math.max(0, current.offsetTop - self.map.clientHeight / 2);
}

function draw(self, step) {
  const { context, answer } = self,
    { t, words } = context,
    { pieces, window, query } = answer;
  if (answer.layer !== step.layer) return;
  const [title] = words().walkSteps[step.kind],
    token = visible(pieces[query - window.start] ?? '…'),
    values = { token, head: answer.head + 1, layer: step.layer + 1, ...answer.shape, n: window.total };
  const block = /^[acm]\./.test(step.kind) ? t('block', { n: step.layer + 1 }) : '';
  self.title.textContent = [step.stack ? t(step.stack) : '', block, title].filter(Boolean).join(' · ');
  reserve(self, answer, values);
  self.sentence.textContent = sentenceOf(self, step, values);
  self.tokens.replaceChildren(
    tokenRow({ pieces, start: window.start, chosen: query, label: t('walkedToken'), pick: (i) => context.store.set({ query: i }) }),
  );
  const screen = screens[step.kind]({ ...answer, kind: { a: 'attention', c: 'cross', m: 'mlp' }[step.kind[0]], token, context, row: query - window.start });
  self.formula.textContent = screen.formula;
  self.picture.replaceChildren(...screen.picture);
}

// what a step says of this model
function sentenceOf({ context }, { kind, stack }, values) {
  const words = context.words(),
    { causal, head, pair, segments } = context.model().plume,
    isMasked = stack ? stack === 'decoder' : causal;
  const other = {
    embed: segments > 0 && words.embedSegments,
    'a.softmax': !isMasked && words.softmaxUnmasked,
    label: head === 'span' && words.labelSpan,
    memory: pair !== 'target' && words.memoryAlone,
  }[kind];
  return fill(other || words.walkSteps[kind][1], values);
}

// room for the longest sentence of this walk, so that nothing below moves from step to step
function reserve(self, { pieces }, values) {
  const { sentence, steps, live } = self,
    token = pieces.map(visible).reduce((a, b) => (b.length > a.length ? b : a), ''),
    key = `${live.clientWidth}/${self.context.model().id}/${token}`;
  if (self.reserved === key) return;
  self.reserved = key;
  sentence.style.minHeight = '0';
  const said = new Set(steps.map((step) => sentenceOf(self, step, { ...values, token }))),
    heights = Array.from(said, (text) => {
      sentence.textContent = text;
      return sentence.offsetHeight;
    });
  sentence.style.minHeight = `${Math.max(...heights)}px`;
}

const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? '');

export function legend(t) {
  return h('div', { class: 'sign-legend' }, h('span', {}, t('negative')), h('i'), h('span', {}, t('positive')));
}
