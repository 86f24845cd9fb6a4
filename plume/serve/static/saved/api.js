// In a saved page there is no server: the same questions are answered here, from the weights in the page.

import { createModel, rowOf, softmax, spread } from './model.js';
import { createTokenizer } from './tokenizer.js';

const THUMBNAIL = 24, // cells along one side of a head's small picture
  TEMPERATURES = Array.from({ length: 40 }, (_, i) => (i + 1) / 20),
  LISTED = 10;

class ApiError extends Error {
  constructor(message, code) {
    super(message);
    this.status = 400;
    this.code = code;
  }
}

// lets the page draw and react; between two pieces of work
const pause = () => new Promise((resolve) => setTimeout(resolve));

const logSum = (values) => {
  const top = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return top === -Infinity ? top : top + Math.log(values.reduce((a, x) => a + Math.exp(x - top), 0));
};

// ids of the k largest, largest first, equal ones by id
function largest(values, k) {
  if (8 * k > values.length) return Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b).slice(0, k); // prettier-ignore
  const best = [];
  values.forEach((value, id) => {
    if (best.length === k && value <= values[best[k - 1]]) return;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < value) at--;
    best.splice(at, 0, id);
    best.length = Math.min(best.length, k);
  });
  return best;
}

// ---- the draw: the sampler's own noise, so that a seed gives the same text here as in Plume

// 64 bits as two numbers of 32
const product = ([high, low], [otherHigh, otherLow]) => {
  const [a, b, c, d] = [low & 0xffff, low >>> 16, otherLow & 0xffff, otherLow >>> 16],
    cross = ((a * c) >>> 16) + ((b * c) & 0xffff) + a * d,
    carry = Math.floor(cross / 65536) + ((b * c) >>> 16) + b * d;
  return [(carry + Math.imul(high, otherLow) + Math.imul(low, otherHigh)) >>> 0, Math.imul(low, otherLow) >>> 0];
};
const shifted = ([high, low], n) => [high >>> n, ((low >>> n) | (high << (32 - n))) >>> 0];
const xor = ([a, b], [c, d]) => [(a ^ c) >>> 0, (b ^ d) >>> 0];
function mixed([high, low]) {
  const sum = low + 0x7f4a7c15;
  let x = [(high + 0x9e3779b9 + (sum > 0xffffffff ? 1 : 0)) >>> 0, sum >>> 0];
  x = product(xor(x, shifted(x, 30)), [0xbf58476d, 0x1ce4e5b9]);
  x = product(xor(x, shifted(x, 27)), [0x94d049bb, 0x133111eb]);
  return xor(x, shifted(x, 31));
}
export function noise(seed, position, ids) {
  let key = [Math.floor(seed / 2 ** 32), seed >>> 0];
  for (const part of [0, 0, position]) key = mixed(xor(key, mixed([0, part])));
  return ids.map((id) => {
    const [high, low] = mixed(xor(key, mixed([0, id])));
    return -Math.log(-Math.log((high * 2 ** 20 + (low >>> 12) + 0.5) / 2 ** 52));
  });
}

// tokens that the filters leave, with log-probabilities
function filtered(logits, { temperature, top_k, top_p }) {
  const scaled = logits.map((x) => x / temperature);
  let ids = top_k || top_p ? largest(scaled, top_k || scaled.length) : Array.from(scaled.keys());
  const total = logSum(ids.map((id) => scaled[id])),
    chances = ids.map((id) => scaled[id] - total);
  if (top_p && top_p < 1) {
    let sum = 0;
    const count = 1 + ids.filter((_, i) => (sum += Math.exp(chances[i])) < top_p).length;
    ids = ids.slice(0, count);
  }
  return { ids, chances };
}
function choose(logits, options, position) {
  if (options.temperature === 0) return largest(logits, 1)[0];
  const { ids, chances } = filtered(logits, options),
    drawn = noise(options.seed, position, ids).map((x, i) => x + chances[i]);
  return ids[drawn.indexOf(drawn.reduce((a, b) => Math.max(a, b), -Infinity))];
}

// ---- the answers

