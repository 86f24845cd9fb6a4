// Tokens: how the text was cut; ids, bytes, and the merges that built the piece under the pointer.

import { fixed, h, visible } from '../draw.js';
import { subject } from '../store.js';

export function mount(root, context) {
  const { t } = context,
    pieces = h('div', { class: 'pieces' }),
    count = h('p', { class: 'muted' });
  root.append(pieces, count);
  context.side(h('p', {}, t('introTokens')), h('p', { class: 'muted' }, t('introTokens2')));
  return { root, context, pieces, count };
}

export function update(self, state) {
  const { context } = self,
    model = context.model();
  if (!state.text) {
    self.pieces.replaceChildren();
    self.count.textContent = '';
    return;
  }
  const body = subject(state);
  context.ask(self.root, context.question('tokens'), '/v1/tokenize', { model: model.id, ...body }, (answer) => {
    self.answer = answer;
    context.adopt(answer);
    context.report({ count: answer.tokens.length, context: model.plume.context, ms: answer.ms });
    draw(self);
  });
}

export function unmount(self) {
  self.root.replaceChildren();
}

function draw(self) {
  const { context, answer } = self,
    { t } = context;
  self.pieces.replaceChildren(
    ...answer.tokens.map((id, i) => {
      const element = h(
        'span',
        { class: `piece p${i % 5}`, tabindex: 0, 'data-key': i, 'data-value': answer.pieces[i] },
        visible(answer.pieces[i]),
        answer.pieces[i].includes('\n') ? '\n' : '',
        h('sub', {}, id),
      );
      const show = () => about(self, i);
      element.addEventListener('pointerenter', show);
      element.addEventListener('focus', show);
      return element;
    }),
  );
  const bytes = answer.bytes.reduce((sum, hex) => sum + hex.length / 2, 0);
  self.count.textContent = answer.tokens.length
    ? t('piecesCount', { n: answer.tokens.length, bytes, ratio: fixed(bytes / answer.tokens.length) })
    : '';
}

async function about(self, i) {
  const { context, answer } = self,
    { t } = context,
    span = answer.spans?.[i];
  const facts = `${t('id')} ${answer.tokens[i]}\n${t('bytes')} ${answer.bytes[i].replace(/(..)/g, '$1 ')}${span ? `\n${t('characters')} ${span[0]}–${span[1]}` : ''}`;
  const parts = [h('h2', { class: 'mono' }, visible(answer.pieces[i])), h('pre', {}, facts)];
  context.side(...parts);
  self.over = i;
  const reply = await context.api
    .ask(context.question('merges'), '/v1/tokenize', { model: context.model().id, input: [answer.tokens[i]], merges: true })
    .catch(() => null);
  if (!reply || self.over !== i || self.answer !== answer || !self.pieces.isConnected) return;
  const steps = reply.merges
    ? h(
        'div',
        { class: 'merges' },
        reply.merges.map((step) =>
          h(
            'div',
            {},
            step.map((piece, k) => h('span', { class: `piece p${k % 5}` }, visible(piece))),
          ),
        ),
      )
    : h('p', { class: 'muted' }, t('noMerges'));
  context.side(...parts, h('h2', {}, t('mergesTitle')), steps);
}
