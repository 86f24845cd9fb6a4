// One place for what the page shows. The address holds all of it, so a link shows another person exactly this picture.

export const DEFAULTS = {
  view: 'next',
  text: '',
  ids: '',
  pair: '', // second text of a pair, context of a question, choices, or target so far
  row: 0,
  model: '',
  other: '',
  temperature: 1,
  topk: 0,
  topp: 1,
  seed: 1,
  samples: 1,
  length: 60,
  layer: 0,
  head: 0,
  mix: 'head',
  sort: 'layer',
  picture: 'matrix',
  query: -1,
  start: -1,
  colour: 'rank',
  place: -1,
  masked: '',
  runs: '',
  axis: 'tokens',
  scale: 'linear',
  stack: '', // of an encoder-decoder: encoder, decoder or cross
  group: 'pieces',
  step: 'text', // of the walk
  part: 'head',
  value: 'zero',
  patch: '', // the text that is patched from
  edits: '',
  map: 'effect',
  index: -1, // the token or label that is explained
  position: -1, // and where
  method: 'integrated_gradients',
  tour: '', // which, at which step, begun on which model
};
// what a link may hold; the page and the sampler agree within these
const LIMITS = { temperature: [0, 2], topk: [0, 1e6], topp: [0.05, 1], samples: [1, 8], length: [1, 1000], seed: [0, 2 ** 31], row: [0, 1e4] };
// what belongs to one text and is left behind with it
export const FRESH = { ids: '', masked: '', query: -1, start: -1, place: -1, row: 0, index: -1, position: -1, edits: '' };

function number(name, value) {
  const [low, high] = LIMITS[name] ?? [-Infinity, Infinity],
    inside = Math.min(high, Math.max(low, value));
  return name === 'temperature' ? Math.round(20 * inside) / 20 : inside;
}

export function parse(hash) {
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ''))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (typeof DEFAULTS[name] === 'number') {
      if (value !== '' && Number.isFinite(Number(value))) state[name] = number(name, Number(value));
    } else state[name] = value;
  }
  return state;
}

export function format(state) {
  const fragment = new URLSearchParams();
  for (const [name, usual] of Object.entries(DEFAULTS)) if (state[name] !== usual) fragment.set(name, state[name]);
  return '#' + fragment;
}

export function createStore() {
  let state = parse(location.hash),
    shown = location.hash;
  const asked = new URLSearchParams(location.search).get('text');
  if (asked !== null && !state.text) state.text = asked;
  const listeners = new Set();
  const tell = (changed) => listeners.forEach((listener) => listener(state, changed));

  window.addEventListener('popstate', () => {
    const before = state;
    state = parse(location.hash);
    shown = location.hash;
    tell(Object.keys(DEFAULTS).filter((name) => before[name] !== state[name]));
  });

  return {
    get state() {
      return state;
    },
    // the address that this state came from or went to
    get address() {
      return shown;
    },
    listen(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    // push makes a step that Back undoes; without it the newest step is rewritten
    set(patch, { push = false } = {}) {
      const changed = Object.keys(patch).filter((name) => patch[name] !== state[name]);
      if (!changed.length) return;
      state = { ...state, ...patch };
      const address = location.pathname + format(state);
      if (push) history.pushState(null, '', address);
      else history.replaceState(null, '', address);
      shown = location.hash;
      tell(changed);
    },
  };
}

// what a question about the text carries: ids once a token was chosen, since spelling them again could cut them otherwise
export function subject(state) {
  return { input: state.ids ? state.ids.split('.').map(Number) : state.text };
}

// what a question about the inside of a model carries: the second text and the row too
export function explained(state, model) {
  const second = model.plume.pair;
  return { model: model.id, ...subject(state), ...(second ? { pair: state.pair } : {}), ...(state.row ? { row: state.row } : {}) };
}

// what the browser keeps for this page in one of its places; null where a frame may not have any
export function kept(place, name, value) {
  try {
    if (value !== undefined) window[place].setItem(name, value);
    return window[place].getItem(name);
  } catch {
    return null;
  }
}
