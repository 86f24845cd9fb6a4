"""What a person sees who makes a mistake: one clear message, code 2, no traceback, nothing half-written."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import FAMILIES, random_model

from plume.cli.generate_command import answer
from plume.cli.main import COMMANDS, data_of_run, main
from plume.cli.verbs import KNOWN, VERBS, settings
from plume.config import (
    DataConfig,
    DistillConfig,
    FinetuneConfig,
    PretrainConfig,
    SamplingConfig,
    TokenizerConfig,
    UserError,
    build,
    describe,
    read_recipe,
    trained_like,
)
from plume.data import keyed_folder, prepare
from plume.hf import save_model
from plume.train.pretrain import plain
from plume.util import files, places
from plume.util.console import shown, tell
from plume.util.progress import Progress
from plume.util.run_folder import write_recipe

ROOT = Path(__file__).resolve().parents[1]


def refused(capsys, words, *parts):
    assert main(words) == 2
    said = capsys.readouterr()
    message = said.err + said.out
    assert "Traceback" not in message
    for part in parts:
        assert part in " ".join(message.replace("│", " ").split())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_missing_file(capsys, here):
    refused(capsys, ["demo", "--text", "no_such_book.txt", "--folder", "run"], "no_such_book.txt")
    assert list(here.iterdir()) == []


def test_an_empty_text(capsys, here):
    (here / "empty.txt").write_text("")
    refused(capsys, ["demo", "--text", "empty.txt", "--folder", "run"], "there is no text in empty.txt")
    assert [path.name for path in here.iterdir()] == ["empty.txt"]


def test_a_text_shorter_than_the_context(capsys, here):
    (here / "short.txt").write_text("Only a few words, far too few for a window of the model.\n" * 3)
    refused(capsys, ["demo", "--text", "short.txt", "--folder", "run", "--minutes", "0.01"], "one window needs 65")
    assert [path.name for path in here.iterdir()] == ["short.txt"]


def test_a_truncated_model(capsys, here):
    folder = save_model(random_model(FAMILIES["gpt2"]), here / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(capsys, ["import", str(folder), "--out", "copy"], "model.safetensors is corrupt or truncated")
    assert not (here / "copy").exists()


def test_a_wrong_vocabulary_size(capsys, here):
    folder = save_model(random_model(FAMILIES["gpt2"]), here / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 61', '"vocab_size": 62'))
    refused(capsys, ["import", str(folder), "--out", "copy"], "(61, 16) in the file, (62, 16) by config.json")
    assert not (here / "copy").exists()


def test_an_unknown_preset(capsys):
    refused(capsys, ["plan", "gtp2"], "there is no preset, recipe or run folder 'gtp2'; did you mean 'gpt2'?")


def test_a_typo_in_an_option(capsys):
    refused(capsys, ["plan", "gpt2", "--modle.layers", "3"], "there is no modle; did you mean model?")
    refused(capsys, ["plan", "gpt2", "--model.layrs", "3"], "did you mean model.layers?")
    refused(capsys, ["demo", "--minuets", "3"], "there is no minuets; did you mean minutes?")


def test_a_typo_in_a_verb(capsys):
    refused(capsys, ["pretran"], "there is no verb 'pretran'; plume --help lists them; did you mean 'pretrain'?")


def test_verbs_of_other_tools_are_named_as_here(capsys):
    refused(capsys, ["train", "x"], "there is no verb 'train'", "use plume pretrain or plume finetune")
    refused(capsys, ["help", "finetune"], "use plume --help, or plume VERB --help")
    refused(capsys, ["chat"], "use plume generate MODEL")


def test_a_file_without_its_option_is_told_which_one(capsys):
    refused(capsys, ["demo", "my_book.txt"], "a text is given as --text my_book.txt")
    words = ["finetune", "runs/book", "rows.csv", "--folder", "runs/x"]
    refused(capsys, words, "labelled rows are given as --task.train rows.csv")


def test_a_misspelt_folder_is_told_the_one_that_is_there(capsys, here, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (here / "runs" / "book").mkdir(parents=True)
    refused(capsys, ["generate", "runs/bok", "x"], "HF_HUB_OFFLINE is set", "did you mean 'runs/book'?")


def test_a_missing_section_names_the_fields_that_it_needs(capsys, here):
    folder = save_model(random_model(FAMILIES["gpt2"]), here / "model")
    refused(capsys, ["distill", str(folder), "--folder", "student"], "train.steps is missing")


def test_pretrain_alone_lists_the_recipes(capsys):
    refused(capsys, ["pretrain"], "which recipe?", "gpt2-laptop", "english-20")


def test_runs_where_there_are_none(capsys, here):
    refused(capsys, ["runs"], "there is no folder runs")


def test_the_tokenizer_of_the_bundled_model(capsys):
    assert main(["tokenizer", "inspect", "plume-en", "Hello"]) == 0
    assert "byte-bpe, 8192 tokens" in capsys.readouterr().out


def test_tables_fit_into_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["plan", "gpt2"]) == main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60 and "38,597,376" in shown and "GFLOP/s" in shown and "…" not in shown


def test_tables_that_do_not_fit_are_a_line_for_each_cell(capsys, monkeypatch, here):
    for name in ("one", "two"):
        (here / f"{name}.txt").write_text(f"number {name} has a text of some words\n" * 40_000)
    monkeypatch.setenv("COLUMNS", "60")
    words = ["--folder", "data", "--tokenizer.kind", "bytes", "--workers", "1"]
    assert main(["prepare", "one.txt", "two.txt", *words]) == 0
    printed = capsys.readouterr().out
    assert "source: one.txt\nMB: 1.4\n" in printed and "share: 50.0%" in printed and "…" not in printed


def test_brackets_in_names_are_no_styles(capsys, here):
    source = Path("texts [") / "book].txt"  # [/book] would end a style that nothing began
    source.parent.mkdir()
    source.write_text("a text of some words\n" * 40)
    main(["prepare", str(source), "--folder", "data [red]", "--tokenizer.kind", "bytes", "--workers", "1"])
    printed = capsys.readouterr().out
    assert "data [red]: " in printed and str(source) in printed


def test_a_verb_typed_in_a_shell_ends_with_code_2(here):
    command = [sys.executable, "-m", "plume", "demo", "--text", "nothing.txt"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("plume: ")
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["--help"]], ids=["shorter than the buffer", "longer"])
def test_output_onto_a_full_disk_is_one_message(words):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "plume", *words]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "plume: output: No space left on device\n")


def test_a_closed_standard_output_is_no_error(here, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["generate", "plume-en", "A", "--max-new-tokens", "2"]) == 0


def test_a_folder_made_elsewhere_is_imported(capsys, here):
    from plume.config import TokenizerConfig
    from plume.text import train_tokenizer

    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), ["any text"])
    from dataclasses import replace

    model = random_model(replace(FAMILIES["gpt2"], vocab_size=tokenizer.vocab_size))
    save_model(model, here / "theirs", tokenizer=tokenizer, info={"task": {"kind": "generate"}})
    assert main(["import", "theirs", "--out", "ours", "--precision", "float16"]) == 0
    about = json.loads((here / "ours" / "plume.json").read_text())
    assert about["imported_from"] == "theirs" and about["task"] == {"kind": "generate"}  # what it was trained for stays
    assert (here / "ours" / "tokenizer.json").is_file()


@pytest.mark.parametrize("columns", ["60", "80"])
def test_progress_fits_into_a_narrow_terminal(monkeypatch, capsys, columns):
    """Whole figures in one line each, which a bar left no room for."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal for rich
    monkeypatch.setenv("TERM", "xterm")
    with Progress(unit="bytes") as progress, progress.task("prepare", 297_000) as advance:
        advance(297_000, "98,774 tokens, 0.2 MB/s")
    plain_text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err)
    (last, *_) = [line for line in plain_text.splitlines() if "MB" in line]
    assert len(last.rstrip()) <= int(columns) and "…" not in last and "297.0/297.0 kB" in last and "0.2 MB/s" in last


