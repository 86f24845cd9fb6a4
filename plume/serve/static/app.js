// The frame: header, text, one view (or two to compare), the side pane, keys and exports.

import { createApi } from './api.js';
import { createStore, explained, FRESH, kept } from './store.js';
import { fixed, h, save } from './draw.js';
import { beginning, lesson, ownWords } from './beginning.js';
import { createBusy, keepFocus } from './busy.js';
import { createTours } from './tours.js';
import en from './words/en.js';
import * as compare from './views/compare.js';
import * as next from './views/next.js';

const LATER = ['write', 'walk', 'attention', 'layers', 'cause', 'attribution', 'surprise', 'masks', 'tokens', 'runs'],
  VIEWS = { next, ...Object.fromEntries(LATER.map((name) => [name, null])) }; // the others are loaded when they are shown
const WAIT = 150;

const $ = (id) => document.getElementById(id);
const store = createStore(),
  busy = createBusy($('view'), () => store.address),
  loaded = busy.begin(),
  api = busy.watch(createApi());
for (const name of Object.keys(VIEWS)) if (api.views && !api.views.includes(name)) delete VIEWS[name]; // a saved page has fewer
let words = en,
  models = [],
  shown = null,
  lastAnswer = null,
  facts = {},
  asked = null, // the first screen's question, where it has one
  typing = null, // the timer that awaits the next key, and what ends the waiting
  typedAt = 0;

