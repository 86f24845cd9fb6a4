// Everything that draws: elements, tokens, bars, strips, matrices and curves.

export const SVG = 'http://www.w3.org/2000/svg';

// children are text or nodes, never markup: a token cannot become a tag
export function h(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}
export function s(tag, props = {}, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}
export function build(element, props, children) {
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
  if (x >= 0.01) return `${x.toFixed(x >= 10 ? 1 : 2)} %`;
  return x >= 0.0001 ? `${Number(x.toPrecision(1))} %` : '< 0.0001 %';
}
export const fixed = (x, digits = 2) => (x === null || !Number.isFinite(x) ? '–' : x.toFixed(digits).replace('-', '−'));
export const short = (n) =>
  n >= 1e9 ? `${(n / 1e9).toFixed(1)}B` : n >= 1e6 ? `${(n / 1e6).toFixed(1)}M` : n >= 1e4 ? `${(n / 1e3).toFixed(0)}k` : String(n);

export function bar(p, kind = '') {
  return h('span', { class: `track ${kind}` }, h('span', { class: 'fill', 'data-none': !p, style: { width: `${Math.min(100, 100 * p)}%` } }));
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
// signed values: orange below zero, blue above, the paper at zero
const SIGNED = {
  light: [
    [0.52, 0.09, 0.1],
    [0.975, 0, 0.004],
    [0.42, -0.03, -0.14],
  ],
  dark: [
    [0.76, 0.07, 0.1],
    [0.24, 0, -0.004],
    [0.75, -0.05, -0.12],
  ],
};
const tables = {};
function signs() {
  const name = dark() ? 'dark' : 'light',
    [low, middle, high] = SIGNED[name],
    mix = (a, b, t) => srgb(a.map((v, c) => v + (b[c] - v) * t));
  tables[`signed ${name}`] ??= Array.from({ length: 511 }, (_, i) => (i < 255 ? mix(middle, low, (255 - i) / 255) : mix(middle, high, (i - 255) / 255)));
  return tables[`signed ${name}`];
}
const signed = (t) => signs()[255 + Math.round(255 * Math.min(1, Math.max(-1, t)))];
export const signedShade = (t) => `rgb(${signed(t).join(' ')})`;
// black or white, whichever is at least 4.5 : 1 on this colour
function on(colour) {
  const [r, g, b] = colour.map((v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? '#000' : '#fff';
}
export const onSigned = (t) => on(signed(t));
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
export const onShade = (t) => on(shades()[Math.round(255 * Math.min(1, Math.max(0, t)))]);

// ---- arrays

export function unpack({ shape, f32, f16, u8, data: plain }) {
  if (plain) return { shape, data: plain }; // computed in this page
  const bytes = Uint8Array.from(atob(f32 ?? f16 ?? u8), (c) => c.charCodeAt(0));
  if (u8) return { shape, data: bytes };
  if (f32) return { shape, data: new Float32Array(bytes.buffer) };
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

// one cell per pixel; CSS makes it as large as wanted. Signed values run from -1 to 1, others from 0 to 1; -Infinity is hatched
export function paint(canvas, rows, columns, value, { isSigned = false } = {}) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d'),
    image = context.createImageData(columns, rows),
    table = shades(),
    cut = dark() ? [52, 56, 62] : [222, 219, 212];
  for (let i = 0; i < rows * columns; i++) {
    const x = value(Math.floor(i / columns), i % columns);
    const [r, g, b] = x === -Infinity ? cut : isSigned ? signed(x) : table[Math.round(255 * Math.min(1, Math.max(0, x)))];
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

export const largest = (...vectors) => vectors.reduce((top, vector) => vector.reduce((m, x) => (Number.isFinite(x) ? Math.max(m, Math.abs(x)) : m), top), 1e-9);
export const signedNumber = (x, digits = 4) => (x === -Infinity ? '−∞' : `${x < 0 ? '−' : ''}${Math.abs(x).toFixed(digits)}`);

// as long as the screen takes, and such that all rows are full where possible
function rowLength(count) {
  if (count <= 160) return count;
  for (let wide = 160; wide >= 64; wide--) if (count % wide === 0) return wide;
  return 128;
}

// a name that fits on the edge of a picture
export const clipped = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

// a whole vector, every number a cell, in rows of `columns`; hovering gives index and value. Its numbers are on the element
export function strip(values, { top, columns, cell: given, label = '', chosen } = {}) {
  const wide = columns ?? rowLength(values.length),
    rows = Math.ceil(values.length / wide),
    cell = given ?? Math.max(4, Math.min(14, Math.floor(520 / wide))),
    tall = rows > 1 ? 9 : 14,
    most = top ?? largest(values);
  const canvas = paint(h('canvas'), rows, wide, (i, j) => (i * wide + j < values.length ? values[i * wide + j] / most : 0), { isSigned: true });
  Object.assign(canvas.style, { width: `${wide * cell}px`, height: `${rows * tall}px` });
  const readout = h('output', { class: 'readout' });
  const show = (i) => {
    readout.textContent = i === null || i >= values.length ? '' : `[${i}] ${signedNumber(values[i])}`;
  };
  canvas.addEventListener('pointermove', (event) => {
    const box = canvas.getBoundingClientRect();
    const j = Math.floor(((event.clientX - box.left) / box.width) * wide),
      i = Math.floor(((event.clientY - box.top) / box.height) * rows);
    show(Math.max(0, i * wide + j));
  });
  canvas.addEventListener('pointerleave', () => show(null));
  const low = values.reduce((m, x) => Math.min(m, x), Infinity),
    high = values.reduce((m, x) => Math.max(m, x), -Infinity);
  const box = h(
    'div',
    { class: 'strip', role: 'img', 'aria-label': `${label} ${values.length}: ${signedNumber(low, 2)} … ${signedNumber(high, 2)}` },
    canvas,
    chosen !== undefined ? h('i', { class: 'row-mark', style: { top: `${chosen * tall}px`, height: `${tall}px` } }) : null,
    readout,
  );
  box.values = values;
  return box;
}

// a matrix of any shape with its names; hovering gives the value. Its numbers are on the element
export function heat({ data, rows, columns, rowNames = [], columnNames = [], isSigned = false, top, size = 26, on, pick, query, label = '' }) {
  const most = top ?? (isSigned ? largest(data) : 1);
  const names = Math.max(0, ...rowNames.map((name) => Math.min(14, name.length)), 0),
    left = rowNames.length ? Math.min(120, 10 + 7.4 * names) : 0,
    above = columnNames.length ? Math.min(110, 10 + 7.4 * Math.max(0, ...columnNames.map((name) => Math.min(12, name.length)))) : 0;
  const canvas = paint(h('canvas'), rows, columns, (i, j) => (data[i * columns + j] === -Infinity ? -Infinity : data[i * columns + j] / most), { isSigned });
  Object.assign(canvas.style, { position: 'absolute', left: `${left}px`, top: `${above}px`, width: `${columns * size}px`, height: `${rows * size}px` });
  const skip = Math.ceil(11 / size),
    words = (name, i, attributes) => (i % skip ? null : s('text', { class: 'word', ...attributes }, clipped(name, 14)));
  const svg = s(
    'svg',
    { width: left + columns * size, height: above + rows * size },
    rowNames.map((name, i) => words(name, i, { x: left - 6, y: above + (i + 0.5) * size + 4, 'text-anchor': 'end' })),
    columnNames.map((name, j) => words(name, j, { transform: `translate(${left + (j + 0.5) * size + 4} ${above - 6}) rotate(-90)` })),
    query >= 0 ? s('rect', { class: 'mark-row', x: left, y: above + query * size, width: columns * size, height: size }) : null,
  );
  const readout = h('output', { class: 'readout' });
  const at = (event) => {
    const box = canvas.getBoundingClientRect(),
      j = Math.floor(((event.clientX - box.left) / box.width) * columns),
      i = Math.floor(((event.clientY - box.top) / box.height) * rows);
    return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
  };
  const box = h(
    'div',
    {
      class: 'heat',
      role: 'img',
      'aria-label': `${label} ${rows} × ${columns}`,
      style: { width: `${left + columns * size}px`, height: `${above + rows * size}px` },
      onpointermove: (event) => {
        const cell = at(event);
        readout.textContent = cell ? `${rowNames[cell[0]] ?? cell[0]} → ${columnNames[cell[1]] ?? cell[1]}  ${signedNumber(data[cell[0] * columns + cell[1]])}` : '';
        if (cell && on) on(...cell);
      },
      onpointerleave: () => {
        readout.textContent = '';
      },
      onclick: (event) => {
        const cell = at(event);
        if (cell && pick) pick(...cell);
      },
    },
    canvas,
    svg,
    readout,
  );
  box.values = data;
  return box;
}

// ---- attention

// queries down and keys across, a cell per pair; on(i, j) hears the pointer, null when it leaves
export function matrix({ data, pieces, keys = pieces, width, on, pick, query }) {
  const rows = pieces.length,
    columns = keys.length,
    edge = (names) => Math.min(110, 12 + 7.4 * Math.max(...names.map((p) => Math.min(12, visible(p).length)))),
    [left, above] = [edge(pieces), edge(keys)];
  const cell = Math.max(5, Math.min(34, (width - left) / columns, (width - above) / rows)),
    [wide, high] = [cell * columns, cell * rows];
  const canvas = paint(h('canvas'), rows, columns, (i, j) => data[i * columns + j]);
  Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px`, position: 'absolute', left: `${left}px`, top: `${above}px` });
  const skip = Math.ceil(11 / cell),
    cut = (piece) => clipped(visible(piece), 12),
    middle = (i) => (i + 0.5) * cell;
  const sides = pieces.map((piece, i) =>
    i % skip ? null : s('text', { class: 'word', x: left - 6, y: above + middle(i) + 4, 'text-anchor': 'end' }, cut(piece)),
  );
  const heads = keys.map((piece, j) =>
    j % skip ? null : s('text', { class: 'word', transform: `translate(${left + middle(j) + 4} ${above - 6}) rotate(-90)` }, cut(piece)),
  );
  const frame = s('rect', { class: 'mark-row', rx: 2, visibility: 'hidden', width: wide, height: cell, x: left });
  const svg = s('svg', { width: left + wide, height: above + high, role: 'img', 'aria-label': `${rows} × ${columns}` }, sides.filter(Boolean), heads.filter(Boolean), frame);
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const [j, i] = [event.clientX - box.left, event.clientY - box.top].map((v) => Math.floor(v / cell));
    return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
  };
  const light = (i, j) => {
    sides.forEach((word, at) => word?.classList.toggle('lit', at === i));
    heads.forEach((word, at) => word?.classList.toggle('lit', at === j));
    frame.setAttribute('visibility', i === undefined ? 'hidden' : 'visible');
    if (i !== undefined) frame.setAttribute('y', above + i * cell);
  };
  const resting = query >= 0 && query < rows ? query : undefined;
  light(resting);
  const box = h(
    'div',
    {
      class: 'matrix',
      style: { width: `${left + wide}px`, height: `${above + high}px` },
      onpointermove: (event) => {
        const at = place(event);
        if (at) {
          light(...at);
          on(...at);
        }
      },
      onpointerleave: () => {
        light(resting);
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
  box.values = data;
  return box;
}

// two columns of tokens and a line from each query to each key
export function arcs({ data, pieces, keys = pieces, width, on, pick, query }) {
  const columns = keys.length,
    step = 22,
    left = 130,
    right = Math.max(left + 120, Math.min(width - 130, 420)),
    lines = [];
  const show = (i) =>
    lines.forEach(({ path, from, w }) => {
      path.setAttribute('stroke-opacity', i === null ? 0.75 * w : from === i ? Math.min(1, 0.15 + w) : 0.02);
      path.setAttribute('stroke-width', from === i ? 1 + 4 * w : 1.2);
    });
  pieces.forEach((_, i) =>
    keys.forEach((_, j) => {
      const w = data[i * columns + j];
      if (w < 0.02) return;
      const [y0, y1] = [i, j].map((k) => 14 + k * step),
        middle = (left + right) / 2;
      lines.push({ from: i, w, path: s('path', { class: 'arc', d: `M${left} ${y0}C${middle} ${y0} ${middle} ${y1} ${right} ${y1}` }) });
    }),
  );
  const resting = query >= 0 && query < pieces.length ? query : null;
  const word = (piece, i, side) =>
    s(
      'text',
      {
        class: `word ${!side && i === resting ? 'lit' : ''}`,
        x: side ? right + 8 : left - 8,
        y: 18 + i * step,
        'text-anchor': side ? 'start' : 'end',
        style: { cursor: side ? 'default' : 'pointer' },
        onpointerenter: () => {
          if (!side) show(i);
          if (side) on(null, i);
          else on(i, null);
        },
        onpointerleave: () => {
          show(resting);
          on(null);
        },
        onclick: side ? undefined : () => pick(i),
      },
      clipped(visible(piece), 14),
    );
  show(resting);
  return s(
    'svg',
    { width: right + 130, height: Math.max(pieces.length, columns) * step + 8, role: 'img', 'aria-label': `${pieces.length} × ${columns}` },
    lines.map((line) => line.path),
    pieces.map((piece, i) => word(piece, i, 0)),
    keys.map((piece, i) => word(piece, i, 1)),
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

export function save(name, blob) {
  const link = h('a', { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
