"""A hostile network: python -m benchmarks.storm requests [--requests 100000 | --minutes 60 [--rate 60]]; idle; scores.

`requests` sends checked completions, malformed requests, given-up requests, half-open connections and requests for
checkpoints in turn, one of them damaged, all at once. It reports wrong answers, server errors, hangs and memory. The
warm-up has every kind of request, fills every slot of the key-value cache and starts as many threads as requests can
be under way: what is read, compiled or touched once is no growth. With --url it goes to a server that runs already;
that server needs a model `small`, as `small_models` makes one.
`idle` opens thousands of idle and half-sent connections beside real clients; `scores` sends ten texts of 1 MB to be
scored, beside which others are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Event, Process, Queue
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.results import Row, report
from benchmarks.serve import PROMPT, server

JSON = {"content-type": "application/json"}
FIELDS = ("model", "prompt", "input", "max_tokens", "temperature", "n", "stop", "logit_bias", "echo", "messages", "x",
          "logprobs", "top_logprobs", "seed", "stream", "k", "pair", "view", "layer", "choices")  # fmt: skip
VALUES = ("small", "masked", "", "\ud800", " " * 5000, 0, -1, 3, 1e308, 2**70, 0.5, None, True, [], [1, "a"], [0, 1],
          {}, {"a": {"b": []}}, {"1": 5}, "a" * 2000, "\x00", "walk", [["a"]])  # fmt: skip
PATHS = ("completions", "chat/completions", "responses", "embeddings", "score", "next-tokens", "tokenize", "explain",
         "fill-mask", "classify", "predict", "choose", "translate", "next-sentence", "nothing")  # fmt: skip
HEADS = (
    b"",
    b"GET /healthz HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n{",
    b"BREW /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"GET /v1/models/%ff%fe%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
)
CHECKED = {"max_tokens": 12, "logprobs": 2}
STEPS = (10, 20, 30, 40)  # checkpoints of the run; the last is damaged
CONTEXT = 1024  # of the small model: a stream of its length takes long enough to be timed
TOGETHER = 48  # requests under way
SLOTS = 16  # sequences that the server generates at once, its default
WARM = 1000  # requests before memory is measured
BLOCKS = 30  # means of memory that a slope is fitted to
KINDS: tuple[tuple[str, dict[str, object]], ...] = (  # every kind of request that these models answer
    ("completions", {"model": "small", "prompt": PROMPT, "max_tokens": 8, "logprobs": 2, "echo": True, "n": 2}),
    ("completions", {"model": "small", "prompt": PROMPT, "max_tokens": 8, "stream": True, "temperature": 0.7}),
    ("chat/completions", {"model": "small", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}),
    ("responses", {"model": "small", "input": PROMPT, "max_output_tokens": 8}),
    ("next-tokens", {"model": "small", "input": PROMPT, "temperatures": True, "temperature": 0.7, "top_p": 0.9}),
    ("fill-mask", {"model": "masked", "input": "the [MASK]"}),
    *((path, {"model": model, "input": PROMPT}) for path in ("score", "tokenize") for model in ("small", "masked")),
    *(("embeddings", {"model": model, "input": [PROMPT[:60]] * 4}) for model in ("small", "masked")),
    *(
        ("explain", {"model": model, "input": PROMPT[:60], "view": view})
        for model in ("small", "masked")
        for view in ("heads", "attention", "steps", "layers", "walk", "kinds")
    ),
)
STREAMS = 5  # whose median rate is taken


def small_models(place: Path) -> list[str]:
    """A GPT-2, a BERT and a run with checkpoints, the last of them damaged."""
    import torch

    from plume.config import PRESETS, TokenizerConfig
    from plume.hf import save_model
    from plume.model.heads import Model
    from plume.text import train_tokenizer
    from plume.train.checkpoint import Checkpoints
    from plume.train.distribute import Ranks
    from plume.util.run_folder import write_recipe

    folder, run = place / "small", place / "runs" / "run"
    if not run.is_dir():
        tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), [PROMPT])
        pieces = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=300), [PROMPT])
        torch.manual_seed(0)
        shape = replace(PRESETS["gpt2-char"], vocab_size=tokenizer.vocab_size, context=CONTEXT)
        model = Model(shape, "next-token")
        masked = Model(replace(PRESETS["bert-tiny"], vocab_size=pieces.vocab_size), "masked-token")
        for parameter in (*model.parameters(), *masked.parameters()):
            torch.nn.init.normal_(parameter, std=0.1)
        save_model(model, folder, tokenizer=tokenizer)
        save_model(masked, place / "masked", tokenizer=pieces)
        run.mkdir(parents=True)
        write_recipe(run, {"train": {"steps": STEPS[-1]}})
        save_model(model, run / "model", tokenizer=tokenizer)
        checkpoints = Checkpoints(run / "checkpoints", Ranks(), keep_last=9, print=print)
        for step in STEPS:
            scaled = {f"model/{n}": p.detach() * (step / STEPS[-1]) for n, p in model.named_parameters()}
            checkpoints.save(step, scaled, {}, best=None)
        last = next(path for path in (run / "checkpoints").iterdir() if path.name.endswith(str(STEPS[-1])))
        largest = max((path for path in last.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 255
        largest.write_bytes(data)
    return [f"small={folder}", f"masked={place / 'masked'}", "--runs", str(place / "runs")]


@contextmanager
def running(place: Path, port: int, *words: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server of the small models; one checkpoint at a time is open, so that each request may open another."""
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "plume", "serve", *small_models(place), "--port", str(port), "--queue", "4096"]
    command += ["--checkpoint-bytes", "1", "--access-log", str(place / "storm.log"), *words]
    with server(command, url) as process:
        yield url, process