function createAnswers({ entry, config, offsets, tokenizer: definition }, block) {
  const tokenizer = createTokenizer(definition),
    model = createModel(config, block, offsets),
    { spell } = tokenizer,
    { width, heads, layers, context, vocabulary } = config,
    size = width / heads,
    cache = model.createCache(); // of the text that is asked about; a text under way has its own

  const idsOf = (input) => (typeof input === 'string' ? tokenizer.encode(input) : [...(input ?? [])]);
  function checked(ids) {
    if (!ids.length) throw new ApiError('the text is empty');
    if (ids.length > context) throw new ApiError(`the text has ${ids.length} tokens, but the model reads at most ${context}`, 'context_length_exceeded');
    return ids;
  }
  const textFields = (ids) => ({ model: entry.id, text: tokenizer.decode(ids), tokens: ids, pieces: ids.map(spell), context });
  const logitsAt = (position, from = cache) => model.logits(model.hidden(model.stream(layers, position, from)));

  function candidates(logits, k) {
    const tokens = largest(logits, Math.min(k, logits.length)),
      listed = new Set(tokens),
      others = logits.filter((_, id) => !listed.has(id)),
      total = logSum(logits);
    const found = { tokens, pieces: tokens.map(spell), logits: tokens.map((id) => logits[id]), rest: others.length ? logSum(others) : null };
    return { found: { ...found, probabilities: found.logits.map((x) => Math.exp(x - total)) }, others };
  }

  function nextTokens(body) {
    let ids = idsOf(body.input);
    if (!ids.length && tokenizer.start !== null) ids = [tokenizer.start];
    model.read(checked(ids), cache);
    const logits = logitsAt(ids.length - 1),
      { found, others } = candidates(logits, body.k ?? LISTED);
    if (body.temperatures) found.rests = TEMPERATURES.map((t) => (others.length ? logSum(others.map((x) => x / t)) : null));
    if (body.temperature !== undefined) {
      const { ids: kept } = filtered(logits, body),
        chances = softmax(logits.map((x) => x / Math.max(body.temperature, 1e-6)));
      found.kept = { count: kept.length, probability: kept.reduce((sum, id) => sum + chances[id], 0) };
    }
    return { ...textFields(ids), vocabulary, candidates: found };
  }

  function tokenize(body) {
    const ids = idsOf(body.input),
      lengths = ids.map((id) => tokenizer.bytesOf(id).length),
      letters = typeof body.input === 'string' ? [...body.input].flatMap((letter, i) => Array(new TextEncoder().encode(letter).length).fill(i)) : null;
    let end = 0;
    const span = (n) => [letters[end], letters[(end += n) - 1] + 1];
    return {
      ...textFields(ids),
      bytes: ids.map((id) => Array.from(tokenizer.bytesOf(id), (byte) => byte.toString(16).padStart(2, '0')).join('')),
      spans: letters && definition.kind !== 'characters' ? lengths.map(span) : letters && ids.map((_, i) => [i, i + 1]),
      starts: tokenizer.starts(ids),
      ...(body.merges ? { merges: ids.length ? tokenizer.merges(ids[0]) : null } : {}),
    };
  }

  // one event per token, in the shape of /v1/completions
  async function* complete(body, signal) {
    const ids = checked(body.prompt === undefined ? [tokenizer.start] : idsOf(body.prompt)),
      own = model.createCache(),
      streamer = tokenizer.streamer(),
      options = { temperature: 1, seed: 1, ...body };
    if (ids.length >= context) throw new ApiError(`the prompt fills the context of ${context} tokens`, 'context_length_exceeded');
    for (let made = 0; ; made++) {
      await pause();
      if (signal.aborted) return;
      model.read(ids, own);
      const logits = logitsAt(ids.length - 1, own),
        total = logSum(logits),
        id = choose(logits, options, made),
        isEnd = tokenizer.ends.has(id);
      if (!isEnd) ids.push(id);
      const finish = isEnd ? 'stop' : made + 1 === (body.max_tokens ?? 16) || ids.length >= context ? 'length' : null,
        text = (isEnd ? '' : streamer.decode(tokenizer.bytesOf(id), { stream: true })) + (finish ? streamer.decode() : ''),
        top = largest(logits, body.logprobs ?? 0).map((other) => [other, spell(other), logits[other] - total]);
      yield { choices: [{ text, finish_reason: finish, logprobs: { tokens: [spell(id)], token_ids: [id], token_logprobs: [logits[id] - total], top: [top] } }] };
      if (finish) return;
    }
  }

  // ---- the inside of the model

  // scores before and behind the mask, and weights, of one head: (T, T) each
  function attention({ q, k }, layer, head) {
    const count = q.length / width,
      [products, scores, masked, weights] = Array.from({ length: 4 }, () => new Float32Array(count * count));
    for (let i = 0; i < count; i++) {
      for (let j = 0; j < count; j++) {
        const at = i * count + j;
        for (let d = head * size; d < (head + 1) * size; d++) products[at] += q[i * width + d] * k[j * width + d];
        scores[at] = products[at] / Math.sqrt(size);
        masked[at] = model.isHidden(layer, i, j) ? -Infinity : scores[at];
      }
      weights.set(softmax(masked.subarray(i * count, (i + 1) * count)), i * count);
    }
    return { products, scores, masked, weights };
  }
  const weightsOf = (layer) => {
    const parts = model.parts(layer, cache).attention;
    return Array.from({ length: heads }, (_, head) => attention(parts, layer, head).weights);
  };
  const meanOf = (all) => all[0].map((_, i) => all.reduce((sum, w) => sum + w[i], 0) / all.length);

  // the rows and columns of a (T, T) matrix that a window shows
  function cut(data, { start, size: shown, total }) {
    const result = new Float32Array(shown * shown);
    for (let i = 0; i < shown; i++) result.set(data.subarray((start + i) * total + start, (start + i) * total + start + shown), i * shown);
    return { shape: [shown, shown], data: result };
  }

  // at most THUMBNAIL wide; each cell is the largest of those it stands for
  function small({ shape: [count], data }) {
    const wide = Math.min(THUMBNAIL, count),
      place = Array.from({ length: count }, (_, i) => Math.min(wide - 1, Math.floor(((i + 1) * wide - 1) / count))),
      result = new Uint8Array(wide * wide);
    data.forEach((w, at) => {
      const cell = place[Math.floor(at / count)] * wide + place[at % count];
      result[cell] = Math.max(result[cell], Math.round(255 * w));
    });
    return result;
  }

  function scoresOf(weights, ids) {
    const count = ids.length,
      mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0),
      at = (i, j) => weights[i * count + j],
      later = ids.slice(1).map((_, i) => i + 1),
      over = (picks) => mean(ids.map((_, i) => picks(i)).filter((keys) => keys.length).map(([i, ...keys]) => keys.reduce((sum, j) => sum + at(i, j), 0))); // prettier-ignore
    const where = (test) => (i) => {
      const keys = ids.map((_, j) => j).filter((j) => j < i && test(i, j));
      return keys.length ? [i, ...keys] : [];
    };
    return {
      previous: mean(later.map((i) => at(i, i - 1))),
      first: mean(later.map((i) => at(i, 0))),
      duplicate: over(where((i, j) => ids[j] === ids[i])),
      induction: over(where((i, j) => j > 0 && ids[j - 1] === ids[i])),
      distance: mean(ids.map((_, i) => ids.reduce((sum, _, j) => sum + at(i, j) * Math.abs(i - j), 0))),
    };
  }

  const views = {
    async heads(body, window) {
      const scores = {},
        pictures = [];
      for (let layer = 0; layer < layers; layer++) {
        await pause();
        const all = weightsOf(layer),
          found = all.map((w) => scoresOf(w, cache.ids));
        pictures.push(...all.map((w) => small(cut(w, window))));
        for (const name in found[0]) (scores[name] ??= []).push(found.map((one) => one[name]));
      }
      const side = Math.min(THUMBNAIL, window.size),
        data = new Uint8Array(pictures.length * side * side);
      pictures.forEach((picture, i) => data.set(picture, i * side * side));
      return { scores, thumbnails: { shape: [layers, heads, side, side], data } };
    },

    attention({ layer, head, mix }, window) {
      const count = cache.ids.length;
      let found = mix === 'head' ? attention(model.parts(layer, cache).attention, layer, head).weights : meanOf(weightsOf(layer));
      if (mix === 'rollout') {
        found = Float32Array.from({ length: count * count }, (_, i) => (i % (count + 1) ? 0 : 1));
        for (let l = 0; l <= layer; l++) {
          const half = meanOf(weightsOf(l)).map((w, i) => w / 2 + (i % (count + 1) ? 0 : 0.5)),
            next = new Float32Array(count * count);
          for (let i = 0; i < count; i++)
            for (let k = 0; k <= i; k++) for (let j = 0; j < count; j++) next[i * count + j] += half[i * count + k] * found[k * count + j];
          found = next;
        }
      }
      return { layer, head, mix, matrix: cut(found, window) };
    },

    steps({ layer, head, query }, { start, size: shown, total }) {
      const parts = model.parts(layer, cache).attention,
        { products, scores, weights } = attention(parts, layer, head),
        all = cache.ids.map((_, j) => j).filter((j) => !model.isHidden(layer, query, j)),
        keys = all.filter((j) => j >= start && j < start + shown),
        of = (part, t) => Array.from(parts[part].subarray(t * width + head * size, t * width + (head + 1) * size)),
        row = (data) => keys.map((j) => data[query * total + j]);
      const steps = { query, keys, pieces: keys.map((j) => spell(cache.ids[j])), all_keys: all.length, q: of('q', query), k: keys.map((j) => of('k', j)), v: keys.map((j) => of('v', j)) };
      return { layer, head, steps: { ...steps, scores: row(products), scaled: row(scores), weights: row(weights), output: of('heads', query) } };
    },

    async layers(body, window, signal) {
      const lens = { tokens: [], pieces: [], probabilities: [] },
        norms = [],
        shown = Array.from({ length: window.size }, (_, i) => window.start + i);
      for (let layer = 0; layer <= layers; layer++) {
        const rows = [];
        for (const t of shown) {
          await pause();
          if (signal.aborted) return {};
          rows.push(candidates(model.logits(model.hidden(model.stream(layer, t, cache))), 5).found);
        }
        for (const name in lens) lens[name].push(rows.map((row) => row[name]));
        norms.push(shown.map((t) => Math.hypot(...model.stream(layer, t, cache))));
      }
      return { lens, norms, contributions: contributions(shown, lens.tokens[layers]) };
    },

    walk({ layer, head, query }, window) {
      const at = Math.min(query, cache.ids.length - 1),
        vector = (data) => ({ shape: [data.length], data }),
        shape = { width, heads, head_width: size, mlp: config.mlp, vocabulary, context, norm: config.post ? 'post' : 'pre', activation: config.activation, embed_scale: config.embed_scale };
      const common = { layer, head, query: at, shape, read_from: cache.ids.length - 1 };
      if (layer < 0) {
        const { token, place, embedding } = model.embed(cache.ids[at], at);
        return { ...common, parts: { token_rows: vector(token), position_rows: vector(place), embedding: vector(embedding) } };
      }
      if (layer >= layers) {
        const hidden = model.hidden(model.stream(layers, at, cache)),
          { found } = candidates(model.logits(hidden), LISTED),
          parts = { stream: model.stream(layers, at, cache), hidden, row: rowOf(model.output, found.tokens[0]) };
        return { ...common, read_at: at, answers: [], candidates: found, parts: Object.fromEntries(Object.entries(parts).map(([name, data]) => [name, vector(data)])) };
      }
      const found = model.parts(layer, cache),
        parts = {},
        row = (data) => vector(data.slice((at * data.length) / cache.ids.length, ((at + 1) * data.length) / cache.ids.length));
      for (const kind of ['attention', 'mlp']) for (const name in found[kind]) parts[`${kind}.${name}`] = row(found[kind][name]);
      for (const name of ['k', 'v']) {
        const rows = new Float32Array(window.size * size);
        for (let i = 0; i < window.size; i++) rows.set(found.attention[name].subarray((window.start + i) * width + head * size).subarray(0, size), i * size);
        parts[`attention.${name}_row`] = parts[`attention.${name}`];
        parts[`attention.${name}`] = { shape: [window.size, size], data: rows };
      }
      for (const [name, data] of Object.entries(attention(found.attention, layer, head))) parts[`attention.${name}`] = cut(data, window);
      return { ...common, source_pieces: [], parts };
    },
  };

  // what embedding, attention and MLPs add to the likeliest logit (minus the mean one) at each position: the logit's
  // direction carried back through each norm with its divisor held fixed
  function contributions(shown, tokens) {
    const mean = new Float32Array(width);
    for (let id = 0; id < vocabulary; id++) rowOf(model.output, id).forEach((x, i) => { mean[i] += x / vocabulary; }); // prettier-ignore
    const found = { embedding: [], bias: [], head: [], total: [], answer: [], pieces: [], attention: [], mlp: [], cross: [] },
      blocks = Array.from({ length: layers }, (_, layer) => model.parts(layer, cache)),
      dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
    shown.forEach((t, place) => {
      const [answer] = tokens[place],
        row = (data) => data.subarray(t * width, (t + 1) * width);
      let direction = rowOf(model.output, answer).map((x, i) => x - mean[i]),
        bias = 0;
      const total = dot(direction, model.hidden(model.stream(layers, t, cache)));
      const through = (norm, x) => {
        bias += dot(direction, norm.shift);
        const scaled = direction.map((d, i) => d * norm.gain[i]),
          [middle] = spread(scaled),
          [, variance] = spread(x);
        direction = scaled.map((d) => (d - middle) / Math.sqrt(variance + norm.epsilon));
      };
      if (!config.post) through(model.last, model.stream(layers, t, cache));
      for (let layer = layers - 1; layer >= 0; layer--)
        for (const kind of ['mlp', 'attention']) {
          if (config.post) through(model.normsOf(layer)[kind], row(blocks[layer][kind].sum));
          (found[kind][layer] ??= [])[place] = dot(direction, row(blocks[layer][kind].update));
        }
      found.embedding.push(dot(direction, model.stream(0, t, cache)));
      found.bias.push(bias);
      found.head.push(0);
      found.total.push(total);
      found.answer.push(answer);
      found.pieces.push(spell(answer));
    });
    return found;
  }

  async function explain(body, signal) {
    const ids = checked(idsOf(body.input)),
      total = ids.length,
      shown = Math.min(body.size ?? 64, total),
      start = Math.min(body.start ?? total - shown, total - shown),
      window = { start, size: shown, total },
      row = ids.slice(start, start + shown);
    model.read(ids, cache);
    const text = typeof body.input === 'string' ? body.input : tokenizer.decode(ids),
      payload = { model: entry.id, text, view: body.view, stack: 'decoder', tokens: row, pieces: row.map(spell), starts: tokenizer.starts(ids).slice(start, start + shown), window, causal: true, layers };
    return { ...payload, ...(await views[body.view](body, window, signal)) };
  }

  const paths = { '/v1/models': () => ({ data: [entry] }), '/v1/next-tokens': nextTokens, '/v1/tokenize': tokenize, '/v1/explain': explain };
  return {
    complete,
    async answer(path, body, signal) {
      if (path !== '/v1/completions') return paths[path](body, signal);
      let text = '';
      for await (const event of complete(body, signal)) text += event.choices[0].text;
      return { choices: [{ text }] };
    },
  };
}