@pytest.mark.parametrize(
    "verb",
    [verb for verbs in VERBS.values() for verb in verbs],
)
@pytest.mark.parametrize("columns", ["60", "80"])
def test_help_lists_every_option_with_its_meaning(verb, columns, capsys, monkeypatch):
    """Nothing is cut off, whatever the width of the terminal."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*verb.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    about = KNOWN[verb]
    assert "…" not in shown
    assert " ".join(f"Usage: plume {verb} {about.usage}".split()) in shown
    for row in describe(about.kind) if about.kind else []:
        meaning = ": ".join(part for part in (" | ".join(row.choices), row.help) if part)
        assert f"--{row.name.replace('_', '-')} {meaning}" in shown
    for flag, meaning in about.flags.items():
        assert f"--{flag} {meaning}" in shown


@pytest.mark.parametrize("columns", ["", "wide", "-3"])
def test_help_needs_no_width_of_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["generate", "--help"]) == 0 and "--temperature" in capsys.readouterr().out


def test_the_first_screen_follows_the_work(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    places = [shown.find(f"\n  {verb} ") for verbs in VERBS.values() for verb in verbs if " " not in verb]
    assert -1 not in places and places == sorted(places)
    assert "Begin with `plume demo`" in shown
    assert set(COMMANDS) == {name for name, verb in KNOWN.items() if verb.kind is not None}


@pytest.mark.parametrize("verb", ["finetune", "prepare", "generate", "serve", "evaluate", "tokenizer train"])
def test_a_verb_alone_says_what_it_wants(verb, capsys):
    refused(capsys, verb.split(), f"Usage: plume {verb} ", f"plume {verb} --help lists its options")


# ---- a folder says all


@pytest.fixture
def run_folder(here):
    folder = here / "runs" / "first"
    folder.mkdir(parents=True)
    write_recipe(folder, plain(build(PretrainConfig, read_recipe(ROOT / "recipes" / "gpt2-laptop.toml"))))
    return folder


def test_a_run_folder_stands_for_its_recipe(run_folder):
    """Wherever the run has been moved to, it goes on there."""
    wanted = settings(PretrainConfig, [str(run_folder), "--resume", "--train.steps", "400"])
    assert (wanted.folder, wanted.resume, wanted.train.steps) == (run_folder, True, 400)


def test_a_recipe_that_plume_brings_has_a_name(capsys, here):
    assert settings(PretrainConfig, ["gpt2-laptop"]).train.optimizer == "muon"
    refused(capsys, ["pretrain", "gpt2-labtop"], "; did you mean 'gpt2-laptop'?")
    words, prepared = ["gpt2-laptop", "--folder", "data"], ("paths",)
    data = settings(PretrainConfig, words[:1]).data
    assert settings(DataConfig, words, *prepared, section="data") == replace(data, folder=Path("data"))
    (here / "gpt2-laptop").write_text("a text of that name")
    assert settings(DataConfig, words, *prepared, section="data").paths == ("gpt2-laptop",)


def test_a_run_folder_is_a_model_unless_it_is_to_go_on(run_folder):
    words = [str(run_folder), "--task.train", "rows.csv", "--folder", "tuned"]
    assert settings(FinetuneConfig, words, "model").model == str(run_folder)


def test_a_student_learns_as_its_teacher_did(run_folder):
    words = [str(run_folder), "--folder", "student", "--train.steps", "5"]
    wanted = settings(DistillConfig, words, "teacher", start=trained_like(words[0]))
    assert (wanted.teacher, str(wanted.prepared)) == (str(run_folder), "data/gpt2-laptop")
    assert (wanted.train.steps, wanted.train.optimizer) == (5, "muon")
    assert trained_like("gpt2") == {}


def test_a_student_reads_what_its_teacher_read(here):
    """The folder of the teacher's recipe held other data, so that its own has a key."""
    configs = []
    for name in ("first", "second"):
        (here / f"{name}.txt").write_text(f"This is the {name} text.\n" * 50)
        data = DataConfig(paths=(f"{name}.txt",), folder=Path("data/all"), tokenizer=TokenizerConfig(kind="bytes"))
        configs.append(prepare(keyed_folder(data)).folder)
        write_recipe(here / name, {"folder": name, "data": asdict(data)})
    assert [data_of_run(name, "data/all") for name in ("first", "second")] == [str(folder) for folder in configs]
    assert configs[0] == Path("data/all") != configs[1]
    write_recipe(here / "third", {"folder": "third", "prepared": "elsewhere"})
    assert data_of_run("third", "elsewhere") == "elsewhere"


