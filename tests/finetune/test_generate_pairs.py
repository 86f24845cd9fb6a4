"""A GPT that learns to write the target of a pair: rows, loss and gradients written out, chats, and whole runs."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from test_losses import model_for
from tiny import random_base, tokenizer_of

import plume
from plume.config import PRESETS, FinetuneConfig, TaskConfig, TokenizerConfig, UserError
from plume.hf import save_model
from plume.model.heads import Model
from plume.tasks.generate import GenerateTask, with_end_token
from plume.tasks.schema import Example, TaskSettings
from plume.tasks.task_data import load_task
from plume.text.tokenizer_training import train_tokenizer
from plume.train.adapt import grow_table

PAIRS = [("a fine film", "what a joy"), ("dull", "a bore"), ("who lives in the old house on the hill?", "Mary")]


def kind_for(family, *, length=32, template=()):
    tokenizer = with_end_token(tokenizer_of(family))
    settings = TaskSettings(kind="generate", length=length, template=template)
    return GenerateTask(settings, tokenizer, causal=True)


def examples(pairs=PAIRS):
    return [Example({"source": a}, b, "") for a, b in pairs]


def row_of(kind, source, target):
    """Tokens of one row and how many of them are the prompt, spelled out."""
    t = kind.tokenizer
    prompt = t.encode(f"Q: {source} A:") if kind.settings.template else [*t.encode(source), t.end]
    return [*prompt, *t.encode(f" {target}" if kind.settings.template else target), t.end], len(prompt)


@pytest.mark.parametrize("family", ["gpt2", "openai-gpt"])
@pytest.mark.parametrize("template", [(), ("Q: {source} A:",)])
def test_loss_and_gradients_equal_a_loop_over_the_tokens_of_the_answers(family, template):
    kind = kind_for(family, template=template)
    model, _ = model_for(family, "next-token")
    if kind.tokenizer.vocab_size > model.config.vocab_size:
        grow_table(model, kind.tokenizer.vocab_size)
    batch = kind.encode(examples()).batch(np.arange(len(PAIRS)))
    loss = kind.losses(model, kind.hidden(model, batch), batch).sum() / kind.count(batch)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    terms = []
    for source, target in PAIRS:
        row, first = row_of(kind, source, target)
        logits = model(torch.tensor([row[:-1]]))[0, :, : model.config.vocab_size]
        terms += [-logits[place - 1].log_softmax(0)[row[place]] for place in range(first, len(row))]
    expected = sum(terms) / len(terms)
    assert kind.count(batch) == len(terms)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=2e-5, rtol=2e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=2e-5, rtol=2e-4)


def test_the_loss_is_that_of_transformers_with_the_prompt_masked(tmp_path):
    folder = random_base("gpt2", tmp_path / "gpt2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    kind, model = kind_for("gpt2"), plume.load(folder).model
    batch = kind.encode(examples(PAIRS[2:])).batch(np.arange(1))
    row, first = row_of(kind, *PAIRS[2])
    wanted = theirs(torch.tensor([row]), labels=torch.tensor([[-100] * first + row[first:]])).loss
    found = kind.losses(model, kind.hidden(model, batch), batch) / kind.count(batch)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_long_source_is_truncated_before_what_closes_it_and_leaves_room_for_an_answer():
    for template in ((), ("Q: {source} A:",)):
        kind = kind_for("gpt2", length=16, template=template)
        rows = kind.encode(examples([("a fine film " * 20, "dull"), ("a fine film " * 20, "a dull film " * 20)]))
        closing = kind.closing()
        for prompt, target in zip(rows.sources, rows.targets, strict=True):
            assert len(prompt) + len(target) - 1 <= 16 and prompt[-len(closing) :] == closing
            assert target[-1] == kind.tokenizer.end
        assert len(rows.sources[0]) == 12 and kind.truncation.rows == 2


def test_a_template_that_leaves_no_room_for_a_source_is_refused():
    """Its end is kept whatever is truncated: such rows were longer than the model can read."""
    with pytest.raises(UserError, match=r"behind \{source\}, which task.length=32 leaves no room"):
        kind_for("gpt2", template=("{source} => Please answer with one word, yes or no, and nothing else at all:",))


def test_chats_and_instructions_have_a_source_for_each_answer(tmp_path):
    talk = [("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "why"), ("assistant", "so")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]}] * 3
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_task(TaskConfig(train=str(path), validation=str(path)))
    assert data.kind == "generate" and [e.label for e in data.train[:2]] == ["hello", "so"]
    start = "system: be kind\n\nuser: hi\n\nassistant:"
    assert [e.fields["source"] for e in data.train[:2]] == [start, f"{start} hello\n\nuser: why\n\nassistant:"]
    settings = GenerateTask.settings_for(TaskSettings(kind="generate", length=64), data.train)
    kind = GenerateTask(settings, tokenizer_of("gpt2"), causal=True)
    row = kind.encode(data.train[:1])
    assert kind.tokenizer.decode(row.sources[0]) == start  # as the server asks, without a delimiter
    assert kind.tokenizer.decode(row.targets[0][:-1]) == " hello"
    asked = {"instruction": "Add.", "input": "1 2", "output": "3"}
    path.write_text((json.dumps(asked) + "\n") * 4)
    one = load_task(TaskConfig(train=str(path), validation=str(path))).train[0]
    assert one.fields["source"] == "user: Add.\n\n1 2\n\nassistant:" and one.label == "3"


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "hi"}]])
def test_messages_without_a_text_are_named_or_skipped(tmp_path, content):
    path = tmp_path / "chat.jsonl"
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    bad = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, bad, {"messages": ["hi"]}, good)))
    with pytest.raises(UserError, match=r"chat\.jsonl line 2: messages must be a list .* each with a text; .*skip_bad"):
        load_task(TaskConfig(train=str(path), validation=str(path)))
    data = load_task(TaskConfig(train=str(path), validation=str(path), skip_bad_rows=True))
    assert [e.label for e in data.train] == ["hello", "hello"] and sum(data.skipped.counts.values()) == 4


# ---- whole runs --------------------------------------------------------------------------------------------------


def write_pairs(path, what, count, *, seed, longest=5):
    """Copies, reversed texts, or a key with its value in a list of pairs."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        word = "".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, longest)))
        keys = draw.sample("abcdefgh", 3)
        values = [draw.choice("12345678") for _ in keys]
        place = draw.randrange(len(keys))
        listed = " ".join(a + b for a, b in zip(keys, values, strict=True))
        source, target = {
            "copy": (word, word),
            "reverse": (word, word[::-1]),
            "lookup": (f"{listed} {keys[place]}", keys[place] + values[place]),
        }[what]
        lines.append(json.dumps({"source": source, "target": target}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def base_of(preset, folder, *, layers=2, width=64):
    tokenizer = train_tokenizer(TokenizerConfig(kind="byte-bpe", vocab_size=257, special_tokens="gpt2"), ["abc"])
    torch.manual_seed(0)
    config = replace(
        PRESETS[preset], vocab_size=tokenizer.vocab_size, context=32, layers=layers, width=width, heads=2, dropout=0.0
    )
    model = Model(config, "next-token")
    if config.positions == "learned":  # drawn with 0.02 as transformers does; OpenAI's 0.01 takes longer to tell places
        with torch.no_grad():
            model.body.embed.positions.weight.mul_(2)
    return save_model(model, folder, tokenizer=tokenizer)


def config_of_run(base, task, folder, **more):
    usual = {"batch": 32, "seeds": 1, "beams": 1, "device": "cpu", "precision": "float32", "metric": "exact_match"}
    return FinetuneConfig(**{**usual, **more}, model=str(base), task=task, folder=folder)


def test_a_fine_tuned_gpt_writes_through_every_call(tmp_path):
    base = base_of("gpt2", tmp_path / "base", layers=1, width=16)
    data = write_pairs(tmp_path / "rows.jsonl", "copy", 40, seed=0)
    result = plume.finetune(config_of_run(base, TaskConfig(train=data), tmp_path / "run", epochs=1.0))
    lm = plume.load(result.folder)
    (found,) = lm.predict([{"source": "abc"}])
    assert found.value == lm.translate("abc", max_new_tokens=53).text.strip()  # beam search both times
    ids = [*lm.encode("abc"), lm.tokenizer.end]
    assert lm.translate("abc", beams=1).text == lm.generate(ids, temperature=0).text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(result.model)
    written = theirs.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, len(ids) :]
    ours = lm.generate(ids, temperature=0, max_new_tokens=5).tokens
    assert written.tolist()[: len(ours)] == list(ours)
    with pytest.raises(UserError, match="a GPT fine-tuned to generate"):
        plume.load(base).translate("abc")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("preset", "what", "width", "run"),
    [
        ("gpt2", "reverse", 64, {"epochs": 2.0, "lr": 3e-3}),
        ("gpt2", "lookup", 128, {"epochs": 3.0, "lr": 1e-3, "batch": 256}),  # with 32 transformers' own loss stalls too
        ("transformer-decoder", "copy", 64, {"epochs": 1.0, "lr": 2e-3}),
    ],
)
def test_a_small_decoder_learns_to_copy_reverse_and_look_up(tmp_path, preset, what, width, run):
    """Rows enough that none has to be learned by heart."""
    base = base_of(preset, tmp_path / "base", width=width)
    task = TaskConfig(
        train=write_pairs(tmp_path / "train.jsonl", what, 40_000, seed=0),
        validation=write_pairs(tmp_path / "rows.jsonl", what, 100, seed=1),
    )
    result = plume.finetune(config_of_run(base, task, tmp_path / "run", validate_every=500, **run))
    assert result.best.metrics["exact_match"] > 0.95
