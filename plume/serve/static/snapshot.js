// Any part of the page as a picture: what is laid out is read back as rectangles, words, lines and images.

import { build, h, s, SVG } from './draw.js';

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
    const label = node.tagName === 'SELECT' ? node.selectedOptions[0]?.text : ['range', 'checkbox'].includes(node.type) ? '' : node.value;
    if (label) words(label, style, { left: box.left + 6, top: box.top, height: box.height });
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
