"""The documentation site: it builds with warnings as errors, and its reference has every name, option and endpoint."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plume
from plume.cli.verbs import KNOWN
from plume.config import ServeConfig, describe
from plume.config.aliases import ALIASES
from plume.serve import create_app

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    made = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return place


@pytest.mark.slow
def test_the_reference_has_every_name(site):
    def words(page: str) -> set[str]:
        text = re.sub(r"<[^>]+>", " ", (site / "reference" / page).read_text(encoding="utf-8"))
        return set(html.unescape(text).split())

    assert {name for name in plume.__all__ if name not in words("python.html")} == set()
    options = {f"--{row.name.replace('_', '-')}" for v in KNOWN.values() if v.kind for row in describe(v.kind)}
    assert len(options) > 200 and options - words("options.html") == set()
    paths = create_app(ServeConfig(models=("model",))).openapi()["paths"]
    assert len(paths) > 20 and set(paths) - words("http.html") == set()
    assert set(ALIASES) - words("names.html") == set()


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.glob("**/*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//(?!www\.w3)", text), page


@pytest.mark.slow
def test_both_languages_can_be_searched(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - found == set()
    assert [word for word in re.split(index["config"]["separator"], "the 困惑度") if word] == ["the", "困", "惑", "度"]
