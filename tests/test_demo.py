"""The demo's own decisions: the vocabulary for a text, and commands that can be typed as they are shown."""

import io
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from plume import demo
from plume.config import DemoConfig


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(demo, "measure_step", lambda model, batch: 1.0)


def test_every_frequent_letter_of_a_chinese_text_can_be_a_token(quick, tmp_path):
    """Bytes alone would give a small vocabulary, in which most letters would be torn into pieces."""
    letters = [chr(0x4E00 + i) for i in range(1500)]
    (tmp_path / "book.txt").write_text("".join(letters) * 12, encoding="utf-8")
    chosen = demo.settings(DemoConfig(text=(str(tmp_path / "book.txt"),)))
    assert chosen.model.vocab_size >= 256 + len(letters)
    (tmp_path / "plain.txt").write_text("only letters of one byte\n" * 2000)
    assert demo.settings(DemoConfig(text=(str(tmp_path / "plain.txt"),))).model.vocab_size == 512


def test_the_last_validation_is_at_the_end(quick):
    """One step after another would only be told twice."""
    for minutes in (0.1, 1.7, 2.0):
        train = demo.settings(DemoConfig(minutes=minutes)).train
        assert train.steps % train.validate_every == 0 and train.steps // train.validate_every == 5


def test_commands_are_shown_as_a_shell_wants_them():
    folder = Path("my runs/故 事")
    stream = io.StringIO()
    demo.show_next(Console(file=stream, width=80), SimpleNamespace(folder=folder, model=folder / "model"))
    commands = [line for line in stream.getvalue().splitlines() if line.startswith("  plume generate")]
    assert shlex.split(commands[0])[:3] == ["plume", "generate", str(folder)]
