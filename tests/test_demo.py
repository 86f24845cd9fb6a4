"""The demo's own decisions: the vocabulary for a text, and commands that can be typed as they are shown."""

import io
import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import plume
from plume import demo
from plume.config import DemoConfig, ModelConfig, TokenizerConfig, UserError
from plume.hf import save_model
from plume.model.heads import Model
from plume.text import train_tokenizer
from plume.train import budget


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(budget, "step_seconds", lambda model, batch, config: 0.05)


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
    demo.show_next(Console(file=stream, width=80), SimpleNamespace(folder=folder, model=folder / "model"))
    commands = [line for line in stream.getvalue().splitlines() if line.startswith("  plume generate")]
    assert shlex.split(commands[0])[:3] == ["plume", "generate", str(folder)]


def test_losses_stand_beside_their_perplexities():
    stream = io.StringIO()
    result = SimpleNamespace(
        uniform=math.log(512), unigram=math.log(100), outcome=SimpleNamespace(loss=1.0, validation=math.log(20))
    )
    demo.show_losses(Console(file=stream, width=100), result)
    rows = [line for line in stream.getvalue().splitlines() if "knows" not in line]
    for words, number in (("uniform", "512.0"), ("unigram", "100.0"), ("this model", "20.0")):
        assert any(words in row and number in row for row in rows)


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
    folder = DemoConfig().folder
    demo.show_next(Console(file=stream, width=120), SimpleNamespace(folder=folder, model=folder / "model"))
    assert "plume demo --text my_book.txt --folder runs/my_book" in stream.getvalue()
