// The screens of the walk: for each step one formula with this case's values, and one picture.

import { bar, fixed, h, heat, largest, percent, s, signedNumber, strip, visible } from '../draw.js';
import { answerName } from '../parts.js';
import { subject } from '../store.js';
import { filtered } from './next.js';

const number = (x) => signedNumber(x, 4);

// vectors under each other, each with its name and shape; all on one colour scale
function strips(rows, options = {}) {
  const top = largest(...rows.map(([, values]) => values));
  return h(
    'div',
    { class: 'strips' },
    rows.flatMap(([name, values, more = {}]) => [
      h('span', { class: 'strip-name' }, name, h('small', {}, more.shape ?? String(values.length))),
      strip(values, { top, label: name, ...options, ...more }),
    ]),
  );
}
const edge = (text) => h('div', { class: 'edge' }, text);

function mean(x) {
  return x.reduce((a, b) => a + b, 0) / x.length;
}
function normed(before, after) {
  const mu = mean(before),
    sigma = Math.sqrt(mean(before.map((v) => (v - mu) ** 2)));
  return {
    formula: `μ = ${number(mu)}   σ = ${number(sigma)}\nLN(x) = (x − μ) / σ · γ + β\nLN(x)[0] = (${number(before[0])} − μ) / σ · γ[0] + β[0] = ${number(after[0])}`,
    picture: [strips([['x', before]]), strips([['LN(x)', after]])],
  };
}
const headOf = (values, head, width) => values.slice(head * width, (head + 1) * width);

function scoreTable({ names, vectors, columns, strong, top }) {
  return h(
    'table',
    { class: 'walk-table' },
    h(
      'tbody',
      {},
      names.map((name, i) =>
        h(
          'tr',
          { class: i === strong ? 'strong' : '' },
          h('td', { class: 'mono' }, name),
          vectors ? h('td', {}, strip(vectors(i), { top, cell: 4, label: name })) : null,
          columns.map((column) => h('td', { class: 'number' }, column(i))),
        ),
      ),
    ),
  );
}
const rowOf = ({ data, shape }, i) => data.slice(i * shape[1], (i + 1) * shape[1]);
const keysOf = (seen) => (seen.kind === 'cross' ? seen.source_pieces : seen.pieces);

function square(seen, part, options) {
  const { data, shape } = seen.vectors[`${seen.kind}.${part}`],
    [rows, columns] = shape,
    size = Math.max(5, Math.min(24, 200 / Math.max(rows, columns)));
  return heat({
    data,
    rows,
    columns,
    size,
    rowNames: seen.pieces.map(visible),
    columnNames: keysOf(seen).map(visible),
    query: seen.row,
    label: part,
    ...options,
  });
}
const pair = (...children) => h('div', { class: 'walk-pair' }, children);
const titled = (name, node) => h('figure', {}, h('figcaption', {}, name), node);

// ---- attention, in a stack's own text or from the decoder to the encoder's output

