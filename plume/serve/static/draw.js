// Everything that draws: elements, tokens, bars, matrices, curves, and any part of the page as a picture.

const SVG = 'http://www.w3.org/2000/svg';

// children are text or nodes, never markup: a token cannot become a tag
export function h(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}
export function s(tag, props = {}, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}
function build(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith('aria-') && value !== undefined) {
      element.setAttribute(name, String(value));
      continue;
    }
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name === 'value') element.value = value;
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const MARKS = { ' ': '·', '\n': '⏎', '\t': '⇥' };
// white space and control characters shown as signs
export const visible = (piece) =>
  piece.replace(/[\x00-\x20\x7f]/g, (c) => MARKS[c] ?? String.fromCharCode(0x2400 + (c === '\x7f' ? 33 : c.charCodeAt(0)))) || '∅';
export const token = (piece) => h('span', { class: 'token', title: visible(piece) }, visible(piece));

export function percent(p) {
  if (!(p > 0)) return p === 0 ? '0 %' : '–';
  const x = 100 * p;
  if (x >= 99.995) return '100 %';
  return x >= 0.01 ? `${x.toFixed(x >= 10 ? 1 : 2)} %` : `${x.toExponential(0)} %`;
}
export const fixed = (x, digits = 2) => (x === null || !Number.isFinite(x) ? '–' : x.toFixed(digits));
export const short = (n) =>
  n >= 1e9 ? `${(n / 1e9).toFixed(1)}B` : n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${(n / 1e3).toFixed(0)}k` : String(n);

export function bar(p, kind = '') {
  return h('span', { class: `track ${kind}` }, h('span', { class: 'fill', style: { width: `${Math.min(100, 100 * p)}%` } }));
}

// buttons of which one is pressed: what the state holds under this name
export function choice({ t, store }, name, values) {
  const button = ([value, word]) =>
    h('button', { type: 'button', 'data-value-is': value, onclick: () => store.set({ [name]: value }) }, t(word));
  return h('div', { class: 'group', 'data-name': name }, values.map(button));
}
export function press(choices, state) {
  for (const group of choices)
    for (const button of group.children) button.setAttribute('aria-pressed', button.dataset.valueIs === state[group.dataset.name]);
}

// ---- colour: equal steps of the value are equal steps to the eye (straight lines in OKLab)

const RAMPS = {
  light: [
    [0.98, 0, 0.003],
    [0.36, -0.02, -0.105],
  ],
  dark: [
    [0.225, -0.001, -0.006],
    [0.86, -0.03, -0.07],
  ],
};

function srgb([l, a, b]) {
  const [x, y, z] = [l + 0.3963 * a + 0.2158 * b, l - 0.1056 * a - 0.0639 * b, l - 0.0895 * a - 1.2915 * b].map((v) => v ** 3);
  return [4.0767 * x - 3.3077 * y + 0.231 * z, -1.2684 * x + 2.6098 * y - 0.3413 * z, -0.0042 * x - 0.7034 * y + 1.7076 * z].map((v) =>
    Math.round(255 * Math.min(1, Math.max(0, v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055))),
  );
}
export function dark() {
  const forced = document.documentElement.style.colorScheme;
  return forced ? forced === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}
const tables = {};
export function shades() {
  const name = dark() ? 'dark' : 'light',
    [from, to] = RAMPS[name];
  tables[name] ??= Array.from({ length: 256 }, (_, i) => srgb(from.map((v, c) => v + (to[c] - v) * (i / 255))));
  return tables[name];
}
export function shade(t) {
  return `rgb(${shades()[Math.round(255 * Math.min(1, Math.max(0, t)))].join(' ')})`;
}
// text on a shade: whichever of paper and ink can be read there
export const onShade = (t) => (t > 0.48 ? 'var(--paper)' : 'var(--ink)');

// ---- arrays

export function unpack({ shape, f16, u8 }) {
  const bytes = Uint8Array.from(atob(f16 ?? u8), (c) => c.charCodeAt(0));
  if (u8) return { shape, data: bytes };
  const halves = new Uint16Array(bytes.buffer),
    data = new Float32Array(halves.length);
  halves.forEach((x, i) => {
    const exponent = (x >> 10) & 31,
      fraction = x & 1023;
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    data[i] = x & 0x8000 ? -size : size;
  });
  return { shape, data };
}

// one cell per pixel; CSS makes it as large as wanted
export function paint(canvas, rows, columns, value) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d'),
    image = context.createImageData(columns, rows),
    table = shades();
  for (let i = 0; i < rows * columns; i++) {
    const [r, g, b] = table[Math.round(255 * Math.min(1, Math.max(0, value(Math.floor(i / columns), i % columns))))];
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// a vector as a line of cells; the two signs are the two ends of the ramp
export function strip(vector, largest) {
  const top = largest || Math.max(...vector.map(Math.abs), 1e-9);
  return paint(
    h('canvas', {
      title:
        vector
          .slice(0, 8)
          .map((x) => x.toFixed(2))
          .join('  ') + ' …',
    }),
    1,
    vector.length,
    (_, i) => 0.5 + vector[i] / top / 2,
  );
}

// ---- attention

// words down and across, a cell per pair; on(i, j) hears the pointer, null when it leaves
export function matrix({ data, pieces, width, on, pick, query }) {
  const n = pieces.length,
    label = Math.min(110, 12 + 7.4 * Math.max(...pieces.map((p) => Math.min(12, visible(p).length))));
  const cell = Math.max(5, Math.min(34, (width - label) / n)),
    size = cell * n;
  const canvas = paint(
    h('canvas', {
      style: {
        width: `${size}px`,
        height: `${size}px`,
        'image-rendering': 'pixelated',
        position: 'absolute',
        left: `${label}px`,
        top: `${label}px`,
        'border-radius': '3px',
      },
    }),
    n,
    n,
    (i, j) => data[i * n + j],
  );
  const skip = Math.ceil(11 / cell);
  const cut = (piece) => visible(piece).slice(0, 12);
  const rows = [],
    columns = [];
  pieces.forEach((piece, i) => {
    if (i % skip) return;
    const at = label + (i + 0.5) * cell;
    rows[i] = s('text', { class: 'word', x: label - 6, y: at + 4, 'text-anchor': 'end', 'font-size': 12 }, cut(piece));
    columns[i] = s('text', { class: 'word', transform: `translate(${at + 4} ${label - 6}) rotate(-90)` }, cut(piece));
  });
  const frame = s('rect', {
    fill: 'none',
    stroke: 'var(--accent)',
    'stroke-width': 1.5,
    rx: 2,
    visibility: 'hidden',
    width: size,
    height: cell,
    x: label,
  });
  const svg = s(
    'svg',
    { width: label + size, height: label + size, role: 'img', style: { position: 'relative', 'pointer-events': 'none' } },
    rows.filter(Boolean),
    columns.filter(Boolean),
    frame,
  );
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const [j, i] = [event.clientX - box.left, event.clientY - box.top].map((v) => Math.floor(v / cell));
    return i >= 0 && j >= 0 && i < n && j < n ? [i, j] : null;
  };
  const light = (i, j) => {
    rows.forEach((word, at) => word.classList.toggle('lit', at === i));
    columns.forEach((word, at) => word.classList.toggle('lit', at === j));
    frame.setAttribute('visibility', i === undefined ? 'hidden' : 'visible');
    if (i !== undefined) frame.setAttribute('y', label + i * cell);
  };
  if (query >= 0 && query < n) light(query);
  const box = h(
    'div',
    {
      class: 'matrix',
      style: { width: `${label + size}px`, height: `${label + size}px` },
      onpointermove: (event) => {
        const at = place(event);
        if (at) {
          light(...at);
          on(...at);
        }
      },
      onpointerleave: () => {
        light(query >= 0 && query < n ? query : undefined);
        on(null);
      },
      onclick: (event) => {
        const at = place(event);
        if (at) pick(at[0]);
      },
    },
    canvas,
    svg,
  );
  return box;
}

// two columns of words and a line between each pair that looks at each other
export function arcs({ data, pieces, width, on, pick, query }) {
  const n = pieces.length,
    step = 22,
    left = 130,
    right = Math.max(left + 120, Math.min(width - 130, 420));
  const lines = [],
    words = [[], []];
  const show = (i) =>
    lines.forEach(({ path, from, w }) => {
      path.setAttribute('stroke-opacity', i === null ? 0.75 * w : from === i ? Math.min(1, 0.15 + w) : 0.02);
      path.setAttribute('stroke-width', from === i ? 1 + 4 * w : 1.2);
    });
  for (let i = 0; i < n; i++)
    for (let j = 0; j < n; j++) {
      const w = data[i * n + j];
      if (w < 0.02) continue;
      const [y0, y1] = [i, j].map((k) => 14 + k * step),
        middle = (left + right) / 2;
      lines.push({ from: i, w, path: s('path', { class: 'arc', d: `M${left} ${y0}C${middle} ${y0} ${middle} ${y1} ${right} ${y1}` }) });
    }
  pieces.forEach((piece, i) =>
    [0, 1].forEach((side) => {
      const word = s(
        'text',
        {
          class: 'word',
          x: side ? right + 8 : left - 8,
          y: 18 + i * step,
          'text-anchor': side ? 'start' : 'end',
          style: { cursor: 'pointer' },
          onpointerenter: () => {
            if (!side) {
              show(i);
              on(i, null);
            } else on(null, i);
          },
          onpointerleave: () => {
            show(query >= 0 ? query : null);
            on(null);
          },
          onclick: () => pick(i),
        },
        visible(piece).slice(0, 14),
      );
      words[side].push(word);
    }),
  );
  show(query >= 0 && query < n ? query : null);
  words[0][query]?.classList.add('lit');
  return s(
    'svg',
    { width: right + 130, height: n * step + 8, role: 'img' },
    lines.map((line) => line.path),
    words.flat(),
  );
}

// ---- curves

function ticks(low, high, count, log) {
  if (log) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) for (const m of [1, 2, 5]) found.push(m * 10 ** e);
    const inside = found.filter((v) => v >= low * 0.999 && v <= high * 1.001);
    if (inside.length > 6) return inside.filter((v) => Number.isInteger(Math.round(Math.log10(v) * 1e6) / 1e6));
    if (inside.length > 1) return inside; // a narrow range has none of these: even steps then
  }
  const rough = (high - low) / count || 1,
    base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * base).find((v) => v >= rough);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(Number(v.toPrecision(10)));
  return found;
}
const tick = (v) =>
  Math.abs(v) >= 1e4 ? short(v) : Math.abs(v) >= 1e-3 || v === 0 ? String(Number(v.toPrecision(4))) : v.toExponential(0);

// lines: [{x: [], y: [], name, kind: 'c0 dashed'}]; on(index along the longest line, its x)
// room on both sides of a single value
const around = (v) => [v - (0.1 * Math.abs(v) || 0.5), v + (0.1 * Math.abs(v) || 0.5)];

export function curves({ lines, width, height = 150, log = false, title, on, label = tick, mark }) {
  const pad = { left: 44, right: 8, top: title ? 22 : 8, bottom: 22 };
  const real = lines.filter((line) => line.y.some((v) => v !== null && Number.isFinite(v)));
  const usable = (v) => v !== null && Number.isFinite(v) && (!log || v > 0);
  const xs = real.flatMap((line) => line.x),
    ys = real.flatMap((line) => line.y.filter(usable));
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (!ys.length) [x0, x1, y0, y1] = [0, 1, log ? 0.1 : 0, 1];
  if (!log) y0 = Math.min(y0, y0 > 0 && y0 < 0.4 * y1 ? 0 : y0);
  if (y0 === y1) [y0, y1] = log ? [y0 / 2, y1 * 2] : around(y0);
  if (x0 === x1) [x0, x1] = around(x0);
  const to = (v) => (log ? Math.log(v) : v);
  const X = (v) => pad.left + ((v - x0) / (x1 - x0)) * (width - pad.left - pad.right);
  const Y = (v) => height - pad.bottom - ((to(v) - to(y0)) / (to(y1) - to(y0))) * (height - pad.top - pad.bottom);
  const svg = s('svg', { width, height, role: 'img', 'aria-label': title ?? '' });
  if (title) svg.append(s('text', { x: 0, y: 12 }, title));
  for (const v of ticks(y0, y1, 4, log))
    svg.append(
      s('line', { class: 'tick', x1: pad.left, x2: width - pad.right, y1: Y(v), y2: Y(v) }),
      s('text', { x: pad.left - 6, y: Y(v) + 4, 'text-anchor': 'end' }, tick(v)),
    );
  for (const v of ticks(x0, x1, Math.max(2, Math.floor(width / 110)), false))
    svg.append(s('text', { x: X(v), y: height - 6, 'text-anchor': 'middle' }, label(v)));
  for (const line of real) {
    let path = '',
      down = false;
    line.x.forEach((x, i) => {
      const v = line.y[i];
      if (!usable(v)) {
        down = false;
        return;
      }
      path += `${down ? 'L' : 'M'}${X(x).toFixed(1)} ${Y(v).toFixed(1)}${down ? '' : 'h0'}`; // a point alone is a dot
      down = true;
    });
    svg.append(s('path', { class: `curve ${line.kind}`, d: path }));
  }
  for (const at of mark ?? [])
    svg.append(s('line', { class: 'cursor-line', x1: X(at), x2: X(at), y1: pad.top, y2: height - pad.bottom, 'stroke-dasharray': '2 3' }));
  if (on && real.length) {
    const longest = real.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const pointer = s('line', { class: 'cursor-line', y1: pad.top, y2: height - pad.bottom, visibility: 'hidden' });
    svg.append(pointer);
    svg.addEventListener('pointermove', (event) => {
      const x = x0 + ((event.clientX - svg.getBoundingClientRect().left - pad.left) / (width - pad.left - pad.right)) * (x1 - x0);
      const i = longest.x.reduce((best, v, k) => (Math.abs(v - x) < Math.abs(longest.x[best] - x) ? k : best), 0);
      for (const name of ['x1', 'x2']) pointer.setAttribute(name, X(longest.x[i]));
      pointer.setAttribute('visibility', 'visible');
      on(i, longest.x[i]);
    });
    svg.addEventListener('pointerleave', () => pointer.setAttribute('visibility', 'hidden'));
  }
  return svg;
}

// ---- any part of the page as a picture: what is laid out is read back as rectangles, words, lines and images

export function snapshot(root) {
  const area = root.getBoundingClientRect(),
    width = Math.ceil(Math.max(area.width, root.scrollWidth)),
    height = Math.ceil(Math.max(area.height, root.scrollHeight));
  const page = getComputedStyle(document.body).backgroundColor;
  const svg = s('svg', { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` }, s('rect', { width, height, fill: page }));
  const at = (box) => ({ x: (box.left - area.left).toFixed(1), y: (box.top - area.top).toFixed(1) });
  const clear = (colour) => colour === 'transparent' || /,\s*0\)$|\/\s*0\)$/.test(colour);
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) {
      write(node);
      return;
    }
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    const style = getComputedStyle(node),
      box = node.getBoundingClientRect();
    if (style.display === 'none' || style.visibility === 'hidden') return;
    if (node.tagName === 'CANVAS') {
      svg.append(
        s('image', {
          ...at(box),
          width: box.width,
          height: box.height,
          href: node.toDataURL(),
          preserveAspectRatio: 'none',
          'image-rendering': 'pixelated',
        }),
      );
      return;
    }
    if (node.tagName === 'svg') {
      svg.append(inked(node, at(box)));
      return;
    }
    const border = parseFloat(style.borderTopWidth) && !clear(style.borderTopColor) && style.borderTopStyle !== 'none';
    if (!clear(style.backgroundColor) || (border && style.borderLeftWidth === style.borderTopWidth)) {
      for (const part of node.getClientRects())
        svg.append(
          s('rect', {
            ...at(part),
            width: part.width.toFixed(1),
            height: part.height.toFixed(1),
            rx: parseFloat(style.borderTopLeftRadius) || 0,
            fill: clear(style.backgroundColor) ? 'none' : style.backgroundColor,
            stroke: border ? style.borderTopColor : 'none',
          }),
        );
    }
    if (node.tagName === 'SELECT' || node.tagName === 'INPUT') {
      field(node, style, box);
      return;
    }
    node.childNodes.forEach(walk);
  };
  const words = (text, style, box) =>
    svg.append(
      s(
        'text',
        {
          x: at(box).x,
          y: (box.top - area.top + box.height / 2).toFixed(1),
          'dominant-baseline': 'central',
          fill: style.color,
          'font-family': style.fontFamily,
          'font-size': style.fontSize,
          'font-weight': style.fontWeight,
          'xml:space': 'preserve',
        },
        text.toWellFormed().replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, '\ufffd'), // XML has no word for these
      ),
    );
  const write = (node) => {
    const text = node.data,
      range = document.createRange(),
      style = getComputedStyle(node.parentElement);
    let start = 0,
      line = null;
    const flush = (end) => {
      if (line && text.slice(start, end).trim()) words(text.slice(start, end), style, line);
    };
    for (let i = 0; i < text.length; i++) {
      range.setStart(node, i);
      range.setEnd(node, i + 1);
      const box = range.getBoundingClientRect();
      if (!box.width) continue;
      if (line && Math.abs(box.top - line.top) < 3) continue;
      flush(i);
      start = i;
      line = box;
    }
    flush(text.length);
  };
  const field = (node, style, box) => {
    const said = node.tagName === 'SELECT' ? node.selectedOptions[0]?.text : ['range', 'checkbox'].includes(node.type) ? '' : node.value;
    if (said) words(said, style, { left: box.left + 6, top: box.top, height: box.height });
  };
  const inked = (node, place) => {
    const copy = node.cloneNode(true),
      originals = [node, ...node.querySelectorAll('*')];
    [copy, ...copy.querySelectorAll('*')].forEach((part, i) => {
      const style = getComputedStyle(originals[i]);
      for (const name of [
        'fill',
        'stroke',
        'stroke-width',
        'stroke-opacity',
        'stroke-dasharray',
        'font-family',
        'font-size',
        'font-weight',
        'visibility',
      ])
        part.setAttribute(name, style.getPropertyValue(name));
      part.removeAttribute('class');
      part.removeAttribute('style');
    });
    return build(copy, { ...place, overflow: 'visible' }, []);
  };
  walk(root);
  return new XMLSerializer().serializeToString(svg);
}

export async function asPng(svg) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await picture.decode();
  const canvas = h('canvas', { width: 2 * picture.width, height: 2 * picture.height });
  canvas.getContext('2d').drawImage(picture, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => {
    canvas.toBlob(resolve, 'image/png');
  });
}

export function save(name, blob) {
  const link = h('a', { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
