"""The server under load, beside a peer: python -m benchmarks.serve [clients|storm|page] [--precision int8]."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from benchmarks.results import Row, report, skip

PROMPT = (
    "In a shocking finding, scientist discovered a herd of unicorns living in a remote, previously unexplored valley. "
)
LINUX_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@contextmanager
def server(command: list[str], url: str) -> Iterator[psutil.Process]:
    """A server in its own process, from its first answer to the end of the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        try:
            until = time.monotonic() + 300
            while True:
                try:
                    if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(f"{command} did not start:\n{log.read().decode()[-2000:]}")
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


# ---- many streaming clients --------------------------------------------------------------------------------------


@dataclass
class Load:
    tokens: int
    seconds: float
    first: list[float]  # seconds to the first token, client by client

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def stream(client: httpx.AsyncClient, url: str, number: int, tokens: int, end: int) -> tuple[int, float]:
    body = {"model": "shape", "prompt": f"{PROMPT} {number}", "max_tokens": tokens, "stream": True, "seed": number}
    body |= {"temperature": 1.0, "top_k": 40}
    body |= {"logit_bias": {str(end): -100}}  # without an end token every answer has the same length
    began, first, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                first = first if count else time.perf_counter() - began
                count += 1
    return tokens, first


async def load(url: str, clients: int, tokens: int, end: int) -> Load:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        began = time.perf_counter()
        done = await asyncio.gather(*(stream(client, url, i, tokens, end) for i in range(clients)))
    return Load(sum(count for count, _ in done), time.perf_counter() - began, [first for _, first in done])


def peer_command(folder: Path, precision: str, port: int) -> list[str]:
    """llama-cpp-python's server with the same weights, in the precision nearest to ours."""
    from plume.config import ExportConfig
    from plume.generate.export import export

    file = folder.parent / f"{folder.name}-{precision}.gguf"
    if not file.is_file():
        export(ExportConfig(model=str(folder), precision=precision, out=file))
    threads = str(len(psutil.Process().cpu_affinity()))
    words = ["--model", str(file), "--model_alias", "shape", "--n_ctx", "1024", "--n_threads", threads]
    return ["-m", "llama_cpp.server", *words, "--port", str(port), "--interrupt_requests", "false"]


def clients(place: Path, rounds: int, tokens: int, precision: str, preset: str) -> None:
    from plume.config import PRESETS
    from plume.generate.bench import random_folder

    end = PRESETS[preset].vocab_size - 1
    folder = place / preset
    if not folder.is_dir():
        random_folder(preset, place)
    ours, theirs = "http://127.0.0.1:8931", "http://127.0.0.1:8932"
    words = ["-m", "plume", "serve", f"shape={folder}", "--port", "8931", "--engine.precision", precision]
    found: dict[str, list[Load]] = {"plume, 1 client": [], "plume, 16 clients": [], "llama-cpp-python, 16 clients": []}
    with (
        server([*words, "--access-log", str(place / "access.log")], ours),
        server(peer_command(folder, precision, 8932), theirs),
    ):
        asyncio.run(load(ours, 2, 8, end))
        asyncio.run(load(theirs, 1, 8, end))
        for _ in range(rounds):  # in turn, so that a busy moment of the machine meets all of them
            for name, url, count in zip(found, (ours, ours, theirs), (1, 16, 16), strict=True):
                found[name].append(asyncio.run(load(url, count, tokens, end)))
    rates = {name: statistics.median(one.rate for one in runs) for name, runs in found.items()}
    late = {name: sorted(first for run in runs for first in run.first) for name, runs in found.items()}
    p95 = {name: firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))] for name, firsts in late.items()}
    one, many, peer = rates
    speeds = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items())
    report(
        Row(
            key="scaling",
            what=f"124M, {precision}: tokens/s of 16 streaming clients against one",
            figure=rates[many] / rates[one],
            at_least=3.0,
            detail=speeds,
        ),
        Row(
            key="peer",
            what="tokens/s of 16 clients against llama-cpp-python's server",
            figure=rates[many] / rates[peer],
            at_least=1.5,
            detail=speeds,
        ),
        *(
            Row(key=f"p95, {n}", what=f"p95 time to the first token, {n}", figure=1000 * p95[n], unit="ms", digits=0)
            for n in p95
        ),
    )


# ---- a storm of short requests -----------------------------------------------------------------------------------


