// The tokenizer of a saved page: byte-level BPE, bytes or characters, with the ids that Plume gives.

// GPT-2's pattern. JavaScript's \s is not Unicode's white space, so that is named
const WORDS = /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+$|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}/gu;

// GPT-2's visible letter for every byte: itself where it can be printed, else the next one from 256 on
function byteLetters() {
  const printable = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : next++));
}
const LETTERS = byteLetters(),
  BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));

export function createTokenizer({ kind, tokens, merges, special, start, ends, unknown, opens, closes }) {
  const ids = new Map(tokens.map((token, id) => [token, id])),
    ranks = new Map(merges.map(([left, right], rank) => [`${left} ${right}`, rank])),
    specials = new Set(special),
    known = new Map(),
    encoder = new TextEncoder(),
    reader = (fatal) => new TextDecoder('utf-8', { fatal, ignoreBOM: true }),
    strict = reader(true);

  const bytesOf = (id) =>
    kind === 'characters' || specials.has(id) || [...tokens[id]].some((letter) => !BYTES.has(letter))
      ? encoder.encode(tokens[id])
      : Uint8Array.from(tokens[id], (letter) => BYTES.get(letter));

  // every state of a word from its bytes to its pieces: the merge of the lowest rank first, at all its places
  function history(word) {
    const steps = [Array.from(encoder.encode(word), (byte) => LETTERS[byte])];
    for (;;) {
      const now = steps.at(-1);
      let best = Infinity;
      for (let i = 0; i + 1 < now.length; i++) best = Math.min(best, ranks.get(`${now[i]} ${now[i + 1]}`) ?? Infinity);
      if (best === Infinity) return steps;
      const [left, right] = merges[best],
        joined = [];
      for (let i = 0; i < now.length; i++)
        if (now[i] === left && now[i + 1] === right) joined.push(left + now[++i]);
        else joined.push(now[i]);
      steps.push(joined);
    }
  }

  function word(text) {
    if (!known.has(text)) known.set(text, history(text).at(-1).map((piece) => ids.get(piece)));
    return known.get(text);
  }

  function spell(id) {
    if (specials.has(id)) return tokens[id];
    const bytes = bytesOf(id);
    try {
      return strict.decode(bytes);
    } catch {
      return Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, '0')}`).join('');
    }
  }

  return {
    start,
    ends: new Set(ends),
    bytesOf,
    spell,
    streamer: () => reader(false),
    encode(text) {
      if (kind === 'characters') return Array.from(text, (letter) => ids.get(letter) ?? unknown);
      if (kind === 'bytes') return Array.from(encoder.encode(text), (byte) => ids.get(LETTERS[byte]));
      return (text.match(WORDS) ?? []).flatMap(word);
    },
    decode: (row) => reader(false).decode(Uint8Array.from(row.flatMap((id) => [...bytesOf(id)]))),
    starts: (row) => row.map((id, i) => i === 0 || opens[id] === '1' || closes[row[i - 1]] === '1'),
    // how the merges build a token; null where there are none, or it is only a part of a character
    merges(id) {
      const text = spell(id);
      if (kind !== 'byte-bpe' || specials.has(id) || encoder.encode(text).length !== bytesOf(id).length) return null;
      const readable = (piece) => reader(false).decode(Uint8Array.from(piece, (letter) => BYTES.get(letter)));
      return history(text).map((step) => step.map(readable));
    },
  };
}
