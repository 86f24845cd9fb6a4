// Cause: what changes when a head, an MLP or the residual stream is set to zero, to its mean, or to its value in another text.

import { bar, choice, clipped, fixed, h, largest, onSigned, percent, press, signedNumber, signedShade, visible } from '../draw.js';
import { answerName, ask, tokenRow } from '../parts.js';
import { legend } from './walk.js';

const LETTERS = { head: 'h', cross_head: 'c', mlp: 'm', residual: 'r' },
  SPAN = 48;

export function mount(root, context) {
  const { t, store } = context;
  const groups = [
    choice(context, 'value', [
      ['zero', 'setZero'],
      ['mean', 'setMean'],
      ['patch', 'setPatch'],
    ]),
    choice(context, 'part', [
      ['head', 'partHead'],
      ['cross_head', 'partCross'],
      ['mlp', 'partMlp'],
      ['residual', 'partResidual'],
    ]),
    choice(context, 'map', [
      ['effect', 'mapEffect'],
      ['contribution', 'mapContribution'],
      ['kind', 'mapKind'],
    ]),
  ];
  const patch = h('textarea', {
    rows: 1,
    class: 'patch',
    placeholder: t('patchText'),
    'aria-label': t('patchText'),
    onchange: () => store.set({ patch: patch.value }),
  });
  const tokens = h('div'),
    title = h('h2'),
    map = h('div', { class: 'effect-map scroll' }),
    edits = h('div', { class: 'edits' }),
    shift = h('div');
  root.append(
    h('div', { class: 'controls' }, groups),
    patch,
    tokens,
    h('div', { class: 'cause' }, h('div', {}, title, map), h('div', {}, h('h2', {}, t('shiftTitle')), edits, shift)),
  );
  context.side(h('p', {}, t('introCause')), h('p', { class: 'muted' }, t('introCause2')), legend(t));
  return { root, context, groups, patch, tokens, title, map, edits, shift };
}

export function unmount(self) {
  self.root.replaceChildren();
}

const parsed = (text) =>
  text
    .split('~')
    .filter(Boolean)
    .map((code) => {
      const [layer, item] = code.slice(1).split('.').map(Number);
      return { part: Object.keys(LETTERS).find((name) => LETTERS[name] === code[0]), layer, item, code };
    });

