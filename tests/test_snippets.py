"""Every block of code in the documentation is run by a test or has its reason here; named commands are real ones."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import readme
from families import random_model
from tokenizers import Tokenizer as Fast
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from plume.cli.main import main
from plume.cli.verbs import KNOWN, settings
from plume.config import PRESETS, DataConfig, ServeConfig, build, describe
from plume.config.recipes import locate
from plume.evaluate.eval_tasks import own_task
from plume.hf import save_model
from plume.lm import load

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh.md")]  # twins have the same blocks: tests/test_docs.py
BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
RUN_BY_PAGE = {"bash", "python", "text"}  # tests/test_docs.py and tests/test_python_api.py
ELSEWHERE = {  # what a block without a language begins with, and the test that runs it or why none does
    "README.md": {"pip install plume-lm", "plume explore", "plume explore gpt2", "make demo"},  # tests/test_release.py
    "CONTRIBUTING.md": {"make test"},  # test_targets_of_make_are_there
    "architecture.md": {" raw text -> text"},  # a drawing
    "folders.md": {"plume import FOLDER"},  # test_a_folder_is_imported_as_the_page_says
    "class.md": {"plume serve runs/demo", "pip download plume-lm"},  # test_a_server_for_a_class; needs an index
    "cluster.md": {"#!/bin/bash"},  # test_the_batch_script_is_one: there is no Slurm here
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def block(name: str, start: str) -> str:
    """The one block of a page that begins so."""
    (page,) = (page for page in ENGLISH if page.name == name)
    (found,) = (text for _, text in blocks(page) if text.startswith(start))
    return found


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.name)
def test_every_block_is_run_or_has_its_reason(page):
    for language, text in blocks(page):
        if language in ("toml", "json", "py"):  # below; the last in tests/serve and tests/evaluate
            continue
        known = ELSEWHERE.get(page.name, set())
        run = language in RUN_BY_PAGE and page.name != "CONTRIBUTING.md"
        assert run or any(text.startswith(start) for start in known), f"nothing runs this block of {page.name}:\n{text}"


def test_settings_files_are_read():
    """Every block of TOML is the file of some verb."""
    kinds = {"data": (DataConfig, "data"), "serve": (ServeConfig, ""), "own-server": (ServeConfig, "")}
    for page in ENGLISH:
        for language, text in blocks(page):
            if language == "toml":
                kind, section = kinds[page.stem]
                table = tomllib.loads(re.sub(r'"<[^>]*>"', f'"{"0" * 64}"', text))
                assert build(kind, table[section] if section else table)


def test_rows_of_a_task_of_ones_own_are_read(tmp_path):
    rows = [json.loads(line) for language, text in blocks(ROOT / "docs" / "evaluate.md") if language == "json"
            for line in text.splitlines()]  # fmt: skip
    assert len(rows) == 4
    for number, row in enumerate(rows):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(row) + "\n", encoding="utf-8")
        assert own_task(file, {}).path == file


def test_targets_of_make_are_there():
    targets = re.findall(r"^make ([\w-]+)", block("CONTRIBUTING.md", "make test"), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(targets) == 7 and all(f"\n{target}: " in makefile for target in targets)


def test_a_server_for_a_class():
    words = block("class.md", "plume serve runs/demo").replace("HASH", "0" * 64).split()
    assert settings(ServeConfig, words[2:], "models").connections_per_address == 50


def test_the_batch_script_is_one():
    script = block("cluster.md", "#!/bin/bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "-m plume pretrain" in script


def test_a_folder_is_imported_as_the_page_says(tmp_path, monkeypatch):
    """Weights of a RoBERTa whose config.json does not name a class, and a tokenizer from elsewhere."""
    monkeypatch.chdir(tmp_path)
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abcdefgh"]
    tokenizer = Fast(models.WordLevel({letter: n for n, letter in enumerate(letters)}, unk_token="<unk>"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    special = named | {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("TOKENIZER_FOLDER")
    fields = {"vocab_size": len(letters), "layers": 1, "heads": 2, "width": 16, "context": 16}
    save_model(random_model(build(type(PRESETS["roberta-base"]), {"preset": "roberta-base"} | fields), "masked-token"),
               tmp_path / "FOLDER")  # fmt: skip
    config = json.loads((tmp_path / "FOLDER" / "config.json").read_text())
    config.pop("architectures")
    (tmp_path / "FOLDER" / "config.json").write_text(json.dumps(config))
    assert main(block("folders.md", "plume import FOLDER").split()[1:]) == 0
    assert load(tmp_path / "models" / "mine").fill_mask("a <mask>")


def named_commands(page: Path) -> list[str]:
    """Commands in sentences, tables and blocks."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for _, block in BLOCK.findall(text) for line in block.splitlines()]
    return re.findall(r"`(plume [^`\n-][^`\n]*)`", text) + [line for line in lines if line.startswith("plume ")]


def test_commands_in_sentences_have_options_that_exist():
    pages, count = [*PAGES, readme.READMES[1], ROOT / "CHANGELOG.md"], 0
    for page in pages:
        for command in named_commands(page):
            words = command.split()[1:]
            (verb, *_) = [name for name in (" ".join(words[:2]), words[0]) if name in KNOWN] or [None]
            assert verb is not None, f"{page.name}: {command}"
            kind, flags = KNOWN[verb].kind, {*KNOWN[verb].flags, "help"}
            for option in re.findall(r"(?<=\s)--([\w.-]+)", command):
                count += 1
                known = kind is not None and locate(kind, option.replace("-", "_"), "") in {
                    row.name for row in describe(kind)
                }
                assert known or option in flags, f"{page.name}: --{option} in {command}"
    assert count > 300