const t = (name, values = {}) => String(words[name] ?? name).replace(/\{(\w+)\}/g, (_, key) => values[key] ?? '');
const modelCalled = (id) => models.find((model) => model.id === id);
const tours = createTours({ box: $('tour'), store, t, models: () => models, views: Object.keys(VIEWS), language: () => (words === en ? 'en' : 'zh') });

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
    // asks; dims the old picture meanwhile; calls take when the answer is the newest and still about what is shown
    async ask(root, name, path, body, take) {
      const about = () => JSON.stringify(explained(store.state, modelCalled(modelOf(store.state)))),
        before = about();
      root.classList.add('waiting');
      try {
        const answer = await api.ask(name + suffix, path, body);
        if (answer === undefined) return;
        root.classList.remove('waiting');
        if (about() !== before) return;
        lastAnswer = { question: { path, ...body }, answer };
        say('');
        if (!suffix && answer.task_rows !== undefined) showRows(answer.task_rows);
        take(answer);
      } catch (error) {
        root.classList.remove('waiting');
        fail(error);
      }
    },
    fail,
    report(found) {
      if (!suffix) {
        facts = { ...facts, ...found };
        showFacts();
      }
    },
    data(value) {
      lastAnswer = value;
    },
    // a token was chosen: its id is kept, since the letters alone could be cut otherwise
    take(tokens, text) {
      store.set({ ...FRESH, ids: tokens.join('.'), text }, { push: true });
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

function showView() {
  return busy.during(drawView);
}

async function drawView() {
  const name = store.state.view in VIEWS ? store.state.view : 'next',
    split = Boolean(store.state.other) && name !== 'runs' && name !== 'write';
  const module = await viewModule(name);
  if (store.state.view !== name && store.state.view in VIEWS) return; // another one was chosen while this was loaded
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
  tours.show(store.state);
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
    model = modelCalled(store.state.model),
    box = $('hint');
  box.classList.remove('warn');
  box.replaceChildren();
  const button = (word, onclick) => h('button', { type: 'button', onclick }, word);
  if (!text && model)
    box.append(
      t('beginnings'),
      ...model.plume.prompts.map((prompt) => button(prompt, () => setText(prompt))),
      ...(model.plume.generates ? [button(t('ownWords'), async () => offer(model, await ownWords(api, t, model)))] : []),
      button(t('lesson'), () => setText(t('lessonText'))),
    );
  else if (/\S[ \u00a0]+$/.test(text) && model?.plume.spaced && model.plume.generates)
    box.append(t('trailing'), button(t('heal'), () => setText(text.trimEnd())));
  else if (asked?.query >= 0 && Object.entries(asked).every(([name, value]) => store.state[name] === value)) box.append(t('lessonHint'));
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
  return words.engine.reduce((text, [pattern, other]) => text.replace(pattern, other), name);
}

// ---- the text

function setText(text) {
  store.set({ ...FRESH, text }, { push: true });
}

function fit() {
  for (const area of [$('text'), $('pair')]) {
    area.style.height = 'auto';
    area.style.height = `${area.scrollHeight}px`;
  }
}

// the second field, for models of two texts
function showPair() {
  const kind = modelCalled(store.state.model)?.plume.pair ?? '';
  $('pair-field').hidden = !kind;
  if (!kind) showRows(1);
  $('pair-name').textContent = kind ? t(`name_${kind}`) : '';
  $('pair').setAttribute('aria-label', kind ? t(`name_${kind}`) : '');
  if ($('pair').value !== store.state.pair) $('pair').value = store.state.pair;
  fit();
}

// which of the rows that a task makes of the text is explained: an order of a pair, a choice, a window
function showRows(count) {
  $('row-field').hidden = count < 2;
  if ($('row').options.length !== count) $('row').replaceChildren(...Array.from({ length: count }, (_, i) => h('option', { value: i }, `${i + 1} / ${count}`)));
  $('row').value = store.state.row;
}

function typed() {
  fit();
  clearTimeout(typing?.timer);
  const end = typing?.end ?? busy.begin();
  const timer = setTimeout(() => {
    const push = Date.now() - typedAt > 1500;
    typedAt = Date.now();
    store.set({ ...FRESH, text: $('text').value, pair: $('pair').value }, { push });
    typing = null;
    end();
  }, WAIT);
  typing = { timer, end };
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
  for (const [id, word] of [['text', 'text'], ['writing', 'text'], ['tour', 'toursTitle']]) $(id).setAttribute('aria-label', t(word));
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
  $('other').parentElement.hidden = models.length < 2;
  $('model').value = store.state.model;
  $('other').value = store.state.other;
}

// a text that was awaited: whoever has written one meanwhile, or gone to another model, keeps theirs
function offer(model, text) {
  if (!store.state.text && store.state.model === model.id) setText(text);
}

// another model: the text stays, and what it lacks is filled in
async function switchModel(id) {
  const model = modelCalled(id),
    patch = { ...FRESH, model: id, layer: 0, head: 0, stack: '', step: 'text' };
  if (!store.state.text || (model.plume.pair && !store.state.pair)) {
    const first = await beginning(api, t, model),
      { text, pair } = store.state;
    if ($('model').value !== id) return;
    Object.assign(patch, text ? {} : { text: first.text }, pair ? {} : { pair: first.pair });
  }
  store.set(patch, { push: true });
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

function showTours() {
  const buttons = tours.list();
  buttons.forEach((button) => button.addEventListener('click', () => $('dialog').close()));
  openDialog(h('h2', {}, t('toursTitle')), h('p', { class: 'muted' }, t('toursWhy')), h('div', { class: 'tour-list' }, buttons));
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
  if (event.altKey && (event.key === 'ArrowLeft' || event.key === 'ArrowRight')) {
    stop();
    history.go(event.key === 'ArrowLeft' ? -1 : 1);
    return;
  }
  if ((event.ctrlKey || event.metaKey) && event.key === 'Enter') {
    stop();
    store.set({ view: 'write' }, { push: true });
    showView().then(() => {
      if (store.state.view === 'write') shown.module.key?.(shown.handle, 'Start');
    });
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
  else if (event.key === 'n' || event.key === 'b') tours.move(event.key === 'n' ? 1 : -1);
  else if (event.key === 'Backspace') {
    stop();
    history.back();
  } else if (!event.shiftKey && shown?.module.STEP_KEYS?.includes(event.key)) {
    stop();
    shown.module.key(shown.handle, event.key);
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
    save(`${name}.json`, new Blob([JSON.stringify({ link: location.href, ...lastAnswer }, (_, value) => (ArrayBuffer.isView(value) ? [...value] : value), 1)], { type: 'application/json' }));
    return;
  }
  const { asPng, snapshot } = await import('./snapshot.js');
  const svg = snapshot($('view'));
  save(`${name}.${kind}`, kind === 'svg' ? new Blob([svg], { type: 'image/svg+xml' }) : await asPng(svg));
}

async function speak(language) {
  words = language === 'zh' ? (await import('./words/zh.js')).default : en;
  kept('localStorage', 'plume-language', language);
  header();
  pickers();
  showPair();
  showFacts();
  hints();
  if (models.length) showView();
}

function wire() {
  $('text').addEventListener('input', typed);
  $('pair').addEventListener('input', typed);
  $('model').addEventListener('change', (event) => switchModel(event.target.value));
  $('other').addEventListener('change', (event) => store.set({ other: event.target.value }, { push: true }));
  $('theme').addEventListener('click', () => {
    const wanted = matchMedia('(prefers-color-scheme: dark)').matches,
      root = document.documentElement;
    const dark = root.style.colorScheme ? root.style.colorScheme === 'dark' : wanted;
    root.style.colorScheme = dark ? 'light' : 'dark';
    kept('localStorage', 'plume-theme', root.style.colorScheme);
    showView();
  });
  $('language').addEventListener('click', () => speak(words === en ? 'zh' : 'en'));
  $('row').addEventListener('change', (event) => store.set({ ...FRESH, ids: store.state.ids, row: Number(event.target.value) }, { push: true }));
  $('keys').addEventListener('click', showKeys);
  $('tours').addEventListener('click', showTours);
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
    showPair();
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
  const model = modelCalled(state.model) ?? models[0],
    bare = !state.text && location.hash.length < 2;
  let first = model && !state.text && state.view !== 'runs' ? await beginning(api, t, model) : {};
  if (bare && model?.plume.first_view === 'attention') asked = Object.assign(first, await lesson(api, model, first.text));
  if (!state.text && $('text').value) first = {}; // a text was written while the models were awaited
  store.set({ model: model?.id ?? '', ...(state.other && !modelCalled(state.other) ? { other: '' } : {}), ...first });
  pickers();
  showPair();
  hints();
  await showView();
}

document.documentElement.style.colorScheme = kept('localStorage', 'plume-theme') ?? '';
wire();
keepFocus($('view'));
$('text').value = store.state.text;
await speak(kept('localStorage', 'plume-language') ?? (navigator.language.startsWith('zh') ? 'zh' : 'en'));
fit();
await begin();
if (store.state.view === 'walk') $('view').focus({ preventScroll: true }); // so that the arrow keys step at once
else if (matchMedia('(pointer: fine)').matches) $('text').focus();
$('text').setSelectionRange($('text').value.length, $('text').value.length);
loaded();
