"""Every task's loss and gradients equal a computation written out one example, one row and one token at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import config_of, tokenizer_of

from plume.hf import save_model
from plume.model import ragged
from plume.model.heads import Model
from plume.tasks import kind_named
from plume.tasks.schema import Example, TaskSettings
from plume.tasks.task_kind import TaskOptions
from plume.tasks.token_rows import with_task_tokens
from plume.train.adapt import grow_table
from plume.train.finetune import TaskObjective

CAUSAL = ("gpt2", "openai-gpt")
CLOSE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """Rows of these few short texts are computed in several groups of like length."""
    monkeypatch.setattr(ragged, "WASTE", 2)


def model_for(family, head, labels=()):
    torch.manual_seed(3)
    model = Model(config_of(family), head, labels)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokenizer = with_task_tokens(tokenizer_of(family))
    fresh = grow_table(model, tokenizer.vocab_size)
    assert fresh == (3 if family in CAUSAL else 0)
    return model.train(), tokenizer  # dropout is 0 everywhere in these


def wrapped(tokenizer, first, second=None):
    """What the papers put around the texts, spelled out."""
    a, b = tokenizer.encode(first), None if second is None else tokenizer.encode(second)
    s = tokenizer.special_ids
    if "_start_" in s:
        middle = [] if b is None else [s["_delimiter_"], *b]
        return [s["_start_"], *a, *middle, s["_classify_"]], None
    open_, close = tokenizer.classify, tokenizer.separator
    if tokenizer.start is not None:  # RoBERTa
        ids = [open_, *a, close] if b is None else [open_, *a, close, close, *b, close]
        return ids, [0] * len(ids)
    if b is None:
        return [open_, *a, close], [0] * (len(a) + 2)
    return [open_, *a, close, *b, close], [0] * (len(a) + 2) + [1] * (len(b) + 1)


def states(model, ids, segments):
    """Hidden states of one row alone, without padding."""
    given = torch.tensor([segments]) if segments is not None and model.config.segments > 1 else None
    return model.body(torch.tensor([ids]), segments=given)[0]  # (T, D)


def summary(model, hidden):
    if model.config.causal:
        return hidden[-1]
    return torch.tanh(model.head.summary.dense(hidden[0]))


def next_token_mean(model, ids, hidden):
    logits = hidden[:-1] @ model.table[: model.config.vocab_size].T
    return sum(-logits[t].log_softmax(0)[ids[t + 1]] for t in range(len(ids) - 1)) / (len(ids) - 1)


def check(model, job, examples, expected, auxiliary, parts=1):
    """Loss and gradients of the whole batch, of micro-batches, and of the written-out computation."""
    objective = TaskObjective(job, auxiliary)
    data = job.encode(examples)
    whole = data.batch(torch.arange(len(data)).numpy())
    weights = torch.tensor(list(objective.parts.values()))
    counts = objective.counts(whole)
    model.zero_grad()
    loss = (objective.totals(model, whole) / counts * weights).sum()
    loss.backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected_loss = expected()
    expected_loss.backward()
    theirs = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    if parts:  # accumulated over pieces of one item each: the same
        model.zero_grad()
        for item in range(len(data)):
            part = objective.totals(model, data.batch(torch.tensor([item]).numpy()))
            (part / counts * weights).sum().backward()
        for name, gradient in theirs.items():
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, **CLOSE)


def task(kind, family, tokenizer, *, options=None, **more):
    settings = TaskSettings(kind=kind, length=config_of(family).context, **more)
    return kind_named(kind)(settings, tokenizer, causal=family in CAUSAL, options=options)


TEXTS = [("a fine film", "yes"), ("what a bore, truly awful and cold", "no"), ("lovely", "yes")]
PAIRS = [("a fine film", "what a joy", "yes"), ("cold and empty and dull", "warm", "no"), ("fun", "great fun", "yes")]


@pytest.mark.parametrize("auxiliary", [0.0, 0.5])
@pytest.mark.parametrize("family", CAUSAL)
def test_classification(family, auxiliary):
    model, tokenizer = model_for(family, "classify", ("no", "yes"))
    job = task("classify", family, tokenizer, labels=("no", "yes"))

    def expected():
        total = 0.0
        for text, label in TEXTS:
            ids, _ = wrapped(tokenizer, text)
            hidden = states(model, ids, None)
            logits = model.head.out.weight @ summary(model, hidden)
            total += -logits.log_softmax(0)[("no", "yes").index(label)]
            total += auxiliary * next_token_mean(model, ids, hidden)
        return total / len(TEXTS)

    check(model, job, [Example({"text": t}, y, "") for t, y in TEXTS], expected, auxiliary)


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
def test_entailment_reads_both_texts_in_one_row(family):
    model, tokenizer = model_for(family, "classify", ("no", "yes"))
    causal = family in CAUSAL
    auxiliary = 0.5 if causal else 0.0
    job = task("pair", family, tokenizer, labels=("no", "yes"))

    def expected():
        total = 0.0
        for first, second, label in PAIRS:
            ids, segments = wrapped(tokenizer, first, second)
            hidden = states(model, ids, segments)
            logits = model.head.out(summary(model, hidden))
            total += -logits.log_softmax(0)[("no", "yes").index(label)]
            if causal:
                total += auxiliary * next_token_mean(model, ids, hidden)
        return total / len(PAIRS)

    check(model, job, [Example({"text": a, "pair": b}, y, "") for a, b, y in PAIRS], expected, auxiliary)


@pytest.mark.parametrize("auxiliary", [0.0, 0.3])
@pytest.mark.parametrize("target", ["label", "number"])
def test_similarity_adds_both_orders(target, auxiliary):
    labels = ("no", "yes") if target == "label" else ("score",)
    model, tokenizer = model_for("gpt2", "similarity", labels)
    job = task("similarity", "gpt2", tokenizer, labels=labels, target=target)

    def expected():
        total = 0.0
        for first, second, label in PAIRS:
            rows = [wrapped(tokenizer, first, second)[0], wrapped(tokenizer, second, first)[0]]
            hidden = [states(model, ids, None) for ids in rows]
            logits = model.head.out.weight @ (hidden[0][-1] + hidden[1][-1])
            if target == "number":
                total += (logits[0] - len(first)) ** 2
            else:
                total += -logits.log_softmax(0)[labels.index(label)]
            both = [next_token_mean(model, ids, h) for ids, h in zip(rows, hidden, strict=True)]
            total += auxiliary * (both[0] + both[1]) / 2
        return total / len(PAIRS)

    examples = [Example({"text": a, "pair": b}, len(a) if target == "number" else y, "") for a, b, y in PAIRS]
    check(model, job, examples, expected, auxiliary)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_choice_is_a_softmax_over_candidates(family):
    model, tokenizer = model_for(family, "choose")
    causal = family in CAUSAL
    job = task("choose", family, tokenizer)
    items = [
        ("a fine film", "was it dull?", ["yes", "no way", "truly great fun"], 1),
        ("cold", None, ["warm", "and empty"], 1),
    ]

    def expected():
        total = 0.0
        for context, question, choices, right in items:
            side = context if question is None else f"{context} {question}"
            scores, language = [], 0.0
            for choice in choices:
                ids, segments = wrapped(tokenizer, side, choice)
                hidden = states(model, ids, segments)
                scores.append(model.head.out(summary(model, hidden))[0])
                if causal:
                    language = language + next_token_mean(model, ids, hidden) / len(choices)
            total += -torch.stack(scores).log_softmax(0)[right] + 0.5 * language
        return total / len(items)

    examples = []
    for context, question, choices, right in items:
        fields = {"context": context, "choices": choices, **({} if question is None else {"question": question})}
        examples.append(Example(fields, right, ""))
    check(model, job, examples, expected, 0.5 if causal else 0.0)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_tags_are_read_off_the_first_piece_of_each_word(family):
    model, tokenizer = model_for(family, "tag", ("O", "B"))
    job = task("tag", family, tokenizer, labels=("O", "B"))
    sentences = [(["Mary", "lives", "here"], ["B", "O", "O"]), (["Parisians"], ["B"])]

    def expected():
        total, words = 0.0, 0
        for sentence, tags in sentences:
            pieces = [tokenizer.encode(w if i == 0 else f" {w}") for i, w in enumerate(sentence)]
            ids, segments = tokenizer.add_special_tokens([p for piece in pieces for p in piece])
            hidden = states(model, ids, segments)
            place = 1
            for piece, tag in zip(pieces, tags, strict=True):
                total += -model.head.out(hidden[place]).log_softmax(0)[("O", "B").index(tag)]
                place += len(piece)
                words += 1
        return total / words

    check(model, job, [Example({"words": w}, t, "") for w, t in sentences], expected, 0.0)


def test_spans_are_the_mean_of_start_and_end():
    model, tokenizer = model_for("bert", "span")
    job = task("span", "bert", tokenizer, question_length=8)
    items = [
        ("who lives there?", "Mary Smith lives in Paris", (0, "Mary Smith")),
        ("what?", "a fine film", (2, "fine")),
        ("why?", "cold and empty", None),
    ]

    def expected():
        total = 0.0
        for question, context, answer in items:
            ids, segments = wrapped(tokenizer, question, context)
            logits = model.head.out(states(model, ids, segments))  # (T, 2)
            first = len(tokenizer.encode(question)) + 2
            start = end = 0
            if answer is not None:
                covered = [
                    first + i
                    for i, p in enumerate(tokenizer.pieces(context))
                    if p.end > answer[0] and p.start < answer[0] + len(answer[1])
                ]
                start, end = covered[0], covered[-1]
            total += -(logits[:, 0].log_softmax(0)[start] + logits[:, 1].log_softmax(0)[end]) / 2
        return total / len(items)

    examples = [Example({"question": q, "context": c}, [] if a is None else [a], "") for q, c, a in items]
    check(model, job, examples, expected, 0.0)


def test_spans_are_those_of_transformers_where_padding_has_no_probability(tmp_path):
    """transformers' softmax runs over padding too, so its loss depends on the longest row of the batch."""
    model, tokenizer = model_for("bert", "span")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(
        save_model(model, tmp_path / "model", tokenizer=tokenizer)
    )
    job = task("span", "bert", tokenizer, question_length=8)
    long, short = ("who lives there?", "Mary Smith lives in Paris", (0, "Mary Smith")), ("what?", "fine", (0, "fine"))

    def losses(items):
        examples = [Example({"question": q, "context": c}, [a], "") for q, c, a in items]
        batch = job.encode(examples).batch(np.arange(len(items)))
        ours = job.losses(model, job.hidden(model, batch), batch).mean()
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        given = {"input_ids": batch.tokens, "token_type_ids": batch.segments, "attention_mask": real.long()}
        ends = batch.targets.unbind(1)
        whole = theirs(**given, start_positions=ends[0], end_positions=ends[1])
        logits = [x.masked_fill(~real, -torch.inf) for x in (whole.start_logits, whole.end_logits)]
        masked = sum(F.cross_entropy(x, end) for x, end in zip(logits, ends, strict=True)) / 2
        return ours, masked, whole.loss

    for items in ([long], [short]):
        ours, masked, whole = losses(items)
        torch.testing.assert_close(ours, whole, **CLOSE)
    ours, masked, whole = losses([long, short])
    torch.testing.assert_close(ours, masked, **CLOSE)
    assert whole > ours + 0.01  # the padding's share
    ours.backward()
    masked.backward()
    ours_grad, their_grad = model.body.embed.tokens.weight.grad, theirs.bert.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(ours_grad[: len(their_grad)], their_grad, **CLOSE)
    torch.testing.assert_close(model.head.out.weight.grad, theirs.qa_outputs.weight.grad, **CLOSE)