# ---- what a person sees


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_does_not_obey_what_a_model_writes():
    """An escape could clear the screen or rename the window; in a file every character stays."""
    text = "one\x1b[2Jtwo\x07\r\x7f\x9b\n\tthree 中"
    assert shown(text, io.StringIO()) == text
    assert shown(text, Terminal()) == "one␛[2Jtwo␇␍␡\ufffd\n\tthree 中"
    lm = SimpleNamespace(config=SimpleNamespace(decoder_layers=0), stream=lambda *_: iter(["a\x1b", "[2J"]))
    for out, said in ((Terminal(), "a␛[2J\n"), (io.StringIO(), "a\x1b[2J\n")):
        answer(lm, "", SamplingConfig(), out)
        assert out.getvalue() == said


def test_lines_end_between_words_on_a_terminal_and_stay_whole_in_a_file(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    text = "there is no recipe [gpt3] :smile: for 12 things; did you mean another, perhaps a longer one?"
    screen, file = Terminal(), io.StringIO()
    tell(text, screen)
    tell(text, file)
    lines = screen.getvalue().splitlines()
    assert file.getvalue() == text + "\n"
    assert len(lines) > 1 and max(map(len, lines)) <= 40 and " ".join(map(str.strip, lines)) == text


# ---- Ctrl-C


def test_an_output_that_cannot_hold_every_letter(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="cp1252", write_through=True))
    monkeypatch.setattr(sys.modules["plume.cli.main"], "overview", lambda: "naïve 漢")
    assert main([]) == 0 and written.getvalue().decode("cp1252").strip() == "naïve \\u6f22"


