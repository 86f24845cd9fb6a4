// Runs: curves of training runs, updated while they go, with speed, samples, stalls and restarts.

import { choice, curves, fixed, h, press, short } from '../draw.js';

const AXES = [
    ['tokens', 'byTokens'],
    ['seconds', 'byTime'],
    ['step', 'bySteps'],
  ],
  STALLED = 60;

export function mount(root, context) {
  const { t } = context;
  const groups = [
    choice(context, 'axis', AXES),
    choice(context, 'scale', [
      ['linear', 'linear'],
      ['log', 'log'],
    ]),
  ];
  const names = h('div', { class: 'names' }),
    charts = h('div'),
    samples = h('div');
  root.append(h('div', { class: 'controls' }, groups), h('div', { class: 'runs' }, names, h('div', {}, charts, samples)));
  context.side(h('p', {}, t('introRuns')));
  const self = { root, context, groups, names, charts, samples, runs: null, records: new Map(), known: new Map() };
  self.clock = setInterval(() => load(self), 2000);
  load(self);
  return self;
}

export function update(self, state) {
  press(self.groups, state);
  if (self.runs) {
    drawNames(self);
    draw(self);
    read(self);
  }
}

export function unmount(self) {
  clearInterval(self.clock);
  self.gone = true;
  self.context.api.stop('run');
  self.context.api.stop('runs');
  self.root.replaceChildren();
}

async function load(self) {
  try {
    const { runs } = (await self.context.api.ask('runs', '/v1/runs')) ?? {};
    if (!runs || self.gone) return;
    self.runs = runs;
    update(self, self.context.store.state);
  } catch (error) {
    self.context.fail(error);
  }
}

function chosen(self) {
  const { runs } = self.context.store.state,
    known = self.runs.map((run) => run.name);
  const wanted = runs ? runs.split('~').filter((name) => known.includes(name)) : known.slice(0, 1);
  return wanted.slice(0, 5);
}

// one run after another, over one connection: those whose figures have changed since they were read
async function read(self) {
  if (self.reading) return;
  self.reading = true;
  try {
    for (;;) {
      const stamp = (run) => `${run.step}/${run.tokens}/${run.restarts}/${run.validation}`;
      const next = self.gone ? null : self.runs.find((run) => chosen(self).includes(run.name) && self.known.get(run.name) !== stamp(run));
      if (!next) return;
      const answer = await self.context.api.ask('run', `/v1/runs/${encodeURIComponent(next.name)}`);
      if (!answer || self.gone) return;
      self.known.set(next.name, stamp(next));
      self.records.set(next.name, answer.records);
      drawNames(self);
      draw(self);
    }
  } catch (error) {
    self.context.fail(error);
  } finally {
    self.reading = false;
  }
}

function drawNames(self) {
  const { t } = self.context,
    on = chosen(self);
  if (!self.runs.length) {
    self.listed = '';
    self.names.replaceChildren();
    self.charts.replaceChildren(h('p', { class: 'empty' }, t('noRuns')));
    return;
  }
  const names = self.runs.map((run) => run.name).sort().join('~'); // the newest comes first, which changes while they run
  if (self.listed !== names) {
    self.listed = names; // the boxes stay while figures come, so that none is replaced under a pointer or a focus
    self.rows = new Map(self.runs.map((run) => [run.name, runRow(self, run.name)]));
    self.names.replaceChildren(...Array.from(self.rows.values(), (row) => row.label));
  }
  for (const run of self.runs) {
    const { box, chip, note } = self.rows.get(run.name),
      place = on.indexOf(run.name);
    box.checked = place >= 0;
    chip.className = place >= 0 ? `chip c${place}` : '';
    note.className = run.running ? 'live' : '';
    note.textContent = noteOf(self, run);
  }
}

function runRow(self, name) {
  const { store } = self.context,
    box = h('input', { type: 'checkbox', onchange: () => toggle() }),
    chip = h('i'),
    note = h('small');
  const toggle = () => {
    const on = chosen(self);
    store.set({ runs: (on.includes(name) ? on.filter((one) => one !== name) : [...on, name]).join('~') || '~' }); // '~' is none
    box.checked = chosen(self).includes(name); // five at most
  };
  return { box, chip, note, label: h('label', {}, box, h('span', {}, chip, ` ${name}`, note)) };
}

