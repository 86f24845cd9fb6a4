"""The plan of the house: which room may use which, and that the door opens quickly."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house import figures

import plume

ROOT = Path(plume.__file__).parent
ROOMS = [
    "config",
    "files",
    "text",
    "data",
    "model",
    "heads",
    "families",
    "weights",
    "train",
    "plan",
    "generate",
    "evaluate",
    "explain",
    "serve",
    "demo",
    "cli",
]
DOORS = {"__init__", "__main__"}  # these open on every room


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms a file uses, wherever in the file, except for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "plume":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plume."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("plume.")}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if room_of(path) not in DOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_uses_only_the_rooms_before_it(path):
    room = room_of(path)
    assert room in ROOMS, f"{room} has no place in the plan of the house"
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    assert not imports(path) & later


def test_the_drawing_names_every_room_in_order():
    drawing = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = drawing.split("<!-- rooms -->")[1].split("<!-- /rooms -->")[0]
    places = [rooms.find(f"`{room}`") for room in ROOMS]
    assert -1 not in places, f"not drawn: {[room for room, place in zip(ROOMS, places, strict=True) if place < 0]}"
    assert places == sorted(places)


@pytest.mark.parametrize("module", ["plume.config", "plume.cli", "plume.weights"])
def test_light_rooms_do_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_answers_at_once():
    """Measured in processor time, which other work on the machine does not change."""
    times = []
    command = [sys.executable, "-m", "plume", "--help"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    for _ in range(3):
        before = os.times()
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert "pretrain" in result.stdout
    assert min(times) < 0.3


def test_the_house_keeps_to_its_figures():
    """Each figure of docs/architecture.md is a bound; `python tests/house.py` shows where one is passed."""
    drawing = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = drawing.split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    stated = {name: int(bound) for name, bound in re.findall(r"^\|[^|]+\| ([^|]+) \| (\d+) \|", table, re.MULTILINE)}
    found = figures()
    assert stated.keys() == found.keys()
    assert {name: figure for name, figure in found.items() if figure > stated[name]} == {}