export function update(self, state) {
  const { context } = self,
    model = context.model(),
    { plume } = model;
  press(self.groups, state);
  self.groups[1].querySelector('[data-value-is=cross_head]').hidden = plume.pair !== 'target';
  const byHead = state.part === 'head' || state.part === 'cross_head';
  self.groups[2].hidden = !byHead; // positions have no contribution and no kind
  self.groups[2].querySelector('[data-value-is=kind]').hidden = state.part !== 'head';
  self.title.textContent = context.t(`map_${mapOf(state)}`);
  self.patch.hidden = state.value !== 'patch';
  if (document.activeElement !== self.patch) self.patch.value = state.patch;
  if (plume.head === 'bare') {
    self.map.replaceChildren(h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aHead'), model: model.id })));
    return;
  }
  if (!state.text || (state.value === 'patch' && !state.patch)) {
    if (state.value === 'patch') self.map.replaceChildren(h('p', { class: 'empty' }, context.t('patchFirst')));
    return;
  }
  const target = { ...(state.index >= 0 ? { index: state.index } : {}), ...(state.position >= 0 ? { position: state.position } : {}), size: SPAN },
    how = { value: state.value, ...(state.value === 'patch' ? { other: state.patch } : {}) };
  ask(self, 'kinds', self.map, { view: 'kinds' }, (answer) => {
    self.kinds = answer;
    redraw(self);
  });
  ask(self, 'effects', self.map, { ...target, ...how, view: 'effects', part: state.part }, (answer) => {
    self.effects = { ...answer, part: state.part };
    context.report({ count: answer.window.total, context: plume.context, ms: answer.ms });
    drawTokens(self);
    drawMap(self);
  });
  const edits = parsed(state.edits).map(({ part, layer, item }) => ({
    part,
    layer,
    ...(part === 'head' || part === 'cross_head' ? { head: item } : { positions: [item] }),
    value: state.value,
  }));
  ask(self, 'cause', self.shift, { ...target, ...how, view: 'cause', edits }, (answer) => {
    self.answer = answer;
    drawShift(self);
  });
  drawEdits(self);
  redraw(self);
}

// the map, unless another part is awaited
function redraw(self) {
  if (self.effects?.part === self.context.store.state.part) drawMap(self);
}

function drawTokens(self) {
  const { context, effects } = self,
    { pieces, window, target } = effects,
    { t } = context;
  self.tokens.replaceChildren(
    h('p', { class: 'muted' }, t('targetIs', { token: answerName(context, target, context.store.state.row), position: target.position === null ? '' : t('atPosition', { n: target.position + 1 }), logit: fixed(target.logit, 3) })),
    tokenRow({
      pieces,
      start: window.start,
      chosen: target.position ?? -1,
      label: t('positionOf'),
      pick: (i) => context.store.set({ position: i, index: -1 }),
    }),
  );
}

function toggle(self, layer, item) {
  const { store } = self.context,
    { part } = store.state,
    code = `${LETTERS[part]}${layer}.${item}`,
    all = store.state.edits.split('~').filter(Boolean);
  store.set({ edits: (all.includes(code) ? all.filter((one) => one !== code) : [...all, code]).join('~') }, { push: true });
}

// what the map shows: contributions are of heads, kinds of the heads of self-attention
function mapOf({ map, part }) {
  return (map === 'contribution' && (part === 'head' || part === 'cross_head')) || (map === 'kind' && part === 'head') ? map : 'effect';
}

// layers down; heads or positions across; each cell a button with its figure
function drawMap(self) {
  const { context, effects } = self,
    { state } = context.store,
    { t } = context,
    byHead = state.part === 'head' || state.part === 'cross_head',
    named = mapOf(state) === 'kind',
    shares = mapOf(state) === 'contribution' && effects.heads,
    values = named ? effects.effect : shares ? effects.heads : effects.effect,
    window = effects.window,
    from = byHead ? 0 : window.start,
    columns = values[0].slice(from, byHead ? undefined : window.start + window.size),
    top = largest(...values),
    on = new Set(state.edits.split('~'));
  const kindOf = (layer, item) => (byHead && state.part === 'head' && self.kinds?.names[layer]?.[item]) || '';
  const cell = (layer, item) => {
    const value = values[layer][item],
      kind = kindOf(layer, item),
      shown = value / top;
    const figure = named ? (kind ? t(`kind_${kind}`) : '·') : signedNumber(value, Math.abs(value) >= 10 ? 1 : 2);
    const button = h(
      'button',
      {
        type: 'button',
        'aria-pressed': on.has(`${LETTERS[state.part]}${layer}.${item}`),
        'aria-label': `${name(layer)} ${byHead ? t('headN', { n: item + 1 }) : visible(effects.pieces[item - from] ?? '')}: ${figure}${kind && !named ? ` ${t(`kind_${kind}`)}` : ''}`,
        'data-value': value,
        style: named ? {} : { background: signedShade(shown), color: onSigned(shown) },
        onclick: () => toggle(self, layer, item),
      },
      figure,
    );
    return context.why(button, () => about(self, layer, item, byHead));
  };
  const name = (layer) => (state.part === 'residual' ? (layer === 0 ? t('embedding') : t('behindLayer', { n: layer })) : t('layer', { n: layer + 1 }));
  self.map.replaceChildren(
    h(
      'table',
      { class: 'map' },
      h('thead', {}, h('tr', {}, h('th', {}, t('layers')), columns.map((_, i) => h('th', {}, byHead ? i + 1 : clipped(visible(effects.pieces[i]), 8))))),
      h(
        'tbody',
        {},
        values.map((_, layer) => h('tr', {}, h('th', {}, name(layer)), columns.map((_, i) => h('td', {}, cell(layer, i + from))))),
      ),
    ),
  );
}

function about(self, layer, item, byHead) {
  const { context, effects, kinds } = self,
    { t } = context,
    { state } = context.store;
  const parts = [
    h('h2', {}, byHead ? t('headIs', { layer: layer + 1, head: item + 1 }) : `${t('layerIs', { layer: layer + 1 })} · ${visible(effects.pieces[item - effects.window.start] ?? '')}`),
    h('pre', {}, `${t('effectOf')} = ${signedNumber(effects.effect[layer][item])}${byHead && effects.heads ? `\n${t('contributionOf')} = ${signedNumber(effects.heads[layer][item])}` : ''}`),
    h('p', { class: 'muted' }, t('effectWhy')),
  ];
  if (byHead && kinds && state.part === 'head')
    parts.push(
      h('h2', {}, kinds.names[layer][item] ? t(`kind_${kinds.names[layer][item]}`) : t('kindNone')),
      h('pre', {}, ['previous', 'first', 'duplicate', 'induction'].map((kind) => `${t(`kind_${kind}`)}  ${percent(kinds.scores[kind][layer][item])}`).join('\n')),
      h('p', { class: 'muted' }, t('kindsWhy')),
    );
  return parts;
}

function drawEdits(self) {
  const { context } = self,
    { t, store } = context,
    edits = parsed(store.state.edits);
  const chip = ({ part, layer, item, code }) =>
    h(
      'button',
      { type: 'button', class: 'plain', onclick: () => store.set({ edits: edits.filter((one) => one.code !== code).map((one) => one.code).join('~') }) },
      part === 'mlp' || part === 'residual' ? t('editAt', { part: t(part === 'mlp' ? 'partMlp' : 'partResidual'), layer: part === 'mlp' ? layer + 1 : layer, n: item + 1 }) : t('headIs', { layer: layer + 1, head: item + 1 }),
      ' ×',
    );
  self.edits.replaceChildren(...(edits.length ? edits.map(chip) : [h('p', { class: 'muted' }, t('noEdits'))]));
}

// each answer before and after; clicking one explains it
function drawShift(self) {
  const { context, answer } = self,
    { t, store } = context;
  const rows = answer.rows.map(({ index, name, before, after, logit_before, logit_after }) =>
    h(
      'button',
      {
        type: 'button',
        class: 'row shift',
        'aria-pressed': index === answer.target.index,
        'data-before': logit_before,
        'data-after': logit_after,
        onclick: () => store.set({ index }),
      },
      h('span', { class: 'token' }, answerName(context, { name }, store.state.row)),
      h('span', { class: 'both' }, before === null ? '' : [bar(before, 'before'), bar(after)]),
      h('span', { class: 'number' }, before === null ? `${fixed(logit_before, 3)} → ${fixed(logit_after, 3)}` : `${percent(before)} → ${percent(after)}`),
    ),
  );
  self.shift.replaceChildren(
    h('div', { class: 'list answers wide' }, rows),
    answer.divergence === null ? '' : h('p', { class: 'muted' }, t('divergence', { x: fixed(answer.divergence, 4) })),
  );
}