function noteOf(self, run) {
  const { t } = self.context,
    age = run.age < 120 ? `${Math.round(run.age)} s` : run.age < 7200 ? `${Math.round(run.age / 60)} min` : `${Math.round(run.age / 3600)} h`;
  return [
    run.running ? t('live') : t('finished', { step: run.step ?? 0 }),
    run.running && run.age > STALLED && t('stalled', { time: age }),
    run.restarts > 0 && t('restarted', { n: run.restarts }),
  ]
    .filter(Boolean)
    .join(' · ');
}

function draw(self) {
  const { t, store } = self.context,
    { axis, scale } = store.state,
    on = chosen(self);
  if (!self.runs.length) return;
  const by = AXES.some(([name]) => name === axis) ? axis : 'tokens',
    width = Math.min(880, self.charts.clientWidth || 600);
  const lines = (field, dashed = '') =>
    on.map((name, i) => {
      const known = (self.records.get(name) ?? []).filter((record) => record[field] !== undefined && record[by] !== undefined);
      return { name, kind: `c${i} ${dashed}`, x: known.map((record) => record[by]), y: known.map((record) => record[field]) };
    });
  const label = by === 'seconds' ? (v) => (v >= 120 ? `${Math.round(v / 6) / 10} min` : `${v} s`) : short;
  const chart = (title, all, height, wide) =>
    curves({ title, lines: all, width: wide, height, log: scale === 'log', label, on: (_, x) => about(self, by, x) });
  const { notes, differ } = comparable(self, on),
    bits = lines('bits');
  const small = Math.max(190, Math.min(280, (width - 48) / 3));
  self.charts.replaceChildren(
    ...notes.map((note) => h('p', { class: 'muted' }, note)),
    ...(differ && bits.some((line) => line.y.length) ? [chart(t('bitsTitle'), bits, 220, width)] : []),
    chart(t('loss'), [...lines('loss'), ...lines('validation', 'dashed')], 300, width),
    h(
      'div',
      { class: 'small-multiples' },
      [
        ['rate', 'rate'],
        ['norm', 'gradient'],
        ['speed', 'speed'],
      ].map(([field, word]) => chart(t(word), lines(field), 130, small)),
    ),
  );
  const told = on
    .flatMap((name) =>
      (self.records.get(name) ?? []).filter((record) => record.sample !== undefined).map((record) => ({ ...record, name })),
    )
    .sort((a, b) => b.step - a.step);
  self.samples.replaceChildren(
    ...(told.length
      ? [
          h('h2', {}, t('samplesTitle')),
          ...told
            .slice(0, 30)
            .map((record) =>
              h(
                'div',
                { class: 'sample' },
                h('small', { class: 'muted' }, `${on.length > 1 ? `${record.name} · ` : ''}${t('atStep', { n: record.step })}`),
                h('p', {}, record.sample),
              ),
            ),
        ]
      : []),
  );
  self.context.data({ runs: Object.fromEntries(on.map((name) => [name, self.records.get(name)])) });
}

// why the losses of the chosen runs cannot be compared
function comparable(self, on) {
  const { t } = self.context,
    runs = self.runs.filter((run) => on.includes(run.name)),
    masked = runs.filter((run) => run.masked).map((run) => run.name),
    differ = new Set(runs.map((run) => run.tokenizer).filter(Boolean)).size > 1;
  const notes = [
    differ && t('otherTokenizers'),
    masked.length > 0 && (differ || runs.some((run) => run.tokenizer && !run.masked)) && t('maskedRuns', { names: masked.join(', ') }),
  ].filter(Boolean);
  return { notes, differ };
}

function about(self, by, x) {
  const { t } = self.context,
    parts = [];
  for (const name of chosen(self)) {
    const near = (field) =>
      (self.records.get(name) ?? [])
        .filter((record) => record[field] !== undefined)
        .reduce((best, record) => (best && Math.abs(best[by] - x) <= Math.abs(record[by] - x) ? best : record), null);
    const point = near('loss'),
      checked = near('validation');
    if (point)
      parts.push(
        h('h2', {}, name),
        h(
          'pre',
          {},
          [
            t('atStep', { n: point.step }),
            `loss ${fixed(point.loss, 4)}`,
            checked && `${t('validation')} ${fixed(checked.validation, 4)}`,
            checked?.bits !== undefined && t('bits', { x: fixed(checked.bits, 4) }),
            point.rate !== undefined && `${t('rate')} ${point.rate.toExponential(2)}`,
            point.norm !== undefined && `${t('gradient')} ${fixed(point.norm, 3)}`,
            point.speed !== undefined && `${short(Math.round(point.speed))} tokens/s`,
          ]
            .filter(Boolean)
            .join('\n'),
        ),
      );
  }
  self.context.side(...parts);
}
