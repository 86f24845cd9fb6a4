// Every word of the page in English. {name} is filled in.
export default {
  language: '中', otherLanguage: 'Chinese', theme: 'Light or dark', keysTitle: 'Keys',
  model: 'model', compareWith: 'compare with', none: 'none', text: 'The text', placeholder: 'Write something here, or choose a beginning below.',
  next: 'Next', write: 'Write', surprise: 'Surprise', attention: 'Attention', layers: 'Layers', masks: 'Masks', tokens: 'Tokens', runs: 'Runs',
  copyLink: 'copy link', copied: 'copied', close: 'Close',
  tokensOf: '{n} / {context} tokens', perplexity: 'perplexity {x}', milliseconds: '{n} ms', engine: [],
  opening: 'Asking for the models …', cannot: 'The server cannot be reached.', keyNeeded: 'This server wants a key.', keySend: 'Use this key', notForModel: 'This view needs {what}; {model} is something else.',
  aCausal: 'a model that writes (GPT)', aMasked: 'a model that fills masks (BERT)', aToken: 'a model that predicts tokens',
  tooLong: 'The text is longer than the model’s context of {n} tokens.',
  robot: 'Robot laws', unicorn: 'Unicorns', story: 'A story', beginnings: 'Beginnings:',
  trailing: 'The text ends in a space. Tokens mostly carry their own space in front, so the model has hardly ever seen a text end here.', heal: 'remove it',

  introNext: 'The ten likeliest next tokens. Take one with a click or with the keys 1 to 9 and 0; Alt+← takes it back.',
  introNext2: 'The bars and the rest of the vocabulary add up to one. Temperature flattens or sharpens them; top-k and top-p cut the tail, which turns grey.',
  temperature: 'temperature', topk: 'top-k', topp: 'top-p', off: 'off', rest: '{n} other tokens', cut: 'cut',
  probability: 'Probability of {token}', logit: 'Logit of {token}', logitWhy: 'The model’s score before softmax: its last hidden state times this token’s row of the table.',
  greedy: 'Temperature 0 always takes the first.', kept: 'kept by the filters: {p}', restWhy: 'All tokens that are not among the ten, together.',

  introWrite: 'The model writes on. Hover a token to see what else it might have said; click it, then an alternative, to branch off there.',
  introWrite2: 'Each sample has its seed: the same seed and settings give the same text again.',
  start: 'Write', stop: 'Stop', length: 'tokens', samples: 'samples', seed: 'seed', branches: 'Branches', noBranches: 'Nothing written yet.', use: 'take as text',
  insteadOf: 'Instead of {token}', branchOff: 'Choose one to branch off here.', logprob: 'log p {x}', stopped: 'stopped', writing: 'writing',

  introSurprise: 'How expected was each token? Cool colours: the model had it among its first guesses. Warm: it came as a surprise.',
  introSurprise2: 'Text that a model wrote is mostly cool; what people write keeps surprising it.',
  byRank: 'by rank', byProbability: 'by probability', rank0: 'first guess', rank1: 'top 10', rank2: 'top 100', rank3: 'top 1000', rank4: 'further down',
  p0: '≥ 50 %', p1: '≥ 10 %', p2: '≥ 1 %', p3: '≥ 0.1 %', p4: 'less', surprisal: 'surprisal', entropy: 'entropy', bits: '{x} bits per byte',
  expected: 'Expected here', was: 'it was {token}', rankIs: 'rank {n}', noExpectation: 'The first token has nothing before it.',
  surprisalWhy: 'surprisal = −ln p', perplexityWhy: 'perplexity = exp(mean surprisal)', curvesTitle: 'surprisal and entropy along the text, in nats',

  introAttention: 'Each small square is one head: a row per asking token, a column per token it looks at. Click one to see it large.',
  introAttention2: 'Hover a row to see whom that token looks at. Click it to follow the numbers from q to the weighted sum.',
  sortBy: 'sort by', sort_layer: 'layer', sort_distance: 'mean distance', sort_to_previous: 'to previous', sort_to_first: 'to first', sort_to_same: 'to same token',
  matrix: 'matrix', arcs: 'arcs', one: 'this head', mean: 'mean of heads', rollout: 'rollout', headIs: 'Layer {layer}, head {head}', layerIs: 'Layer {layer}',
  looksAt: '{token} looks at', lookedAtBy: '{token} is looked at by', window: 'tokens {from}–{to} of {total}', step: 'Step through',
  stepsTitle: 'Step by step: what {token} asks in layer {layer}, head {head}', q: 'q', k: 'k', score: 'q · k', scaled: '÷ √{d}', softmax: 'softmax', v: 'v', output: 'Σ softmax · v', headOf: 'key',
  propertyWhy: { layer: '', distance: 'mean distance looked back, in tokens', to_previous: 'mean weight on the token just before', to_first: 'mean weight on the first token', to_same: 'mean weight on other places with the same token' },
  weightWhy: 'weight = softmax(q · k / √d)',

  introLayers: 'What would the model say if it stopped after each layer? Each cell is its best guess there for the next token; the stronger the colour, the surer.',
  introLayersMasked: 'What would the model put at each place if it stopped after each layer? The stronger the colour, the surer.',
  introLayers2: 'The last row is the model’s real answer. Hover a cell for its first five and for what attention and MLP added.',
  embedding: 'embedding', layer: 'layer {n}', afterLayer: 'After layer {n}', afterEmbedding: 'After the embedding', norm: 'length of the residual stream', towards: 'Added towards {token}', attentionPart: 'attention', mlpPart: 'MLP',
  contributionWhy: 'along the direction of the final answer; all layers, embedding and biases add up to logit − mean logit = {x}',

  introMasks: 'Press words to hide them. The model sees both sides and says what it would put there.',
  introMasks2: 'Choose a fill to put it into the text.', noMask: 'No word is masked: press one.', maskOf: 'For {word}', fillWhy: 'p = softmax of the logits at the mask',

  introTokens: 'How the text is cut. The model never sees letters, only these pieces by their numbers.',
  introTokens2: 'Hover a piece for its bytes and for the merges that built it.',
  id: 'id', bytes: 'bytes', characters: 'characters', mergesTitle: 'Merges, one by one', noMerges: 'This kind of tokenizer has no merges.', piecesCount: '{n} tokens, {bytes} bytes, {ratio} bytes per token',

  introCompare: 'The same text in two models. What differs is outlined.', checkpoint: 'checkpoint', final: 'final',
  introRuns: 'Training runs beside the model. Those that still run are followed live.', noRuns: 'There are no runs here. Start the page beside a folder of runs: plume explore MODEL --runs runs',
  byTokens: 'tokens', byTime: 'time', bySteps: 'steps', linear: 'linear', log: 'log', loss: 'loss (solid: training, dashed: validation)', rate: 'learning rate', gradient: 'gradient norm', speed: 'tokens per second',
  samplesTitle: 'Samples along the way', live: 'running', stalled: 'no news for {time}', restarted: 'restarted {n}×', finished: '{step} steps', atStep: 'step {n}', validation: 'validation',

  keys: [['1 … 9, 0', 'take a candidate (with Alt while writing)'], ['Backspace, Alt+←', 'undo'], ['Alt+→', 'redo'], ['/', 'to the text'], ['Esc', 'leave the text; stop writing'], ['Ctrl+Enter', 'write on'],
    ['[ ]', 'layer'], [', .', 'head'], ['Tab', 'next pane'], ['Shift+← →', 'previous, next view'], ['?', 'these keys']],
};
