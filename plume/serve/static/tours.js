// Guided tours: steps over the views, each a state of the page and a sentence; and the bar that plays them on any model.

import { h } from './draw.js';
import { stepsOf } from './parts.js';

// A step is {view, en, zh} with any of: text (a word of the language file), layer, head and other parts of the state; walk (the
// kind of a walk's step); needs (what the model must be, else the step is left out); uses (another model, if one is there).
const TOURS = [
  {
    id: 'token',
    name: { en: 'The way of a token', zh: '一个词元的旅程' },
    steps: [
      { view: 'tokens', en: 'A text becomes tokens: pieces of a fixed vocabulary, each with an id. The model’s input is ids, not letters.', zh: '文本先变成词元：固定词表中的片段，各有编号。模型的输入是编号，不是字母。' },
      { view: 'walk', walk: 'embed', en: 'The id picks a row of the token table, the position a row of another. Their sum is the token’s first vector; every later step changes it.', zh: '编号选出词元表的一行，位置选出另一张表的一行。两者之和是该词元的第一个向量，之后每一步都在改动它。' },
      { view: 'walk', walk: 'a.qkv', layer: 0, en: 'In every block each vector is turned into a query, a key and a value: the query is matched against keys, and the values are what is passed on.', zh: '在每个块里，每个向量变成查询、键和值：查询与各个键匹配，传递的是值。' },
      { view: 'walk', walk: 'a.softmax', layer: 0, en: 'Each query is multiplied with every key; the softmax turns the products into weights. These are the attention weights.', zh: '每个查询与每个键做点积，softmax 把结果变成权重。这就是注意力权重。' },
      { view: 'walk', walk: 'a.add', layer: 0, en: 'The weighted values are added to the token’s vector. Nothing is replaced: the residual stream collects updates.', zh: '加权后的值加到词元的向量上。什么都没有被替换：残差流累积各次更新。' },
      { view: 'walk', walk: 'm.act', layer: 0, en: 'Then an MLP works on each token alone: up to a wider vector, through a non-linear function, down again, added too.', zh: '接着 MLP 单独处理每个词元：升到更宽的向量，经过非线性函数，再降回来，同样相加。' },
      { view: 'layers', needs: 'predicts', en: 'Block after block the answer forms: each row shows what the model would predict if it stopped there.', zh: '答案逐块成形：每一行显示模型停在那里时会预测什么。' },
      { view: 'walk', walk: 'logits', needs: 'predicts', en: 'The last vector is compared with the row of every token: one logit each.', zh: '最后的向量与每个词元的行相乘：每个词元一个 logit。' },
      { view: 'walk', walk: 'label', en: 'The head turns the vector that it reads into one logit per answer.', zh: '输出头把所读的向量变成每个答案一个 logit。' },
      { view: 'next', en: 'A softmax makes probabilities of the logits. This distribution is all that a language model computes.', zh: 'softmax 把 logit 变成概率。语言模型计算的就是这个分布。' },
      { view: 'walk', walk: 'cache', needs: 'generates', en: 'A chosen token joins the text and the way begins again; keys and values of earlier tokens are kept in the cache.', zh: '选中的词元接到文本后面，旅程重新开始；先前词元的键和值留在缓存里。' },
    ],
  },
  {
    id: 'mask',
    name: { en: 'Why masks', zh: '为什么要掩码' },
    steps: [
      { view: 'attention', layer: 0, head: 0, needs: 'causal', mix: 'head', picture: 'matrix', en: 'Rows are queries, columns are keys. The upper right is empty: no token attends to a later one.', zh: '行是查询，列是键。右上角是空的：没有词元关注后面的词元。' },
      { view: 'walk', walk: 'a.mask', layer: 0, en: 'The mask sets the scores of later tokens to −∞ before the softmax, which then gives them exactly 0.', zh: '掩码在 softmax 之前把后面词元的分数设为 −∞，softmax 于是恰好给出 0。' },
      { view: 'walk', walk: 'a.softmax', layer: 0, needs: 'causal', en: 'Each row still sums to one, over fewer tokens. Without the mask the model could copy the answer that it is trained to predict.', zh: '每一行的和仍是一，只是词元更少。没有掩码，模型就能照抄训练时要预测的答案。' },
      { view: 'surprise', needs: 'generates', en: 'Thanks to the mask, one pass over a text predicts every token from those before it: a training example per token.', zh: '有了掩码，一次计算就能从前文预测每一个词元：每个词元都是一个训练样本。' },
      { view: 'walk', walk: 'cache', needs: 'generates', en: 'And since no earlier state changes when a token is appended, keys and values can be kept: the KV cache.', zh: '而且接上新词元不会改变先前的状态，键和值可以保留：这就是 KV 缓存。' },
      { view: 'attention', layer: 0, head: 0, needs: 'bidirectional', mix: 'head', picture: 'matrix', en: 'This model has no causal mask: every token attends to both sides, so the whole square is used.', zh: '这个模型没有因果掩码：每个词元关注两侧，整个方阵都被使用。' },
      { view: 'masks', needs: 'masks', masked: '1', en: 'So it cannot be trained to predict the next token, which is part of its input. Instead, words are replaced by a mask token: press one.', zh: '所以不能训练它预测下一个词元，因为下一个词元就在输入里。于是把词换成遮盖词元：点一个试试。' },
      { view: 'attention', layer: 0, head: 0, needs: 'pairs', mix: 'head', picture: 'matrix', stack: '', en: 'The decoder of an encoder-decoder has the mask; its encoder and its cross-attention have none.', zh: '编码器-解码器中，解码器有掩码，编码器和交叉注意力没有。' },
    ],
  },
  {
    id: 'heads',
    name: { en: 'What heads do', zh: '注意力头在做什么' },
    steps: [
      { view: 'attention', sort: 'layer', mix: 'head', text: 'repeatedText', needs: 'single', en: 'Each small square is one head on a text that repeats itself. Heads differ: some attend nearby, some far away.', zh: '每个小方块是一个头，文本有重复。各头不同：有的关注近处，有的关注远处。' },
      { view: 'attention', sort: 'layer', mix: 'head', needs: 'pairs', en: 'Each small square is one head. Heads differ: some attend nearby, some far away.', zh: '每个小方块是一个头。各头不同：有的关注近处，有的关注远处。' },
      { view: 'attention', sort: 'previous', mix: 'head', en: 'Sorted by the weight on the previous token: first come the heads that mostly attend one position back.', zh: '按对前一个词元的权重排序：排在前面的头主要关注前一个位置。' },
      { view: 'attention', sort: 'first', mix: 'head', en: 'Many heads put most of their weight on the first token when no other key matches.', zh: '没有匹配的键时，许多头把大部分权重放在第一个词元上。' },
      { view: 'attention', sort: 'induction', mix: 'head', needs: 'single', en: 'Induction heads attend to the token behind an earlier copy of this one: “it came after this last time”.', zh: '归纳头关注相同词元上次出现之后的那个词元：“上次后面跟的是它”。' },
      { view: 'cause', map: 'kind', part: 'head', needs: 'headed', en: 'The same, measured on a sequence of random tokens that is repeated once; a head is named by what it mostly attends to.', zh: '在重复一遍的随机词元序列上测量；按主要关注的位置给头命名。' },
      { view: 'cause', map: 'effect', part: 'head', value: 'zero', needs: 'headed', en: 'Which heads matter for this answer? Each cell is the change of its logit when that head alone is set to zero. Click one.', zh: '哪些头对这个答案重要？每格是仅把该头置零时 logit 的变化。点一个试试。' },
    ],
  },
  {
    id: 'pretraining',
    name: { en: 'What pretraining changes', zh: '预训练改变了什么' },
    steps: [
      { view: 'next', uses: 'before', needs: 'checkpoints', en: 'Left: this model. Right: the first checkpoint of its run. Early on, the model knows little more than how frequent tokens are.', zh: '左边是这个模型，右边是同一训练的第一个检查点。起初模型只知道词元出现的频率。' },
      { view: 'surprise', uses: 'before', needs: 'checkpoints', en: 'The same text: fewer and fewer tokens are surprising. The slider above moves through the checkpoints.', zh: '同一段文本：令人意外的词元越来越少。上方滑块可在检查点之间移动。' },
      { view: 'attention', uses: 'before', needs: 'checkpoints', sort: 'layer', mix: 'head', en: 'Attention is nearly even at first; patterns appear with training.', zh: '注意力起初几乎均匀，模式随训练出现。' },
      { view: 'layers', uses: 'before', needs: 'checkpoints', en: 'And the layers begin to divide the work: the answer is prepared step by step.', zh: '各层开始分工：答案一步步准备出来。' },
      { view: 'runs', uses: 'none', needs: 'checkpoints', en: 'The loss of the run: fast at first, then slowly. That is all that training optimises.', zh: '训练损失：先快后慢。训练优化的只有它。' },
      { view: 'surprise', needs: 'alone', en: 'Cool colours are tokens that pretraining has taught the model to expect. An untrained model would find every token as surprising as any other.', zh: '冷色是预训练教会模型预期的词元。未训练的模型会觉得每个词元同样意外。' },
      { view: 'layers', needs: 'alone', en: 'Pretraining also divides the work between layers. Serve a run folder (plume explore runs/demo) and this tour compares two of its checkpoints.', zh: '预训练还让各层分工。用 plume explore runs/demo 打开一次训练，本导览会比较其中两个检查点。' },
      { view: 'next', needs: 'silent', en: 'This model’s head was trained on labels; the body below it was pretrained. Serve a run folder (plume explore runs/demo) and this tour compares two of its checkpoints.', zh: '这个模型的输出头在标签上训练，下面的主体经过预训练。用 plume explore runs/demo 打开一次训练，本导览会比较其中两个检查点。' },
    ],
  },
  {
    id: 'bert',
    name: { en: 'How BERT differs', zh: 'BERT 有何不同' },
    steps: [
      { view: 'attention', layer: 0, head: 0, needs: 'causal', mix: 'head', picture: 'matrix', en: 'This is a GPT: it reads from left to right, each token attends to itself and to what came before.', zh: '这是 GPT：从左到右阅读，每个词元只关注自己和前文。' },
      { view: 'next', needs: 'generates', en: 'So it can predict the next token, and generate text. A BERT cannot: its input is always a whole text.', zh: '所以它能预测下一个词元，也能生成文本。BERT 不能：它的输入总是整段文本。' },
      { view: 'attention', uses: 'masked', layer: 0, head: 0, needs: 'bidirectional', mix: 'head', picture: 'matrix', en: 'A BERT attends to both sides. [CLS] and [SEP] stand around the text; they belong to what it was trained on.', zh: 'BERT 关注两侧。文本前后有 [CLS] 和 [SEP]，它们属于训练时的输入。' },
      { view: 'masks', uses: 'masked', needs: 'masks', masked: '1', en: 'It was pretrained to fill masks: 15 % of the tokens were masked and predicted from both sides.', zh: '它的预训练是填空：15% 的词元被遮住，由两侧的词元预测。' },
      { view: 'walk', uses: 'masked', walk: 'a.softmax', layer: 0, needs: 'bidirectional', en: 'Inside there is no mask between scores and softmax; all else is the same block.', zh: '内部在分数与 softmax 之间没有掩码，其余都是同样的块。' },
      { view: 'walk', walk: 'label', en: 'Fine-tuned, it answers at one position: the head reads the summary token and gives a logit per label.', zh: '微调之后，它在一个位置上作答：输出头读取汇总词元，给出每个标签的 logit。' },
      { view: 'attention', needs: 'pairs', stack: 'encoder', layer: 0, head: 0, mix: 'head', picture: 'matrix', en: 'The encoder of this model is what became BERT: it attends to both sides.', zh: '这个模型的编码器就是后来的 BERT：它关注两侧。' },
      { view: 'attention', needs: 'pairs', stack: '', layer: 0, head: 0, mix: 'head', picture: 'matrix', en: 'Its decoder is what became GPT: masked, from left to right.', zh: '它的解码器就是后来的 GPT：带掩码，从左到右。' },
      { view: 'tokens', needs: 'unmasked', en: 'Serve a BERT beside this model (plume explore GPT BERT) and the tour continues with it: both sides, masks, labels.', zh: '同时打开一个 BERT（plume explore GPT BERT），导览会接着展示它：两侧、遮盖、标签。' },
    ],
  },
];

