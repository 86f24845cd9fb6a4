"""Every command and snippet of README and docs is run, page by page, in an empty folder."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVERS = ("plume serve", "plume explore")  # these run until they are told to stop
SHORTER = {"plume demo": "--minutes 0.05"}  # what a person would wait for, a test does not


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a reader of the README has at hand: the recipes, a book, some reviews."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    import this

    zen = "".join(this.d.get(letter, letter) for letter in this.s)
    (tmp_path / "my_book.txt").write_text(f"{zen}\n\n" * 60, encoding="utf-8")
    rows = [f"{word} film {n},{label}" for n in range(40) for word, label in (("fine", "good"), ("dull", "bad"))]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,sentiment", *rows]), encoding="utf-8")
    return tmp_path


def run(block: str, language: str, folder: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if language == "python":
        subprocess.run([sys.executable, "-c", block], cwd=folder, env=env, check=True, timeout=200)
        return
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0].strip()
        if not command or command.startswith("#"):
            continue
        command += "".join(f" {more}" for start, more in SHORTER.items() if command.startswith(start))
        if command.startswith(SERVERS):
            serve(command, folder, env)
        else:
            subprocess.run(["bash", "-c", command], cwd=folder, env=env, check=True, timeout=200)


def serve(command: str, folder: Path, env: dict[str, str]) -> None:
    """Start a server, see that it says where it listens, and end it."""
    words = f"exec {command} --port 0" + (" --no-browser" if command.startswith("plume explore") else "")
    process = subprocess.Popen(["bash", "-c", words], cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while "http://127.0.0.1" not in said:
            line = process.stderr.readline()
            assert line, f"{command} ended: {said}"
            said += line
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_works(page, folder):
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        run(block, language, folder)


def test_pages_name_no_file_that_is_not_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
