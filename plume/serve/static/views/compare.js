// Compare: the same view of two models side by side; what differs is outlined. Checkpoints of a run get a slider.

import { h } from '../draw.js';

export function mount(root, context, module, contextFor) {
  const { t } = context,
    columns = h('div', { class: 'two' }),
    controls = h('div', { class: 'controls' });
  root.append(controls, columns);
  const sides = ['model', 'other'].map((name, i) => {
    const box = h('div'),
      title = h('h2');
    columns.append(h('section', {}, title, box));
    return {
      name,
      title,
      handle: module.mount(
        box,
        contextFor((state) => state[name], i ? `/${i}` : ''),
      ),
    };
  });
  const self = { root, context, module, columns, controls, sides, watch: new MutationObserver(() => outline(self)) };
  self.watch.observe(columns, { childList: true, subtree: true });
  context.side(h('p', {}, t('introCompare')));
  return self;
}

export function update(self, state) {
  sliders(self, state);
  for (const { name, title, handle } of self.sides) {
    title.textContent = state[name];
    self.module.update(handle, state);
  }
}

export function unmount(self) {
  self.watch.disconnect();
  self.sides.forEach(({ handle }) => self.module.unmount(handle));
}

export function key(self, pressed) {
  self.module.key?.(self.sides[0].handle, pressed);
}

// what stands on one side alone, or says something else there
function outline(self) {
  self.watch.disconnect();
  const [left, right] = [...self.columns.children].map(
    (side) => new Map([...side.querySelectorAll('[data-key]')].map((element) => [element.dataset.key, element])),
  );
  const both = left.size > 0 && right.size > 0;
  for (const [mine, other] of [
    [left, right],
    [right, left],
  ])
    for (const [name, element] of mine)
      element.classList.toggle('differs', both && other.get(name)?.dataset.value !== element.dataset.value);
  self.watch.observe(self.columns, { childList: true, subtree: true });
}

// one slider for each side whose model is a checkpoint of a run
function sliders(self, state) {
  const { context } = self;
  const made = self.sides.map(({ name }) => {
    const model = context.models().find((one) => one.id === state[name]);
    const steps = context
      .models()
      .filter((one) => one.plume.run && one.plume.run === model?.plume.run)
      .sort((a, b) => (a.plume.step ?? Infinity) - (b.plume.step ?? Infinity));
    if (steps.length < 2) return null;
    const at = Math.max(
      0,
      steps.findIndex((one) => one.id === state[name]),
    );
    return h(
      'label',
      {},
      context.t('checkpoint'),
      h('input', {
        type: 'range',
        min: 0,
        max: steps.length - 1,
        value: at,
        'data-side': name,
        onchange: (event) => context.store.set({ [name]: steps[event.target.value].id }),
      }),
      h('span', { class: 'number' }, steps[at].plume.step ?? context.t('final')),
    );
  });
  if (!self.controls.contains(document.activeElement)) self.controls.replaceChildren(...made.filter(Boolean));
}