def test_embeddings_contrast_with_the_rest_of_the_batch():
    model, tokenizer = model_for("bert", "bare")
    job = task("embed", "bert", tokenizer, options=TaskOptions(temperature=0.1))

    def vector(text):
        ids, segments = wrapped(tokenizer, text)
        mean = states(model, ids, segments).mean(dim=0)
        return mean / mean.norm()

    def expected():
        total = 0.0
        for place, (first, _, _) in enumerate(PAIRS):
            scores = torch.stack([vector(first) @ vector(other) / 0.1 for _, other, _ in PAIRS])
            total += -scores.log_softmax(0)[place]
        return total / len(PAIRS)

    examples = [Example({"text": a, "pair": b}, None, "") for a, b, _ in PAIRS]
    check(model, job, examples, expected, 0.0, parts=0)  # the batch itself is the question: it cannot be cut


def test_embeddings_fit_given_similarities():
    model, tokenizer = model_for("bert", "bare")
    job = task("embed", "bert", tokenizer, target="number")
    wanted = [5.0, 1.0, 2.5]  # STS-B's scale ends at 5, a cosine at 1

    def expected():
        total = 0.0
        for (first, second, _), number in zip(PAIRS, wanted, strict=True):
            means = [states(model, *wrapped(tokenizer, text)).mean(dim=0) for text in (first, second)]
            total += (F.cosine_similarity(*means, dim=0) - number / 5) ** 2
        return total / len(PAIRS)

    examples = [Example({"text": a, "pair": b}, n, "") for (a, b, _), n in zip(PAIRS, wanted, strict=True)]
    check(model, job, examples, expected, 0.0)


def test_class_weights_are_torch_s():
    model, tokenizer = model_for("bert", "classify", ("no", "yes"))
    job = task("classify", "bert", tokenizer, labels=("no", "yes"), options=TaskOptions(class_weights=(3.0, 0.75)))

    def expected():
        rows = [states(model, *wrapped(tokenizer, text)) for text, _ in TEXTS]
        logits = torch.stack([model.head.out(summary(model, hidden)) for hidden in rows])
        targets = torch.tensor([("no", "yes").index(label) for _, label in TEXTS])
        return F.cross_entropy(logits, targets, weight=torch.tensor([3.0, 0.75]))

    check(model, job, [Example({"text": t}, y, "") for t, y in TEXTS], expected, 0.0)


def test_new_rows_are_small_and_old_ones_stay():
    torch.manual_seed(0)
    model = Model(config_of("gpt2"))
    before, size = model.table.detach().clone(), model.config.vocab_size
    assert grow_table(model, size + 3) == 3
    assert torch.equal(model.table[:size], before)
    assert model.table.shape == (size + 3, model.config.width)
    assert 0 < model.table.detach()[size:].std() < 5 * 0.02
    assert model(torch.tensor([[size + 2, 1]])).shape[-1] == size + 3