const attention = {
  norm: ({ vectors, kind, shape }) =>
    shape.norm === 'pre'
      ? normed(vectors[`${kind}.input`].data, vectors[`${kind}.norm`].data)
      : normed(vectors[`${kind}.sum`].data, vectors[`${kind}.norm`].data),

  qkv({ vectors, kind, shape, token, head, context }) {
    const input = vectors[shape.norm === 'pre' ? `${kind}.norm` : `${kind}.input`].data,
      q = vectors[`${kind}.q`].data,
      wide = { columns: shape.head_width, shape: `${shape.width}` };
    const rows = [['q', q, wide]],
      own = kind === 'attention'; // else k and v come from the encoder's output
    if (own) rows.push(['k', vectors['attention.k_row'].data, wide], ['v', vectors['attention.v_row'].data, wide]);
    const together = own ? `\n${context.t('together')} ${shape.width} × ${3 * shape.width}` : '';
    return {
      formula: `q = x · W_q + b_q      W_q: ${shape.width} × ${shape.width}${together}\nq[0] = ${number(q[0])}`,
      picture: [strips([[`x (${token})`, input]]), edge(`× ${shape.width} × ${(own ? 3 : 1) * shape.width}`), strips(rows.map(([name, values, more]) => [name, values, { ...more, chosen: shape.heads > 1 ? head : undefined }]))],
    };
  },

  heads({ vectors, kind, shape, head }) {
    const q = vectors[`${kind}.q`].data;
    return {
      formula: `${shape.width} = ${shape.heads} × ${shape.head_width}\nq_${head + 1} = q[${head * shape.head_width} … ${(head + 1) * shape.head_width - 1}]`,
      picture: [strips([['q', q, { columns: shape.head_width, chosen: head, shape: `${shape.heads} × ${shape.head_width}` }]]), strips([[`q_${head + 1}`, headOf(q, head, shape.head_width)]])],
    };
  },

  scores(seen) {
    const { vectors, kind, shape, head, row } = seen,
      q = headOf(vectors[`${kind}.q`].data, head, shape.head_width),
      k = vectors[`${kind}.k`],
      products = rowOf(vectors[`${kind}.products`], row),
      last = kind === 'cross' ? 0 : row,
      key = rowOf(k, last);
    return {
      formula: `q · k = Σ q[i] k[i]\n${visible(keysOf(seen)[last])}: ${number(q[0])} × ${number(key[0])} + ${number(q[1] ?? 0)} × ${number(key[1] ?? 0)} + … = ${number(products[last])}`,
      picture: [
        strips([['q', q]]),
        scoreTable({ names: keysOf(seen).map(visible), vectors: (i) => rowOf(k, i), top: largest(k.data), columns: [(i) => number(products[i])], strong: last }),
      ],
    };
  },

  scale(seen) {
    const { vectors, kind, shape, row } = seen,
      products = rowOf(vectors[`${kind}.products`], row),
      scores = rowOf(vectors[`${kind}.scores`], row),
      last = kind === 'cross' ? 0 : row;
    return {
      formula: `score = q · k / √d      √${shape.head_width} = ${number(Math.sqrt(shape.head_width))}\n${visible(keysOf(seen)[last])}: ${number(products[last])} / ${number(Math.sqrt(shape.head_width))} = ${number(scores[last])}`,
      picture: [scoreTable({ names: keysOf(seen).map(visible), columns: [(i) => number(products[i]), () => `÷ √${shape.head_width} =`, (i) => number(scores[i])], strong: last })],
    };
  },

  mask(seen) {
    const { vectors, kind } = seen,
      top = largest(vectors[`${kind}.scores`].data);
    return {
      formula: `j > i  →  score[i, j] = −∞\nT × T = ${vectors[`${kind}.scores`].shape.join(' × ')}`,
      picture: [pair(titled(seen.context.t('beforeMask'), square(seen, 'scores', { isSigned: true, top })), titled(seen.context.t('afterMask'), square(seen, 'masked', { isSigned: true, top })))],
    };
  },

  softmax(seen) {
    const { vectors, kind, row } = seen,
      masked = rowOf(vectors[`${kind}.masked`], row),
      weights = rowOf(vectors[`${kind}.weights`], row),
      best = weights.indexOf(weights.reduce((a, b) => Math.max(a, b), 0)),
      sum = masked.reduce((a, x) => a + Math.exp(x), 0);
    return {
      formula: `w = exp(score) / Σ exp(score)\n${visible(keysOf(seen)[best])}: exp(${number(masked[best])}) / ${number(sum)} = ${number(weights[best])}`,
      picture: [
        pair(
          square(seen, 'weights', {}),
          scoreTable({ names: keysOf(seen).map(visible), columns: [(i) => number(masked[i]), (i) => bar(weights[i]), (i) => number(weights[i])], strong: best }),
        ),
      ],
    };
  },

  sum(seen) {
    const { vectors, kind, shape, head, row } = seen,
      v = vectors[`${kind}.v`],
      weights = rowOf(vectors[`${kind}.weights`], row),
      z = headOf(vectors[`${kind}.heads`].data, head, shape.head_width);
    return {
      formula: `z = Σ w[j] v[j]\nz[0] = ${[...weights.keys()]
        .sort((a, b) => weights[b] - weights[a])
        .slice(0, 2)
        .map((j) => `${number(weights[j])} × ${number(rowOf(v, j)[0])}`)
        .join(' + ')} + … = ${number(z[0])}`,
      picture: [
        scoreTable({
          names: [...keysOf(seen).map(visible), 'z'],
          vectors: (i) => (i < weights.length ? rowOf(v, i) : z), // under the values, on their scale
          top: largest(v.data),
          columns: [(i) => (i < weights.length ? bar(weights[i]) : ''), (i) => (i < weights.length ? number(weights[i]) : '')],
          strong: weights.length,
        }),
      ],
    };
  },

  concat({ vectors, kind, shape, head }) {
    const z = vectors[`${kind}.heads`].data;
    return {
      formula: `[z_1, …, z_${shape.heads}]: ${shape.heads} × ${shape.head_width} = ${shape.width}`,
      picture: [strips([['z', z, { columns: shape.head_width, chosen: head, shape: `${shape.heads} × ${shape.head_width}` }]])],
    };
  },

  project({ vectors, kind, shape }) {
    const z = vectors[`${kind}.heads`].data,
      update = vectors[`${kind}.update`].data;
    return {
      formula: `o = z · W_o + b_o      W_o: ${shape.width} × ${shape.width}\no[0] = ${number(update[0])}`,
      picture: [strips([['z', z]]), edge(`× ${shape.width} × ${shape.width}`), strips([['o', update]])],
    };
  },

  add: ({ vectors, kind }) => added(vectors, kind, 'o'),
};

