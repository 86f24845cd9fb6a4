"""The server under load, beside a peer: python -m benchmarks.serve [clients|slots|page] [--precision int8]."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from benchmarks.results import Row, made_text, report, skip

PROMPT = (
    "In a shocking finding, scientist discovered a herd of unicorns living in a remote, previously unexplored valley. "
)
LINUX_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


Body = Mapping[str, Any]
NOTHING: Body = MappingProxyType({})


@contextmanager
def server(command: list[str], url: str, program: str = sys.executable) -> Iterator[psutil.Process]:
    """A server in its own process, from its first answer to the end of the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([program, *command], stdout=log, stderr=log)
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


async def stream(
    client: httpx.AsyncClient, url: str, number: int, tokens: int, end: int, more: Body
) -> tuple[int, float]:
    body = {"model": "shape", "prompt": f"{PROMPT} {number}", "max_tokens": tokens, "stream": True, "seed": number}
    body |= {"temperature": 1.0, "top_k": 40}
    body |= {"logit_bias": {str(end): -100}} | more  # without an end token every answer has the same length
    began, first, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                first = first if count else time.perf_counter() - began
                count += 1
    return tokens, first


async def load(url: str, clients: int, tokens: int, end: int, more: Body = NOTHING, first: int = 0) -> Load:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        began = time.perf_counter()
        done = await asyncio.gather(*(stream(client, url, first + i, tokens, end, more) for i in range(clients)))
    return Load(sum(count for count, _ in done), time.perf_counter() - began, [first for _, first in done])


def gguf_file(folder: Path, precision: str) -> Path:
    """The same weights for llama.cpp, in the precision nearest to ours."""
    from plume.config import ExportConfig
    from plume.inference.export import export

    file = folder.parent / f"{folder.name}-{precision}.gguf"
    if not file.is_file():
        export(ExportConfig(model=str(folder), precision=precision, out=file))
    return file


def threads() -> str:
    return str(len(psutil.Process().cpu_affinity()))


def peer_command(folder: Path, precision: str, port: int) -> list[str]:
    """llama-cpp-python's server."""
    words = ["--model", str(gguf_file(folder, precision)), "--model_alias", "shape", "--n_ctx", "1024"]
    words += ["--n_threads", threads()]
    return ["-m", "llama_cpp.server", *words, "--port", str(port), "--interrupt_requests", "false"]


def clients(place: Path, rounds: int, tokens: int, precision: str, preset: str) -> None:
    from plume.bench import random_folder
    from plume.config import PRESETS

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
            what="tokens/s of 16 clients against llama-cpp-python's server, which answers one request at a time",
            figure=rates[many] / rates[peer],
            detail=speeds,
        ),
        *(
            Row(key=f"p95, {n}", what=f"p95 time to the first token, {n}", figure=1000 * p95[n], unit="ms", digits=0)
            for n in p95
        ),
    )


def slots(place: Path, rounds: int, tokens: int, precision: str, preset: str) -> None:
    """Beside llama.cpp's own server with a slot for each client, both at temperature 1 with top-k 40 and top-p 0.9."""
    from plume.bench import random_folder
    from plume.config import PRESETS

    program = shutil.which("llama-server")
    if program is None:
        skip("llama.cpp's own server (llama-server) is not on the path")
    end, folder = PRESETS[preset].vocab_size - 1, place / preset
    if not folder.is_dir():
        random_folder(preset, place)
    ours, theirs = "http://127.0.0.1:8933", "http://127.0.0.1:8934"
    for count in (16, 64):
        mine = ["-m", "plume", "serve", f"shape={folder}", "--port", "8933", "--engine.precision", precision]
        mine += ["--batch", str(count), "--access-log", str(place / "access.log")]
        other = ["-m", str(gguf_file(folder, precision)), "--alias", "shape", "--port", "8934", "-np", str(count)]
        other += ["-c", str(256 * count), "-t", threads(), "-tb", threads()]
        found: dict[str, list[Load]] = {ours: [], theirs: []}
        bodies = {ours: {"top_p": 0.9}, theirs: {"top_p": 0.9, "min_p": 0.0, "ignore_eos": True, "logit_bias": []}}
        with server(mine, ours), server(other, theirs, program):
            for url in found:
                asyncio.run(load(url, count, 4, end, bodies[url]))
            for turn in range(1, rounds + 1):  # other prompts each time: none is in a cache
                for url, runs in found.items():
                    runs.append(asyncio.run(load(url, count, tokens, end, bodies[url], first=turn * count)))
        report(*slot_rows(count, precision, *found.values()))


