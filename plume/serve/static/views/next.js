// Next: the ten likeliest tokens; sliders redraw from the logits of the first 200 and the log-sums of the rest.

import { bar, fixed, h, percent, token, visible } from '../draw.js';
import { answerList, answerName, ask, tokenRow } from '../parts.js';
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
  const rows = h('div', { class: 'candidates', role: 'group', 'aria-label': context.t('next') }),
    controls = h(
      'div',
      { class: 'controls' },
      sliders.map((one) => one.label),
    );
  root.append(controls, rows);
  context.side(h('p', {}, context.t('introNext')), h('p', { class: 'muted' }, context.t('introNext2')));
  return { root, context, sliders, controls, rows, answer: null };
}

export function update(self, state) {
  const { context, root } = self;
  self.sliders.forEach((one) => one.set(state));
  const { plume } = context.model();
  self.controls.hidden = !plume.generates;
  if (!plume.generates) {
    answers(self, state);
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

// models that do not generate: labels with their probabilities, the fills of a mask, or an encoder-decoder's next token
function answers(self, state) {
  const { context } = self,
    { t } = context,
    { plume } = context.model();
  self.asked = '';
  self.answer = null;
  if (!state.text) {
    self.rows.replaceChildren();
    return;
  }
  const body = plume.predicts || plume.pair === 'target' ? { view: 'walk', layer: plume.decoder_layers || plume.layers } : { view: 'labels' };
  self.asked_answers ??= { context };
  const askAt = (at) => ask(self.asked_answers, 'answers', self.rows, { ...body, query: at, size: 128 }, (answer) => {
    const { pieces, window, candidates, read_from: from } = answer;
    if (context.store.state.query < 0 && from !== at) {
      askAt(from); // the first answer tells where the head reads
      return;
    }
    context.report({ count: window.total, context: plume.context, ms: answer.ms });
    const perToken = Boolean(candidates) || plume.head === 'tag',
      rows = candidates
        ? candidates.pieces.map((name, i) => ({ index: candidates.tokens[i], name: visible(name), probability: candidates.probabilities[i] }))
        : answer.answers.map((row, index) => ({ index, ...row, name: answerName(context, row, index, pieces[row.position - window.start]) }));
    self.rows.replaceChildren(
      h('h2', {}, t(plume.pair === 'target' ? 'readTarget' : 'readTokens', { n: window.total })),
      tokenRow({ pieces, start: window.start, chosen: perToken ? at : -1, label: t('tokens'), pick: (i) => context.store.set({ query: i }) }),
      h('h2', {}, t(candidates ? (plume.masks ? 'fillsHere' : 'nextOfTarget') : 'answersTitle')),
      answerList({ rows, label: t('answersTitle') }),
    );
    context.side(h('p', {}, t(candidates ? 'introFills' : 'introAnswers')), h('p', { class: 'muted' }, t('introAnswers2')));
  });
  askAt(Math.max(0, state.query));
}

export function key(self, pressed) {
  const place = pressed === '0' ? 9 : Number(pressed) - 1;
  if (Number.isInteger(place) && self.answer && place >= 0) take(self, place);
}

function take(self, place) {
  const { tokens, text, candidates } = self.answer;
  if (place < candidates.tokens.length) self.context.take([...tokens, candidates.tokens[place]], text + candidates.pieces[place]);
}

// probabilities under temperature, then which of them the filters leave. `beyond` is what the server counted where the
// filters end among the tokens that are not listed: {count, probability}
export function filtered({ logits, rests, vocabulary }, { temperature, topk, topp }, beyond) {
  const heat = Math.min(rests.length, Math.round(temperature / 0.05));
  if (heat === 0) return { p: logits.map((_, i) => (i === 0 ? 1 : 0)), rest: 0, kept: logits.map((_, i) => i === 0), restKept: false };
  const warm = heat * 0.05,
    top = logits[0] / warm,
    powers = logits.map((l) => Math.exp(l / warm - top));
  const restPower = rests[heat - 1] === null ? 0 : Math.exp(rests[heat - 1] - top);
  const whole = powers.reduce((a, b) => a + b, 0) + restPower,
    raw = powers.map((x) => x / whole);
  const limit = topk > 0 ? Math.min(topk, raw.length) : raw.length,
    inLimit = raw.slice(0, limit).reduce((a, b) => a + b, 0) + (topk > 0 && topk <= raw.length ? 0 : restPower / whole);
  let before = 0;
  const kept = raw.map((x, i) => {
    const keep = i < limit && (topp >= 1 || before / inLimit < topp);
    before += x;
    return keep;
  });
  const listed = raw.reduce((a, b) => a + b, 0),
    reaches = kept.at(-1) && logits.length < vocabulary && (topk === 0 || topk > logits.length), // filters end among the others
    partly = reaches && (topp < 1 || topk > 0),
    rest = partly ? Math.max(0, (beyond?.probability ?? 1) - listed) : restPower / whole,
    restKept = partly ? (beyond?.count ?? vocabulary) > logits.length : reaches,
    sum = raw.reduce((a, x, i) => a + (kept[i] ? x : 0), 0) + (restKept ? rest : 0);
  return { p: raw.map((x, i) => (kept[i] ? x / sum : x)), rest: restKept ? rest / sum : rest, kept, restKept, sum, partly };
}

function draw(self) {
  const { context, answer } = self,
    { state } = context.store,
    { candidates } = answer;
  const filters = `${self.asked}${state.temperature}/${state.topk}/${state.topp}`;
  const seen = filtered({ ...candidates, vocabulary: answer.vocabulary }, state, self.beyond?.of === filters ? self.beyond : undefined);
  if (seen.partly && self.beyond?.of !== filters) countKept(self, state, filters);
  const count = Math.min(SHOWN, candidates.tokens.length),
    rows = [];
  for (let i = 0; i < count; i++) {
    const piece = candidates.pieces[i],
      kept = seen.kept[i];
    const row = h(
      'button',
      {
        type: 'button',
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
      { class: `row rest ${hidden > 0 ? '' : 'cut'}`, tabindex: 0 },
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

// the filters end beyond the listed tokens: the server counts where
async function countKept(self, state, filters) {
  const body = {
    ...JSON.parse(self.asked),
    k: 1,
    temperatures: false,
    temperature: state.temperature,
    ...(state.topk > 0 ? { top_k: state.topk } : {}),
    ...(state.topp < 1 ? { top_p: state.topp } : {}),
  };
  const answer = await self.context.api.ask(self.context.question('beyond'), '/v1/next-tokens', body).catch(self.context.fail);
  if (!answer || !self.answer) return;
  self.beyond = { of: filters, ...answer.candidates.kept };
  draw(self);
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
