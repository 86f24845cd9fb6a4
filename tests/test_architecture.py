"""The layers of the package: which may import which, that the command line starts fast, and what is counted."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plume

ROOT = Path(plume.__file__).parent
LAYERS = [
    "config",
    "util",
    "text",
    "data",
    "model",
    "hf",
    "explain",
    "inference",
    "tasks",
    "lm",
    "train",
    "evaluate",
    "lab",
    "serve",
    "plan",
    "bench",
    "demo",
    "cli",
]
ENTRY = {"__init__", "__main__"}  # these may import every layer


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The layers a file imports, wherever and however, except for types alone.

    A module named in a string counts too: `import_module("plume.explain")`, `python -m plume.data.pool`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: a relative import")
        if isinstance(node, ast.ImportFrom) and node.module == "plume":
            found |= {alias.name for alias in node.names} & set(LAYERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("plume."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("plume.")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {name.split(".")[1] for name in re.findall(r"^plume\.\w+(?:\.\w+)*$", node.value)} & set(LAYERS)
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if layer_of(path) not in ENTRY)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_layer_imports_only_the_layers_above_it(path):
    layer = layer_of(path)
    assert layer in LAYERS, f"{layer} is not in the list of layers"
    later = set(LAYERS[LAYERS.index(layer) + 1 :])
    assert not imports(path) & later


def test_the_docs_list_every_layer_in_order():
    drawing = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    layers = drawing.split("<!-- layers -->")[1].split("<!-- /layers -->")[0]
    places = [layers.find(f"`{layer}`") for layer in LAYERS]
    assert -1 not in places, f"not drawn: {[layer for layer, place in zip(LAYERS, places, strict=True) if place < 0]}"
    assert places == sorted(places)


@pytest.mark.parametrize("module", ["plume.config", "plume.cli.main", "plume.hf"])
def test_light_layers_do_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_is_read_without_importing_the_compiler_of_torch():
    """It takes seconds, and nothing of it is used."""
    code = (
        "import sys; from plume.hf import load_model, resolve; load_model(resolve('plume-en')); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_of_unix_alone_are_imported_where_they_are_used(path):
    """At the top of a file they would keep it from being imported on Windows."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names]
    named += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not {"resource", "fcntl", "termios", "pwd", "grp", "pty", "tty"} & set(named)


HELP = """
import runpy, sys, sysconfig
from pathlib import Path
before, places = set(sys.modules), [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
sys.argv = ["plume", *sys.argv[1:]]
try:
    runpy.run_module("plume", run_name="__main__")
finally:
    loaded = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before}
    packages = {n.split(".")[0] for n, file in loaded.items() if file and any(p in Path(file).parents for p in places)}
    print("LOADED", len(loaded), *packages)
"""


@pytest.mark.parametrize("words", [["--help"], ["pretrain", "--help"], ["--version"]], ids=" ".join)
def test_help_loads_little(words):
    """Python's own modules and Plume's configs; `benchmarks/start.py` measures the time."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    command = [sys.executable, "-c", HELP, *words]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=alone).stdout
    count, *packages = shown.split("LOADED ")[1].split()
    assert "pretrain" in shown or words == ["--version"]
    assert set(packages) <= {"plume"} and int(count) < 150


PRIVATE = re.compile(
    r"\bas asked\b|\bgo(es)? on\b|\b(is|are) told\b|\blook(s|ed)? at\b|\bsaid\b|\btold\b|\bdoor\b|somebody|two stacks|"
    r"is damaged|passed over|company in a batch|(is|are) made of|\bjudge\b"
)


def test_messages_are_in_the_terms_of_the_field():
    """Every text in the code but docstrings, and the English of the page."""
    from architecture import TREES  # every file parsed, which collecting tests does not need

    for path, tree in TREES.items():
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        first = [node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body]
        docstrings = {id(node.value) for node in first if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not PRIVATE.search(node.value), (path, node.lineno, node.value)
    words = (ROOT / "serve" / "static" / "words" / "en.js").read_text(encoding="utf-8")
    assert [m[0] for m in PRIVATE.finditer(words)] == ["told"]  # of an example: "it was told to"


def test_the_package_keeps_to_its_figures():
    """Each figure of docs/architecture.md is a bound; `python tests/architecture.py` shows where one is passed."""
    from architecture import figures

    drawing = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = drawing.split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    stated = {name: int(bound) for name, bound in re.findall(r"^\|[^|]+\| ([^|]+) \| (\d+) \|", table, re.MULTILINE)}
    found = figures()
    assert stated.keys() == found.keys()
    assert {name: figure for name, figure in found.items() if figure > stated[name]} == {}
