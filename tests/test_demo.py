"""The demo's own decisions: the vocabulary for a text, and commands that can be typed as they are shown."""

import io
import lzma
import math
import random
import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import plume
from plume import demo
from plume.config import DataConfig, DemoConfig, ModelConfig, TokenizerConfig, UserError
from plume.data import open_shards, prepare
from plume.hf import save_model
from plume.model.heads import Model
from plume.text import load_tokenizer, train_tokenizer
from plume.train import budget
from plume.train.held_out import held_out_bits


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(budget, "speed", lambda model, config: (2e-5, 0.01))


def test_every_frequent_letter_of_a_chinese_text_can_be_a_token(quick, tmp_path):
    """Bytes alone would give a small vocabulary, in which most letters would be torn into pieces."""
    letters = [chr(0x4E00 + i) for i in range(1500)]
    (tmp_path / "book.txt").write_text("".join(letters) * 12, encoding="utf-8")
    chosen = demo.settings(DemoConfig(text=(str(tmp_path / "book.txt"),)))[0]
    assert chosen.model.vocab_size >= 256 + len(letters)
    (tmp_path / "plain.txt").write_text("only letters of one byte\n" * 2000)
    assert demo.settings(DemoConfig(text=(str(tmp_path / "plain.txt"),)))[0].model.vocab_size == 512


def test_a_text_in_another_encoding(quick, tmp_path):
    (tmp_path / "book.txt").write_text("".join(chr(0x4E00 + i) for i in range(1500)) * 12, encoding="gb18030")
    chosen = demo.settings(DemoConfig(text=(str(tmp_path / "book.txt"),), encoding="gb18030"))[0]
    assert chosen.model.vocab_size >= 1756 and chosen.data.encoding == "gb18030"
    with pytest.raises(UserError, match="encoding='gb'"):
        DemoConfig(encoding="gb")


def test_the_last_validation_is_at_the_end(quick):
    """One step after another would only be told twice."""
    for minutes in (0.1, 1.7, 2.0):
        train = demo.settings(DemoConfig(minutes=minutes))[0].train
        assert train.steps % train.validate_every == 0 and train.steps // train.validate_every == 5


def test_commands_are_shown_as_a_shell_wants_them():
    folder = Path("my runs/故 事")
    stream = io.StringIO()
    demo.show_next(Console(file=stream, width=80), SimpleNamespace(folder=folder, model=folder / "model"), DemoConfig())
    commands = [line for line in stream.getvalue().splitlines() if line.startswith("  plume generate")]
    assert shlex.split(commands[0])[:3] == ["plume", "generate", str(folder)]


def test_a_long_command_stays_on_one_line():
    """Broken within a quoted path it would name another folder."""
    folder, stream = Path("my [draft] runs/故 事"), io.StringIO()
    result = SimpleNamespace(folder=folder, model=folder / "model")
    demo.show_next(Console(file=stream, width=80), result, DemoConfig(text=("a rather long name of a text.txt",)))
    longer = next(line for line in stream.getvalue().splitlines() if "--minutes 20" in line)
    assert shlex.split(longer)[:-2][-1] == f"{folder}-20"


def test_what_comes_next_fits_into_a_narrow_terminal():
    stream, folder = io.StringIO(), Path("runs/demo")
    demo.show_next(Console(file=stream, width=60), SimpleNamespace(folder=folder, model=folder / "model"), DemoConfig())
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert "  plume explore runs/demo" in lines and "    inspect it in the browser" in lines
    assert max(map(len, lines)) <= 60


def test_bits_per_byte_stand_beside_those_of_counts_and_xz(tmp_path):
    """Each against its definition, written out over the held-out text."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "dog", "that", "ate", "its", "bone"]
    dice = random.Random(1)
    (tmp_path / "text.txt").write_text(
        "\n".join(" ".join(dice.choice(words) for _ in range(8)) for _ in range(400)), encoding="utf-8"
    )
    data, model = tmp_path / "data", tmp_path / "run" / "model"
    tokenizer = TokenizerConfig(vocab_size=300)
    prepare(
        DataConfig(paths=(str(tmp_path / "text.txt"),), folder=data, tokenizer=tokenizer, validation_fraction=0.1,
                   documents="line")
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = load_tokenizer(data / "tokenizer")
    shape = {"vocab_size": tokens.vocab_size, "context": 32, "layers": 1, "heads": 2, "width": 16}
    save_model(Model(ModelConfig(**shape)), model, tokenizer=tokens)
    found = held_out_bits(model, data)

    def split(name):
        (stream,) = open_shards(data, name).streams
        return stream.read(0, len(stream)).tolist()

    train, held_out = split("train"), split("validation")
    text = tokens.decode([t for t in held_out if t not in tokens.special_ids.values()]).encode()
    before = tokens.decode([t for t in train if t not in tokens.special_ids.values()]).encode()
    size, single = len(text), {t: (train.count(t) + 1) / (len(train) + tokens.vocab_size) for t in set(held_out)}
    pairs, firsts = Counter(pairwise(train)), Counter(train[:-1])
    behind = Counter(first for first, _ in pairs)

    def pair(first, then):
        if not firsts[first]:
            return single[then]
        return max(pairs[first, then] - 0.75, 0) / firsts[first] + 0.75 * behind[first] / firsts[first] * single[then]

    assert found["uniform"] == pytest.approx(len(held_out) * math.log2(tokens.vocab_size) / size)
    assert found["unigram"] == pytest.approx(-sum(math.log2(single[t]) for t in held_out) / size)
    expected = math.log2(single[held_out[0]]) + sum(math.log2(pair(*both)) for both in pairwise(held_out))
    assert found["bigram"] == pytest.approx(-expected / size)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
    packed = [len(lzma.compress(part, lzma.FORMAT_RAW, filters=filters)) for part in (before + text, before)]
    assert found["xz"] == pytest.approx(8 * (packed[0] - packed[1]) / size)
    assert found["this model"] == pytest.approx(windows_by_transformers(model, tokens, held_out, 32), rel=1e-4)
    stream = io.StringIO()
    outcome = SimpleNamespace(loss=1.0, validation=1.0)
    demo.show_losses(Console(file=stream, width=80), SimpleNamespace(outcome=outcome, model=model), data, 0.5)
    for words, number in (("bigram", found["bigram"]), ("xz", found["xz"]), ("this model", found["this model"])):
        assert any(words in row and f"{number:.2f}" in row for row in stream.getvalue().splitlines())


def windows_by_transformers(folder, tokenizer, ids, context):
    """Token by token: windows begin at every quarter of a context, the last one ends with the text."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    starts, bits = sorted({*range(0, len(ids) - 1 - context, context // 4), len(ids) - 1 - context}), 0.0
    for place in range(1, len(ids)):
        start = next(start for start in starts if start + context >= place)
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[start:place]])).logits[0, -1].double().log_softmax(-1)
        bits -= float(logits[ids[place]]) / math.log(2)
    size = len(tokenizer.decode_bytes([t for t in ids[1:] if t not in tokenizer.special_ids.values()]))
    return bits / size


