"""The HTTP API: the real openai client, answers against transformers, refusals in OpenAI's shape."""

import json
import math
import random
import threading
import time

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from plume.serve.run_views import MetricsTail, curve
from plume.text import load_tokenizer

PROMPT = "The robot must obey"


@pytest.fixture(scope="module")
def ai(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(models):
    return transformers.GPT2LMHeadModel.from_pretrained(models["gpt"], attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer(models):
    return load_tokenizer(models["gpt"])


@torch.no_grad()
def logprobs_of(theirs, ids) -> torch.Tensor:
    return theirs(torch.tensor([ids])).logits[0].log_softmax(-1)


# ---- the openai client


def test_models_are_listed(ai):
    listed = {model.id: model for model in ai.models.list()}
    assert list(listed) == ["gpt", "other", "bert", "labels", "tags", "spans"]
    assert ai.models.retrieve("bert").id == "bert"
    assert listed["gpt"].plume["generates"] and listed["bert"].plume["masks"] and not listed["labels"].plume["predicts"]


def test_greedy_completion_is_what_transformers_generates(ai, theirs, tokenizer):
    ids = tokenizer.encode(PROMPT)
    expected = theirs.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, len(ids) :]
    answer = ai.completions.create(model="gpt", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == tokenizer.decode(expected.tolist())
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens == len(ids)


def test_a_stream_is_the_whole_in_parts(ai):
    options = {"model": "gpt", "prompt": PROMPT, "max_tokens": 20, "seed": 5}
    whole = ai.completions.create(**options)
    parts = list(ai.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    assert parts[-1].usage.completion_tokens == 20
    assert len(parts) > 10


def test_logprobs_are_the_models_own(ai, theirs, tokenizer):
    answer = ai.completions.create(model="gpt", prompt=PROMPT, max_tokens=6, seed=3, logprobs=4).choices[0]
    ids = tokenizer.encode(PROMPT)
    for i, token in enumerate(answer.logprobs.token_ids):
        row = logprobs_of(theirs, ids + answer.logprobs.token_ids[:i])[-1]
        assert answer.logprobs.token_logprobs[i] == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(4)
        assert [top[0] for top in answer.logprobs.top[i]] == best.indices.tolist()
        expected = {row[t].item() for t in {*best.indices.tolist(), token}}  # the sampled token is always among them
        assert sorted(answer.logprobs.top_logprobs[i].values()) == pytest.approx(sorted(expected), abs=1e-4)
    assert tokenizer.decode(answer.logprobs.token_ids) == answer.text


def test_echo_gives_the_prompt_back_with_its_logprobs(ai, theirs, tokenizer):
    answer = ai.completions.create(model="gpt", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0]
    ids = tokenizer.encode(PROMPT)
    assert answer.text == PROMPT and answer.logprobs.token_logprobs[0] is None
    rows = logprobs_of(theirs, ids)
    expected = [float(rows[i - 1, ids[i]]) for i in range(1, len(ids))]
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    for token, offset in zip(answer.logprobs.tokens, answer.logprobs.text_offset, strict=True):
        assert PROMPT[offset : offset + len(token)] == token
    longer = ai.completions.create(model="gpt", prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, seed=1).choices[0]
    assert longer.text.startswith(PROMPT) and len(longer.logprobs.tokens) == len(ids) + 3


def test_n_samples_differ_and_seeds_repeat(ai):
    options = {"model": "gpt", "prompt": PROMPT, "max_tokens": 10, "seed": 7}
    first = [choice.text for choice in ai.completions.create(**options, n=4).choices]
    assert [choice.text for choice in ai.completions.create(**options, n=4).choices] == first
    assert len(set(first)) > 1
    assert ai.completions.create(**options | {"seed": 8}).choices[0].text != first[0]


def test_best_of_keeps_the_likeliest(ai):
    options = {"model": "gpt", "prompt": PROMPT, "max_tokens": 5, "seed": 2, "logprobs": 1}
    everything = ai.completions.create(**options, n=6).choices
    means = sorted((float(np.mean(choice.logprobs.token_logprobs)) for choice in everything), reverse=True)
    best = ai.completions.create(**options, n=2, best_of=6).choices
    assert [float(np.mean(choice.logprobs.token_logprobs)) for choice in best] == pytest.approx(means[:2], abs=1e-4)


def test_stop_strings_end_the_answer_before_them(ai):
    options = {"model": "gpt", "prompt": PROMPT, "max_tokens": 40, "seed": 11}
    text = ai.completions.create(**options).choices[0].text
    stop = text[8:11]
    answer = ai.completions.create(**options, stop=[stop, "\x00never"]).choices[0]
    assert answer.text == text[: text.index(stop)] and answer.finish_reason == "stop"
    streamed = ai.completions.create(**options, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == answer.text


def test_logit_bias_forces_and_bans(ai, tokenizer):
    (token,) = tokenizer.encode("A")
    forced = ai.completions.create(model="gpt", prompt=PROMPT, max_tokens=5, logit_bias={str(token): 100})
    assert forced.choices[0].text == "AAAAA"
    greedy = {"model": "gpt", "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    first = ai.completions.create(**greedy).choices[0].logprobs.token_ids[0]
    banned = ai.completions.create(**greedy, logit_bias={str(first): -100})
    assert banned.choices[0].logprobs.token_ids[0] != first


def test_several_prompts_as_texts_and_as_tokens(ai, tokenizer):
    prompts = [PROMPT, "Once upon a", "你好"]
    options = {"model": "gpt", "max_tokens": 6, "temperature": 0}
    alone = [ai.completions.create(**options, prompt=prompt).choices[0].text for prompt in prompts]
    together = ai.completions.create(**options, prompt=prompts)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    as_tokens = ai.completions.create(**options, prompt=[tokenizer.encode(prompt) for prompt in prompts])
    assert [choice.text for choice in as_tokens.choices] == alone


def test_embeddings_are_means_of_transformers_hidden_states(ai, models):
    bert = transformers.BertModel.from_pretrained(models["bert"], add_pooling_layer=False).eval()
    tokenizer = load_tokenizer(models["bert"])
    texts = ["the robot", "once upon a time there was a girl"]
    answer = ai.embeddings.create(model="bert", input=texts)
    for row, text in zip(answer.data, texts, strict=True):
        ids, _ = tokenizer.add_special_tokens(tokenizer.encode(text))
        with torch.no_grad():
            expected = bert(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(row.embedding, expected, atol=1e-4)
    plain = ai.embeddings.create(model="bert", input=texts[0], encoding_format="float")
    np.testing.assert_allclose(plain.data[0].embedding, answer.data[0].embedding, atol=1e-6)
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "gtp"}, openai.NotFoundError, "models: gpt, other"),
        ({"model": "bert"}, openai.BadRequestError, "does not generate"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"top_p": 2}, openai.BadRequestError, "top_p"),
        ({"n": 0}, openai.BadRequestError, "n=0 must be"),
        ({"suffix": "the end"}, openai.BadRequestError, "suffix"),
        ({"best_of": 1, "n": 2}, openai.BadRequestError, "best_of"),
        ({"best_of": 3, "stream": True}, openai.BadRequestError, "best_of"),
        ({"prompt": "word " * 10_000}, openai.BadRequestError, "context"),
        ({"prompt": [10**8]}, openai.BadRequestError, "vocabulary"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "this server generates"),
        ({"prompt": ["A"] * 20, "n": 100, "max_tokens": 1}, openai.BadRequestError, "sequences; this server takes"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"399999": 1}}, openai.BadRequestError, "vocabulary"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "did you mean 'temperature'"),
    ],
)
def test_mistakes_have_openais_shape(ai, fields, kind, message):
    with pytest.raises(kind) as caught:
        ai.completions.create(**{"model": "gpt", "prompt": "A", "max_tokens": 3} | fields)
    assert message in caught.value.message
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.param != "input"  # this endpoint has no such field


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": [10**6]}, "prompt"),
        ("score", {"input": "a", "prompt": [10**6]}, "prompt"),
        ("score", {"input": [10**6], "prompt": "a"}, "input"),
    ],
)
def test_the_field_of_a_wrong_token_is_named(client, path, body, field):
    answer = client.post(f"/v1/{path}", json={"model": "gpt", **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


# ---- beyond OpenAI


def test_next_tokens_equal_transformers_and_sum_to_one(client, theirs, tokenizer):
    body = {"model": "gpt", "input": PROMPT, "k": 20, "temperatures": True}
    answer = client.post("/v1/next-tokens", json=body).json()
    p = logprobs_of(theirs, tokenizer.encode(PROMPT))[-1].exp()
    found = answer["candidates"]
    assert found["tokens"] == p.topk(20).indices.tolist()
    np.testing.assert_allclose(found["probabilities"], p.topk(20).values.numpy(), rtol=1e-4)
    whole = sum(math.exp(x) for x in found["logits"]) + math.exp(found["rest"])
    np.testing.assert_allclose([math.exp(x) / whole for x in found["logits"]], found["probabilities"], rtol=1e-4)
    with torch.no_grad():
        logits = theirs(torch.tensor([tokenizer.encode(PROMPT)])).logits[0, -1]
    for i, temperature in ((0, 0.05), (19, 1.0), (39, 2.0)):
        expected = float((logits.sort(descending=True).values[20:] / temperature).logsumexp(0))
        assert found["rests"][i] == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_a_click_equals_a_fresh_call(client):
    """Taking a candidate by its id gives what the longer sequence gives by itself."""
    first = client.post("/v1/next-tokens", json={"model": "gpt", "input": PROMPT}).json()
    ids = [*first["tokens"], first["candidates"]["tokens"][3]]
    clicked = client.post("/v1/next-tokens", json={"model": "gpt", "input": ids}).json()
    client.post("/v1/next-tokens", json={"model": "gpt", "input": "something else, quite different from it"})
    again = client.post("/v1/next-tokens", json={"model": "gpt", "input": ids}).json()
    assert clicked == again
    assert clicked["text"] == first["text"] + first["candidates"]["pieces"][3]


def test_empty_text_means_the_start_token(client, theirs, tokenizer):
    answer = client.post("/v1/next-tokens", json={"model": "gpt", "input": ""}).json()
    p = logprobs_of(theirs, [tokenizer.start])[-1].exp()
    assert answer["candidates"]["tokens"] == p.topk(10).indices.tolist()


def test_score_equals_transformers(client, theirs, tokenizer):
    answer = client.post("/v1/score", json={"model": "gpt", "input": PROMPT}).json()
    assert client.post("/v1/score", json={"model": "gpt", "input": PROMPT, "prompt": ""}).json() == answer
    ids = tokenizer.encode(PROMPT)
    rows = logprobs_of(theirs, [tokenizer.start, *ids])
    surprisal = [-float(rows[i, token]) for i, token in enumerate(ids)]
    assert answer["surprisal"] == pytest.approx(surprisal, abs=1e-3)
    assert answer["perplexity"] == pytest.approx(math.exp(sum(surprisal) / len(ids)), rel=1e-3)
    assert answer["bits_per_byte"] == pytest.approx(sum(surprisal) / math.log(2) / len(PROMPT.encode()), rel=1e-3)
    assert answer["rank"] == [int((rows[i] > rows[i, token]).sum()) for i, token in enumerate(ids)]


def test_masked_models_fill_and_score(client, models):
    bert = transformers.BertForMaskedLM.from_pretrained(models["bert"]).eval()
    tokenizer = load_tokenizer(models["bert"])
    answer = client.post("/v1/fill-mask", json={"model": "bert", "input": "the [MASK] must obey", "k": 5}).json()
    ids, _ = tokenizer.add_special_tokens(tokenizer.encode("the [MASK] must obey", allow_special=True))
    place = ids.index(tokenizer.mask)
    with torch.no_grad():
        p = bert(torch.tensor([ids])).logits[0, place].softmax(-1).topk(5)
    (mask,) = answer["masks"]
    assert mask["candidates"]["tokens"] == p.indices.tolist() and mask["place"] == place - 1
    np.testing.assert_allclose(mask["candidates"]["probabilities"], p.values.numpy(), rtol=1e-3)
    scored = client.post("/v1/score", json={"model": "bert", "input": "the robot must obey"}).json()
    assert len(scored["surprisal"]) == len(tokenizer.encode("the robot must obey"))


def test_labels_tags_and_answers_equal_transformers(client, models):
    tokenizer = load_tokenizer(models["labels"])
    kind = transformers.BertForSequenceClassification
    theirs = kind.from_pretrained(models["labels"]).eval()
    answer = client.post("/v1/classify", json={"model": "labels", "input": ["the robot", "once upon a time"]}).json()
    for row, text in zip(answer["data"], ["the robot", "once upon a time"], strict=True):
        ids, _ = tokenizer.add_special_tokens(tokenizer.encode(text))
        with torch.no_grad():
            p = theirs(torch.tensor([ids])).logits[0].softmax(-1)
        assert row["label"] == ("bad", "good")[int(p.argmax())]
        assert row["probabilities"] == pytest.approx({"bad": float(p[0]), "good": float(p[1])}, abs=1e-4)
    words = ["the", "robot", "must", "obey"]
    tagged = client.post("/v1/tag", json={"model": "tags", "input": words}).json()["data"]
    assert [row["word"] for row in tagged] == words and {row["tag"] for row in tagged} <= {"O", "NAME", "PLACE"}
    asked = {"model": "spans", "question": "who must obey?", "input": "the robot must obey the human"}
    found = client.post("/v1/answer", json=asked).json()
    assert found["text"] == asked["input"][found["start"] : found["end"]]
    for path, body in (
        ("classify", {"input": "x"}),
        ("tag", {"input": ["x"]}),
        ("answer", {"question": "x", "input": "y"}),
    ):
        refused = client.post(f"/v1/{path}", json={"model": "gpt", **body})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "wrong_model"
    assert client.post("/v1/classify", json={"model": "labels", "input": " "}).status_code == 400


def test_tokenize_shows_pieces_bytes_and_merges(client, tokenizer):
    text = "The robot 你好"
    answer = client.post("/v1/tokenize", json={"model": "gpt", "input": text}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert bytes.fromhex("".join(answer["bytes"])).decode() == text
    assert next(text[a:b] for a, b in answer["spans"]) == answer["pieces"][0]
    one = client.post("/v1/tokenize", json={"model": "gpt", "input": answer["tokens"][:1], "merges": True}).json()
    assert one["merges"][0] == list(answer["pieces"][0]) and one["merges"][-1] == [answer["pieces"][0]]
    none = client.post("/v1/tokenize", json={"model": "bert", "input": [7], "merges": True}).json()
    assert none["merges"] is None


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_explanations_come_in_slices(client, models, model):
    body = {"model": model, "input": PROMPT, "layer": 1, "head": 2}
    heads = client.post("/v1/explain", json=body | {"view": "heads"}).json()
    count = heads["window"]["total"]
    assert heads["thumbnails"]["shape"] == [2, 4, count, count]
    assert np.shape(heads["scores"]["previous"]) == (2, 4)
    kind = transformers.GPT2LMHeadModel if model == "gpt" else transformers.BertForMaskedLM
    theirs = kind.from_pretrained(models[model], attn_implementation="eager").eval()
    with torch.no_grad():
        seen = theirs(torch.tensor([heads["tokens"]]), output_attentions=True)
    import base64

    one = client.post("/v1/explain", json=body | {"view": "attention", "size": 3, "start": 1}).json()
    matrix = np.frombuffer(base64.b64decode(one["matrix"]["f32"]), "<f4").reshape(3, 3)
    np.testing.assert_allclose(matrix, seen.attentions[1][0, 2, 1:4, 1:4].numpy(), atol=1e-3)
    assert one["pieces"] == heads["pieces"][1:4]
    steps = client.post("/v1/explain", json=body | {"view": "steps", "query": 2}).json()["steps"]
    np.testing.assert_allclose(steps["weights"], seen.attentions[1][0, 2, 2, : len(steps["keys"])].numpy(), atol=1e-4)
    layers = client.post("/v1/explain", json=body | {"view": "layers"}).json()
    np.testing.assert_allclose(
        layers["lens"]["probabilities"][-1], seen.logits[0].softmax(-1).topk(5).values.numpy(), atol=1e-4
    )
    assert np.shape(layers["norms"]) == (3, count)


def test_wrong_places_in_explanations_are_named(client):
    for wrong, word in (
        ({"layer": 9}, "layer=9"),
        ({"head": 9}, "head=9"),
        ({"view": "steps", "query": 99}, "query=99"),
        ({"view": "walk", "head": 9}, "head=9"),
    ):
        body = {"model": "gpt", "input": PROMPT, "view": "attention"} | wrong
        answer = client.post("/v1/explain", json=body)
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]


# ---- runs


def test_runs_are_listed_and_read(client):
    listed = {run["name"]: run for run in client.get("/v1/runs").json()["runs"]}
    assert set(listed) == {"first", "second"} and listed["first"]["step"] == 40
    records = client.get("/v1/runs/first").json()["records"]
    losses = [row["loss"] for row in records if "loss" in row]
    assert losses == [5.5, 5.0, 4.5, 4.0]
    assert [row["sample"] for row in records if "sample" in row] == ["Once upon <b>a</b>", "Once upon a time"]
    assert client.get("/v1/runs/..%2F..%2Fetc").status_code == 404


def test_a_run_is_followed_live(client, runs_folder):
    with client.stream("GET", "/v1/runs/second/events") as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        first = next(events)
        assert first["reset"] and len(first["records"]) == 6
        with (runs_folder / "second" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 30, "loss": 1.25, "tokens": 3000, "seconds": 15}) + "\n")
        assert next(events)["records"][0]["loss"] == 1.25


