// Attribution: how much each token counts for an answer, by integrated gradients or gradient times input.

import { choice, h, largest, onSigned, press, signedNumber, signedShade, visible } from '../draw.js';
import { answerList, answerName, ask, joined, tokenRow, words, wordSums } from '../parts.js';
import { legend } from './walk.js';

export function mount(root, context) {
  const { t } = context;
  const groups = [
    choice(context, 'method', [
      ['integrated_gradients', 'integratedGradients'],
      ['gradient_x_input', 'gradientTimesInput'],
    ]),
    choice(context, 'group', [
      ['pieces', 'pieces'],
      ['words', 'wholeWords'],
    ]),
  ];
  const positions = h('div'),
    text = h('div', { class: 'spans' }),
    sums = h('pre', { class: 'walk-formula' }),
    answers = h('div');
  root.append(h('div', { class: 'controls' }, groups), text, sums, h('h2', {}, t('explainedAnswer')), positions, answers);
  context.side(h('p', {}, t('introAttribution')), h('p', { class: 'muted' }, t('introAttribution2')), legend(t));
  return { root, context, groups, positions, text, sums, answers };
}

export function unmount(self) {
  self.root.replaceChildren();
}

export function update(self, state) {
  const { context } = self,
    model = context.model();
  press(self.groups, state);
  if (model.plume.head === 'bare') {
    self.text.replaceChildren(h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aHead'), model: model.id })));
    return;
  }
  if (!state.text) {
    self.text.replaceChildren();
    return;
  }
  const target = { ...(state.index >= 0 ? { index: state.index } : {}), ...(state.position >= 0 ? { position: state.position } : {}), size: 128 };
  ask(self, 'attribution', self.text, { ...target, view: 'attribution', method: state.method }, (answer) => {
    self.answer = answer;
    context.report({ count: answer.window.total, context: model.plume.context, ms: answer.ms });
    draw(self);
  });
  ask(self, 'answers', self.answers, { ...target, view: 'cause', edits: [] }, (answer) => {
    self.options = answer;
    drawAnswers(self);
  });
  if (self.answer) draw(self);
}

function draw(self) {
  const { context, answer } = self,
    { t, store } = context,
    { attribution, source, target, pieces, starts, window } = answer,
    token = answerName(context, target, store.state.row),
    byWord = store.state.group === 'words',
    own = attribution.scores.slice(window.start, window.start + window.size),
    top = largest(attribution.scores, attribution.source_scores ?? []);
  const spans = (names, scores) =>
    names.map((piece, i) => {
      const span = h(
        'span',
        { class: 'mark signed', tabindex: 0, 'data-value': scores[i], style: { background: signedShade(scores[i] / top), color: onSigned(scores[i] / top) } },
        piece === '\n' ? '⏎\n' : piece,
      );
      return context.why(span, () => [h('h2', { class: 'mono' }, visible(piece)), h('pre', {}, `${signedNumber(scores[i])}`), h('p', { class: 'muted' }, t('scoreOf', { token }))]);
    });
  const groups = words(starts),
    shown = byWord ? spans(joined(pieces, groups), wordSums(own, groups)) : spans(pieces, own);
  self.text.replaceChildren(...(source ? [h('p', {}, h('small', { class: 'muted' }, t('source')), h('br'), spans(source.pieces, attribution.source_scores)), h('small', { class: 'muted' }, t('target'))] : []), h('p', {}, shown));
  self.sums.textContent =
    attribution.method === 'gradient_x_input'
      ? `Σ = ${signedNumber(attribution.total)}      ${t('logitOf', { token })} = ${signedNumber(attribution.logit)}`
      : `Σ = ${signedNumber(attribution.total)}\n${t('logitOf', { token })} − ${t('logitOfBaseline')} = ${signedNumber(attribution.logit)} − ${signedNumber(attribution.baseline)} = ${signedNumber(attribution.logit - attribution.baseline)}      (${t('integrationSteps', { n: attribution.steps })})`;
  self.sums.dataset.total = attribution.total;
  self.positions.replaceChildren(
    target.position === null
      ? ''
      : tokenRow({ pieces, start: window.start, chosen: target.position, label: t('positionOf'), pick: (i) => store.set({ position: i, index: -1 }) }),
  );
}

function drawAnswers(self) {
  const { context, options } = self,
    { store } = context,
    rows = options.rows.map((row) => ({ index: row.index, name: answerName(context, row, store.state.row), probability: row.before, logit: row.logit_before }));
  self.answers.replaceChildren(
    answerList({ rows, chosen: options.target.index, pick: (index) => context.store.set({ index }), label: context.t('explainedAnswer') }),
  );
}