def test_a_verb_that_is_interrupted_says_so(capsys, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("plume.train.pretrain.pretrain", interrupted)
    assert main(["pretrain", "gpt2-laptop"]) == 130
    assert capsys.readouterr().err == "plume: interrupted\n"


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 130)])
@pytest.mark.parametrize("verb", ["pretrain gpt2-laptop", "demo", "distill teacher --folder student --train.steps 5"])
def test_a_training_that_was_stopped_is_not_taken_as_done(verb, finished, code, capsys, monkeypatch):
    outcome = SimpleNamespace(finished=finished)
    result = SimpleNamespace(outcome=outcome, main=True, summary=lambda: "the summary")
    for place in ("plume.train.pretrain.pretrain", "plume.train.distill.distill", "plume.demo.demo"):
        monkeypatch.setattr(place, lambda config: result)
    assert main(verb.split()) == code
    assert capsys.readouterr().err == ("" if finished else "plume: interrupted\n")


# ---- a place that cannot be written to


def without_powers(*command, **more):
    """Run as somebody whom permissions bind: root is not, unless its powers are taken away."""
    root = hasattr(os, "getuid") and os.getuid() == 0
    if root and shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and there is no setpriv to take that away")
    lead = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if root else []
    return subprocess.run([*lead, *command], capture_output=True, text=True, check=False, **more)


