"""Other people's tools against the server: LangChain, LiteLLM, and a collector of OpenTelemetry traces."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from running import serving

from plume.lm import load

GREEDY = {"temperature": 0, "max_tokens": 8}
LITELLM = """
import json, sys, litellm
url, model = sys.argv[1:]
ask = dict(api_base=url, api_key="none", max_tokens=8, temperature=0)
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="The robot", **ask)
chat = dict(model=f"openai/{model}", messages=[{"role": "user", "content": "The robot"}], **ask)
parts = [part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **chat)]
vector = litellm.embedding(model=f"openai/{model}", input=["The robot"], api_base=url, api_key="none")
whole = litellm.completion(**chat).choices[0].message.content
answers = [text.choices[0].text, whole, "".join(parts), len(vector.data[0]["embedding"])]
print(json.dumps(answers))
"""


def test_langchain(server, models):
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    url, lm = f"{server.url}/v1", load(models["gpt"], engine="torch")
    llm = OpenAI(base_url=url, api_key="none", model="gpt", **GREEDY)
    expected = lm.generate("The robot", max_new_tokens=8, temperature=0).text
    assert llm.invoke("The robot") == expected
    assert "".join(llm.stream("The robot")) == expected
    chat = ChatOpenAI(base_url=url, api_key="none", model="gpt", **GREEDY)
    answer = chat.invoke([("user", "The robot")])
    assert "".join(part.text for part in chat.stream([("user", "The robot")])) == answer.text
    assert answer.usage_metadata["output_tokens"] <= 8
    vectors = OpenAIEmbeddings(base_url=url, api_key="none", model="gpt", check_embedding_ctx_length=False)
    assert vectors.embed_query("The robot") == pytest.approx(lm.embed(["The robot"])[0].tolist(), abs=1e-5)


@pytest.mark.slow
def test_litellm(server, models, tmp_path):
    """In an environment of its own: it wants an older openai than the other tests."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "litellm"], check=True, timeout=280)
    found = subprocess.run(
        [python, "-c", LITELLM, f"{server.url}/v1", "gpt"],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lm = load(models["gpt"], engine="torch")
    text, whole, streamed, width = json.loads(found.stdout.splitlines()[-1])
    assert text == lm.generate("The robot", max_new_tokens=8, temperature=0).text
    assert whole == streamed and width == lm.config.width


def test_traces_reach_a_collector(serve_config, models, monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "plume-test")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    only = replace(serve_config, models=(str(models["gpt"]),), runs=None)
    with serving(only, telemetry=True) as (_, client):
        body = {"model": "gpt", "prompt": "a secret", "max_tokens": 3}
        client.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"}).raise_for_status()
        client.get("/v1/nothing")
    collector.shutdown()
    collector.server_close()
    assert b"secret" not in b"".join(bodies)
    sent = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [resource for request in sent for resource in request.resource_spans]
    assert {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"} == {
        "plume-test"
    }
    written, missing = [span for r in resources for scope in r.scope_spans for span in scope.spans]
    assert (written.trace_id.hex(), written.parent_span_id.hex()) == (trace, parent)
    told = {a.key: a.value.int_value or a.value.string_value for a in written.attributes}
    assert written.name == "POST /v1/completions" and told["http.response.status_code"] == 200
    assert told["gen_ai.request.model"] == "gpt" and told["gen_ai.usage.output_tokens"] == 3
    assert 0 < written.end_time_unix_nano - written.start_time_unix_nano < 60e9
    assert missing.name == "GET other" and missing.trace_id.hex() != trace