// what a step may ask of the model that it is shown on
const NEEDS = {
  predicts: ({ predicts }) => predicts,
  generates: ({ generates }) => generates,
  masks: ({ masks }) => masks,
  causal: ({ causal, pair }) => causal && pair !== 'target',
  bidirectional: ({ causal, pair }) => !causal && pair !== 'target',
  pairs: ({ pair }) => pair === 'target',
  single: ({ pair }) => pair !== 'target',
  headed: ({ head }) => head !== 'bare',
  checkpoints: (plume, before) => Boolean(before),
  alone: ({ predicts }, before) => !before && predicts,
  silent: ({ predicts }, before) => !before && !predicts,
  unmasked: ({ causal, pair }, before, models) => causal && pair !== 'target' && !models.some(({ plume }) => plume.masks),
};

export function createTours({ box, store, t, models, views, language }) {
  const tourOf = (state) => TOURS.find(({ id }) => id === state.tour.split('.')[0]);
  const modelOf = (state) => models().find(({ id }) => id === state.model);

  // the first checkpoint of a model's run
  const before = (model) =>
    models()
      .filter(({ id, plume }) => id !== model.id && plume.run && plume.run === model.plume.run && plume.step !== null)
      .sort((a, b) => a.plume.step - b.plume.step)[0];

  // what a step sets, or null when it is not for this model
  function stateOf({ en, zh, name, needs, uses, walk, text, ...state }, model) {
    const shown = uses === 'masked' ? (model.plume.masks ? model : (models().find(({ plume }) => plume.masks) ?? model)) : model,
      { plume } = shown,
      first = before(model);
    if (!views.includes(state.view) || (needs && !NEEDS[needs](plume, first, models()))) return null;
    const patch = { query: -1, start: -1, edits: '', ...state, model: shown.id, other: uses === 'before' ? first.id : '' };
    if (walk) {
      const step = stepsOf(plume).find(({ kind, layer, stack }) => kind === walk && (state.layer === undefined || layer === state.layer) && (!stack || stack === 'decoder'));
      if (!step) return null;
      patch.step = step.id;
    }
    if (text && !plume.pair) Object.assign(patch, { text: t(text), ids: '' });
    return patch;
  }

  function stepsFor(tour, model) {
    return tour.steps.map((step) => ({ ...step, patch: stateOf(step, model) })).filter(({ patch }) => patch);
  }

  function go(tour, at, from) {
    const steps = stepsFor(tour, models().find(({ id }) => id === from) ?? models()[0]),
      place = Math.max(0, Math.min(steps.length - 1, at));
    store.set({ ...steps[place].patch, tour: `${tour.id}.${place}.${from}` }, { push: true });
  }

  const move = (by) => {
    const tour = tourOf(store.state);
    if (!tour) return;
    const [, at, ...from] = store.state.tour.split('.');
    go(tour, Number(at) + by, from.join('.'));
  };

  return {
    move,
    list: () =>
      TOURS.map((tour) => h('button', { type: 'button', class: 'plain', 'data-tour': tour.id, onclick: () => go(tour, 0, modelOf(store.state).id) }, tour.name[language()])),
    show(state) {
      const tour = models().length ? tourOf(state) : null;
      box.hidden = !tour;
      if (!tour) return;
      const [, at, ...from] = state.tour.split('.'),
        steps = stepsFor(tour, models().find(({ id }) => id === from.join('.')) ?? models()[0]),
        place = Math.max(0, Math.min(steps.length - 1, Number(at) || 0));
      const button = (word, by, off) => h('button', { type: 'button', class: by > 0 ? 'primary' : 'plain', 'data-by': by, disabled: off, onclick: () => move(by) }, t(word));
      const focused = box.contains(document.activeElement) ? document.activeElement.dataset.by : null;
      box.replaceChildren(
        h('p', {}, h('strong', {}, tour.name[language()]), h('span', { class: 'muted number' }, ` ${place + 1} / ${steps.length} `), steps[place][language()]),
        h('div', { class: 'tour-buttons' }, button('tourBack', -1, place === 0), button('tourNext', 1, place === steps.length - 1), h('button', { type: 'button', class: 'plain', 'aria-label': t('tourEnd'), title: t('tourEnd'), onclick: () => store.set({ tour: '' }) }, '×')),
      );
      if (focused) (box.querySelector(`[data-by="${focused}"]:enabled`) ?? box.querySelector('button:enabled')).focus();
    },
  };
}
