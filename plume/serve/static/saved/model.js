// A decoder computed in the page, from the packed 8-bit weights of Plume's CPU engine and plain typed arrays.
// T tokens, D width, K head width, V vocabulary

const GROUP = 64, // columns that share one scale
  PANEL = 32; // rows that stand side by side
const [ATTENTION_NORM, QKV, QKV_BIAS, OUT, OUT_BIAS, MLP_NORM, UP, UP_BIAS, DOWN, DOWN_BIAS, PER_LAYER] = Array(11).keys();

// (N, K) codes of 8 bits by rows, and a scale for each group of a row: weight = code × scale, exactly
function matrix(block, at, rows, columns) {
  const groups = Math.ceil(columns / GROUP),
    wide = groups * GROUP,
    codes = new Int8Array(rows * wide),
    scales = new Float32Array(rows * groups),
    bits = new Uint32Array(1),
    float = new Float32Array(bits.buffer);
  for (let row = 0; row < rows; row++)
    for (let group = 0; group < groups; group++) {
      const panel = at + (Math.floor(row / PANEL) * groups + group) * (2 * PANEL + GROUP * PANEL),
        lane = row % PANEL;
      bits[0] = ((block[panel + 2 * lane + 1] << 8) | block[panel + 2 * lane]) << 16; // a bfloat16
      scales[row * groups + group] = float[0];
      for (let i = 0; i < GROUP; i++)
        codes[row * wide + group * GROUP + i] = block[panel + 2 * PANEL + ((i >> 2) * PANEL + lane) * 4 + (i & 3)] - 128;
    }
  return { rows, columns, groups, wide, codes, scales };
}

// rows of x (T, K) times the matrix, plus the bias: (T, N)
function multiply({ rows, columns, groups, wide, codes, scales }, x, bias) {
  const count = x.length / columns,
    result = new Float32Array(count * rows);
  for (let row = 0; row < rows; row++)
    for (let t = 0; t < count; t++) {
      const from = row * wide,
        of = t * columns;
      let sum = bias ? bias[row] : 0;
      for (let group = 0, i = 0; group < groups; group++) {
        const end = Math.min(i + GROUP, columns);
        let a = 0, b = 0, c = 0, d = 0; // prettier-ignore
        for (; i + 3 < end; i += 4) {
          a += codes[from + i] * x[of + i];
          b += codes[from + i + 1] * x[of + i + 1];
          c += codes[from + i + 2] * x[of + i + 2];
          d += codes[from + i + 3] * x[of + i + 3];
        }
        for (; i < end; i++) a += codes[from + i] * x[of + i];
        sum += (a + b + c + d) * scales[row * groups + group];
      }
      result[t * rows + row] = sum;
    }
  return result;
}

export function rowOf({ groups, wide, columns, codes, scales }, row) {
  return Float32Array.from({ length: columns }, (_, i) => codes[row * wide + i] * scales[row * groups + (i >> 6)]);
}

export function spread(x) {
  const mean = x.reduce((a, b) => a + b, 0) / x.length;
  return [mean, x.reduce((a, v) => a + (v - mean) ** 2, 0) / x.length];
}

export function normalise({ gain, shift, epsilon }, x) {
  const wide = gain.length,
    result = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += wide) {
    const [mean, variance] = spread(x.subarray(at, at + wide)),
      scale = 1 / Math.sqrt(variance + epsilon);
    for (let i = 0; i < wide; i++) result[at + i] = (x[at + i] - mean) * scale * gain[i] + shift[i];
  }
  return result;
}

// Abramowitz and Stegun 7.1.26, within 1.5e-7
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  return Math.sign(x) * (1 - t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * Math.exp(-x * x));
}
const ACTIVATIONS = {
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  gelu: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  relu: (x) => Math.max(0, x),
};

export function softmax(row) {
  const top = row.reduce((a, b) => Math.max(a, b), -Infinity),
    powers = row.map((x) => Math.exp(x - top)),
    sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((x) => x / sum);
}
const plus = (a, b) => a.map((x, i) => x + b[i]);

