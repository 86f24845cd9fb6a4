"""What can be counted about the package: `python tests/architecture.py` prints the figures, with places."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "plume").rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in FILES.items()}
COMPILED = {
    "arithmetic.py",
    "forward.py",
    "fused_attention.py",
    "lanes.py",
    "sampling.py",
    "tiles.py",
    "encode_cache.py",
}  # calls cost there
NAMES = {"gpt2", "openai-gpt", "bert", "roberta", "distilbert", "marian"}
RUN = 6  # lines in a row that count as written twice
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path, tree in TREES.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def lines(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def body_lines(file: str, cls: str) -> int:
    """Lines of a class's forward, without its signature."""
    tree = TREES[ROOT / "plume" / file]
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    (forward,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    assert forward.end_lineno is not None
    return forward.end_lineno - forward.body[0].lineno + 1


def typed(node: Function) -> bool:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    named = [a for a in given if a is not None and a.arg not in ("self", "cls")]
    return node.returns is not None and all(a.annotation is not None for a in named)


def open_keywords() -> int:
    """Public functions that take any keyword at all."""
    return sum(
        node.args.kwarg is not None
        and (not node.name.startswith("_") or node.name == "__call__")
        and not re.search(r"Unpack|P\.kwargs", ast.unparse(node.args.kwarg.annotation or ast.Constant(None)))
        for _, node in functions()
    )


def name_branches() -> list[str]:
    """Comparisons with a family's name outside the tables of families."""
    return [
        f"{path.name}:{node.lineno}"
        for path, tree in TREES.items()
        if path.name != "families.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and NAMES & {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
    ]


def number_defaults() -> int:
    """`x or 3`, which takes a 0 for unset; a machine never has 0 cores."""
    return sum(
        isinstance(node, ast.BoolOp)
        and isinstance(node.op, ast.Or)
        and any(isinstance(v, ast.Constant) and type(v.value) in (int, float) for v in node.values)
        and "cpu_count" not in ast.unparse(node)
        for tree in TREES.values()
        for node in ast.walk(tree)
    )


def silent_modules() -> int:
    return sum(bool(text.strip()) and ast.get_docstring(TREES[path]) is None for path, text in FILES.items())


def unused_names() -> list[str]:
    """Functions, classes and methods that nothing names but their own definition; what a decorator takes is used."""
    everywhere = Counter[str]()
    for folder in ("plume", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            everywhere.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    called_by_others = re.compile(r"__\w+__|on_(start|end)|collect|handle_exit|loglikelihood\w*|generate_until")
    return [
        f"{path.name}:{node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, Function | ast.ClassDef)
        and not node.decorator_list
        and everywhere[node.name] < 2
        and not called_by_others.fullmatch(node.name)
    ]


def repeated_runs() -> list[str]:
    """Places where RUN lines of code stand again, to the letter; signatures and tables of names do not count."""
    places = defaultdict[tuple[str, ...], list[str]](list)
    for path, text in FILES.items():
        rows = [(number, line.split("  #")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
        code = [
            (n, row)
            for n, row in rows
            if re.search(r"\w.*\w.*[=(.]|return|yield", row) and not re.match(r"[#@\"']|f[\"']", row)
        ]
        code = [(n, row) for n, row in code if not re.match(r"(from|import) |\w+: |\*?layer\(", row)]
        for i in range(len(code) - RUN + 1):
            places[tuple(row for _, row in code[i : i + RUN])].append(f"{path.name}:{code[i][0]}")
    return [" ~ ".join(where) for where in places.values() if len(where) > 1]


def repeated_names() -> list[str]:
    """File names and class names that the package has more than once; every package has its `__init__`."""
    places = defaultdict[str, list[str]](list)
    for path, tree in TREES.items():
        if path.name != "__init__.py":
            places[path.name].append(str(path.relative_to(ROOT)))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[f"class {node.name}"].append(str(path.relative_to(ROOT)))
    return [f"{name}: {' ~ '.join(where)}" for name, where in places.items() if len(where) > 1]


def repeated_literals() -> list[str]:
    """Sets of values that are written out as a Literal in more than one place."""
    places = defaultdict[frozenset[str], list[str]](list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == "Literal":
                values = frozenset(str(c.value) for c in ast.walk(node.slice) if isinstance(c, ast.Constant))
                places[values].append(f"{path.name}:{node.lineno}")
    return [f"{sorted(values)}: {' ~ '.join(where)}" for values, where in places.items() if len(where) > 1]


def training_in_inference() -> list[str]:
    """Modules at or above inference that import training, by whatever means."""
    above = ("config", "util", "text", "data", "model", "hf", "explain", "inference")
    return [
        str(path.relative_to(ROOT))
        for path, text in FILES.items()
        if path.relative_to(ROOT).parts[1] in above and re.search(r"plume\.train|from plume import train", text)
    ]


def figures() -> dict[str, int]:
    """What stands in the table of docs/architecture.md, by the first words of its rows."""
    every = list(functions())
    return {
        "lines of Python": sum(len(text.splitlines()) for text in FILES.values()),
        "Python files": len(FILES),
        "lines of the longest file": max(len(text.splitlines()) for text in FILES.values()),
        "lines of the longest function": max(lines(node) for path, node in every if path.name not in COMPILED),
        "lines of the longest compiled function": max(lines(node) for path, node in every if path.name in COMPILED),
        "lines of attention": body_lines("model/transformer.py", "Attention"),
        "lines of a block": body_lines("model/transformer.py", "Block"),
        "places that advance the cache": sum(text.count("cache.advance(") for text in FILES.values()),
        "functions without all their types": sum(not typed(node) for _, node in every),
        "branches on a model's name": len(name_branches()),
        "functions that take any keyword": open_keywords(),
        "numbers behind `or`": number_defaults(),
        "modules without a docstring": silent_modules(),
        "names that nothing uses": len(unused_names()),
        f"runs of {RUN} lines written twice": len(repeated_runs()),
        "file and class names used twice": len(repeated_names()),
        "sets of Literal values written twice": len(repeated_literals()),
        "imports of training in inference and above": len(training_in_inference()),
    }


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"| {name} | {figure} |")
    for found in (name_branches, unused_names, repeated_runs, repeated_names, repeated_literals, training_in_inference):
        print(found.__name__, *found(), sep="\n  ")