function added(vectors, kind, name) {
  const before = vectors[`${kind}.input`].data,
    update = vectors[`${kind}.update`].data,
    after = vectors[`${kind}.sum`].data;
  return {
    formula: `x ← x + ${name}\nx[0] = ${number(before[0])} + ${number(update[0])} = ${number(after[0])}`,
    picture: [strips([['x', before], [`+ ${name}`, update], ['= x', after]])],
  };
}

// ---- the screens by step

export const screens = {
  text({ text, stack, window, context }) {
    const own = context.model().plume.pair === 'target' && stack === 'decoder' ? context.store.state.pair : text;
    return { formula: context.t('textFormula', { n: window.total, characters: [...own].length }), picture: [h('p', { class: 'walk-text' }, own || '∅')] };
  },

  tokens: ({ tokens, pieces, window, query, shape, context }) => ({
    formula: `${visible(pieces[query - window.start])} → ${context.t('id')} ${tokens[query - window.start]}      ${context.t('vocabularyOf', { n: shape.vocabulary, last: shape.vocabulary - 1 })}`,
    picture: [
      h(
        'div',
        { class: 'pieces' },
        pieces.map((piece, i) => h('span', { class: `piece p${i % 5} ${i === query - window.start ? 'chosen' : ''}` }, visible(piece), h('sub', {}, tokens[i]))),
      ),
    ],
  }),

  embed({ vectors, tokens, window, query, shape, context }) {
    const { t } = context,
      id = tokens[query - window.start],
      token = vectors.token_rows.data,
      position = vectors.position_rows.data,
      segment = vectors.segment_rows?.data,
      result = vectors.embedding.data,
      sum = token.map((x, i) => x + position[i] + (segment ? segment[i] : 0)),
      isNormed = largest(sum.map((x, i) => x - result[i])) > 1e-3;
    const rows = [
      [t('tokenRow', { id }), token],
      [t('positionRow', { n: query }), position],
      ...(segment ? [[t('segmentRow'), segment]] : []),
      [isNormed ? t('sumRow') : t('embedding'), sum],
    ];
    return {
      formula:
        `W_token: ${shape.vocabulary} × ${shape.width}      W_position: ${shape.context} × ${shape.width}${shape.embed_scale === 1 ? '' : `      × √${shape.width}`}\n` +
        `x[0] = ${number(token[0])} + ${number(position[0])}${segment ? ` + ${number(segment[0])}` : ''} = ${number(sum[0])}${isNormed ? `      LN(x)[0] = ${number(result[0])}` : ''}`,
      picture: [strips(rows), ...(isNormed ? [strips([['LN(x)', result]])] : [])],
    };
  },

  ...Object.fromEntries(Object.entries(attention).flatMap(([name, screen]) => [[`a.${name}`, screen], [`c.${name}`, screen]])),

  'm.norm': ({ vectors, shape }) => (shape.norm === 'pre' ? normed(vectors['mlp.input'].data, vectors['mlp.norm'].data) : normed(vectors['mlp.sum'].data, vectors['mlp.norm'].data)),

  'm.up'({ vectors, shape }) {
    const input = vectors[shape.norm === 'pre' ? 'mlp.norm' : 'mlp.input'].data,
      up = vectors['mlp.up'].data;
    return {
      formula: `h = x · W_up + b_up      W_up: ${shape.width} × ${shape.mlp}\nh[0] = ${number(up[0])}`,
      picture: [strips([['x', input]]), edge(`× ${shape.width} × ${shape.mlp}`), strips([['h', up]])],
    };
  },

  'm.act'({ vectors, shape }) {
    const up = vectors['mlp.up'].data,
      active = vectors['mlp.activation'].data,
      name = shape.activation === 'relu' ? 'ReLU' : 'GELU';
    return {
      formula: `a = ${name}(h)\n${name}(${number(up[0])}) = ${number(active[0])}`,
      picture: [strips([['h', up], ['a', active]]), curve(shape.activation)],
    };
  },

  'm.down'({ vectors, shape }) {
    const active = vectors['mlp.activation'].data,
      update = vectors['mlp.update'].data;
    return {
      formula: `o = a · W_down + b_down      W_down: ${shape.mlp} × ${shape.width}\no[0] = ${number(update[0])}`,
      picture: [strips([['a', active]]), edge(`× ${shape.mlp} × ${shape.width}`), strips([['o', update]])],
    };
  },

  'm.add': ({ vectors }) => added(vectors, 'mlp', 'o'),

  memory: ({ vectors, shape, window }) => ({ formula: `T × d = ${window.total} × ${shape.width}`, picture: [strips([['x', vectors.hidden.data]])] }),

  final: ({ vectors }) => normed(vectors.stream.data, vectors.hidden.data),

  logits({ vectors, candidates, shape, context }) {
    const names = candidates.pieces.map(visible),
      row = vectors.row?.data,
      hidden = vectors.hidden.data;
    const first = row ? `${number(hidden[0])} × ${number(row[0])} + ${number(hidden[1])} × ${number(row[1])} + … = ` : '';
    return {
      formula: `logit = x · W_token[id]      W_token: ${shape.vocabulary} × ${shape.width}\n${names[0]}: ${first}${number(candidates.logits[0])}`,
      picture: [
        strips([['x', hidden]]),
        row ? strips([[`W[${candidates.tokens[0]}]`, row]]) : '', // on a scale of its own: table rows are small
        scoreTable({ names, columns: [(i) => number(candidates.logits[i]), (i) => bar(candidates.probabilities[i]), (i) => percent(candidates.probabilities[i])], strong: 0 }),
        h('p', { class: 'muted' }, context.t('topOnly', { n: names.length, total: shape.vocabulary })),
      ],
    };
  },

  sample({ context, candidates }) {
    const { state } = context.store,
      box = h('div'),
      body = { model: context.model().id, ...subject(state), k: 200, temperatures: true };
    context.api.ask(context.question('sample'), '/v1/next-tokens', body).then((answer) => {
      if (!answer) return;
      const found = answer.candidates,
        seen = filtered({ ...found, vocabulary: answer.vocabulary }, state);
      box.replaceChildren(
        scoreTable({
          names: found.pieces.slice(0, 10).map(visible),
          columns: [(i) => number(found.logits[i]), (i) => bar(seen.p[i], seen.kept[i] ? '' : 'cut'), (i) => (seen.kept[i] ? percent(seen.p[i]) : context.t('cut'))],
          strong: 0,
        }),
      );
    }, context.fail);
    const plain = state.temperature === 1 && !state.topk && state.topp >= 1,
      cut = [state.topk ? `top-k ${state.topk}` : '', state.topp < 1 ? `top-p ${fixed(state.topp)}` : ''].filter(Boolean).join(', ') || context.t('noFilter');
    return {
      formula: `p = exp(logit / T) / Σ exp(logit / T)      T = ${fixed(state.temperature)}      ${cut}\n${visible(candidates.pieces[0])}: exp(${number(candidates.logits[0])} / T) / Σ${plain ? ` = ${percent(candidates.probabilities[0])}` : ''}`,
      picture: [box],
    };
  },

  cache({ context, candidates, window, shape, layers, pieces, tokens, text }) {
    const { t } = context,
      total = window.total,
      bytes = layers * 2 * total * shape.width * 4,
      shown = Math.min(total, 40),
      cell = Math.max(6, Math.min(18, 560 / (shown + 1)));
    const grid = s('svg', { width: 70 + (shown + 1) * cell, height: layers * (cell + 3) + 18, role: 'img', 'aria-label': t('cacheTitle') });
    for (let layer = 0; layer < layers; layer++)
      for (let i = 0; i <= shown; i++)
        grid.append(s('rect', { x: 66 + i * cell, y: layer * (cell + 3), width: cell - 1.5, height: cell, rx: 2, class: i < shown ? 'cached' : 'fresh' }));
    for (let layer = 0; layer < layers; layer++) grid.append(s('text', { x: 58, y: layer * (cell + 3) + cell - 2, 'text-anchor': 'end' }, t('block', { n: layer + 1 })));
    const take = h(
      'button',
      {
        type: 'button',
        class: 'primary',
        onclick: () => {
          context.take([...tokens, candidates.tokens[0]], text + candidates.pieces[0]);
          context.store.set({ step: 'text' });
        },
      },
      t('appendToken', { token: visible(candidates.pieces[0]) }),
    );
    return {
      formula: `${t('cacheTitle')}: ${layers} × 2 × ${shape.heads} × ${total} × ${shape.head_width} = ${(layers * 2 * total * shape.width).toLocaleString()}\n× 4 B = ${(bytes / 1024).toFixed(1)} KiB      + ${t('newToken')}: ${((layers * 2 * shape.width * 4) / 1024).toFixed(1)} KiB`,
      picture: [
        h('p', { class: 'walk-text' }, h('span', {}, text), h('mark', {}, visible(candidates.pieces[0]))),
        grid,
        h('p', { class: 'legend' }, h('span', {}, h('i', { class: 'cached-chip' }), t('cached')), h('span', {}, h('i', { class: 'fresh-chip' }), t('computed'))),
        window.start ? h('p', { class: 'muted' }, t('window', { from: window.start + 1, to: window.start + pieces.length, total })) : take,
      ],
    };
  },

  label({ vectors, answers, read_at, pieces, window, context, shape }) {
    const { t } = context,
      names = answers.map((row, i) => answerName(context, row, i, pieces[row.position - window.start])),
      best = answers.reduce((at, row, i) => (row.logit > answers[at].logit ? i : at), 0);
    return {
      formula: `${t('readAt', { token: visible(pieces[read_at - window.start] ?? ''), n: read_at })}      ${shape.width} → ${answers.length}\n${names[best]}: ${number(answers[best].logit)}`,
      picture: [
        strips([['x', vectors.hidden.data], ...(vectors.summary ? [[t('summary'), vectors.summary.data]] : [])]),
        scoreTable({
          names,
          columns: [(i) => number(answers[i].logit), (i) => bar(answers[i].probability ?? 0), (i) => (answers[i].probability === null ? '' : percent(answers[i].probability))],
          strong: best,
        }),
      ],
    };
  },
};

// the activation function from -4 to 4
function curve(kind) {
  const f = (x) => (kind === 'relu' ? Math.max(0, x) : 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))));
  const points = Array.from({ length: 81 }, (_, i) => -4 + i / 10).map((x) => `${(90 + 20 * x).toFixed(1)} ${(100 - 20 * f(x)).toFixed(1)}`);
  return s(
    'svg',
    { width: 180, height: 120, role: 'img', 'aria-label': kind },
    s('line', { class: 'tick', x1: 10, x2: 170, y1: 100, y2: 100 }),
    s('line', { class: 'tick', x1: 90, x2: 90, y1: 15, y2: 110 }),
    s('path', { class: 'curve c0', d: `M${points.join('L')}` }),
  );
}
