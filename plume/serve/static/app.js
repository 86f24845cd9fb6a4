// The frame: header, text, one view (or two to compare), the side pane, keys and exports.

import { createApi } from './api.js';
import { createStore } from './store.js';
import { asPng, fixed, h, save, snapshot } from './draw.js';
import en from './words/en.js';
import * as compare from './views/compare.js';
import * as next from './views/next.js';

const VIEWS = { next, write: null, surprise: null, attention: null, layers: null, masks: null, tokens: null, runs: null };
const BEGINNINGS = {
  robot:
    'A robot may not injure a human being or, through inaction, allow a human being to come to harm. A robot must obey the orders given it by human beings because it',
  unicorn:
    'In a shocking finding, scientist discovered a herd of unicorns living in a remote, previously unexplored valley, in the Andes Mountains.',
  story: 'Once upon a time, there was a little girl named Lily. She',
};
const WAIT = 150;

const $ = (id) => document.getElementById(id);
const store = createStore(),
  api = createApi();
let words = en,
  models = [],
  shown = null,
  lastAnswer = null,
  facts = {},
  typing = 0,
  typedAt = 0;

const t = (name, values = {}) => String(words[name] ?? name).replace(/\{(\w+)\}/g, (_, key) => values[key] ?? '');
const modelCalled = (id) => models.find((model) => model.id === id);

// ---- what a view is given

function contextFor(modelOf, suffix = '') {
  return {
    api,
    store,
    t,
    words: () => words,
    question: (name) => name + suffix,
    model: () => modelCalled(modelOf(store.state)),
    models: () => models,
    side: (...children) => $('side').replaceChildren(...children),
    why(element, content) {
      const show = () => $('side').replaceChildren(...content());
      element.addEventListener('pointerenter', show);
      element.addEventListener('focus', show);
      return element;
    },
    // asks; dims the old picture meanwhile; calls take when the answer is the newest
    async ask(root, name, path, body, take) {
      root.classList.add('waiting');
      try {
        const answer = await api.ask(name + suffix, path, body);
        if (answer === undefined) return;
        root.classList.remove('waiting');
        lastAnswer = { question: { path, ...body }, answer };
        say('');
        take(answer);
      } catch (error) {
        root.classList.remove('waiting');
        fail(error);
      }
    },
    fail,
    report(told) {
      if (!suffix) {
        facts = { ...facts, ...told };
        showFacts();
      }
    },
    data(value) {
      lastAnswer = value;
    },
    // a token was chosen: ids, not letters, are what goes on
    take(tokens, text) {
      store.set({ ids: tokens.join('.'), text }, { push: true });
    },
    adopt(answer) {
      if (store.state.ids && answer.text !== undefined && answer.text !== store.state.text && !suffix) store.set({ text: answer.text });
    },
  };
}

// ---- the view

async function viewModule(name) {
  VIEWS[name] ??= await import(`./views/${name}.js`);
  return VIEWS[name];
}

async function showView() {
  const name = store.state.view in VIEWS ? store.state.view : 'next',
    split = Boolean(store.state.other) && name !== 'runs' && name !== 'write';
  const module = await viewModule(name);
  const key = `${name}/${split}/${words.language}`;
  if (shown?.key !== key) {
    shown?.module.unmount(shown.handle);
    $('view').replaceChildren();
    $('view').classList.remove('waiting');
    facts = {};
    shown = split
      ? {
          key,
          module: compare,
          handle: compare.mount(
            $('view'),
            contextFor((s) => s.model),
            module,
            contextFor,
          ),
        }
      : {
          key,
          module,
          handle: module.mount(
            $('view'),
            contextFor((s) => s.model),
          ),
        };
  }
  for (const tab of $('tabs').children) {
    tab.setAttribute('aria-selected', tab.dataset.view === name);
    if (tab.dataset.view === name) $('tabs').scrollLeft = tab.offsetLeft + tab.offsetWidth / 2 - $('tabs').clientWidth / 2;
  }
  document.title = `${t(name)} · Plume`;
  showFacts();
  if (models.length || name === 'runs') shown.module.update(shown.handle, store.state);
}

function say(message, ...more) {
  $('hint').classList.toggle('warn', Boolean(message));
  $('hint').replaceChildren(message, ...more);
  if (!message) hints();
}

function fail(error) {
  if (error.status === 401) {
    askForKey();
    return;
  }
  if (error.status === undefined) throw error; // a defect of the page, which the console should show
  const context = modelCalled(store.state.model)?.plume.context;
  if (error.code === 'context_length_exceeded') say(t('tooLong', { n: context }));
  else say(error.status ? error.message : t('cannot'));
}