# ---- requests ----------------------------------------------------------------------------------------------------


def fuzzed(dice: random.Random) -> bytes:
    """A body that is mostly wrong."""
    if dice.random() < 0.2:
        return dice.choice((b"{", b"[]", b"\xff", b"[" * 5000, b" " * 50_000, b'{"model": "small", "prompt": "\xff"}'))
    body = {dice.choice(FIELDS): dice.choice(VALUES) for _ in range(dice.randrange(1, 6))}
    model = dice.choice(("small", "small", "masked"))
    return json.dumps({"model": model, **body} if dice.random() < 0.8 else body).encode()


@dataclass
class Storm:
    url: str
    dice: random.Random
    process: psutil.Process | None = None
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    expected: list[dict[str, object]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, bytes
    rate: float = 0.0  # most requests a second; 0: as many as are answered

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def body(self, number: int) -> dict[str, object]:
        return {"model": "small", "prompt": f"robot {number}", "seed": number, **CHECKED}

    async def learn(self, client: httpx.AsyncClient) -> None:
        """The answers of requests that are alone."""
        for number in range(40):
            answer = await client.post(f"{self.url}/v1/completions", json=self.body(number))
            (choice,) = answer.json()["choices"]
            self.expected.append({"text": choice["text"], "logprobs": choice["logprobs"]["token_logprobs"]})

    async def warm_up(self) -> None:
        """Every kind of request, every slot to its last position, as many threads of each model as there will be."""
        prompts = [(f"{i} " + PROMPT * CONTEXT)[: CONTEXT - 8] for i in range(SLOTS)]  # a token is a byte
        writings = [("completions", {"model": "small", "prompt": prompt, "max_tokens": 8}) for prompt in prompts]
        readings = [(path, body) for path, body in KINDS if path == "embeddings" for _ in range(TOGETHER)]
        opened = [("next-tokens", {"model": f"run@{step}", "input": "robot"}) for step in STEPS[:-1]]
        limits = httpx.Limits(max_connections=2 * TOGETHER)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            answers = [await client.post(f"{self.url}/v1/{path}", json=body) for path, body in (*KINDS, *opened)]
            posts = (client.post(f"{self.url}/v1/{path}", json=body) for path, body in (*writings, *readings))
            for answer in (*answers, *await asyncio.gather(*posts)):
                self.note(answer, "warm-up" if answer.status_code == 200 else "wrong")

    async def one(self, client: httpx.AsyncClient) -> None:
        kind, number = self.dice.random(), self.dice.randrange(len(self.expected))
        may_time_out = 0.5 <= kind < 0.7
        try:
            if kind < 0.38:
                await self.malformed(client)
            elif kind < 0.48:
                await self.odd_connection()
            elif kind < 0.5:
                await self.checkpoint(client)
            elif kind < 0.6:
                await client.post(f"{self.url}/v1/completions", json=self.body(number), timeout=kind / 20)
                self.count("answered before it was given up")
            elif kind < 0.7:
                reading = {"model": "small", "input": PROMPT * 20}
                await client.post(f"{self.url}/v1/score", json=reading, timeout=kind / 2)
                self.count("answered before it was given up")
            else:
                await self.checked(client, number, stream=kind < 0.85)
        except httpx.TimeoutException:
            self.count("given up" if may_time_out else "hangs")
        except httpx.TransportError as error:
            self.count("broken connections")
            self.failures.append(repr(error))

    def note(self, answer: httpx.Response, name: str) -> None:
        self.count("5xx" if answer.status_code >= 500 else name)
        if answer.status_code >= 500:
            self.failures.append(f"{answer.request.url} {answer.request.content[:300]!r}: {answer.text[:300]}")

    async def malformed(self, client: httpx.AsyncClient) -> None:
        path, body = self.dice.choice(PATHS), fuzzed(self.dice)
        self.note(await client.post(f"{self.url}/v1/{path}", content=body, headers=JSON), "malformed")

    async def checkpoint(self, client: httpx.AsyncClient) -> None:
        """Opens it and closes another; the damaged one is refused, and so is any while one is in use."""
        step = self.dice.choice(STEPS)
        answer = await client.post(f"{self.url}/v1/next-tokens", json={"model": f"run@{step}", "input": "robot"})
        allowed = (409, 429) if step == STEPS[-1] else (200, 429)
        self.note(answer, "checkpoints" if answer.status_code in allowed else "wrong")

    async def checked(self, client: httpx.AsyncClient, number: int, *, stream: bool) -> None:
        text, logprobs = "", list[float]()
        if stream:
            body = self.body(number) | {"stream": True}
            async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                        text += choices[0]["text"]
                        logprobs += choices[0]["logprobs"]["token_logprobs"]
        else:
            answer = await client.post(f"{self.url}/v1/completions", json=self.body(number))
            if answer.status_code == 200:
                (choice,) = answer.json()["choices"]
                text, logprobs = choice["text"], choice["logprobs"]["token_logprobs"]
        right = {"text": text, "logprobs": logprobs} == self.expected[number]
        self.count("5xx" if answer.status_code >= 500 else "right" if right else "wrong")
        if not right:
            self.failures.append(f"{answer.status_code} {text!r} instead of {self.expected[number]}")

    async def odd_connection(self) -> None:
        """Something that is no request, and then silence."""
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(self.dice.choice(HEADS))
        await asyncio.sleep(self.dice.random())
        writer.transport.abort()
        self.count("odd connections")

    async def throw(self, requests: int, seconds: float) -> None:
        """As many requests, or for as long; TOGETHER of them at a time."""
        began, sent = time.monotonic(), 0

        async def client_of_its_own() -> None:
            nonlocal sent
            async with httpx.AsyncClient(timeout=60) as client:
                while (sent < requests) if requests else (time.monotonic() - began < seconds):
                    sent += 1
                    if self.rate:
                        await asyncio.sleep(began + sent / self.rate - time.monotonic())
                    await self.one(client)

        async def watch() -> None:
            assert self.process is not None
            while True:
                self.memory.append((time.monotonic() - began, self.process.memory_info().rss))
                await asyncio.sleep(max(1.0, seconds / 200))

        async with httpx.AsyncClient(timeout=60) as client:
            if not self.expected:
                await self.learn(client)
        watching = [asyncio.create_task(watch())] if self.process is not None else []
        await asyncio.gather(*(client_of_its_own() for _ in range(TOGETHER)))
        for task in watching:
            task.cancel()


def requests(place: Path, count: int, minutes: float, url: str | None, rate: float) -> None:
    if url is not None:
        storm = Storm(url, random.Random(count), rate=rate)
        asyncio.run(storm.throw(count, 60 * minutes))
        report(*verdicts(storm, "requests"))
        return
    with running(place, 8933) as (url, process):
        warming = Storm(url, random.Random(0))
        if minutes or count >= WARM:
            asyncio.run(warming.warm_up())
        asyncio.run(warming.throw(WARM if minutes else min(WARM, max(count, 60)), 0))
        time_to_idle(url)
        storm = Storm(url, random.Random(count + 1), process, expected=warming.expected, rate=rate)
        before, began = process.memory_info().rss, time.monotonic()
        asyncio.run(storm.throw(count, 60 * minutes))
        took = time.monotonic() - began
        idle_after = time_to_idle(url)
        after = process.memory_info().rss
    name = f"{minutes:g} minutes" if minutes else f"{count:,} requests"
    detail = f"{before / 2**20:.0f} MB after {WARM:,} requests, {after / 2**20:.0f} MB at the end, {took:.0f} s"
    shown = Row(key="memory", what=f"{name}: memory at the end, of that after the warm-up", figure=after / before,
                at_most=1.05, detail=detail)  # fmt: skip
    slope, error = memory_slope(storm.memory)
    growth = Row(key="slope", what=f"{name}: growth of memory", figure=slope, unit="MB/hour", digits=1,
                 at_most=2 * error, detail=f"standard error {error:.1f}, {len(storm.memory)} readings")  # fmt: skip
    idle = Row(key="idle", what=f"{name}: time until all is idle", figure=idle_after, unit="s", digits=1, at_most=2)
    report(*verdicts(warming, "warm-up"), *verdicts(storm, name), idle, shown, *([growth] if minutes else []))


def verdicts(storm: Storm, name: str) -> list[Row]:
    for line in storm.failures[:20]:
        print(line)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in sorted(storm.counts.items()))
    bars = {"wrong": "wrong answers", "5xx": "server errors", "hangs": "requests without an answer in 60 s"}
    return [
        Row(key=k, what=f"{name}: {text}", figure=storm.counts.get(k, 0), unit="", digits=0, at_most=0, detail=shown)
        for k, text in bars.items()
    ]


