// One place for what the page shows. The address holds all of it, so a link shows another person exactly this picture.

export const DEFAULTS = {
  view: 'next',
  text: '',
  ids: '',
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
};

export function parse(hash) {
  const state = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ''))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (typeof DEFAULTS[name] === 'number') {
      if (value !== '' && Number.isFinite(Number(value))) state[name] = Number(value);
    } else state[name] = value;
  }
  return state;
}

export function format(state) {
  const told = new URLSearchParams();
  for (const [name, usual] of Object.entries(DEFAULTS)) if (state[name] !== usual) told.set(name, state[name]);
  return '#' + told;
}

export function createStore() {
  let state = parse(location.hash);
  const asked = new URLSearchParams(location.search).get('text');
  if (asked !== null && !state.text) state.text = asked;
  const listeners = new Set();
  const tell = (changed) => listeners.forEach((listener) => listener(state, changed));

  window.addEventListener('popstate', () => {
    const before = state;
    state = parse(location.hash);
    tell(Object.keys(DEFAULTS).filter((name) => before[name] !== state[name]));
  });

  return {
    get state() {
      return state;
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
      tell(changed);
    },
  };
}

// what a question about the text carries: ids once a token was chosen, since spelling them again could cut them otherwise
export function subject(state) {
  return state.ids ? { tokens: state.ids.split('.').map(Number) } : { text: state.text };
}