def test_only_new_metrics_are_read_and_a_resumed_run_starts_again(tmp_path):
    """Against a reading of the whole file, through appends, torn lines, cuts to an earlier step and a replaced file."""
    file, dice, shown, read = tmp_path / "metrics.jsonl", random.Random(0), list[dict](), 0
    tail, lines = MetricsTail(tmp_path), list[str]()
    for i in range(300):
        match dice.randrange(8):
            case 0:
                lines = lines[: dice.randrange(len(lines) + 1)]  # resumed from a checkpoint
                file.write_text("".join(lines))
            case 1:
                file.write_text("".join(lines) + '{"step": 9')  # a line that is being written
            case _:
                lines.append(json.dumps({"step": i, "loss": dice.random(), "tokens": 10 * i}) + "\n")
                file.write_text("".join(lines))
        again, new = tail.read()
        read += len(new)
        shown = new if again else [*shown, *new]
        assert [row["loss"] for row in shown] == [json.loads(line)["loss"] for line in lines]
        assert shown == curve(tmp_path)
    assert read < 3000  # 300 readings of the whole would be far more


# ---- the guard


def test_health_metrics_and_log(client, server):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").status_code == 200
    assert all(client.head(path).status_code == 200 for path in ("/healthz", "/readyz"))  # as some balancers ask
    client.post("/v1/completions", json={"model": "gpt", "prompt": "A secret", "max_tokens": 3})
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert families["plume_waiting"].samples and families["plume_first_token_seconds"].samples
    written = [s.value for s in families["plume_tokens"].samples if s.labels == {"model": "gpt", "kind": "completion"}]
    assert written and written[0] >= 3
    rows = [json.loads(line) for line in server.log.getvalue().splitlines()]
    last = [row for row in rows if row["path"] == "/v1/completions"][-1]
    assert last["status"] == 200 and last["completion_tokens"] == 3 and last["first_token_ms"] >= 0
    assert "A secret" not in server.log.getvalue()