export function createModel(config, block, offsets) {
  const { layers, width, heads, mlp, vocabulary, context, post, band } = config,
    size = width / heads,
    floats = (at, count) => new Float32Array(block.buffer, block.byteOffset + at, count),
    norm = (at) => (at < 0 ? null : { gain: floats(at, width), shift: floats(at + 4 * width, width), epsilon: floats(at + 8 * width, 1)[0] }),
    end = layers * PER_LAYER,
    last = norm(offsets[end + 1]),
    output = matrix(block, offsets[end + 2], vocabulary, width),
    table = offsets[end + 3] === offsets[end + 2] ? output : matrix(block, offsets[end + 3], vocabulary, width),
    [factor] = floats(offsets[end], 1),
    positions = floats(offsets[end] + 4, context * width);
  const blocks = Array.from({ length: layers }, (_, layer) => {
    const at = (entry) => offsets[layer * PER_LAYER + entry],
      weight = (entry, rows, columns) => matrix(block, at(entry), rows, columns),
      bias = (entry, rows) => floats(at(entry), rows);
    return {
      before: norm(at(ATTENTION_NORM)), // of a post-norm stack: what ended the block before
      between: norm(at(MLP_NORM)),
      qkv: weight(QKV, 3 * width, width), qkvBias: bias(QKV_BIAS, 3 * width), // prettier-ignore
      out: weight(OUT, width, width), outBias: bias(OUT_BIAS, width), // prettier-ignore
      up: weight(UP, mlp, width), upBias: bias(UP_BIAS, mlp), // prettier-ignore
      down: weight(DOWN, width, mlp), downBias: bias(DOWN_BIAS, width), // prettier-ignore
    };
  });
  const normsOf = (layer) => {
    const { before, between } = blocks[layer];
    return post ? { attention: between, mlp: layer + 1 < layers ? blocks[layer + 1].before : last } : { attention: before, mlp: between };
  };

  // the rows that an embedding adds up, and their sum
  function embed(id, position) {
    const token = rowOf(table, id).map((x) => x * factor),
      place = positions.slice(position * width, (position + 1) * width),
      sum = plus(token, place);
    return { token, place, embedding: post && blocks[0].before ? normalise(blocks[0].before, sum) : sum };
  }

  const isHidden = (layer, query, key) => key > query || (band > 0 && layer % 2 === 1 && query - key >= band);

  // every part of one block for the rows x that stand at `first` and on; k and v of earlier rows come from the cache
  function run(layer, x, first, cache) {
    const own = blocks[layer],
      norms = normsOf(layer),
      count = x.length / width,
      normed = post ? null : normalise(norms.attention, x),
      qkv = multiply(own.qkv, normed ?? x, own.qkvBias),
      column = (n) => {
        const part = new Float32Array(count * width);
        for (let t = 0; t < count; t++) part.set(qkv.subarray((3 * t + n) * width, (3 * t + n + 1) * width), t * width);
        return part;
      },
      [q, k, v] = [column(0), column(1), column(2)],
      mixed = new Float32Array(count * width),
      keys = cache.keys[layer],
      values = cache.values[layer];
    keys.set(k, first * width);
    values.set(v, first * width);
    const scores = new Float64Array(first + count);
    for (let t = 0; t < count; t++)
      for (let head = 0; head < heads; head++) {
        const of = t * width + head * size,
          query = first + t,
          from = band > 0 && layer % 2 === 1 ? Math.max(0, query - band + 1) : 0;
        for (let j = from; j <= query; j++) {
          let sum = 0;
          for (let i = 0, at = j * width + head * size; i < size; i++) sum += q[of + i] * keys[at + i];
          scores[j] = sum / Math.sqrt(size);
        }
        const weights = softmax(scores.subarray(from, query + 1));
        for (let j = from; j <= query; j++)
          for (let i = 0, at = j * width + head * size; i < size; i++) mixed[of + i] += weights[j - from] * values[at + i];
      }
    const update = multiply(own.out, mixed, own.outBias),
      sum = plus(x, update),
      attention = { input: x, norm: post ? normalise(norms.attention, sum) : normed, q, k, v, heads: mixed, update, sum };
    attention.output = post ? attention.norm : sum;
    const inner = attention.output,
      mlpNormed = post ? null : normalise(norms.mlp, inner),
      up = multiply(own.up, mlpNormed ?? inner, own.upBias),
      activation = up.map(ACTIVATIONS[config.activation]),
      added = multiply(own.down, activation, own.downBias),
      total = plus(inner, added),
      made = { input: inner, norm: post ? normalise(norms.mlp, total) : mlpNormed, up, activation, update: added, sum: total };
    made.output = post ? made.norm : total;
    return { attention, mlp: made };
  }

  // what has been read: keys, values and the residual stream before each block and behind the last
  function createCache() {
    const room = () => Array.from({ length: layers }, () => new Float32Array(context * width));
    return { ids: [], keys: room(), values: room(), streams: [...room(), new Float32Array(context * width)] };
  }

  // reads these ids; what the cache shares with them is not computed again
  function read(ids, cache) {
    let first = 0;
    while (first < ids.length && ids[first] === cache.ids[first]) first++;
    if (first < ids.length) {
      let x = new Float32Array((ids.length - first) * width);
      ids.slice(first).forEach((id, i) => x.set(embed(id, first + i).embedding, i * width));
      for (let layer = 0; layer < layers; layer++) {
        cache.streams[layer].set(x, first * width);
        x = run(layer, x, first, cache).mlp.output;
      }
      cache.streams[layers].set(x, first * width);
    }
    cache.ids = [...ids];
  }

  return {
    config,
    output,
    last,
    blocks,
    normsOf,
    embed,
    isHidden,
    createCache,
    read,
    // every part of one block for all that was read
    parts: (layer, cache) => run(layer, cache.streams[layer].slice(0, cache.ids.length * width), 0, cache),
    stream: (layer, position, cache) => cache.streams[layer].slice(position * width, (position + 1) * width),
    hidden: (stream) => (post ? stream : normalise(last, stream)),
    logits: (hidden) => multiply(output, hidden, null),
  };
}
