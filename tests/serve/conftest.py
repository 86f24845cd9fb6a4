"""Tiny models with real tokenizers, and a real server on loopback."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import Running, run_server, tiny
from visit import CHROMIUM, EVIL, FLAGS, LIMIT, Visit

from plume.config import EngineConfig, ServeConfig, TokenizerConfig
from plume.text import load_tokenizer
from plume.util.run_folder import write_recipe


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    bpe, pieces = TokenizerConfig(vocab_size=400), TokenizerConfig(kind="wordpiece", vocab_size=400)
    return {
        "gpt": tiny("gpt2", "next-token", place / "gpt", bpe),
        "other": tiny("openai-gpt", "next-token", place / "other", TokenizerConfig(kind="characters")),
        "bert": tiny("bert-tiny", "masked-token", place / "bert", pieces),
        "labels": tiny("bert-tiny", "classify", place / "labels", pieces, labels=("bad", "good")),
        "tags": tiny("bert-tiny", "tag", place / "tags", pieces, labels=("O", "NAME", "PLACE")),
        "spans": tiny("bert-tiny", "span", place / "spans", pieces),
    }


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as training leaves it."""
    place = tmp_path_factory.mktemp("runs")
    for name, steps in (("first", 40), ("second", 20)):
        folder = place / name
        folder.mkdir()
        write_recipe(folder, {"train": {"steps": steps}})
        rows = []
        for step in range(10, steps + 1, 10):
            point = {
                "loss": 6.0 - step / 20,
                "lr": 1e-3,
                "gradient_norm": 0.5,
                "tokens": 100 * step,
                "seconds": step / 2,
            }
            rows += [
                {"step": step, **point, "tokens_per_second": 200.0},
                {"step": step, "validation_loss": 6.1 - step / 20},
            ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "samples.txt").write_text("--- step 10\nOnce upon <b>a</b>\n--- step 20\nOnce upon a time\n")
    return place


@pytest.fixture(scope="session")
def serve_config(models: dict[str, Path], runs_folder: Path) -> ServeConfig:
    places = tuple(str(path) for path in models.values())
    return ServeConfig(models=places, runs=runs_folder, engine=EngineConfig(engine="torch"), batch=8, queue=64)


@pytest.fixture(scope="session")
def server(serve_config: ServeConfig) -> Iterator[Running]:
    yield from run_server(serve_config)


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def endless(models) -> dict:
    """A request that goes on for long: the end token is forbidden, and the window slides."""
    end = load_tokenizer(models["gpt"]).end
    return {
        "model": "gpt",
        "prompt": "The robot",
        "max_tokens": 4000,
        "overflow": "slide",
        "logit_bias": {str(end): -1000},
    }


# ---- the page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium; Debian's package chromium-headless-shell would do")
    playwright.expect.set_options(timeout=LIMIT)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which checks a page's accessibility."""
    file = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
    if not file.is_file():
        pytest.skip("needs axe-core: npm install --prefix .venv axe-core@4")
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(models, runs_folder, serve_config) -> Iterator[Running]:
    places = (str(models["gpt"]), str(models["bert"]), f"{EVIL}={models['other']}")
    yield from run_server(replace(serve_config, models=places))


@pytest.fixture
def visit(browser, site) -> Iterator[Visit]:
    visit = Visit(browser, site)
    yield visit
    visit.close()
