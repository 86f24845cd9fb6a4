// Write: continuations as they come; each token keeps its alternatives, each choice of one grows the tree.

import { bar, fixed, h, percent, visible } from '../draw.js';
import { subject } from '../store.js';

export function mount(root, context) {
  const { t, store } = context;
  const number = (name, min, max) => {
    const input = h('input', {
      type: 'number',
      min,
      max,
      'aria-label': t(name),
      onchange: () => store.set({ [name]: Math.min(max, Math.max(min, Math.round(Number(input.value)) || min)) }),
    });
    return { name, input, label: h('label', {}, t(name), input) };
  };
  const numbers = [number('length', 1, 1000), number('samples', 1, 8), number('seed', 0, 2 ** 31)];
  const start = h('button', { type: 'button', class: 'primary' }, t('start'));
  const settings = h('span', { class: 'muted' });
  const tree = h('div', { class: 'tree' }),
    columns = h('div', { class: 'columns' });
  root.append(
    h(
      'div',
      { class: 'controls' },
      start,
      numbers.map((one) => one.label),
      settings,
    ),
    h('div', { class: 'write' }, tree, columns),
  );
  context.side(h('p', {}, t('introWrite')), h('p', { class: 'muted' }, t('introWrite2')));
  const self = { root, context, numbers, start, settings, tree, columns, branches: [], shown: [], running: 0, serial: 0 };
  start.addEventListener('click', () => (self.running ? stop(self) : begin(self)));
  return self;
}

export function update(self, state) {
  const { context } = self;
  self.numbers.forEach(({ name, input }) => {
    input.value = state[name];
  });
  self.settings.textContent = `${context.t('temperature')} ${state.temperature.toFixed(2)} · top-k ${state.topk || context.t('off')} · top-p ${state.topp < 1 ? state.topp.toFixed(2) : context.t('off')}`;
  self.writes = context.model().plume.generates;
  self.start.disabled = !self.writes;
  if (!self.writes) {
    self.columns.replaceChildren(
      h('p', { class: 'empty' }, context.t('notForModel', { what: context.t('aCausal'), model: context.model().id })),
    );
    return;
  }
  if (!self.shown.length) drawGiven(self, state);
  drawTree(self);
}

export function unmount(self) {
  stop(self);
}

export function key(self, pressed) {
  if (pressed === 'Escape') stop(self);
  if (pressed === 'Start' && !self.running && self.writes) begin(self);
}

function begin(self) {
  const { state } = self.context.store;
  self.shown = Array.from({ length: state.samples }, (_, i) =>
    grow(self, { prompt: subject(state).input, given: state.text, tokens: [], seed: state.seed + i, parent: null }),
  );
  drawColumns(self);
}

// a branch: what was given, the tokens made since (some taken over from its parent), and where it came from
function grow(self, branch) {
  Object.assign(branch, { id: self.serial++, model: self.context.model().id, finished: '' });
  branch.depth = branch.parent ? branch.parent.depth + 1 : 0;
  const at = branch.parent ? self.branches.indexOf(branch.parent) + 1 : self.branches.length;
  self.branches.splice(at, 0, branch);
  stream(self, branch);
  return branch;
}

async function stream(self, branch) {
  const { context } = self,
    { state } = context.store,
    kept = branch.tokens.map((token) => token.id);
  let prompt = Array.isArray(branch.prompt) ? branch.prompt : null;
  try {
    running(self, 1);
    if (kept.length && prompt === null)
      prompt = (await context.api.ask(`cut${branch.id}`, '/v1/tokenize', { model: branch.model, input: branch.prompt })).tokens;
    const body = {
      model: branch.model,
      prompt: prompt === null ? branch.prompt : [...prompt, ...kept],
      stream: true,
      logprobs: 10,
      seed: branch.seed,
      max_tokens: Math.max(1, state.length - kept.length),
      temperature: state.temperature,
      top_k: state.topk,
      top_p: state.topp,
    };
    const whole = await context.api.stream(`write${branch.id}`, '/v1/completions', body, ({ choices: [choice] }) => {
      if (!choice) return;
      if (choice.finish_reason) branch.finished = choice.finish_reason;
      const scores = choice.logprobs;
      scores?.token_ids?.forEach((id, i) =>
        push(self, branch, {
          id,
          text: i === 0 ? choice.text : '',
          piece: scores.tokens[i],
          logprob: scores.token_logprobs[i],
          top: scores.top[i],
        }),
      );
      if (choice.text && !scores?.token_ids?.length && branch.tokens.length) {
        branch.tokens.at(-1).text += choice.text;
        redraw(self, branch);
      }
    });
    if (!whole) branch.finished = 'stopped';
  } catch (error) {
    branch.finished = 'error';
    context.fail(error);
  } finally {
    running(self, -1);
    branch.caret?.remove();
    context.data({ branches: self.branches.map(({ given, tokens, seed, model, finished }) => ({ model, seed, given, finished, tokens })) });
    drawTree(self);
  }
}