def memory_slope(readings: list[tuple[float, float]]) -> tuple[float, float]:
    """MB per hour over the second half, and its standard error.

    Readings that follow each other are alike, so least squares over all of them would give far too small an error. The
    line is fitted to the means of BLOCKS stretches, and what correlation r is left between neighbouring residuals
    scales the error by sqrt((1 + r) / (1 - r)): n such values tell as much as n (1 - r) / (1 + r) independent ones.
    """
    half = np.array(readings[len(readings) // 2 :])
    if len(half) < BLOCKS:
        return float("nan"), float("nan")
    x, y = (np.array([part.mean() for part in np.array_split(half[:, i], BLOCKS)]) for i in (0, 1))
    x, y = x / 3600, y / 2**20
    (slope, start), covariance = np.polyfit(x, y, 1, cov=True)
    rest = y - slope * x - start
    alike = (rest[1:] @ rest[:-1]) / (rest @ rest) if rest.any() else 0.0
    alike = min(0.9, max(0.0, alike + (1 + 3 * alike) / BLOCKS))  # the estimate is too low by that much (Kendall, 1954)
    return float(slope), float(np.sqrt(covariance[0, 0] * (1 + alike) / (1 - alike)))


def time_to_idle(url: str) -> float:
    """Seconds until no sequence waits or runs and nothing is read."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        gauges = [line for line in lines if line.startswith(("plume_running{", "plume_waiting{", "plume_reading{"))]
        if gauges and all(line.endswith(" 0.0") for line in gauges):
            break
        time.sleep(0.05)
    return time.monotonic() - began


# ---- idle connections --------------------------------------------------------------------------------------------


def probe(url: str, stop: Any, found: Any) -> None:
    """/healthz over and over, each time on a new connection, as a balancer asks: the slowest answer, and failures."""
    slowest, wrong = 0.0, 0
    with httpx.Client(timeout=10, headers={"connection": "close"}) as client:
        while not stop.wait(0.05):
            began = time.monotonic()
            try:
                wrong += client.get(f"{url}/healthz").status_code != 200
            except httpx.TransportError:
                wrong += 1
            slowest = max(slowest, time.monotonic() - began)
    found.put((slowest, wrong))


async def hold(url: str, sockets: int, header_timeout: float) -> tuple[int, int, float]:
    """Answers and failures of real clients, and seconds until the idle connections are gone."""
    host, port = url.removeprefix("http://").split(":")
    right, wrong, opened = 0, 0, asyncio.Event()

    async def real(number: int) -> None:
        nonlocal right, wrong
        body = {"model": "small", "prompt": f"robot {number}", **CHECKED}
        async with httpx.AsyncClient(timeout=30) as client:
            while not opened.is_set():
                try:
                    answer = await client.post(f"{url}/v1/completions", json=body)
                    right, wrong = right + (answer.status_code == 200), wrong + (answer.status_code != 200)
                except httpx.TransportError:
                    wrong += 1

    async def one(number: int) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" if number % 2 else b"")
        kept.append(writer)
        return reader

    kept: list[asyncio.StreamWriter] = []
    others = [asyncio.create_task(real(i)) for i in range(8)]
    readers = []
    for first in range(0, sockets, 100):
        readers += await asyncio.gather(*(one(i) for i in range(first, min(first + 100, sockets))))
    began = time.monotonic()
    for reader in readers:
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), header_timeout + 30)
    gone = time.monotonic() - began
    opened.set()
    await asyncio.gather(*others)
    for writer in kept:
        writer.close()
    return right, wrong, gone


def idle(place: Path, sockets: int, header_timeout: float) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, sockets + 500), hard))
    words = ("--connections", "8000", "--connections-per-address", "8000", "--header-timeout", str(header_timeout))
    for name, more in (("all of them allowed", words), ("with the default limits", words[4:])):
        with running(place, 8935, *more) as (url, _):
            stop, found = Event(), Queue()
            process = Process(target=probe, args=(url, stop, found))  # its clock is not held up by the clients' work
            process.start()
            right, wrong, gone = asyncio.run(hold(url, sockets, header_timeout))
            stop.set()
            slowest, unhealthy = found.get(timeout=30)
            process.join(30)
        what = f"{sockets:,} idle or half-sent connections, {name}"
        failures = wrong + unhealthy
        detail = f"{right} answers to 8 clients meanwhile, {wrong} failures"
        report(
            Row(key=f"{name}, health", what=f"{what}: slowest /healthz", figure=1000 * slowest, unit="ms", digits=0,
                at_most=500, detail=detail),
            Row(key=f"{name}, clients", what=f"{what}: failures of real clients and probes", figure=failures,
                unit="", digits=0, at_most=0, detail=detail),
            Row(key=f"{name}, gone", what=f"{what}: time until they are gone", figure=gone, unit="s", digits=1,
                at_most=header_timeout + 1),
        )  # fmt: skip


# ---- long readings -----------------------------------------------------------------------------------------------


async def stream_rates(url: str, tokens: int) -> float:
    """The median rate of some streams, one after the other."""
    return statistics.median([await stream_rate(url, tokens) for _ in range(STREAMS)])


async def stream_rate(url: str, tokens: int) -> float:
    """Tokens per second of one stream, from its first token on."""
    body = {"model": "small", "prompt": "robot", "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": 1}
    async with (
        httpx.AsyncClient(timeout=600) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        times = [time.monotonic() async for line in answer.aiter_lines() if line.startswith("data: {")]
    return (len(times) - 1) / (times[-1] - times[0])


async def behind_scores(url: str, tokens: int) -> tuple[list[float], list[float], float]:
    """A stream's rate alone and beside ten long scores, seconds of tokenize beside them, and until all is idle."""
    body = {"model": "small", "input": (PROMPT * 10_000)[:990_000]}
    rates = [await stream_rates(url, tokens)]
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=10)) as scoring:
        long = [asyncio.create_task(scoring.post(f"{url}/v1/score", json=body)) for _ in range(10)]
        while reading(url) < 10:
            await asyncio.sleep(0.1)
        beside, waits = asyncio.create_task(stream_rates(url, tokens)), []
        async with httpx.AsyncClient(timeout=60, headers={"connection": "close"}) as client:
            while not beside.done():
                began, asked = time.monotonic(), {"model": "small", "input": PROMPT}
                (await client.post(f"{url}/v1/tokenize", json=asked)).raise_for_status()
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.1)
        rates.append(await beside)
        assert not any(task.done() for task in long), "a score ended before the stream did"
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
    return rates, waits, time_to_idle(url)


