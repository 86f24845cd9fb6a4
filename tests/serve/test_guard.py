"""Keys, limits, slow clients, a full queue, stopping: the right status, and the server lives on."""

import errno
import hashlib
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from running import serving

from plume.cli.verbs import settings
from plume.config import ExploreConfig, ServeConfig, UserError
from plume.serve import new_key, schemas
from plume.serve.api_errors import invalid
from plume.serve.middleware import RateLimiter
from plume.serve.served_models import named

ASK = {"model": "gpt", "prompt": "The robot", "max_tokens": 4}


@pytest.fixture(scope="module")
def small(serve_config, models) -> ServeConfig:
    return replace(serve_config, models=(str(models["gpt"]),), runs=None)


def test_keys_are_needed_and_compared_by_hash(small):
    key, hashed = new_key()
    assert hashlib.sha256(key.encode()).hexdigest() == hashed
    with serving(small, keys=(hashed, "0" * 64)) as (site, client):
        for sent in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Bearer {hashed}"},
            {"authorization": key[:-1]},
        ):
            answer = client.post("/v1/completions", json=ASK, headers=sent)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": f"Bearer {key}", "host": "plume.example"}
        assert client.post("/v1/completions", json=ASK, headers=right).status_code == 200
        assert client.get("/metrics").status_code == 401 and client.get("/v1/runs").status_code == 401
        for path in ("/", "/static/app.js", "/healthz", "/readyz", "/docs"):
            assert client.get(path).status_code == 200
        assert key not in site.log.getvalue()


def test_a_server_open_to_others_needs_keys():
    with pytest.raises(UserError, match="needs keys"):
        ServeConfig(models=("x",), host="0.0.0.0")
    with pytest.raises(UserError, match="not a sha256"):
        ServeConfig(models=("x",), keys=("secret",))
    assert ServeConfig(models=("x",), host="0.0.0.0", keys=(new_key()[1],)).keys


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"port": 70_000}, "port"),
        ({"batch": 0}, "batch"),
        ({"timeout": 0}, "timeout"),
        ({"rate_limit": -1}, "rate_limit"),
    ],
)
def test_settings_are_checked(fields, word):
    with pytest.raises(UserError, match=word):
        ServeConfig(models=("x",), **fields)


def test_models_get_names(tmp_path, monkeypatch):
    (tmp_path / "a" / "demo").mkdir(parents=True)
    assert named((str(tmp_path / "a" / "demo"), "gpt2", f"mine={tmp_path}")) == {
        "demo": str(tmp_path / "a" / "demo"),
        "gpt2": "gpt2",
        "mine": str(tmp_path),
    }
    with pytest.raises(UserError, match="two models"):
        named(("x/demo", "demo=y", "demo=z"))
    (tmp_path / "latest").symlink_to(tmp_path / "a" / "demo")
    monkeypatch.chdir(tmp_path / "a" / "demo")
    assert list(named((str(tmp_path / "latest"),))) == ["latest"]
    assert list(named((".",))) == ["demo"]
    with pytest.raises(UserError, match="no model given"):
        named(())
    (tmp_path / "lr=3e-4").mkdir()
    assert named((str(tmp_path / "lr=3e-4"), f"x={tmp_path}/lr=3e-4")) == {
        "lr=3e-4": str(tmp_path / "lr=3e-4"),
        "x": f"{tmp_path}/lr=3e-4",
    }


def test_a_rate_is_kept_by_client():
    limiter = RateLimiter(60)
    assert [limiter.take("a", 0.0) for _ in range(10)] == [0.0] * 10
    assert limiter.take("a", 0.0) == pytest.approx(1.0)
    assert limiter.take("b", 0.0) == 0.0
    assert limiter.take("a", 1.5) == 0.0


def test_too_many_requests_are_told_to_come_again(small):
    with serving(small, rate_limit=6.0) as (_, client):
        answers = [client.get("/v1/models") for _ in range(4)]
        assert answers[0].status_code == 200 and answers[-1].status_code == 429
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 11
        assert answers[-1].json()["error"]["type"] == "rate_limit_error"
        assert client.get("/healthz").status_code == 200


def test_the_engine_has_run_before_the_server_is_ready(small):
    """A first run may compile for a minute; no request should wait for that."""
    with serving(small) as (site, client):
        assert client.get("/readyz").status_code == 200
        assert any(site.app.state.models._open["gpt"].scheduler.batcher.read)


def test_a_full_queue_answers_429_and_recovers(small, endless):
    long = endless | {"stream": True}
    with serving(small, batch=1, queue=2) as (site, client):
        scheduler = site.app.state.models._open["gpt"].scheduler
        streams = [client.stream("POST", "/v1/completions", json=long) for _ in range(3)]
        for stream in streams:
            stream.__enter__()
        refused = client.post("/v1/completions", json=ASK)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert client.post("/v1/next-tokens", json={"model": "gpt", "input": "a"}).status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
        until = time.monotonic() + 10
        while scheduler.running + scheduler.waiting and time.monotonic() < until:
            time.sleep(0.02)
        assert client.post("/v1/completions", json=ASK).status_code == 200


class FullDisk(io.StringIO):
    """A log that cannot be written."""

    def write(self, _text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_costs_no_answer(small, monkeypatch):
    """Nor a connection, nor the message of a defect."""
    monkeypatch.setattr("running.io", SimpleNamespace(StringIO=FullDisk))
    with serving(small) as (site, client):
        first = client.post("/v1/completions", json=ASK)
        kept = first.extensions["network_stream"].get_extra_info("client_addr")
        again = client.post("/v1/completions", json=ASK)
        assert first.status_code == again.status_code == 200
        assert again.extensions["network_stream"].get_extra_info("client_addr") == kept
        monkeypatch.setattr(site.app.state.models, "listing", lambda: 1 // 0)
        broken = client.get("/v1/models")
        assert broken.status_code == 500 and broken.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "APPLICATION/json ; charset=utf-8"])