def slot_rows(count: int, precision: str, ours: list[Load], theirs: list[Load]) -> Iterator[Row]:
    mine, other = (statistics.median(run.rate for run in runs) for runs in (ours, theirs))
    late = [sorted(first for run in runs for first in run.first) for runs in (ours, theirs)]
    p95 = [firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))] for firsts in late]
    yield Row(
        key=f"slots, {count}",
        what=f"124M, {precision}: tokens/s of {count} streaming clients against llama.cpp's server with as many slots",
        figure=mine / other,
        at_least=1.5,
        detail=f"{mine:.1f} and {other:.1f} tokens/s",
    )
    yield Row(
        key=f"slots, {count}, p95",
        what=f"p95 time to the first token of {count} clients, of llama.cpp's server's",
        figure=p95[0] / p95[1],
        at_most=1.0,
        detail=f"{1000 * p95[0]:.0f} and {1000 * p95[1]:.0f} ms",
    )


# ---- the page ----------------------------------------------------------------------------------------------------


def page(place: Path, model: Path | None, preset: str) -> None:
    """The Explorer on a model of the demo's size, on a large one, and saved as one file."""
    from playwright.sync_api import sync_playwright

    from plume.bench import random_folder

    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None)
    if chromium is None:
        skip("the Explorer needs a Chromium to be drawn in, which is not here")
    if model is None:
        model = place / "gpt2-laptop" if (place / "gpt2-laptop").is_dir() else random_folder("gpt2-laptop", place)
    large = place / preset if (place / preset).is_dir() else random_folder(preset, place)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=LINUX_FLAGS)
        served_page(browser, place, model, large)
        saved_page(browser, place, model)
        browser.close()


def served_page(browser: Any, place: Path, model: Path, large: Path) -> None:
    """First paint, a next-token answer, the walk's data, and the map of effects of a large model."""
    url = "http://127.0.0.1:8934"
    words = ["-m", "plume", "serve", f"demo={model}", f"large={large}", "--port", "8934"]
    with server([*words, "--access-log", str(place / "page.log")], url):
        paints = []
        for _ in range(5):
            tab = browser.new_page()
            tab.goto(f"{url}/#text=def+main(")
            tab.wait_for_selector(".candidates .row")
            paints.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            tab.close()
        with httpx.Client(base_url=url, timeout=120) as client:

            def taken(count: int, path: str, **body: Any) -> list[float]:
                times = []
                for i in range(count):
                    size = body.get("size", 8)
                    began = time.perf_counter()
                    asked = {"model": "demo", "input": [i + 1, *range(2, size + 1)], **body}
                    client.post(path, json=asked).raise_for_status()
                    times.append(1000 * (time.perf_counter() - began))
                return times

            nexts = taken(30, "/v1/next-tokens", k=200, temperatures=True)
            walks = taken(10, "/v1/explain", view="walk", layer=1, head=0, query=31, size=32)
            effects = taken(3, "/v1/explain", view="effects", part="head", value="zero", model="large", size=16)
    for key, what, bar, times in (
        ("paint", "the Explorer on the demo's model: first paint", 1000, paints),
        ("next", "the Explorer on the demo's model: a next-token answer", 150, nexts),
        ("walk", "the Explorer on the demo's model: the walk's data of 32 tokens", 1000, walks),
        ("effects", f"the effects of all heads of {large.name} on 16 tokens", 10_000, effects),
    ):
        slowest = f"slowest of {len(times)}: {max(times):.0f} ms"
        report(
            Row(key=key, what=what, figure=statistics.median(times), unit="ms", digits=0, at_most=bar, detail=slowest)
        )