let made = null;
export const createApi = () => (made ??= open());

function open() {
  const read = (id) => document.getElementById(id).textContent,
    running = new Map(),
    answers = createAnswers(
      JSON.parse(read('plume-model')),
      Uint8Array.from(atob(read('plume-weights')), (letter) => letter.charCodeAt(0)),
    );
  let turn = Promise.resolve(); // answers share one cache, so each waits for the one before

  function begin(name) {
    running.get(name)?.abort();
    const control = new AbortController();
    running.set(name, control);
    return control.signal;
  }

  return {
    views: ['next', 'write', 'walk', 'attention', 'layers', 'tokens'],
    // resolves to undefined when a newer question took its place
    ask(name, path, body) {
      const signal = begin(name);
      const work = async () => {
        await pause();
        if (signal.aborted) return undefined;
        const began = performance.now(),
          answer = await answers.answer(path, body, signal);
        return signal.aborted ? undefined : { ...answer, ms: Math.round(performance.now() - began) };
      };
      const asked = turn.then(work);
      turn = asked.catch(() => {});
      return asked;
    },
    // calls take(event) for each token; resolves to false when stopped
    async stream(name, path, body, take) {
      const signal = begin(name);
      for await (const event of answers.complete(body, signal)) take(event);
      return !signal.aborted;
    },
    stop: (name) => running.get(name)?.abort(),
  };
}