def test_content_types_are_read_in_any_case(small, kind):
    with serving(small) as (_, client):
        answer = client.post("/v1/completions", content=json.dumps(ASK), headers={"content-type": kind})
    assert answer.status_code == 200, answer.text


def test_time_runs_out_with_408_or_a_last_event(small, endless):
    with serving(small, timeout=0.3) as (_, client):
        answer = client.post("/v1/completions", json=endless)
        assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
        lines = client.post("/v1/completions", json=endless | {"stream": True}).text.strip().splitlines()
        assert json.loads(lines[-1][6:])["error"]["code"] == "timeout"
        assert client.post("/v1/completions", json=ASK).status_code == 200


def test_large_and_chunked_bodies_are_cut_off(small):
    with serving(small, max_body_bytes=1000) as (_, client):
        big = json.dumps({**ASK, "prompt": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}
        assert client.post("/v1/completions", content=big, headers=headers).status_code == 413
        pieces = (big[i : i + 100] for i in range(0, len(big), 100))
        assert client.post("/v1/completions", content=pieces, headers=headers).status_code == 413
        assert client.post("/v1/completions", json=ASK).status_code == 200


def test_a_slow_body_is_not_waited_for(small):
    with serving(small, body_timeout=0.3) as (site, client):
        host, port = site.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            slow.sendall(f"{head}content-length: 500\r\n\r\n".encode() + b'{"model":')
            assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]
        assert client.get("/healthz").status_code == 200


def test_a_reader_that_reads_slowly_gets_everything(small, endless):
    with serving(small) as (_, client):
        body = endless | {"max_tokens": 50, "seed": 1}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = []
            for line in stream.iter_lines():
                time.sleep(0.005)
                lines += [line.removeprefix("data: ")] if line else []
        *pieces, last = lines
        assert last == "[DONE]" and len(whole) > 40
        assert "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces) == whole


# ---- the process


def start(config_words, tmp_path):
    command = [sys.executable, "-m", "plume", "serve", *config_words]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL, cwd=tmp_path)
    until = time.monotonic() + 90
    while " at http" not in (said := (tmp_path / "log").read_text()):
        assert process.poll() is None and time.monotonic() < until, said
        time.sleep(0.05)
    return process, said.split(" at ")[1].split()[0]


@pytest.mark.slow
def test_sigterm_lets_running_requests_end(models, endless, tmp_path):
    words = [str(models["gpt"]), "--port", "0", "--engine.engine", "torch", "--access-log", str(tmp_path / "access")]
    process, url = start(words, tmp_path)
    answers: list[str] = []

    def ask() -> None:
        body = endless | {"max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{url}v1/completions", json=body, timeout=60) as stream:
            answers.extend(stream.iter_lines())

    thread = threading.Thread(target=ask)
    thread.start()
    while len(answers) < 4:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert process.wait(30) == 0
    events = [line for line in answers if line]
    assert events[-1] == "data: [DONE]" and len(events) > 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}healthz")
    (row,) = [json.loads(line) for line in (tmp_path / "access").read_text().splitlines()]
    assert row["status"] == 200 and row["completion_tokens"] == 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/at/all"], "there is no folder"),
        ([], "models is missing"),
        (["x", "--prot", "9"], "did you mean port"),
        (["x", "--host", "0.0.0.0"], "needs keys"),
    ],
)
def test_mistakes_at_the_command_line_are_one_message(words, message, capsys, tmp_path, monkeypatch):
    from plume.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["serve", *words, "--port", "0"] if "--prot" not in words else ["serve", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_a_taken_port_is_named(models, capsys):
    from plume.cli.main import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(models["gpt"]), "--port", str(port)]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_a_recipe_and_words_make_the_same_config(tmp_path):
    recipe = tmp_path / "serve.toml"
    recipe.write_text('models = ["a", "b"]\nport = 9000\n[engine]\nprecision = "int8"\n')
    words = ["a", "b", "--port", "9000", "--engine.precision", "int8"]
    assert settings(ServeConfig, [str(recipe)], "models") == settings(ServeConfig, words, "models")


def test_explore_without_a_model_takes_plumes_own():
    assert settings(ExploreConfig, [], "models").models == ("plume-en",)
    assert settings(ExploreConfig, ["a", "--save", "page.html"], "models").models == ("a",)


def test_a_new_key_is_printed_once(capsys):
    from plume.cli.main import main

    assert main(["serve", "--new-key"]) == 0
    said = capsys.readouterr().out.split()
    key, hashed = said[1], said[3]
    assert hashlib.sha256(key.encode()).hexdigest() == hashed


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (schemas.ClassifyRequest, [], "input: List should have at least 1 item after validation, not 0"),
        (schemas.ClassifyRequest, 5, "input: Input should be a valid string"),
        (schemas.PredictRequest, [{"text": {"a": 1}}], "input.0.text: Input should be a valid string"),
    ],
)
def test_a_wrong_value_of_a_field_of_several_types(kind, given, says):
    """No names of types stand in the message, and what is wrong in the right type comes first."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "m", "input": given})
    errors = [{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()]
    refused = invalid(RequestValidationError(errors))
    assert (refused.message, refused.param) == (says, "input")


def test_a_wrong_layer_is_named_without_its_type():
    with pytest.raises(ValidationError) as caught:
        schemas.EmbeddingRequest.model_validate({"model": "m", "input": "a", "layers": "x"})
    refused = invalid(RequestValidationError(caught.value.errors()))
    assert refused.message.startswith("layers: Input should be a valid integer") and refused.param == "layers"
