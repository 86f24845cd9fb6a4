"""Whatever a client sends: no 5xx, no metric series, no block of the event loop; long work is bounded and shared."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import serving

from plume.serve import new_key, schemas
from plume.serve.app import GENERATING, READING
from plume.serve.middleware import METHODS, is_this_machine
from plume.serve.scheduler import Scheduler
from plume.util.run_folder import write_recipe

JSON = {"content-type": "application/json"}
PATIENCE = 60.0  # seconds that anything may take on a busy machine
WORDS = "The robot must obey the orders given it by human beings. "


@pytest.fixture(scope="module")
def small(serve_config, models):
    return replace(serve_config, models=(str(models["gpt"]), str(models["bert"])), runs=None)


def connect(site) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def raw(site, data: bytes) -> bytes:
    with connect(site) as made:
        made.sendall(data)
        return made.recv(65536)


def wait_until(check: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


def becomes_idle(scheduler: Scheduler) -> None:
    """Long before the work that was cancelled would have ended."""
    wait_until(lambda: scheduler.idle)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "gpt", "\\ud800": 1}',
        b'{"model": "gpt", "\\ud800\\udc00\\ud800": {"\\udfff": "\\ud800"}}',
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "gpt", "prompt": ["a", "\\udc00"]}',
        b'{"model": "gpt", "prompt": "a", "stop": "\\ud800"}',
        b'{"model": "gpt", "prompt": "a", "logit_bias": {"\\ud800": 1}}',
        b'{"model": "gpt", "prompt": "a", "user": "\\ud800"}',
        b'{"model": "gpt", "prompt": "a", "stop": [1, null]}',
        b'{"model": "gpt", "prompt": "a", "n": 1e400}',
        b'{"model": "gpt", "prompt": "a", "seed": 1' + b"0" * 400 + b"}",
        b'{"model": "gpt", "prompt": "a", "max_tokens": -1}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe\x00",
        b" " * 1_000_000,
        b'{"model": "gpt", "prompt": [' + b"-1," * 199_999 + b"-1]}",
        b'{"model": "gpt", "prompt": [' + b'"x",' * 300_000 + b'"x"]}',
        json.dumps({"model": "gpt", **{f"field{i}": i for i in range(50_000)}}).encode(),
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
def test_a_wrong_body_is_a_400_and_blocks_nobody(small, site, body):
    began = time.process_time()  # of the server too, which is a thread
    for path in ("completions", "score", "embeddings", "tokenize"):
        answer = httpx.post(f"{site.url}/v1/{path}", content=body, headers=JSON, timeout=PATIENCE)
        assert answer.status_code in (400, 404), (path, answer.text[:300])
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 10_000
    assert time.process_time() - began < 10


@pytest.fixture(scope="module")
def site(small):
    with serving(small) as (site, _):
        yield site


@pytest.mark.parametrize("fill", [" ", "\n", "a", "\t ", "é"])
def test_a_megabyte_of_one_character_does_not_block_the_loop(site, fill):
    """While it is tokenized, /healthz answers before this process has computed for a second."""
    body = {"model": "gpt", "input": fill * (900_000 // len(fill.encode()))}
    with httpx.Client(base_url=site.url) as client, httpx.Client(base_url=site.url, timeout=PATIENCE) as health:
        done = threading.Event()
        slowest = 0.0

        def ask() -> None:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/score", json=body, timeout=httpx.Timeout(PATIENCE, read=3))
            done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        while not done.is_set():
            began = time.process_time()
            assert health.get("/healthz").status_code == 200
            slowest = max(slowest, time.process_time() - began)
            time.sleep(0.01)
        thread.join()
    assert slowest < 1
    becomes_idle(site.app.state.models._open["gpt"].scheduler)


def test_methods_paths_and_hosts_make_no_series(site):
    def series() -> set[str]:
        found = text_string_to_metric_families(httpx.get(f"{site.url}/metrics").text)
        return {str((s.name, sorted(s.labels.items()))) for family in found for s in family.samples}

    def odd(i: int) -> None:
        raw(site, f"M{i} /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        raw(site, f"GET /v1/models/{i} HTTP/1.1\r\nhost: evil{i}\r\n\r\n".encode())
        raw(site, f"GET /{i}?{i} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        httpx.post(f"{site.url}/v1/completions", json={"model": f"m{i}", "prompt": "a"})

    for method in ("BREW", "PROPFIND", "X" * 200):
        raw(site, f"{method} /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    odd(0)
    series()
    before = series()
    for i in range(1, 50):
        odd(i)
    after = series()
    assert after == before
    assert not any(f"'method', '{m}'" in row for row in after for m in ("BREW", "M1", "PROPFIND"))
    assert len(METHODS) == 7


def test_metrics_are_read_while_requests_come_and_go(site):
    stop, wrong = threading.Event(), []

    def read() -> None:
        with httpx.Client(base_url=site.url, timeout=30) as client:
            while not stop.wait(0.002):  # the server has one core with the tests
                if (status := client.get("/metrics").status_code) != 200:
                    wrong.append(status)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=site.url, timeout=30) as client:
        for i in range(30):
            body = {"model": "gpt", "prompt": [f"a{i}"] * 8, "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("127.0.0.1:8000", True), ("localhost", True), ("LOCALHOST:80", True), ("[::1]", True), ("[::1]:8000", True),
        ("127.3.2.1", True), ("[0:0:0:0:0:0:0:1]:9", True),
        ("testserver", False), ("::1", False), ("evil.example", False), ("localhost.evil.example", False), ("", False),
        ("127.0.0.1.evil.example", False), ("localhost:8000:1", False), ("[::1", False), ("[::2]", False),
        ("0.0.0.0", False), ("10.0.0.1", False), ("local host", False), ("127.0.0.1@evil.example", False),
        ("0x7f.1", False), ("2130706433", False),
    ],
)  # fmt: skip
def test_hosts_are_this_machines_by_address_family(host, right):
    assert is_this_machine(host) is right


def test_authorization_is_read_as_the_standard_says(small):
    key, hashed = new_key()
    with serving(small, keys=(hashed,)) as (_, client):

        def status(*values: str) -> int:
            return client.get("/v1/models", headers=[("authorization", value) for value in values]).status_code

        for scheme in ("Bearer", "bearer", "BEARER"):
            assert status(f"{scheme} {key}") == 200
        assert status(f"Bearer   {key}") == 200
        for wrong in (key, f"Basic {key}", f"Bearer{key}", "Bearer", f"Bearer {key}x", f"Token {key}"):
            assert status(wrong) == 401, wrong
        assert status(f"Bearer {key}", f"Bearer {key}") == 401


def test_request_ids_are_taken_over_when_they_are_plain(site):
    assert httpx.get(f"{site.url}/healthz", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = httpx.get(f"{site.url}/healthz", headers={"x-request-id": "a b" * 99}).headers["x-request-id"]
    assert len(made) == 32
    rows = [json.loads(line) for line in site.log.getvalue().splitlines()]
    assert [row["path"] for row in rows if row["id"] == "abc-1"] == ["/healthz"]


# ---- every request is bounded and shares


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("score", {"model": "gpt", "input": WORDS * 10_000}),
        ("score", {"model": "bert", "input": "the robot must obey " * 12}),
        ("embeddings", {"model": "bert", "input": ["the robot must obey " * 10] * 2000}),
        ("completions", {"model": "gpt", "prompt": [WORDS] * 60, "echo": True, "logprobs": 5, "max_tokens": 0}),
        ("explain", {"model": "gpt", "input": WORDS, "view": "layers"}),
    ],
)
def test_every_endpoint_ends_at_the_timeout(small, path, body, monkeypatch):
    """Each layer and each step is made slow, so that all of them would take many times the timeout."""
    from torch import nn

    forward = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: (time.sleep(0.15), forward(self, x))[1])
    with serving(small, timeout=0.4) as (site, client):
        answer = client.post(f"/v1/{path}", json=body, timeout=PATIENCE)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout", answer.text[:200]
        for served in site.app.state.models.opened:
            becomes_idle(served.scheduler)


def test_an_answer_may_still_be_sent_for_a_moment_after_the_timeout(small, monkeypatch):
    """What has no parts, such as the list of models, is left behind then."""
    monkeypatch.setattr("plume.serve.middleware.GRACE", 0.1)
    with serving(small, timeout=0.1) as (site, client):
        waiting = threading.Event()
        monkeypatch.setattr(site.app.state.models, "listing", lambda: waiting.wait(PATIENCE))
        answer = client.get("/v1/models", timeout=PATIENCE)
        waiting.set()
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"


def test_behind_ten_long_scores_others_are_answered_and_all_is_idle_when_they_leave(small):
    """How soon is measured by the benchmark serve.scores."""
    body = json.dumps({"model": "gpt", "input": (WORDS * 20_000)[:990_000]}).encode()
    head = (
        f"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    )
    with serving(small, timeout=10 * PATIENCE) as (site, client), ExitStack() as stack:
        scheduler = site.app.state.models._open["gpt"].scheduler
        senders = [stack.enter_context(connect(site)) for _ in range(10)]
        for sender in senders:
            sender.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: scheduler.reading == 10)
        for path, given in (("tokenize", WORDS), ("next-tokens", "The robot"), ("tokenize", "a")):
            answer = client.post(f"/v1/{path}", json={"model": "gpt", "input": given}, timeout=PATIENCE)
            assert answer.status_code == 200
        generated = client.post(
            "/v1/completions", json={"model": "gpt", "prompt": "a", "max_tokens": 5}, timeout=PATIENCE
        )
        assert generated.status_code == 200
        assert scheduler.reading == 10  # none of them had ended
        for sender in senders:
            sender.close()
        becomes_idle(scheduler)
        assert scheduler.counters.cancelled == 10


@pytest.mark.parametrize("name", ["gpt", "other", "bert"])
def test_a_long_text_tokenized_in_parts_has_the_same_ids(models, name, monkeypatch):
    from plume.serve import served_models
    from plume.text import load_tokenizer

    monkeypatch.setattr(served_models, "LONG_TEXT", 20)
    tokenizer, dice = load_tokenizer(models[name]), random.Random(7)
    pieces = ["the", " robot", "  must", " obey", "\n", " ", ".", ",", " don't", " 12", " </b>", "\u673a", "a", " A"]
    for _ in range(50):
        text = "".join(dice.choice(pieces) for _ in range(400))
        parts = list(served_models.parts_of(text))
        assert len(parts) > 5 and "".join(parts) == text
        assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text)


def test_a_long_text_is_tokenized_only_in_turn(small, models, monkeypatch):
    """While another request has the turn, no part of a long text is tokenized: it would delay all threads."""
    from plume.serve import served_models
    from plume.serve.scheduler import pause

    monkeypatch.setattr(served_models, "LONG_TEXT", 20)
    place = str(models["gpt"])
    served = served_models.Served("gpt", served_models.Origin(place), served_models.open_lm(place, small), small)
    parts, has_turn, enough = [], threading.Event(), threading.Event()
    encode = type(served.lm.tokenizer).encode
    monkeypatch.setattr(type(served.lm.tokenizer), "encode", lambda *a, **k: (parts.append(1), encode(*a, **k))[1])

    def hold() -> None:
        pause()
        has_turn.set()
        assert enough.wait(10)

    def run(work: Callable[[], object]) -> threading.Thread:
        reading = served.scheduler.start_reading("a", time.monotonic() + 30)
        thread = threading.Thread(target=reading.run, args=(work,))
        thread.start()
        return thread

    holding = run(hold)
    assert has_turn.wait(10)
    tokenizing = run(lambda: served.tokens_of(WORDS * 10))
    while not served.scheduler.ready and not parts:
        time.sleep(0.001)
    assert not parts
    enough.set()
    holding.join(10)
    tokenizing.join(10)
    assert len(parts) > 5
    served.close()


@pytest.mark.parametrize("name", ["gpt2", "openai-gpt", "bert-base-uncased"])
def test_published_tokenizers_cut_long_texts_alike(name, shared, monkeypatch):
    from plume.serve import served_models
    from plume.text import load_tokenizer

    folder, book = (shared / "tokenizers" / name, shared / "data" / "tinyshakespeare" / "input.txt")
    if not folder.is_dir() or not book.is_file():
        pytest.skip(f"needs {folder} and {book}")
    monkeypatch.setattr(served_models, "LONG_TEXT", 50)
    tokenizer, text = load_tokenizer(folder), book.read_text(encoding="utf-8")[:60_000]
    parts = list(served_models.parts_of(text))
    assert len(parts) > 500
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text)


def test_tokenize_has_a_limit_of_its_own(site):
    answer = httpx.post(f"{site.url}/v1/tokenize", json={"model": "gpt", "input": "a" * 100_001})
    assert answer.status_code == 400 and "at most 100000" in answer.json()["error"]["message"]


MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "field", "fits", "more"),
    [
        ("completions", "n", 128, 129),
        ("completions", "best_of", 128, 129),
        ("completions", "logprobs", 20, 21),
        ("completions", "temperature", 100, 101),
        ("completions", "stop", ["a"] * 16, ["a"] * 17),
        ("completions", "stop", "a" * 1000, "a" * 1001),
        ("completions", "stop_tokens", [1] * 1000, [1] * 1001),
        ("completions", "logit_bias", {str(i): 1 for i in range(1000)}, {str(i): 1 for i in range(1001)}),
        ("chat/completions", "messages", [MESSAGE] * 1024, [MESSAGE] * 1025),
        ("chat/completions", "top_logprobs", 20, 21),
        ("next-tokens", "k", 1000, 1001),
        ("tag", "input", ["a"] * 4096, ["a"] * 4097),
        ("predict", "input", [{"text": "a"}] * 256, [{"text": "a"}] * 257),
        ("choose", "choices", ["a"] * 64, ["a"] * 65),
        ("translate", "beams", 16, 17),
    ],
)
def test_fields_have_limits(path, field, fits, more):
    schema = ({name: found[0] for name, found in {**GENERATING, **READING}.items()})[path]
    body = {"model": "gpt", "messages": [MESSAGE]} if schema is schemas.ChatRequest else {"model": "gpt", "input": "a"}
    body = {"model": "gpt", "prompt": "a"} if schema is schemas.CompletionRequest else body
    assert schema.model_validate(body | {field: fits})
    with pytest.raises(ValueError, match=field):
        schema.model_validate(body | {field: more})


def test_a_client_cannot_choose_its_address(site):
    """Limits and turns go by address: a header that names another one is not read."""
    for i in range(3):
        headers = {"x-forwarded-for": f"203.0.113.{i}", "x-request-id": f"forwarded-{i}"}
        assert httpx.get(f"{site.url}/v1/models", headers=headers).status_code == 200
    rows = [json.loads(line) for line in site.log.getvalue().splitlines()]
    assert {row["client"] for row in rows if row["id"].startswith("forwarded-")} == {"127.0.0.1"}


@pytest.mark.parametrize("path", ["/v1/runs/long", "/v1/runs/long/events"])
def test_a_long_run_does_not_block_the_loop(small, tmp_path, path, monkeypatch):
    """Its metrics become JSON beside the event loop, in parts between which other threads run."""
    from plume.serve import served_models

    folder, made = tmp_path / "long", []
    folder.mkdir()
    write_recipe(folder, {"train": {"steps": 200_000}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 3.25}) + "\n" for i in range(10_000)))
    compact = served_models.compact_json

    def noted(value: object) -> str:
        made.append((threading.current_thread().name, len(value) if isinstance(value, list) else 1))
        return compact(value)

    monkeypatch.setattr(served_models, "compact_json", noted)
    with serving(small, runs=tmp_path) as (_, client), client.stream("GET", path) as answer:
        whole = answer.read() if "events" not in path else next(answer.iter_lines()).removeprefix("data: ")
    assert [row["step"] for row in json.loads(whole)["records"]] == list(range(10_000))
    assert sum(size for _, size in made) >= 10_000 and max(size for _, size in made) <= served_models.CHUNK
    assert all(name.startswith("asyncio_") for name, _ in made)