@pytest.fixture
def locked(here):
    folder = here / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "book.txt", "--folder", "locked/data"],
        ["tokenizer", "train", "book.txt", "--out", "locked/tokenizer", "--kind", "characters"],
        ["runs", "runs", "--plot", "locked/plot.png"],
    ],
    ids=lambda words: words[0],
)
def test_a_folder_that_cannot_be_written_to(here, locked, run_folder, words):
    (here / "book.txt").write_text("some words\n" * 100)
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    found = without_powers(sys.executable, "-m", "plume", *words)
    assert (found.returncode, found.stdout) == (2, ""), found.stderr
    assert found.stderr.startswith("plume: locked/") and "Permission denied" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_compiled_code_finds_a_place_where_neither_package_nor_home_can_be_written(here, locked):
    """numba refuses to compile otherwise, and matplotlib complains at length."""
    package = here / "package" / "plume"
    shutil.copytree(ROOT / "plume", package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    temporary = here / "temporary"
    temporary.mkdir()
    code = "import plume; from plume.text import merging; from plume.util.files import new_figure; new_figure(2, 2)"
    code += "; print(plume.__file__)"
    told = {**os.environ, "HOME": str(locked), "TMPDIR": str(temporary), "PYTHONPATH": str(package.parent)}
    told = {name: value for name, value in told.items() if not name.startswith(("XDG", "NUMBA", "MPL"))}
    for _ in range(2):  # the second run finds the folder of the first
        found = without_powers(sys.executable, "-c", code, env=told, cwd=here)
        assert (found.returncode, found.stderr) == (0, ""), found.stderr
        assert found.stdout.strip() == str(package / "__init__.py")
        assert [path.name for path in temporary.iterdir()] == [f"plume-{os.getuid()}"]


@pytest.mark.parametrize("out", ["results", "."])
def test_a_file_never_replaces_a_folder(here, capsys, out):
    """Whatever is written goes through one function, and a folder may hold anything."""
    (here / "results").mkdir()
    (here / "results" / "thesis.txt").write_text("years of work")
    (here / "prompts.txt").write_text("a\n")
    for call in (
        lambda: files.write_text(Path(out), "x"),
        lambda: files.save_figure(files.new_figure(2, 2), Path(out)),
    ):
        with pytest.raises(UserError, match="name a file"):
            call()
    folder = save_model(random_model(FAMILIES["gpt2"]), here / "model")
    for words in (["generate", str(folder), "--prompts", "prompts.txt"], ["export", str(folder)]):
        assert main([*words, "--out", out]) == 2
        assert f"out={out} is a folder; name a file" in capsys.readouterr().err
    assert (here / "results" / "thesis.txt").read_text() == "years of work"


def test_a_teacher_that_does_not_exist(here, capsys):
    assert main(["distill", "no/where/at/all", "--folder", "student"]) == 2
    assert "there is no folder no/where/at/all" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_temporary_folder(tmp_path):
    """Anybody can make one there, and importing plume must not end with it."""
    first = places.own_folder(str(tmp_path))
    assert first.is_dir() and places.own_folder(str(tmp_path)) == first
    first.rmdir()
    first.write_text("not a folder")
    places.own_folder.cache_clear()  # as in the next process
    other = places.own_folder(str(tmp_path))
    assert other.is_dir() and other != first and places.own_folder(str(tmp_path)) == other


def test_a_user_without_a_home(tmp_path):
    """Such as a container with --user 12345: a folder in the temporary one is the cache, and `~` stays as it is."""
    code = """
import os, pwd
pwd.getpwuid = pwd.getpwnam = lambda _: {}["unknown"]
import plume
from plume.config import at_home
from plume.util.places import user_cache
print(user_cache(), os.environ["MPLCONFIGDIR"], at_home("~/texts"))
"""
    unset = ("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
    env = {name: value for name, value in os.environ.items() if name not in unset} | {"TMPDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    own = tmp_path / f"plume-{os.getuid()}"
    assert found.stdout.split() == [str(own), str(own), "~/texts"], found.stderr
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("home", ["a file", "a file/below"])
def test_a_home_that_cannot_be_written_to(home, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert places.user_cache() == tmp_path / f"plume-{os.getuid()}"


def test_a_long_path_stays_whole_in_a_pipe(capsys, tmp_path):
    """A script takes it from the output; at 80 columns it would be broken over two lines."""
    out = tmp_path / ("a-long-name-" * 10) / "with [b]brackets[/b]"
    (tmp_path / "a.txt").write_text("a text of a few words, and some more of them. " * 40)
    assert main(["tokenizer", "train", str(tmp_path / "a.txt"), "--out", str(out), "--vocab-size", "300"]) == 0
    assert str(out) in capsys.readouterr().out
