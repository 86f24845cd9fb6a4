// 页面上的全部中文用语。{name} 处填入数值。
export default {
  language: 'En', otherLanguage: '英文', theme: '浅色或深色', keysTitle: '快捷键',
  model: '模型', compareWith: '对比', none: '无', text: '文本', placeholder: '在这里写点什么，或者从下面选一个开头。',
  next: '下一词', write: '续写', surprise: '意外度', attention: '注意力', layers: '逐层', masks: '遮盖', tokens: '分词', runs: '训练',
  copyLink: '复制链接', copied: '已复制', close: '关闭',
  tokensOf: '{n} / {context} 个词元', perplexity: '困惑度 {x}', milliseconds: '{n} 毫秒',
  engine: [['CPU engine', 'CPU 引擎'], [', ', '，'], [/(\w+) weights/, '$1 权重'], [', ', '，'], [/(\d+) threads/, '$1 线程'], [/torch on (\w+)/, 'torch（$1）']],
  opening: '正在询问有哪些模型……', cannot: '无法连接服务器。', keyNeeded: '此服务器需要密钥。', keySend: '使用此密钥', notForModel: '此视图需要{what}，而 {model} 不是。',
  aCausal: '会写作的模型（GPT）', aMasked: '会填空的模型（BERT）', aToken: '能预测词元的模型',
  tooLong: '文本超出了模型 {n} 个词元的上下文。',
  robot: '机器人定律', unicorn: '独角兽', story: '一个故事', beginnings: '开头：',
  trailing: '文本以空格结尾。词元多半自带前面的空格，所以模型几乎没见过在此处结束的文本。', heal: '去掉它',

  introNext: '十个最可能的下一个词元。点击或按 1 到 9 和 0 选取；Alt+← 撤销。',
  introNext2: '这些横条加上其余词表的总和为一。温度使分布更平或更尖；top-k 与 top-p 剪掉尾部，被剪的变灰。',
  temperature: '温度', topk: 'top-k', topp: 'top-p', off: '关', rest: '其余 {n} 个词元', cut: '已剪',
  probability: '{token} 的概率', logit: '{token} 的 logit', logitWhy: 'softmax 之前的分数：最后的隐藏状态乘以词表中该词元的一行。',
  greedy: '温度为 0 时总是选第一个。', kept: '过滤后保留：{p}', restWhy: '十个之外的所有词元合计。',

  introWrite: '模型继续往下写。指向一个词元看它本来还可能说什么；点击它，再选一个，就从那里分支。',
  introWrite2: '每个样本都有种子：同样的种子和设置会得到同样的文本。',
  start: '续写', stop: '停止', length: '词元数', samples: '样本数', seed: '种子', branches: '分支', noBranches: '还没有内容。', use: '用作文本',
  insteadOf: '不选 {token} 的话', branchOff: '选一个，从这里分支。', logprob: '对数概率 {x}', stopped: '已停止', writing: '正在写',

  introSurprise: '每个词元有多在意料之中？冷色：模型一猜就中。暖色：出乎意料。',
  introSurprise2: '模型写的文本大多是冷色；人写的文本总会让它意外。',
  byRank: '按名次', byProbability: '按概率', rank0: '第一猜', rank1: '前 10', rank2: '前 100', rank3: '前 1000', rank4: '更靠后',
  p0: '≥ 50 %', p1: '≥ 10 %', p2: '≥ 1 %', p3: '≥ 0.1 %', p4: '更低', surprisal: '惊异度', entropy: '熵', bits: '每字节 {x} 比特',
  expected: '此处的预期', was: '实际是 {token}', rankIs: '第 {n} 名', noExpectation: '第一个词元前面什么也没有。',
  surprisalWhy: '惊异度 = −ln p', perplexityWhy: '困惑度 = exp(平均惊异度)', curvesTitle: '沿文本的惊异度与熵（纳特）',

  introAttention: '每个小方块是一个头：一行是提问的词元，一列是它看向的词元。点击可放大。',
  introAttention2: '指向一行，看该词元在看谁。点击它，可逐步查看从 q 到加权和的数值。',
  sortBy: '排序', sort_layer: '层', sort_distance: '平均距离', sort_to_previous: '看前一个', sort_to_first: '看第一个', sort_to_same: '看相同词元',
  matrix: '矩阵', arcs: '连线', one: '此头', mean: '各头平均', rollout: '逐层展开', headIs: '第 {layer} 层，第 {head} 头', layerIs: '第 {layer} 层',
  looksAt: '{token} 看向', lookedAtBy: '看向 {token} 的', window: '第 {from}–{to} 个词元，共 {total} 个', step: '逐步查看',
  stepsTitle: '逐步：{token} 在第 {layer} 层第 {head} 头问了什么', q: 'q', k: 'k', score: 'q · k', scaled: '÷ √{d}', softmax: 'softmax', v: 'v', output: 'Σ softmax · v', headOf: '键',
  propertyWhy: { layer: '', distance: '向前看的平均距离（词元）', to_previous: '对前一个词元的平均权重', to_first: '对第一个词元的平均权重', to_same: '对其他相同词元的平均权重' },
  weightWhy: '权重 = softmax(q · k / √d)',

  introLayers: '如果模型在每一层之后就停下，它会说什么？每格是它在那里对下一个词元的最佳猜测；颜色越浓越有把握。',
  introLayersMasked: '如果模型在每一层之后就停下，它会在每个位置放什么？颜色越浓越有把握。',
  introLayers2: '最后一行是模型真正的回答。指向一格，看前五名以及注意力与 MLP 各加了多少。',
  embedding: '嵌入', layer: '第 {n} 层', afterLayer: '第 {n} 层之后', afterEmbedding: '嵌入之后', norm: '残差流的长度', towards: '朝向 {token} 的增量', attentionPart: '注意力', mlpPart: 'MLP',
  contributionWhy: '沿最终答案的方向；各层、嵌入与偏置之和等于 logit − 平均 logit = {x}',

  introMasks: '按一下词语把它遮住。模型看得到两侧，会说出那里该是什么。',
  introMasks2: '选一个填进文本。', noMask: '还没有遮住词语：按一个试试。', maskOf: '替换 {word}', fillWhy: 'p = 遮盖处 logit 的 softmax',

  introTokens: '文本是怎样切分的。模型看不到字母，只看到这些片段的编号。',
  introTokens2: '指向一个片段，看它的字节和合并过程。',
  id: '编号', bytes: '字节', characters: '字符', mergesTitle: '逐步合并', noMerges: '这种分词器没有合并规则。', piecesCount: '{n} 个词元，{bytes} 字节，每词元 {ratio} 字节',

  introCompare: '同一文本在两个模型中。不同之处加了框。', checkpoint: '检查点', final: '最终',
  introRuns: '模型旁边的训练过程。仍在运行的会实时更新。', noRuns: '这里没有训练记录。请在运行文件夹旁启动：plume explore MODEL --runs runs',
  byTokens: '词元', byTime: '时间', bySteps: '步', linear: '线性', log: '对数', loss: '损失（实线：训练，虚线：验证）', rate: '学习率', gradient: '梯度范数', speed: '每秒词元',
  samplesTitle: '沿途样本', live: '运行中', stalled: '{time} 没有消息', restarted: '重启 {n} 次', finished: '{step} 步', atStep: '第 {n} 步', validation: '验证',

  keys: [['1 … 9, 0', '选取候选（写字时按住 Alt）'], ['Backspace, Alt+←', '撤销'], ['Alt+→', '重做'], ['/', '回到文本'], ['Esc', '离开文本；停止续写'], ['Ctrl+Enter', '续写'],
    ['[ ]', '层'], [', .', '头'], ['Tab', '下一窗格'], ['Shift+← →', '上一个、下一个视图'], ['?', '这些快捷键']],
};