def reading(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("plume_reading{"))


def scores(place: Path, tokens: int) -> None:
    with running(place, 8936) as (url, _):
        (alone, beside), waits, idle_after = asyncio.run(behind_scores(url, tokens))
    what = "behind ten scores of 1 MB"
    report(
        Row(key="tokenize", what=f"{what}: slowest of {len(waits)} tokenize", figure=max(waits), unit="s", at_most=0.5),
        Row(key="stream", what=f"{what}: rate of a stream, of that alone", figure=beside / alone, at_least=0.5,
            detail=f"{beside:.0f} and {alone:.0f} tokens/s"),
        Row(key="idle", what="the ten clients gone: time until all is idle", figure=idle_after, unit="s", at_most=1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["requests", "idle", "scores"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=0.0, help="for so long instead of so many requests")
    parser.add_argument("--rate", type=float, default=0.0, help="most requests a second; 0: as many as are answered")
    parser.add_argument("--url", help="a server that runs already, with a model `small`")
    parser.add_argument("--sockets", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=900, help="for scores: of the stream")
    parser.add_argument("--header-timeout", type=float, default=10.0)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "plume-bench-storm")
    given = parser.parse_args()
    given.place.mkdir(parents=True, exist_ok=True)
    if given.what == "requests":
        requests(given.place, 0 if given.minutes else given.requests, given.minutes, given.url, given.rate)
    elif given.what == "scores":
        scores(given.place, given.tokens)
    else:
        idle(given.place, given.sockets, given.header_timeout)


if __name__ == "__main__":
    main()
