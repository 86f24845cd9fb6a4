// Next: the ten likeliest tokens; sliders redraw from the logits of the first 200 and the log-sums of the rest.

import { bar, fixed, h, percent, token, visible } from '../draw.js';
import { subject } from '../store.js';

const SHOWN = 10;

export function mount(root, context) {
  const slider = (name, from, to, step, value, show) => {
    const figure = h('span', { class: 'number' }),
      input = h('input', {
        type: 'range',
        min: from,
        max: to,
        step,
        'aria-label': context.t(name),
        oninput: () => context.store.set({ [name]: value(Number(input.value)) }),
      });
    return {
      label: h('label', { class: 'slider' }, context.t(name), input, figure),
      set(state) {
        input.value = show(state[name])[0];
        figure.textContent = show(state[name])[1];
      },
    };
  };
  const off = context.t('off');
  const sliders = [
    slider(
      'temperature',
      0,
      2,
      0.05,
      (v) => v,
      (v) => [v, v.toFixed(2)],
    ),
    slider(
      'topk',
      0,
      50,
      1,
      (v) => v,
      (v) => [v, v === 0 ? off : v],
    ),
    slider(
      'topp',
      0.05,
      1,
      0.05,
      (v) => v,
      (v) => [v, v >= 1 ? off : v.toFixed(2)],
    ),
  ];
  const rows = h('div', { class: 'candidates', role: 'list' });
  root.append(
    h(
      'div',
      { class: 'controls' },
      sliders.map((one) => one.label),
    ),
    rows,
  );
  context.side(h('p', {}, context.t('introNext')), h('p', { class: 'muted' }, context.t('introNext2')));
  return { root, context, sliders, rows, answer: null };
}

export function update(self, state) {
  const { context, root } = self;
  self.sliders.forEach((one) => one.set(state));
  if (!context.model().plume.writes) {
    self.rows.replaceChildren(
      h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aCausal'), model: context.model().id })),
    );
    return;
  }
  const body = { model: context.model().id, ...subject(state), k: 200, temperatures: true },
    asked = JSON.stringify(body);
  if (asked === self.asked) {
    if (self.answer) draw(self);
    return;
  }
  self.asked = asked;
  context.ask(root, context.question('next'), '/v1/next-tokens', body, (answer) => {
    self.answer = answer;
    context.adopt(answer);
    context.report({ count: answer.tokens.length, context: answer.context, ms: answer.ms });
    draw(self);
  });
}

export function unmount(self) {
  self.rows.remove();
}

export function key(self, pressed) {
  const place = pressed === '0' ? 9 : Number(pressed) - 1;
  if (Number.isInteger(place) && self.answer && place >= 0) take(self, place);
}

function take(self, place) {
  const { tokens, text, candidates } = self.answer;
  if (place < candidates.tokens.length) self.context.take([...tokens, candidates.tokens[place]], text + candidates.pieces[place]);
}

// probabilities under temperature, then which of them the filters leave; the rest of the vocabulary counts as one
export function filtered({ logits, rests, vocabulary }, { temperature, topk, topp }) {
  const heat = Math.round(temperature / 0.05);
  if (heat === 0) return { p: logits.map((_, i) => (i === 0 ? 1 : 0)), rest: 0, kept: logits.map((_, i) => i === 0), restKept: false };
  const top = logits[0] / temperature,
    powers = logits.map((l) => Math.exp(l / temperature - top));
  const restPower = rests[heat - 1] === null ? 0 : Math.exp(rests[heat - 1] - top);
  const whole = powers.reduce((a, b) => a + b, 0) + restPower,
    raw = powers.map((x) => x / whole);
  const limit = topk > 0 ? Math.min(topk, raw.length) : raw.length,
    inLimit = raw.slice(0, limit).reduce((a, b) => a + b, 0) + (topk > 0 ? 0 : restPower / whole);
  let before = 0;
  const kept = raw.map((x, i) => {
    const keep = i < limit && (topp >= 1 || before / inLimit < topp);
    before += x;
    return keep;
  });
  const restKept = !(topk > 0) && logits.length < vocabulary && (topp >= 1 || before / inLimit < topp);
  const sum = raw.reduce((a, x, i) => a + (kept[i] ? x : 0), 0) + (restKept ? restPower / whole : 0);
  return {
    p: raw.map((x, i) => (kept[i] ? x / sum : x)),
    rest: restKept ? restPower / whole / sum : restPower / whole,
    kept,
    restKept,
    sum,
  };
}