function stop(self) {
  self.branches.forEach((branch) => self.context.api.stop(`write${branch.id}`));
}

function running(self, change) {
  self.running += change;
  self.start.textContent = self.context.t(self.running ? 'stop' : 'start');
}

function push(self, branch, made) {
  branch.tokens.push(made);
  if (branch.box) branch.box.insertBefore(span(self, branch, branch.tokens.length - 1), branch.caret);
  if (branch.row) branch.row.replaceWith(row(self, branch));
}

function redraw(self, branch) {
  if (branch.box) drawColumns(self);
}

function span(self, branch, place) {
  const made = branch.tokens[place];
  const element = h(
    'span',
    {
      class: 'made',
      tabindex: 0,
      onclick: () => self.context.side(...alternatives(self, branch, place)),
      onkeydown: (event) => {
        if (event.key === 'Enter') {
          self.context.side(...alternatives(self, branch, place));
          document.querySelector('#side .row')?.focus();
        }
      },
    },
    made.text,
  );
  return self.context.why(element, () => alternatives(self, branch, place));
}

function alternatives(self, branch, place) {
  const { t } = self.context,
    made = branch.tokens[place];
  const rows = made.top.map(([id, piece, logprob]) =>
    h(
      'button',
      { type: 'button', class: 'row', onclick: () => fork(self, branch, place, { id, piece, logprob, text: piece, top: made.top }) },
      h('span', { class: 'token' }, visible(piece)),
      bar(Math.exp(logprob)),
      h('span', { class: 'number' }, percent(Math.exp(logprob))),
    ),
  );
  return [
    h('h2', {}, t('insteadOf', { token: visible(made.piece) })),
    h('p', { class: 'muted' }, t('branchOff')),
    h('div', { class: 'list' }, rows),
    h('pre', {}, `ln p = ${fixed(made.logprob, 3)}\np = ${percent(Math.exp(made.logprob))}`),
  ];
}

function fork(self, parent, place, chosen) {
  const branch = grow(self, {
    prompt: parent.prompt,
    given: parent.given,
    tokens: [...parent.tokens.slice(0, place), chosen],
    seed: parent.seed,
    parent,
  });
  self.shown = [branch];
  drawColumns(self);
  drawTree(self);
}

function total(branch) {
  return branch.tokens.reduce((sum, made) => sum + made.logprob, 0);
}

function row(self, branch) {
  const { t } = self.context,
    since = branch.parent
      ? branch.tokens.slice(branch.tokens.findIndex((made, i) => made.id !== branch.parent.tokens[i]?.id))
      : branch.tokens;
  branch.row = h(
    'button',
    {
      type: 'button',
      class: 'branch',
      'aria-current': self.shown.includes(branch),
      style: { 'padding-left': `${8 + 14 * branch.depth}px` },
      onclick: () => {
        self.shown = [branch];
        drawColumns(self);
        drawTree(self);
      },
    },
    since
      .map((made) => made.text)
      .join('')
      .trim()
      .slice(0, 28) || '…',
    h('small', {}, `${t('seed')} ${branch.seed} · ${t('logprob', { x: fixed(total(branch), 1) })}`),
  );
  return branch.row;
}

function drawTree(self) {
  const { t } = self.context;
  self.tree.replaceChildren(
    h('h2', {}, t('branches')),
    ...(self.branches.length ? self.branches.map((branch) => row(self, branch)) : [h('p', { class: 'muted' }, t('noBranches'))]),
  );
}

function drawGiven(self, state) {
  self.columns.replaceChildren(h('div', { class: 'prose' }, h('span', { class: 'given' }, state.text)));
}

function drawColumns(self) {
  const { t, store } = self.context;
  self.branches.forEach((branch) => {
    branch.box = null;
  });
  self.columns.replaceChildren(
    ...self.shown.map((branch) => {
      branch.caret = h('span', { class: 'cursor' });
      branch.box = h(
        'div',
        { class: 'prose' },
        h('span', { class: 'given' }, branch.given),
        branch.tokens.map((_, i) => span(self, branch, i)),
        branch.caret,
      );
      if (branch.finished) branch.caret.remove();
      const use = h(
        'button',
        {
          type: 'button',
          onclick: () => store.set({ text: branch.given + branch.tokens.map((made) => made.text).join(''), ids: '' }, { push: true }),
        },
        t('use'),
      );
      return h('div', {}, h('div', { class: 'seed' }, `${t('seed')} ${branch.seed} `, use), branch.box);
    }),
  );
}
