"""`plume generate` as a user meets it: one prompt, many prompts, a conversation, and mistakes."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import FAMILIES, random_model

import plume
from plume.cli.generate_command import Conversation, answer, remember_lines
from plume.cli.main import main
from plume.cli.verbs import settings
from plume.config import GenerateConfig, SamplingConfig, UserError
from plume.evaluate.subject import check_head
from plume.hf import save_model
from plume.lm import LM
from plume.model.heads import HEADS
from plume.tasks import how_to_ask


def test_one_prompt_is_streamed(trained_folder, capsys):
    words = ["generate", str(trained_folder), "def wrap(", "--seed", "1", "--max-new-tokens", "8", "--threads", "2"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert first.endswith("\n") and len(first) > 3


def test_several_samples_are_numbered(trained_folder, capsys):
    assert main(["generate", str(trained_folder), "def ", "--n", "2", "--seed", "1", "--threads", "2"]) == 0
    out = capsys.readouterr().out
    assert "--- 1 ---" in out and "--- 2 ---" in out


def test_a_sample_from_the_start_token(trained_folder, capsys):
    assert main(["generate", str(trained_folder), "--unconditional", "--max-new-tokens", "4", "--threads", "2"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_of_prompts(trained_folder, tmp_path, suffix, capsys):
    prompts = ["def a(", "import os", "class X:", "é 日本"] * 4
    lines = prompts if suffix == ".txt" else [json.dumps({"prompt": prompt}) for prompt in prompts]
    path, out = tmp_path / f"prompts{suffix}", tmp_path / "answers.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--seed", "1", "--max-new-tokens", "5", "--threads", "2"]
    assert main(["generate", str(trained_folder), "--prompts", str(path), "--out", str(out), *options]) == 0
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert main(["generate", str(trained_folder), prompts[1], "--seed", "2", *options[2:]]) == 0  # each takes the next
    assert capsys.readouterr().out.rstrip("\n") == answers[1]["text"].rstrip("\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", path.name]


def test_standard_input_is_one_prompt_or_one_per_line(trained_folder, monkeypatch, capsys):
    options = ["--seed", "1", "--max-new-tokens", "5", "--threads", "2"]
    for words, prompts in (([], ["def a(\nimport"]), (["--prompts", "-"], ["def a(", "import"])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfdef a(\r\nimport\r\n")))
        assert main(["generate", str(trained_folder), *words, *options]) == 0
        said = capsys.readouterr().out
        if words:
            assert [json.loads(line)["prompt"] for line in said.splitlines()] == prompts
        else:
            assert main(["generate", str(trained_folder), prompts[0], *options]) == 0
            assert capsys.readouterr().out == said


@pytest.mark.parametrize("words", [[], ["--prompts", "-"]])
def test_a_closed_standard_input_is_named(words, trained_folder, monkeypatch, capsys):
    """Python then has None in its place."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", str(trained_folder), *words]) == 2
    assert "there is no standard input; give a prompt" in capsys.readouterr().err


