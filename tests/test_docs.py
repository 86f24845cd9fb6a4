"""Every command and snippet of README and docs is run, page by page, in an empty folder."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.name.endswith(".zh.md")),  # twins, see below
]
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
BILINGUAL = {"glossary.md"}
SUMMARISED = {"experiments.md"}  # in Chinese, entry by entry
SHORTER_IN_CHINESE = {"architecture.md"}
ONE_SESSION = {"api.md"}  # blocks that follow each other: tests/test_python_api.py runs them
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUTORIAL_BLOCK = re.compile(r"^```(bash|python|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
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
        **evaluation_data(),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def evaluation_data() -> dict[str, str]:
    """A few rows of the data sets that docs/evaluate.md names, in the forms in which they are published."""
    endings = ["milk with joy", "a stone", "the moon", "nothing"]
    hellaswag = {"activity_label": "Eating", "ctx_a": "The cat was hungry, and", "ctx_b": "it ate", "endings": endings}
    pair = {"sentence_good": "The cats eat.", "sentence_bad": "The cats eats.", "UID": "agreement"}
    pair |= {"field": "morphology", "linguistics_term": "agreement", "one_prefix_method": False}
    lines = {
        "lambada/lambada_test.jsonl": [{"text": "The cat was hungry, so the man fed the cat"}] * 3,
        "hellaswag/hellaswag_val.jsonl": [hellaswag | {"label": n % 4} for n in range(4)],
        "hellaswag/hellaswag_train.jsonl": [hellaswag | {"label": 0, "activity_label": str(n)} for n in range(8)],
        "blimp/data/agreement.jsonl": [pair | {"pairID": str(n)} for n in range(3)],
    }
    files = {f"data/{name}": "".join(json.dumps(row) + "\n" for row in rows) for name, rows in lines.items()}
    return files | {"data/wikitext-2/wiki.test.raw": " \n = Page = \n \n The cat was hungry . It ate milk . \n"}


def run_in_shell(command: str, folder: Path) -> None:
    subprocess.run(["bash", "-c", command], cwd=folder, env=environment(), check=True)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(block: str, language: str, folder: Path) -> None:
    if language == "python":
        subprocess.run([sys.executable, "-c", block], cwd=folder, env=environment(), check=True)
        return
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0].strip()
        if not command or command.startswith("#") or command == "plume demo":  # that one has been run
            continue
        for start, options in SHORTER.items():
            if command.startswith(start):
                command += "".join(f" {name} {value}" for name, value in options.items() if name not in command)
        if is_server(command):
            serve(command, folder)
        else:
            run_in_shell(command, folder)


def is_server(command: str) -> bool:
    return command.startswith(SERVERS) and "--save" not in command  # which writes a file and ends


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
            assert it.wait() == 0
        finally:
            it.kill()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in ONE_SESSION and p not in TUTORIALS], ids=lambda page: page.name
)
def test_every_command_of_a_page_works(page, folder):
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        run(block, language, folder)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_prints_what_it_says(page, folder):
    """Block by block in one folder; a block of text has the output of the block before, `...` for what varies;
    where lines end depends on the terminal."""
    output = ""
    for language, block in TUTORIAL_BLOCK.findall(page.read_text(encoding="utf-8").replace("8000", str(free_port()))):
        if language == "text":
            wanted = ".*?".join(re.escape(" ".join(part.split())) for part in block.split("..."))
            assert re.search(wanted, " ".join(output.split())), f"{block}\nis not in\n{output}"
            continue
        command = [sys.executable, "-c", block] if language == "python" else ["bash", "-ec", without_demo(block)]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=folder, env=environment(), **both, text=True)
        output = done.stdout
        assert done.returncode == 0, f"{block}\n{output}"


def without_demo(block: str) -> str:
    return re.sub(r"^plume demo$", "", block, flags=re.MULTILINE)  # that one has been run


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


def commands(page: str) -> list[list[str]]:
    """The commands of each row of the tables of a page."""
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    return [
        re.findall(r"`(plume [^`]+)`", row) for row in rows if not re.match(r"\|---|\| (lesson|often|要点|常见)", row)
    ]


def test_every_row_of_the_papers_has_a_command_and_both_languages_the_same():
    assert commands("papers.md") == commands("papers.zh.md")
    assert len(commands("papers.md")) == 42 and all(commands("papers.md"))


@pytest.mark.slow
def test_the_commands_of_the_papers_work(folder, monkeypatch, capsys):
    """In this process, since most of them take less than starting one; experiments only say what they would run."""
    from plume.cli.main import main

    monkeypatch.chdir(folder)
    monkeypatch.setattr("plume.plan.measure_block", lambda model, seconds=0.5: 1e10)
    for command in dict.fromkeys(command for row in commands("papers.md") for command in row):
        if is_server(command):
            serve(command, folder)
        else:
            dry = ["--dry-run"] if command.startswith("plume reproduce") else []
            assert main([*shlex.split(command)[1:], *dry]) == 0, command
            assert capsys.readouterr().out.strip(), command


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


def anatomy(page: Path) -> tuple[list[tuple[str, str]], set[str], list[str], int]:
    """What two languages have in common: blocks without their comments, words in code, levels of headings, rows."""
    text = page.read_text(encoding="utf-8")
    blocks = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    rest = blocks.sub("", text)
    return (
        [(language, re.sub(r" +#.*", "", block)) for language, block in blocks.findall(text)],
        set(re.findall(r"`([^`\n]+)`", rest)),
        re.findall(r"^(#+) ", rest, re.MULTILINE),
        len(re.findall(r"^\|", rest, re.MULTILINE)),
    )


def chinese_twin(page: Path) -> Path:
    return page.with_name(f"{page.stem}.zh.md")


@pytest.mark.parametrize("page", [p for p in PAGES[1:] if p.name not in BILINGUAL], ids=lambda page: page.name)
def test_every_page_has_a_chinese_twin(page):
    """With the same commands, options, headings and rows, so that neither changes alone."""
    twin = chinese_twin(page)
    assert twin.exists(), f"{page.name} needs a Chinese twin, {twin.name}"
    if page.name in SUMMARISED:
        return
    english, chinese = anatomy(page), anatomy(twin)
    assert english[0] == chinese[0]
    if page.name not in SHORTER_IN_CHINESE:
        assert english[1] == chinese[1]
        assert english[2:] == chinese[2:]


def test_every_entry_of_the_experiments_is_summarised_in_chinese():
    """In the same order, with no figure and no command that the entry has not."""
    english, chinese = (
        re.split(r"^## ", (ROOT / "docs" / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        for name in ("experiments.md", "experiments.zh.md")
    )
    dates = [[entry.split("：")[0].split(":")[0] for entry in entries] for entries in (english, chinese)]
    assert dates[0] == dates[1], "each entry of experiments.md needs its summary in experiments.zh.md"
    for entry, summary in zip(english, chinese, strict=True):
        for pattern in (r"\d+(?:[.,]\d+)*", r"`([^`\n]+)`"):
            added = set(re.findall(pattern, summary)) - set(re.findall(pattern, entry))
            assert added == set(), f"{summary.splitlines()[0]}: not in {entry.splitlines()[0]}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in BILINGUAL], ids=lambda page: page.name)
def test_chinese_pages_link_to_chinese_pages(page):
    """But for the link to the page's own English form."""
    text = chinese_twin(page).read_text(encoding="utf-8")
    linked = {page.parent / target for target in re.findall(r"\]\(([^)#:]+(?<!\.zh)\.md)[)#]", text)}
    assert {other.name for other in linked - {page} if chinese_twin(other).exists()} == set()


def test_pages_name_no_file_that_is_not_there():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_the_pages_name_all_tasks_and_presets():
    from plume.config import PRESETS
    from plume.evaluate.eval_tasks import TASKS

    said = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8"))
    digits = {name for name in TASKS if re.fullmatch(r"arithmetic-[345]d-(plus|minus)", name)}  # "the same with"
    assert set(TASKS) - digits - set(said) == set()
    said = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "train.md").read_text(encoding="utf-8"))
    assert set(PRESETS) - set(said) == set()