function hints() {
  const { text } = store.state,
    box = $('hint');
  box.classList.remove('warn');
  box.replaceChildren();
  if (!text)
    box.append(
      t('beginnings'),
      ...Object.entries(BEGINNINGS).map(([name, words]) => h('button', { type: 'button', onclick: () => setText(words) }, t(name))),
    );
  else if (/\S[ \u00a0]+$/.test(text) && modelCalled(store.state.model)?.plume.spaced)
    box.append(t('trailing'), h('button', { type: 'button', onclick: () => setText(text.trimEnd()) }, t('heal')));
}

function showFacts() {
  const { count, context, perplexity, ms } = facts,
    model = modelCalled(store.state.model);
  const parts = [
    count !== undefined && t('tokensOf', { n: count, context }),
    perplexity && t('perplexity', { x: fixed(perplexity, perplexity < 100 ? 1 : 0) }),
    ms !== undefined && t('milliseconds', { n: ms }),
    model && engineWords(model.plume.engine),
  ];
  $('facts').replaceChildren(...parts.filter(Boolean).map((part) => h('span', {}, part)));
}

// the server names its engine in English; the language says which of its words are said otherwise
function engineWords(name) {
  return words.engine.reduce((said, [pattern, other]) => said.replace(pattern, other), name);
}

// ---- the text

function setText(text) {
  store.set({ text, ids: '', masked: '', query: -1, start: -1, place: -1 }, { push: true });
}