def test_every_answer_carries_the_security_headers(client):
    for path in ("/", "/static/app.js", "/v1/models", "/nowhere", "/docs"):
        headers = client.get(path).headers
        assert (
            "default-src 'none'" in headers["content-security-policy"]
            and "unsafe" not in headers["content-security-policy"]
        )
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert "server" not in headers


def test_static_files_are_a_closed_list(client):
    page = client.get("/")
    assert page.status_code == 200 and "<title>Plume" in page.text
    again = client.get("/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/..%2f..%2fconfig.py"):
        assert client.get(path).status_code == 404


def test_bad_bodies_are_refused(client):
    post = lambda content, **headers: client.post(  # noqa: E731
        "/v1/completions", content=content, headers={"content-type": "application/json"} | headers
    )
    assert post(b"{not json").status_code == 400
    assert post(b"").status_code == 400
    assert post(b"[]").status_code == 400
    assert post(b'{"model": "gpt", "prompt": "\\ud800"}').status_code == 400
    assert post(b'{"model": "gpt", "prompt": "' + b"x" * 3_000_000 + b'"}').status_code == 413
    assert post(b'{"model": "gpt", "temperature": NaN}').status_code == 400
    assert post(b'{"model": "gpt"}', **{"content-type": "text/plain"}).status_code == 415
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/v1/nowhere").json()["error"]["type"] == "not_found_error"
    assert client.get("/healthz").status_code == 200


def test_only_this_machines_names_are_answered_without_keys(client):
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.slow
def test_a_client_that_goes_away_frees_its_place(client, server, tokenizer):
    served = server.app.state.models._open["gpt"]
    before = served.scheduler.counters.cancelled
    endless = {"max_tokens": 4000, "overflow": "slide", "logit_bias": {str(tokenizer.end): -1000}}
    body = {"model": "gpt", "prompt": PROMPT, "stream": True, **endless}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body | {"stream": False}, timeout=0.3)
    until = time.monotonic() + 10
    while served.scheduler.counters.cancelled < before + 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert served.scheduler.counters.cancelled == before + 2
    assert served.scheduler.running == 0


def test_many_at_once_get_their_own_answers(client):
    """Each of many concurrent requests gets exactly what it gets alone."""
    bodies = [{"model": "gpt", "prompt": f"robot {i}", "max_tokens": 8, "seed": i} for i in range(24)]
    alone = [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
    together: dict[int, str] = {}

    def ask(i: int) -> None:
        together[i] = client.post("/v1/completions", json=bodies[i]).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(bodies))] == alone
