"""Every command and snippet of README and docs is run, page by page, in an empty folder."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVERS = ("plume serve", "plume explore")  # these run until they are told to stop
SHORTER = {  # what a person would wait for, a test does not
    "plume demo": {"--minutes": "0.05"},
    "plume finetune": {"--seeds": "1", "--epochs": "1"},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of `plume demo`, made once for all pages."""
    folder = tmp_path_factory.mktemp("demo")
    run_in_shell("plume demo --minutes 0.05", folder)
    return folder / "runs" / "demo"


@pytest.fixture
def folder(tmp_path: Path, demo: Path) -> Path:
    """What a reader of the pages has at hand: the recipes, a first model, a book, reviews, questions, prompts."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree(demo, tmp_path / "runs" / "demo")
    import this

    zen = "".join(this.d.get(letter, letter) for letter in this.s)
    rows = [f"{word} film {n},{label}" for n in range(40) for word, label in (("fine", "good"), ("dull", "bad"))]
    question = {"context": "The cat ate", "choices": ["milk", "hay"], "answer": 0}
    for name, text in {
        "my_book.txt": f"{zen}\n\n" * 60,
        "reviews.csv": "\n".join(["review,sentiment", *rows]),
        "my_questions.jsonl": "\n".join([json.dumps(question)] * 3),
        "prompts.txt": "def main(\nimport ",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run_in_shell(command: str, folder: Path) -> None:
    subprocess.run(["bash", "-c", command], cwd=folder, env=environment(), check=True, timeout=400)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(block: str, language: str, folder: Path) -> None:
    if language == "python":
        subprocess.run([sys.executable, "-c", block], cwd=folder, env=environment(), check=True, timeout=400)
        return
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0].strip()
        if not command or command.startswith("#") or command == "plume demo":  # that one has been run
            continue
        for start, options in SHORTER.items():
            if command.startswith(start):
                command += "".join(f" {name} {value}" for name, value in options.items() if name not in command)
        if command.startswith(SERVERS):
            serve(command, folder)
        else:
            run_in_shell(command, folder)


def serve(command: str, folder: Path) -> None:
    """Start a server, see that it says where it listens, and end it."""
    words = f"exec {command} --port 0" + (" --no-browser" if command.startswith("plume explore") else "")
    with subprocess.Popen(
        ["bash", "-c", words], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as it:
        try:
            assert it.stderr is not None
            said = ""
            while "http://127.0.0.1" not in said:
                line = it.stderr.readline()
                assert line, f"{command} ended: {said}"
                said += line
            it.send_signal(signal.SIGTERM)
            it.stderr.read()
            assert it.wait(timeout=60) == 0
        finally:
            it.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_works(page, folder):
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        run(block, language, folder)


def test_both_readmes_give_the_same_commands():
    """So the commands of the Chinese one are run above, too."""
    english, chinese = (
        [
            (language, re.sub(r"  #.*", "", block))
            for language, block in BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
        ]
        for name in ("README.md", "README.zh.md")
    )
    assert english == chinese


def test_pages_name_no_file_that_is_not_there():
    for page in [*PAGES, ROOT / "README.zh.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_the_pages_name_all_tasks_and_presets():
    from plume.config import PRESETS
    from plume.evaluate.tasks import TASKS

    said = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8"))
    digits = {name for name in TASKS if re.fullmatch(r"arithmetic-[345]d-(plus|minus)", name)}  # "the same with"
    assert set(TASKS) - digits - set(said) == set()
    said = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "train.md").read_text(encoding="utf-8"))
    assert set(PRESETS) - set(said) == set()