function fit() {
  const area = $('text');
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight}px`;
}

function typed() {
  fit();
  clearTimeout(typing);
  typing = setTimeout(() => {
    const push = Date.now() - typedAt > 1500;
    typedAt = Date.now();
    store.set({ text: $('text').value, ids: '', masked: '', query: -1, start: -1, place: -1 }, { push });
  }, WAIT);
}

// ---- header, keys, exports

function header() {
  $('tabs').replaceChildren(
    ...Object.keys(VIEWS).map((name) =>
      h('button', { type: 'button', role: 'tab', 'data-view': name, onclick: () => store.set({ view: name }, { push: true }) }, t(name)),
    ),
  );
  document.querySelectorAll('[data-word]').forEach((element) => {
    element.textContent = t(element.dataset.word);
  });
  $('text').placeholder = t('placeholder');
  $('text').setAttribute('aria-label', t('text'));
  $('language').textContent = t('language');
  for (const [id, word] of [
    ['theme', 'theme'],
    ['language', 'otherLanguage'],
    ['keys', 'keysTitle'],
  ]) {
    $(id).title = t(word);
    $(id).setAttribute('aria-label', t(word));
  }
  document.documentElement.lang = words === en ? 'en' : 'zh';
}

function pickers() {
  const option = (model) => h('option', { value: model.id }, model.id);
  $('model').replaceChildren(...models.map(option));
  $('other').replaceChildren(h('option', { value: '' }, t('none')), ...models.map(option));
  $('model').value = store.state.model;
  $('other').value = store.state.other;
}

function openDialog(...children) {
  $('dialog').replaceChildren(...children, h('form', { method: 'dialog' }, h('button', { class: 'plain' }, t('close'))));
  $('dialog').showModal();
}

function showKeys() {
  openDialog(
    h('h2', {}, t('keysTitle')),
    h(
      'table',
      {},
      words.keys.map(([key, meaning]) => h('tr', {}, h('td', {}, h('kbd', {}, key)), h('td', {}, meaning))),
    ),
  );
}

function askForKey() {
  if ($('dialog').open) return;
  const field = h('input', { type: 'password', autocomplete: 'current-password' });
  openDialog(
    h('h2', {}, t('keyNeeded')),
    h(
      'p',
      {},
      field,
      ' ',
      h(
        'button',
        {
          type: 'button',
          class: 'primary',
          onclick: () => {
            api.key = field.value;
            $('dialog').close();
            begin();
          },
        },
        t('keySend'),
      ),
    ),
  );
}

function onKey(event) {
  const inField = event.target.closest('textarea, input, select, dialog');
  const stop = () => event.preventDefault();
  if (event.altKey && event.key === 'ArrowLeft') {
    stop();
    history.back();
    return;
  }
  if (event.altKey && event.key === 'ArrowRight') {
    stop();
    history.forward();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && event.key === 'Enter') {
    stop();
    store.set({ view: 'write' }, { push: true });
    setTimeout(() => shown.module.key?.(shown.handle, 'Start'), 60);
    return;
  }
  if (event.key === 'Escape') {
    shown?.module.key?.(shown.handle, 'Escape');
    if (inField?.id === 'text') {
      $('text').blur();
      $('view').focus({ preventScroll: true });
    }
    return;
  }
  if (event.ctrlKey || event.metaKey || (inField && !(event.altKey && /^[0-9]$/.test(event.key)))) return;
  const { layer, head, view } = store.state,
    model = modelCalled(store.state.model)?.plume,
    names = Object.keys(VIEWS);
  const turn = (value, by, count) => (value + by + count) % count;
  if (event.key === '/') {
    stop();
    $('text').focus();
  } else if (event.key === '?') showKeys();
  else if (event.key === 'Backspace') {
    stop();
    history.back();
  } else if (event.shiftKey && event.key === 'ArrowLeft')
    store.set({ view: names[turn(names.indexOf(view), -1, names.length)] }, { push: true });
  else if (event.shiftKey && event.key === 'ArrowRight')
    store.set({ view: names[turn(names.indexOf(view), 1, names.length)] }, { push: true });
  else if (model && (event.key === '[' || event.key === ']')) store.set({ layer: turn(layer, event.key === '[' ? -1 : 1, model.layers) });
  else if (model && (event.key === ',' || event.key === '.')) store.set({ head: turn(head, event.key === ',' ? -1 : 1, model.heads) });
  else if (/^[0-9]$/.test(event.key) && shown?.module.key) {
    stop();
    shown.module.key(shown.handle, event.key);
  }
}

async function exportAs(kind) {
  const name = `plume-${store.state.view}`;
  if (kind === 'json') {
    save(`${name}.json`, new Blob([JSON.stringify({ link: location.href, ...lastAnswer }, null, 1)], { type: 'application/json' }));
    return;
  }
  const svg = snapshot($('view'));
  save(`${name}.${kind}`, kind === 'svg' ? new Blob([svg], { type: 'image/svg+xml' }) : await asPng(svg));
}

async function speak(language) {
  words = language === 'zh' ? (await import('./words/zh.js')).default : en;
  localStorage.setItem('plume-language', language);
  header();
  pickers();
  showFacts();
  hints();
  if (models.length) showView();
}

function wire() {
  $('text').addEventListener('input', typed);
  $('model').addEventListener('change', (event) => store.set({ model: event.target.value, ids: '', layer: 0, head: 0 }, { push: true }));
  $('other').addEventListener('change', (event) => store.set({ other: event.target.value }, { push: true }));
  $('theme').addEventListener('click', () => {
    const wanted = matchMedia('(prefers-color-scheme: dark)').matches,
      root = document.documentElement;
    const dark = root.style.colorScheme ? root.style.colorScheme === 'dark' : wanted;
    root.style.colorScheme = dark ? 'light' : 'dark';
    localStorage.setItem('plume-theme', root.style.colorScheme);
    showView();
  });
  $('language').addEventListener('click', () => speak(words === en ? 'zh' : 'en'));
  $('keys').addEventListener('click', showKeys);
  $('copy-link').addEventListener('click', async () => {
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    $('copy-link').textContent = t('copied');
    setTimeout(() => {
      $('copy-link').textContent = t('copyLink');
    }, 1500);
  });
  for (const kind of ['svg', 'png', 'json']) $(`save-${kind}`).addEventListener('click', () => exportAs(kind));
  document.addEventListener('keydown', onKey);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', showView);
  let width = innerWidth;
  window.addEventListener('resize', () => {
    if (innerWidth !== width) {
      width = innerWidth;
      fit();
      showView();
    }
  });
  store.listen((state, changed) => {
    if (changed.includes('text') && $('text').value !== state.text) {
      $('text').value = state.text;
      fit();
    }
    if (changed.includes('model') || changed.includes('other')) pickers();
    hints();
    showView();
  });
}

async function begin() {
  $('hint').replaceChildren(t('opening')); // until the models are known
  try {
    models = (await api.ask('models', '/v1/models')).data;
  } catch (error) {
    fail(error);
    return;
  }
  const { state } = store;
  if (!modelCalled(state.model)) store.set({ model: models[0]?.id ?? '' });
  if (state.other && !modelCalled(state.other)) store.set({ other: '' });
  pickers();
  hints();
  await showView();
}

document.documentElement.style.colorScheme = localStorage.getItem('plume-theme') ?? '';
wire();
$('text').value = store.state.text;
await speak(localStorage.getItem('plume-language') ?? (navigator.language.startsWith('zh') ? 'zh' : 'en'));
fit();
await begin();
if (matchMedia('(pointer: fine)').matches) $('text').focus();
$('text').setSelectionRange($('text').value.length, $('text').value.length);
