// Whether the page is still at work, for screen readers and for whoever waits; and the focus, which a redrawn view keeps.

// begin() returns the function that ends it. The box is aria-busy meanwhile; then data-shown is the address that is shown
export function createBusy(box, address) {
  let pending = 0;
  const begin = () => {
    pending += 1;
    box.setAttribute('aria-busy', 'true');
    const end = () => {
      pending -= 1;
      if (pending) return;
      box.setAttribute('aria-busy', 'false');
      box.dataset.shown = address();
    };
    return () => setTimeout(end); // after all that the answer causes
  };
  const during = async (work) => {
    const end = begin();
    try {
      return await work();
    } finally {
      end();
    }
  };
  // each question counts as work
  const watch = (api) => {
    const { ask } = api;
    api.ask = (...given) => during(() => ask.apply(api, given));
    return api;
  };
  return { begin, during, watch };
}

// where an element is: child numbers from the root down
function path(root, element) {
  const found = [];
  for (let at = element; at !== root; at = at.parentElement) found.unshift([...at.parentElement.children].indexOf(at));
  return found;
}

// a focused element that is replaced by a new one of its kind in the same place hands its focus over
export function keepFocus(root) {
  let focused = null;
  document.addEventListener('pointerdown', () => {
    focused = null; // a click elsewhere takes the focus away
  });
  document.addEventListener('focusin', ({ target }) => {
    focused = target !== root && root.contains(target) ? { tag: target.tagName, path: path(root, target) } : null;
  });
  new MutationObserver(() => {
    if (!focused || (document.activeElement && document.activeElement !== document.body)) return;
    const found = focused.path.reduce((at, i) => at?.children[i], root);
    if (found?.tagName === focused.tag) found.focus({ preventScroll: true });
  }).observe(root, { childList: true, subtree: true });
}