def storm(place: Path, requests: int) -> None:
    """Short requests, some given up half way, some malformed: every answer is compared with the model's own."""
    import torch

    from plume import load as open_model
    from plume.config import PRESETS, TokenizerConfig
    from plume.heads import Model
    from plume.text import train_tokenizer
    from plume.weights import save_model

    folder = place / "small"
    if not folder.is_dir():
        tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [PROMPT])
        torch.manual_seed(0)
        model = Model(replace(PRESETS["gpt2-char"], vocab_size=tokenizer.vocab_size), "next-token")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        save_model(model, folder, tokenizer=tokenizer)
    lm = open_model(folder, slots=1)
    expected = [lm.generate(f"robot {i}", max_new_tokens=12, seed=i, top_k=None).text for i in range(40)]
    lm.close()
    url = "http://127.0.0.1:8933"
    words = ["-m", "plume", "serve", f"small={folder}", "--port", "8933", "--queue", "4096"]
    with server([*words, "--access-log", str(place / "storm.log")], url) as process:
        asyncio.run(throw(url, 400, expected))
        before = process.memory_info().rss
        counts = asyncio.run(throw(url, requests, expected))
        after = process.memory_info().rss
        metrics = httpx.get(f"{url}/metrics").text
    left = [line for line in metrics.splitlines() if line.startswith(("plume_active{", "plume_waiting{"))]
    assert all(line.endswith(" 0.0") for line in left), left
    what = f"{requests:,} short requests, some given up, some malformed"
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    report(
        Row(
            key="wrong",
            what=f"{what}: wrong answers",
            figure=counts["wrong"],
            unit="",
            digits=0,
            at_most=0,
            detail=shown,
        ),
        Row(key="5xx", what=f"{what}: server errors", figure=counts["5xx"], unit="", digits=0, at_most=0),
        Row(
            key="memory",
            what=f"{what}: memory after, of that before",
            figure=after / before,
            at_most=1.05,
            detail=f"{before / 2**20:.0f} MB before, {after / 2**20:.0f} MB after",
        ),
    )


async def throw(url: str, count: int, expected: list[str]) -> dict[str, int]:
    counts = {"right": 0, "wrong": 0, "given up": 0, "refused": 0, "5xx": 0}
    gate, dice = asyncio.Semaphore(48), random.Random(count)

    async def one(client: httpx.AsyncClient, kind: float, number: int) -> None:
        body = {"model": "small", "prompt": f"robot {number}", "max_tokens": 12, "seed": number}
        async with gate:
            if kind < 0.15:
                bad = [
                    b"{",
                    b"[]",
                    b'{"model": 1}',
                    b'{"model": "small", "prompt": "\xff"}',
                    b'{"model":"small","n":-1}',
                ]
                answer = await client.post(f"{url}/v1/completions", content=bad[number % 5], headers=JSON)
                counts["5xx" if answer.status_code >= 500 else "refused"] += 1
                return
            try:
                wait = 60 if kind > 0.35 else kind / 10
                if kind < 0.6:
                    answer = await client.post(f"{url}/v1/completions", json=body, timeout=wait)
                    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else None
                else:
                    text = ""
                    async with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
                        async for line in answer.aiter_lines():
                            if line.startswith("data: {"):
                                text += json.loads(line[6:])["choices"][0]["text"]
            except httpx.TimeoutException:
                counts["given up"] += 1
                return
            kind_of = "5xx" if answer.status_code >= 500 else "right" if text == expected[number] else "wrong"
            counts[kind_of] += 1

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client, dice.random(), dice.randrange(len(expected))) for _ in range(count)))
    return counts


JSON = {"content-type": "application/json"}


# ---- the page ----------------------------------------------------------------------------------------------------


def page(place: Path, model: Path | None) -> None:
    """First paint of the Explorer, and how long a next-token answer takes, on a model of the demo's size."""
    from playwright.sync_api import sync_playwright

    from plume.generate.bench import random_folder

    url = "http://127.0.0.1:8934"
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        skip("the Explorer needs a Chromium to be drawn in, which is not here")
    if model is None:
        model = place / "gpt2-laptop" if (place / "gpt2-laptop").is_dir() else random_folder("gpt2-laptop", place)
    words = ["-m", "plume", "serve", f"demo={model}", "--port", "8934", "--access-log", str(place / "page.log")]
    with server(words, url), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=LINUX_FLAGS)
        paints = []
        for _ in range(5):
            tab = browser.new_page()
            tab.goto(f"{url}/#text=def+main(")
            tab.wait_for_selector(".candidates .row")
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            tab.close()
        browser.close()
        with httpx.Client(base_url=url) as client:
            times = []
            for i in range(30):
                began = time.perf_counter()
                body = {"model": "demo", "text": f"def main{i}(self, value):", "k": 200, "temperatures": True}
                client.post("/v1/next-tokens", json=body).raise_for_status()
                times.append(1000 * (time.perf_counter() - began))
    for key, what, bar, taken in (
        ("paint", "the Explorer on the demo's model: first paint", 1000, paints),
        ("next", "the Explorer on the demo's model: a next-token answer", 150, times),
    ):
        slowest = f"slowest of {len(taken)}: {max(taken):.0f} ms"
        report(
            Row(key=key, what=what, figure=statistics.median(taken), unit="ms", digits=0, at_most=bar, detail=slowest)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["clients", "storm", "page", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--precision", choices=["float32", "int8"], default="int8")
    parser.add_argument("--preset", default="gpt2", help="for clients: the shape of the model")
    parser.add_argument("--model", type=Path, help="for page: unset means random weights of the demo's shape")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "plume-bench-serve")
    given = parser.parse_args()
    given.place.mkdir(parents=True, exist_ok=True)
    if given.what in ("clients", "all"):
        clients(given.place, given.rounds, given.tokens, given.precision, given.preset)
    if given.what in ("storm", "all"):
        storm(given.place, given.requests)
    if given.what in ("page", "all"):
        page(given.place, given.model)


if __name__ == "__main__":
    main()
