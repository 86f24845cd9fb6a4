"""The release: a wheel that works without the repository, extras that are locked and import."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import readme
import release_notes
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import plume

ROOT = Path(plume.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKED = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
}


def packages(extra: str) -> list[Requirement]:
    """What an extra asks for, extras within it opened."""
    wanted = [Requirement(line) for line in (PROJECT["dependencies"] if extra == "core" else EXTRAS[extra])]
    inside = [inner for r in wanted if r.name == PROJECT["name"] for name in r.extras for inner in packages(name)]
    return [r for r in wanted if r.name != PROJECT["name"]] + inside


@pytest.mark.parametrize("extra", ["core", *EXTRAS])
def test_the_lock_pins_what_an_extra_asks_for(extra):
    for package in packages(extra):
        assert package.specifier.contains(LOCKED[canonicalize_name(package.name)]), package


def test_the_version_has_one_place_and_a_section_of_the_changelog():
    assert PROJECT["dynamic"] == ["version"]
    assert f"## {plume.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_notes_of_a_release_are_its_section_of_the_changelog():
    written = release_notes.notes(plume.__version__)
    assert written.startswith("The first release.") and "\n## " not in written
    with pytest.raises(SystemExit, match=r"no notes for 99\.0; it has Unreleased, 0\.1\.0"):
        release_notes.notes("99.0")


def test_citation_names_the_version():
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    dated = re.search(rf"^## {plume.__version__} \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"\nversion: {plume.__version__}\n" in cited and dated and f"\ndate-released: {dated[1]}\n" in cited


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_workflows_pin_their_actions_and_name_files_that_exist(workflow):
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.+)", text)
    assert used and all(re.fullmatch(r"[\w/.-]+@[0-9a-f]{40} # v[\d.]+", action) for action in used)
    named = re.findall(r"(?<=\s)(?:tests|docs)/[\w/.-]+", text)
    assert all((ROOT / name).exists() for name in named)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["core", *EXTRAS])
def test_an_extra_is_installed_as_locked_and_imports(extra):
    modules = list[str]()
    owners = metadata.packages_distributions()
    for package in packages(extra):
        name = canonicalize_name(package.name)
        try:
            installed = metadata.version(package.name).split("+")[0]  # torch says which build it is
        except metadata.PackageNotFoundError:
            if extra in ("bench", "track"):  # `make test` does without these two
                pytest.skip(f"{package.name} is not installed")
            raise
        assert installed == LOCKED[name], package
        public = [m for m, owner in owners.items() if name in map(canonicalize_name, owner) and not m.startswith("_")]
        same = [m for m in public if canonicalize_name(m) == name]
        modules += (same or public)[:1]
    code = f"import {', '.join(modules)}"
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{code}\n{done.stderr}"


class Installed:
    """An environment with the wheel, the packages that it needs, and nothing of the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.home = folder / "home"
        self.home.mkdir()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.home, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def serving(self, *words: str) -> Iterator[str]:
        """The address of a server, which ends cleanly afterwards."""
        command = [str(self.bin / "plume"), *words, "--port", "0"]
        with subprocess.Popen(
            command, cwd=self.home, env=self.environment, stderr=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stderr is not None
                address = None
                while address is None:
                    line = server.stderr.readline()
                    assert line, "the server ended"
                    address = re.search(r"http://127\.0\.0\.1:\d+", line)
                yield address[0]
                server.send_signal(signal.SIGTERM)
                server.stderr.read()
                assert server.wait() == 0
            finally:
                server.kill()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy, so that nothing is left in the repository, and from files that the wheel may not need."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    shutil.copytree(ROOT / "plume", source / "plume", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python = [sys.executable, "-m"]
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    build = [*python, "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, **quiet)
    shutil.rmtree(source)
    subprocess.run([*python, "venv", "--without-pip", str(folder / "venv")], **quiet)
    there = Installed(folder)
    home = there.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # the other packages are lent; only the folder is, so that an editable install in it is not
    Path(home, "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("*.whl")
    pip = [*python, "pip", "--python", str(there.bin / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, **quiet)
    return there


@pytest.mark.slow
def test_the_wheel_stands_alone(installed):
    code = "import sys, plume; print(plume.__file__); print(*sys.path, sep='\\n')"
    place, *path = installed.run("python", "-c", code).splitlines()
    assert installed.folder in Path(place).parents
    assert str(ROOT) not in path
    assert installed.run("plume", "--version").strip() == plume.__version__
    assert "pretrain" in installed.run("plume", "--help")
    assert "124,439,808" in installed.run("plume", "plan", "gpt2")


@pytest.mark.slow
def test_the_wheel_trains_by_a_recipes_name_and_serves_the_explorer(installed):
    (installed.home / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    words = "--model.layers 1 --model.width 32 --model.heads 2 --model.context 32 --train.steps 3 --train.batch 2"
    # bytes and torch: nothing has to be compiled, which takes half a minute in a fresh place
    data = "--data.paths book.txt --data.folder data --data.tokenizer.kind bytes --data.workers 1 --folder run"
    installed.run("plume", "pretrain", "gpt2-laptop", *words.split(), *data.split())
    assert (installed.home / "run" / "model" / "model.safetensors").is_file()
    with installed.serving("serve", "run", "--engine.engine", "torch") as address:
        for page, part in (("/", "<title>Plume"), ("/static/app.js", "import"), ("/static/words/zh.js", "注意力")):
            with urllib.request.urlopen(address + page) as answer:
                assert part in answer.read().decode()


def test_both_first_screens_give_the_same():
    assert len({(*readme.commands(page), readme.sample(page)) for page in readme.READMES}) == 1


def put_gpt2_into_the_cache_of_the_hub(folder: Path) -> None:
    """A tiny GPT-2 of that name, as a download leaves it."""
    place = folder / "hub" / "models--gpt2"
    snapshot = place / "snapshots" / ("0" * 40)
    vocabulary = {letter: n for n, letter in enumerate(["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(snapshot)
    config = GPT2Config(vocab_size=len(vocabulary), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(snapshot)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)


@pytest.mark.slow
def test_the_first_screen_of_the_readme_is_true(installed):
    """Every command before the table of figures, and what one of them prints."""
    put_gpt2_into_the_cache_of_the_hub(installed.home / "hf")
    installed.environment |= {"HF_HOME": str(installed.home / "hf"), "HF_HUB_OFFLINE": "1"}
    seen = list[str]()
    for command in readme.commands(ROOT / "README.md"):
        program, *words = shlex.split(command)
        seen.append(program)
        if program == "make":
            assert f"\n{words[0]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")
        elif words[0] in ("explore", "serve"):
            quiet = ["--no-browser"] if words[0] == "explore" else []
            with installed.serving(*words, *quiet) as address, urllib.request.urlopen(f"{address}/v1/models") as answer:
                assert (words[1:] or ["plume-en"])[0] in answer.read().decode()
        elif program == "plume":
            assert installed.run(program, *words).startswith(readme.sample(ROOT / "README.md"))
        else:
            assert command == f"pip install {PROJECT['name']}"
    assert seen == ["pip", *["plume"] * 4, "make", "make"]


def test_every_pin_installs_on_the_oldest_python():
    """Debian 12 has 3.11.2. One pin that needed 3.11.5 kept pip searching for other versions without an end."""
    needed = {}
    for name in LOCKED:
        with contextlib.suppress(metadata.PackageNotFoundError):  # such as the peers of the benchmarks
            needed[name] = metadata.metadata(name)["Requires-Python"]
    assert len(needed) > 100
    assert not {name: python for name, python in needed.items() if python and "3.11.0" not in SpecifierSet(python)}