function draw(self) {
  const { context, answer } = self,
    { state } = context.store,
    { candidates } = answer;
  const seen = filtered({ ...candidates, vocabulary: answer.vocabulary }, state);
  const count = Math.min(SHOWN, candidates.tokens.length),
    rows = [];
  for (let i = 0; i < count; i++) {
    const piece = candidates.pieces[i],
      kept = seen.kept[i];
    const row = h(
      'button',
      {
        type: 'button',
        role: 'listitem',
        class: `row ${kept ? '' : 'cut'}`,
        'data-key': piece,
        'data-value': '',
        onclick: () => take(self, i),
      },
      h('kbd', {}, (i + 1) % 10),
      token(piece),
      bar(seen.p[i]),
      h('span', { class: 'number' }, kept ? percent(seen.p[i]) : context.t('cut')),
      h('span', { class: 'number logit muted' }, fixed(candidates.logits[i])),
    );
    rows.push(context.why(row, () => why(self, i, seen)));
  }
  // the bar shows what has not been shown: the unlisted ones among the 200 and all others, as far as the filters leave them
  const hidden =
    candidates.tokens.slice(count).reduce((a, _, i) => a + (seen.kept[count + i] ? seen.p[count + i] : 0), 0) +
    (seen.restKept ? seen.rest : 0);
  const others = answer.vocabulary - count;
  if (others > 0) {
    const row = h(
      'div',
      { class: `row rest ${hidden > 0 ? '' : 'cut'}`, role: 'listitem', tabindex: 0 },
      h('span'),
      h('span', { class: 'muted' }, context.t('rest', { n: others.toLocaleString() })),
      bar(hidden),
      h('span', { class: 'number' }, hidden > 0 ? percent(hidden) : context.t('cut')),
      h('span', { class: 'logit' }),
    );
    rows.push(context.why(row, () => [h('h2', {}, context.t('rest', { n: others.toLocaleString() })), h('p', {}, context.t('restWhy'))]));
  }
  const focused = self.rows.contains(document.activeElement) ? [...self.rows.children].indexOf(document.activeElement) : -1;
  self.rows.replaceChildren(...rows);
  if (focused >= 0) self.rows.children[focused]?.focus();
}

function why(self, i, seen) {
  const { context, answer } = self,
    { temperature } = context.store.state,
    { candidates } = answer,
    logit = candidates.logits[i];
  const name = visible(candidates.pieces[i]);
  const formula =
    temperature === 0
      ? context.t('greedy')
      : `p = exp(l / T) / Σ exp(lⱼ / T)\n  = exp(${fixed(logit)} / ${temperature.toFixed(2)}) / Σ\n  = ${percent(seen.kept[i] ? seen.p[i] * (seen.sum ?? 1) : seen.p[i])}`;
  const filter =
    seen.sum !== undefined && seen.sum < 0.99999 && seen.kept[i]
      ? h('pre', {}, `${context.t('kept', { p: percent(seen.sum) })}\np / ${fixed(seen.sum, 4)} = ${percent(seen.p[i])}`)
      : null;
  return [
    h('h2', {}, context.t('probability', { token: name })),
    h('pre', {}, formula),
    ...(filter ? [filter] : []),
    h('h2', {}, context.t('logit', { token: name })),
    h('pre', {}, `l = h · W[${candidates.tokens[i]}] = ${fixed(logit, 3)}`),
    h('p', { class: 'muted' }, context.t('logitWhy')),
  ];
}