def saved_page(browser: Any, place: Path, model: Path) -> None:
    """The page as one file: its size, its speed, and its next tokens beside those of a server of the same weights."""
    from plume.hf import resolve

    file, folder = place / "saved.html", eight_bits(resolve(str(model)), place / "eight_bits")
    subprocess.run([sys.executable, "-m", "plume", "explore", str(model), "--save", str(file)], check=True)
    text = made_text(200_000)
    prompts = [text[i : i + 80] for i in range(1000, 200_000, 3900)][:50]
    tab = browser.new_context(offline=True).new_page()
    tab.goto(file.as_uri())
    tab.wait_for_selector(".candidates .row")
    ask = "async ([path, body]) => (await import('plume/api.js')).createApi().ask('bench', path, body)"
    speeds = []
    for seed in range(5):
        began = time.perf_counter()
        tab.evaluate(ask, ["/v1/completions", {"prompt": "def ", "max_tokens": 100, "seed": seed, "top_k": 40}])
        made = tab.evaluate(ask, ["/v1/next-tokens", {"input": "def ", "k": 1}])  # the page answers in turn
        assert made["tokens"]
        speeds.append(100 / (time.perf_counter() - began))
    found = [tab.evaluate(ask, ["/v1/next-tokens", {"input": p, "k": 10}])["candidates"]["tokens"] for p in prompts]
    tab.close()
    url, agree = "http://127.0.0.1:8935", {}
    for name, words in {
        "same": [str(folder), "--engine.engine", "torch"],
        "float": [str(model)],
        "int8": [str(model), "--engine.precision", "int8"],
    }.items():
        words[0] = f"demo={words[0]}"
        with server(["-m", "plume", "serve", *words, "--port", "8935", "--access-log", str(place / "page.log")], url):
            bodies = [{"model": "demo", "input": prompt, "k": 10} for prompt in prompts]
            answers = [httpx.post(f"{url}/v1/next-tokens", json=body, timeout=60).raise_for_status() for body in bodies]
        theirs = [answer.json()["candidates"]["tokens"] for answer in answers]
        agree[name] = sum(a == b for a, b in zip(found, theirs, strict=True))
        shared = sum(len({*a} & {*b}) for a, b in zip(found, theirs, strict=True)) / 10 / len(prompts)
        agree[f"{name} shared"] = shared
    other = ", ".join(
        f"{name}: {agree[name]} lists, {agree[f'{name} shared']:.1%} of tokens" for name in ("float", "int8")
    )
    size = file.stat().st_size / 1e6
    report(
        Row(key="saved-size", what="the saved page of the demo's model: its size", figure=size, unit="MB", at_most=15),
        Row(
            key="saved-speed", what="the saved page: tokens/s in Chromium", figure=statistics.median(speeds),
            unit="tokens/s", digits=0, at_least=20, detail=f"slowest of 5: {min(speeds):.0f}",
        ),
        Row(
            key="saved-same", what="the saved page: prompts of 50 with the server's ten next tokens, same weights",
            figure=agree["same"], unit="", digits=0, at_least=50, detail=f"servers of other weights: {other}",
        ),
    )  # fmt: skip


def eight_bits(model: Path, folder: Path) -> Path:
    """The same model with the weights that eight bits leave: groups of 64 columns, scales as bfloat16 rounded up."""
    import numpy as np
    import torch

    from plume.hf import load_model, load_tokenizer_of, save_model

    loaded = load_model(model)
    for name, parameter in loaded.named_parameters():
        if parameter.ndim == 2 and "positions" not in name:
            weight = parameter.detach().numpy()
            groups = np.pad(weight, ((0, 0), (0, -weight.shape[1] % 64))).reshape(len(weight), -1, 64)
            scales = np.maximum(np.abs(groups).max(2, keepdims=True), np.float32(1e-30)) / np.float32(127)
            scales = ((scales.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32)
            left = (np.rint(groups / scales) * scales).reshape(len(weight), -1)[:, : weight.shape[1]]
            parameter.data = torch.from_numpy(left.copy())
    return save_model(loaded, folder, tokenizer=load_tokenizer_of(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["clients", "slots", "page", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precision", choices=["float32", "int8"], default="int8")
    parser.add_argument("--preset", default="gpt2", help="for clients and page: the shape of the large model")
    parser.add_argument("--model", type=Path, help="for page: unset means random weights of the demo's shape")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "plume-bench-serve")
    given = parser.parse_args()
    given.place.mkdir(parents=True, exist_ok=True)
    if given.what in ("clients", "all"):
        clients(given.place, given.rounds, given.tokens, given.precision, given.preset)
    if given.what in ("page", "all"):
        page(given.place, given.model, given.preset)
    if given.what in ("slots", "all"):  # last: it ends here where there is no llama-server
        slots(given.place, given.rounds, given.tokens, given.precision, given.preset)


if __name__ == "__main__":
    main()