def test_without_held_out_text_the_training_loss_is_shown(tmp_path):
    stream = io.StringIO()
    result = SimpleNamespace(unigram=4.0, outcome=SimpleNamespace(loss=1.234, validation=None))
    demo.show_losses(Console(file=stream, width=80), result, tmp_path)
    assert "1.234" in stream.getvalue() and "4.000" in stream.getvalue()


def test_samples_are_shown_and_kept(tmp_path):
    """Drawn again by their seeds, one after the other, they are the same texts."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=300), ["the cat sat on the mat"] * 20)
    shape = {"vocab_size": tokenizer.vocab_size, "context": 32, "layers": 1, "heads": 2, "width": 16}
    folder = save_model(Model(ModelConfig(**shape)), tmp_path / "model", tokenizer=tokenizer)
    stream = io.StringIO()
    demo.show_samples(Console(file=stream, width=100), DemoConfig(text=("a.txt",), seed=7), folder)
    pages = (tmp_path / "samples.md").read_bytes().decode()
    lm = plume.load(folder)
    for number, prompt in enumerate(demo.OWN_PROMPTS):
        written = lm.generate(prompt, max_new_tokens=120, temperature=0.8, top_k=40, seed=7 + number)
        assert f"```\n{'' if prompt is None else prompt}{written.text}\n```" in pages
        assert f"sample, seed {7 + number}" in stream.getvalue()
    lm.close()


def test_a_second_demo_gets_a_folder_of_its_own(quick, monkeypatch, tmp_path, capsys):
    """`make demo` twice: neither an error nor the loss of the first run."""
    from plume.train import pretrain as training
    from plume.util.run_folder import write_recipe

    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(training, "pretrain", lambda config: started.append(config) or SimpleNamespace(outcome=ended))
    ended = SimpleNamespace(finished=False)
    for name in ("demo", "demo-2", "demo-3"):
        demo.demo(DemoConfig())
        assert started[-1].folder == Path("runs", name) and not started[-1].overwrite
        write_recipe(Path("runs", name), {"train": {"steps": 20}})
    assert "runs/demo holds a run already; this one goes to runs/demo-3" in " ".join(capsys.readouterr().out.split())
    demo.demo(DemoConfig(overwrite=True))
    assert started[-1].folder == Path("runs/demo") and started[-1].overwrite


def test_a_run_is_replaced_only_with_overwrite(quick, monkeypatch, tmp_path):
    """The closing hint names another folder, so that following it replaces nothing."""
    from plume.train import pretrain as training
    from plume.util.run_folder import write_recipe

    started = []
    monkeypatch.setattr(training, "pretrain", lambda config: started.append(config) or SimpleNamespace(outcome=ended))
    ended = SimpleNamespace(finished=False)
    config = DemoConfig(folder=tmp_path / "demo")
    demo.demo(config)
    write_recipe(tmp_path / "demo", {"train": {"steps": 20}})
    with pytest.raises(
        UserError, match=r"already contains a run; --overwrite replaces it, --folder.*pretrain .* --resume"
    ):
        demo.demo(config)
    assert [run.overwrite for run in started] == [False]
    demo.demo(DemoConfig(folder=tmp_path / "demo", overwrite=True))
    assert [run.overwrite for run in started] == [False, True]
    stream = io.StringIO()
    folder = demo.FOLDER
    demo.show_next(
        Console(file=stream, width=120), SimpleNamespace(folder=folder, model=folder / "model"), DemoConfig()
    )
    assert "plume demo --text my_book.txt --folder runs/my_book" in stream.getvalue()
    result = SimpleNamespace(folder=folder, model=folder / "model")
    demo.show_next(Console(file=stream, width=120), result, DemoConfig(text=("a b.txt",), encoding="latin-1"))
    longer = "plume pretrain auto --minutes 20 --data.paths 'a b.txt' --data.encoding latin-1 --folder"
    assert longer in stream.getvalue().split("Now you can:")[2]
    assert "plume demo" not in stream.getvalue().split("Now you can:")[2]