def test_the_command_ends_where_the_folder_says(trained_folder, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(trained_folder, folder, ignore=shutil.ignore_patterns(".plume"))
    whole = plume.load(folder, engine="torch").generate("def a(", temperature=0, max_new_tokens=20)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": whole.tokens[4]}))
    expected = plume.load(folder, engine="torch").generate("def a(", temperature=0, max_new_tokens=20)
    assert expected.finish_reason == "stop" and whole.text.startswith(expected.text) and expected.text != whole.text
    words = ["--temperature", "0", "--max-new-tokens", "20", "--engine.engine", "torch"]
    assert main(["generate", str(folder), "def a(", *words]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--temperature", "-1"], "temperature=-1.0"),
        (["x", "--top-p", "2"], "top_p=2.0"),
        (["x", "--top-k", "0"], "top_k=0"),
        (["x", "--stop", ""], "zero length"),
        (["x", "--temprature", "1"], "did you mean"),
        ([""], "the prompt is empty; None, or --unconditional"),
        (["x " * 100], "context holds 64"),
        (["--prompts", "nowhere.txt"], "there is no file nowhere.txt"),
    ],
)
def test_mistakes_end_with_one_message(trained_folder, capsys, words, message):
    assert main(["generate", str(trained_folder), *words, "--threads", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_prompt_file_that_is_not_utf8(trained_folder, tmp_path, capsys):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    assert main(["generate", str(trained_folder), "--prompts", str(path), "--threads", "2"]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_options_need_no_section(trained_folder):
    config = settings(
        GenerateConfig,
        ["m", "--top-k", "5", "p", "--precision", "int8", "--stop", "END", "--sampling.seed", "3"],
        "model",
        "prompt",
    )
    assert (config.sampling.top_k, config.sampling.seed, config.sampling.stop) == (5, 3, ("END",))
    assert config.engine.precision == "int8"


def test_a_conversation(lm):
    out = io.StringIO()
    talk = Conversation(lm, SamplingConfig(max_new_tokens=5, seed=1), out)
    talk.take("hello")
    answered = out.getvalue()
    assert answered.startswith("hello") and talk.text.startswith("hello")
    talk.take("/again")
    assert out.getvalue() == answered * 2
    talk.take("/set temperature 0.5")
    talk.take("/set top-k 3")
    assert (talk.sampling.temperature, talk.sampling.top_k) == (0.5, 3)
    for command, expected in [("/options", "top_k = 3"), ("/next hello", "%"), ("/score hello", "perplexity")]:
        before = len(out.getvalue())
        talk.take(command)
        assert expected in out.getvalue()[before:]
    talk.take("/more")
    talk.take("/unconditional")
    talk.take("/help")
    for wrong, message in [
        ("/sett x 1", "did you mean 'set'"),
        ("/set temperature -1", "temperature=-1"),
        ("/set x", "say /set"),
    ]:
        with pytest.raises(UserError, match=message):
            talk.take(wrong)


def test_the_terminal_session_survives_mistakes_and_interrupts(lm, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = iter(["/nonsense", "hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    import sys

    Conversation(lm, SamplingConfig(max_new_tokens=3, seed=1), sys.stdout).run()
    out = capsys.readouterr().out
    assert "there is no command /nonsense" in out and "hello" in out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "Once", "prompts": Path("p.txt")}, "prompt and prompts are different beginnings"),
        ({"prompt": "Once", "unconditional": True}, "prompt and unconditional are different beginnings"),
        ({"prompt": "Once", "out": Path("o.jsonl")}, r"out=o\.jsonl is for the answers to prompts"),
    ],
)
def test_what_would_be_ignored_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        GenerateConfig(model="runs/demo", **fields)


def test_a_user_without_a_home_has_no_history(monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", unknown)
    remember_lines()


def test_an_interrupted_answer_ends_its_line():
    """So that what is said next does not stand behind it."""

    class Stopped:
        config = SimpleNamespace(decoder_layers=0)

        def stream(self, prompt, sampling):
            yield "Once"
            raise KeyboardInterrupt

        def refuse(self, prompt, sampling):
            raise UserError("the prompt is empty")
            yield

    out, refused = io.StringIO(), Stopped()
    with pytest.raises(KeyboardInterrupt):
        answer(Stopped(), "", SamplingConfig(), out)
    assert out.getvalue() == "Once\n"
    refused.stream = refused.refuse
    with pytest.raises(UserError):
        answer(refused, "", SamplingConfig(), out)
    assert out.getvalue() == "Once\n"  # where nothing was written, no line needs to end


def test_every_head_says_how_it_is_asked():
    """A model that does not generate is used otherwise, and each way is a method that there is."""
    for head in HEADS:
        said = how_to_ask(head, "my runs/a")
        method = re.search(r"plume\.load\('my runs/a'\)\.(\w+)\(", said)
        assert method is not None and callable(getattr(LM, method[1])), head
        assert "plume serve 'my runs/a'" in said
    assert "plume.load('a').translate(" in how_to_ask("next-token", "a", encoder_decoder=True)
    assert "plume.load('a').translate(" in how_to_ask("next-token", "a", task="generate")  # a GPT with its prompts


@pytest.mark.parametrize(("task", "call"), [("pair", 'classify(["..."], ["..."])'), ("multilabel", "predict([")])
def test_a_fine_tuned_model_says_how_its_own_task_is_asked(tmp_path, tokenizer, task, call):
    config = replace(FAMILIES["bert"], vocab_size=tokenizer.vocab_size)
    about = {"task": {"kind": task, "labels": ["no", "yes"], "length": 16}}
    folder = save_model(random_model(config, "classify"), tmp_path / "model", tokenizer=tokenizer, info=about)
    with pytest.raises(UserError, match=re.escape(call)):
        plume.load(folder).generate("Once")
    with pytest.raises(UserError, match=re.escape(call)):
        check_head(str(folder))
