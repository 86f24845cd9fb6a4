"""OpenAI's APIs with the real client: chat, responses, logprobs, usage, async, time-outs, cancellation, retries."""

import asyncio
import json
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
import transformers
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from running import serving, tiny

from plume.config import SamplingConfig, TokenizerConfig
from plume.lm import load
from plume.serve import schemas
from plume.serve.chat import render
from plume.text import load_tokenizer

ASK = [{"role": "user", "content": "The robot must obey"}]
CHAT = {"model": "gpt", "messages": ASK, "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def ai(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_client_of_the_page_works(server, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(block.replace("http://127.0.0.1:8000", server.url).replace('"demo"', '"gpt"'), scope := {})
    assert capsys.readouterr().out
    scope["client"].close()


@pytest.fixture(scope="module")
def lm(models):
    return load(models["gpt"], engine="torch")


@pytest.fixture(scope="module")
def tokenizer(models):
    return load_tokenizer(models["gpt"])


# ---- fields


@pytest.mark.parametrize(
    ("request_class", "theirs"),
    [
        (schemas.CompletionRequest, CompletionParams),
        (schemas.ChatRequest, ChatParams),
        (schemas.ResponsesRequest, ResponseParams),
        (schemas.EmbeddingRequest, EmbeddingCreateParams),
    ],
)
def test_every_field_of_openais_schema_is_read_or_ignored(request_class, theirs):
    unknown = set(theirs.__annotations__) - request_class.names() - request_class.without_effect
    assert unknown == set()


def test_sampling_fields_are_those_of_the_config():
    fields = set(SamplingConfig.__dataclass_fields__)
    assert schemas.ADAPTERS.keys() <= fields
    assert fields - schemas.ADAPTERS.keys() == {
        "max_new_tokens", "top_p_rule", "beams", "length_penalty", "speculate", "speculate_tokens"
    }  # fmt: skip


def test_ignored_fields_are_named_in_a_header(ai, server):
    raw = ai.chat.completions.with_raw_response.create(**CHAT, store=True, metadata={"a": "b"}, service_tier="auto")
    assert raw.headers["x-plume-ignored-fields"] == "metadata, service_tier, store"
    plain = ai.chat.completions.with_raw_response.create(**CHAT)
    assert "x-plume-ignored-fields" not in plain.headers


@pytest.mark.parametrize(
    ("path", "body", "right"),
    [
        ("score", {"text": "a"}, "use input"),
        ("tokenize", {"tokens": [1]}, "use input"),
        ("answer", {"question": "a", "context": "b"}, "use input"),
        ("classify", {"texts": ["a"]}, "use input"),
        ("completions", {"prompt": "a", "max_new_tokens": 3}, "use max_tokens"),
        ("completions", {"prompt": "a", "stop_sequences": ["x"]}, "use stop"),
        ("completions", {"prompt": "a", "no_repeat_ngram_size": 2}, "use no_repeat_ngram"),
        ("completions", {"prompt": "a", "temprature": 2}, "did you mean 'temperature'"),
        ("responses", {"input": "a", "n": 2}, "there is no field n"),
        ("responses", {"input": "a", "logprobs": 2}, "use top_logprobs"),
        ("translate", {"input": "a", "stream": True}, "there is no field stream"),
    ],
)
def test_a_wrong_field_gets_the_right_one(client, path, body, right):
    answer = client.post(f"/v1/{path}", json={"model": "gpt", **body})
    assert answer.status_code == 400 and right in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_has_openais_code(ai, tokenizer):
    long = "robot " * 5000
    calls = (
        lambda: ai.completions.create(model="gpt", prompt=long, max_tokens=1),
        lambda: ai.chat.completions.create(**{**CHAT, "messages": [{"role": "user", "content": long}]}),
        lambda: ai.responses.create(model="gpt", input=long, max_output_tokens=16),
    )
    for call in calls:
        with pytest.raises(openai.BadRequestError, match="the prompt has") as found:
            call()
        assert found.value.code == "context_length_exceeded"


def test_models_say_how_long_a_text_they_read(ai):
    assert {model.id: model.max_model_len for model in ai.models.list()}["gpt"] == 64


# ---- completions


def test_the_end_token_is_among_the_logprobs(ai, tokenizer):
    forced = {str(tokenizer.end): 100}
    answer = ai.completions.create(model="gpt", prompt="The robot", max_tokens=5, logit_bias=forced, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == "" and choice.finish_reason == "stop"
    assert choice.logprobs.token_ids == [tokenizer.end] and choice.logprobs.tokens == ["<|endoftext|>"]
    assert choice.logprobs.text_offset == [0] and answer.usage.completion_tokens == 1
    parts = ai.completions.create(
        model="gpt", prompt="The robot", max_tokens=5, logit_bias=forced, logprobs=2, stream=True
    )
    assert [t for part in parts for t in part.choices[0].logprobs.token_ids] == [tokenizer.end]


@pytest.mark.parametrize("text", ["你好，世界。机器人", "\U0001f916 \U0001f600 é ü", "abc def"])
def test_offsets_count_characters(ai, text):
    (choice,) = ai.completions.create(model="gpt", prompt=text, max_tokens=0, echo=True, logprobs=0).choices
    assert choice.text == text
    offsets = choice.logprobs.text_offset
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] < len(text)
    for i, (token, at) in enumerate(zip(choice.logprobs.tokens, offsets, strict=True)):
        if "\\x" not in token:  # whole characters
            following = offsets[i + 1] if i + 1 < len(offsets) else len(text)
            assert text[at:following] == token


def test_offsets_of_a_stream_are_those_of_the_whole(ai):
    options = {"model": "gpt", "prompt": "机器人 robot", "max_tokens": 20, "seed": 1, "logprobs": 1, "echo": True}
    (whole,) = ai.completions.create(**options).choices
    parts = [part.choices[0].logprobs for part in ai.completions.create(**options, stream=True)]
    assert [at for part in parts for at in part.text_offset] == whole.logprobs.text_offset
    assert [p for part in parts for p in part.token_logprobs] == whole.logprobs.token_logprobs


def test_the_sampled_token_is_always_among_the_top(ai):
    options = {"model": "gpt", "prompt": "a", "max_tokens": 30, "temperature": 5.0, "seed": 2}
    for k in (0, 1):
        logprobs = ai.completions.create(**options, logprobs=k).choices[0].logprobs
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert top[token] == logprob


def test_the_seed_of_an_answer_can_be_sent_again(ai, lm):
    body = {"model": "gpt", "prompt": "The robot", "max_tokens": 12}
    first = ai.completions.create(**body, seed=-5).choices[0]
    again = ai.completions.create(**body, seed=first.seed).choices[0]
    assert first.text == again.text == lm.generate("The robot", max_new_tokens=12, top_k=None, seed=first.seed).text


def test_logprobs_do_not_depend_on_the_other_sequences_in_the_batch(server):
    body = {"model": "gpt", "prompt": "The robot", "max_tokens": 16, "seed": 9, "logprobs": 3}
    (alone,) = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]

    async def together():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [body if i % 3 == 0 else body | {"seed": i, "prompt": f"robot {i}"} for i in range(18)]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in asked))
            return [answer.json()["choices"][0] for answer in answers[::3]]

    for found in asyncio.run(together()):
        assert found["text"] == alone["text"] and found["logprobs"]["token_ids"] == alone["logprobs"]["token_ids"]
        assert found["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)


def test_usage_comes_with_the_last_chunk_and_is_null_before(ai):
    for create, options in (
        (ai.completions.create, {"model": "gpt", "prompt": "The robot", "max_tokens": 7}),
        (ai.chat.completions.create, CHAT),
    ):
        *parts, last = create(**options, stream=True, stream_options={"include_usage": True})
        assert all(part.usage is None for part in parts)
        assert last.choices == [] and 0 < last.usage.completion_tokens <= 12
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


# ---- chat


def plain(*messages):
    return "".join(f"{role}: {text}\n\n" for role, text in messages) + "assistant:"


def test_a_base_model_chats_by_the_plain_template(ai, lm):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    answer = ai.chat.completions.create(model="gpt", messages=messages, max_tokens=10, temperature=0)
    stops = ("\n\nuser:", "\n\nsystem:", "\n\nassistant:")
    expected = lm.generate(plain(("system", "Be kind."), ("user", "Hi")), max_new_tokens=10, temperature=0, stop=stops)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == expected.prompt_tokens


def test_the_likeliest_tokens_of_a_chat_need_logprobs(ai):
    with pytest.raises(openai.BadRequestError, match="needs logprobs=true") as found:
        ai.chat.completions.create(**CHAT, top_logprobs=2)
    assert found.value.param == "top_logprobs"
    assert ai.chat.completions.create(**CHAT, top_logprobs=0).choices[0].logprobs is None


def test_a_chat_stream_is_the_whole_in_parts(ai):
    whole = ai.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=2)
    parts = list(ai.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=2, stream=True))
    for choice in whole.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        tokens = [row for part in mine if part.logprobs for row in part.logprobs.content]
        assert tokens == choice.logprobs.content and len(tokens[0].top_logprobs) == 2
        assert mine[-1].finish_reason == choice.finish_reason


def test_a_model_with_a_template_of_its_own_uses_it(models, serve_config, tmp_path, tokenizer, lm):
    folder = tmp_path / "tuned"
    shutil.copytree(models["gpt"], folder)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}[reply]"
    (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    expected = lm.generate(ids, max_new_tokens=8, temperature=0)
    with serving(replace(serve_config, models=(str(folder),), runs=None)) as (_, client):
        body = {"model": "tuned", "messages": ASK, "max_tokens": 8, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["message"]["content"] == expected.text


TEMPLATES = {
    "break": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ {'b': '<&>', 'a': 'é'} | tojson(indent=1, sort_keys=true) }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_have_what_transformers_gives_them(name, models, tmp_path):
    """loop controls, JSON without HTML's escapes, today."""
    folder = shutil.copytree(models["gpt"], tmp_path / "tuned")
    (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [{"role": "user", "content": "a <b> & 'c'"}, {"role": "assistant", "content": "\u4f60"}]
    expected = theirs.apply_chat_template(rows, add_generation_prompt=True, tokenize=False)
    served = SimpleNamespace(lm=SimpleNamespace(tokenizer=load_tokenizer(folder)))
    assert render(served, TEMPLATES[name], [schemas.ChatMessage(**row) for row in rows]) == expected


def test_what_a_template_refuses_is_a_400(models, serve_config, tmp_path):
    """By `raise_exception`, as most do where roles do not alternate, or by an error of its own."""
    folder = shutil.copytree(models["gpt"], tmp_path / "tuned")
    template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if messages[0].content == 'add' %}{{ messages[0].content + 1 }}{% endif %}"
        "{% if messages[0].content == 'many' %}{{ range(10000000) | list }}{% endif %}{{ messages[0].content }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    with serving(replace(serve_config, models=(str(folder),), runs=None)) as (_, client):

        def ask(text):
            body = {"model": "tuned", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            return client.post("/v1/chat/completions", json=body)

        assert ask("The robot").status_code == 200
        for text, reason in (("no", "roles must alternate"), ("add", "str"), ("many", "range")):
            answer = ask(text)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages", (text, answer.text)
            assert reason in answer.json()["error"]["message"].lower()


# ---- responses


def test_responses_equal_chat_and_stream_in_order(ai):
    options = {"model": "gpt", "input": "The robot must obey", "max_output_tokens": 12}
    extra = {"extra_body": {"seed": 3}}
    whole = ai.responses.create(**options, **extra)
    chat = ai.chat.completions.create(**CHAT)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens and whole.status in ("completed", "incomplete")
    events = list(ai.responses.create(**options, **extra, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-1] == f"response.{whole.status}" and kinds[-2] == "response.output_item.done"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_a_stream_of_a_response_has_its_log_probabilities(ai):
    options = {"model": "gpt", "input": "The robot", "max_output_tokens": 20, "top_logprobs": 2}
    *_, last = events = list(ai.responses.create(**options, extra_body={"seed": 3}, stream=True))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert [t.token for e in deltas for t in e.logprobs] == [
        t.token for t in last.response.output[0].content[0].logprobs
    ]
    assert "".join(e.delta for e in deltas) == last.response.output_text


def test_responses_are_stateless(ai):
    listed = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    answer = ai.responses.create(model="gpt", input=listed, instructions="Be kind.", max_output_tokens=4)
    assert answer.instructions == "Be kind." and answer.store is False
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ai.responses.create(model="gpt", input="a", previous_response_id=answer.id)
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        ai.responses.create(model="bert", input="a")


def test_embeddings_of_texts_and_tokens_agree(ai, tokenizer):
    text = "The robot"
    by_text, by_ids = ai.embeddings.create(model="gpt", input=[text, text]), tokenizer.encode(text)
    tokens = ai.embeddings.create(model="gpt", input=by_ids)
    assert by_text.data[1].embedding == pytest.approx(tokens.data[0].embedding, abs=1e-5)


# ---- how the client behaves


def test_the_async_client_streams_several_at_once(server):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one(i):
                stream = await client.chat.completions.create(**CHAT | {"seed": i}, stream=True)
                return "".join([part.choices[0].delta.content or "" async for part in stream])

            streamed = await asyncio.gather(*(one(i) for i in range(8)))
            whole = [await client.chat.completions.create(**CHAT | {"seed": i}) for i in range(8)]
            return streamed, [answer.choices[0].message.content for answer in whole]

    streamed, whole = asyncio.run(run())
    assert streamed == whole


def test_a_cancelled_stream_and_a_timeout_free_the_server(server, endless):
    scheduler = server.app.state.models._open["gpt"].scheduler
    body = {"model": "gpt", "messages": ASK, "max_tokens": 3000, "extra_body": {
        "overflow": "slide", "ignore_eos": True, "min_new_tokens": 3000}}  # fmt: skip
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(**body, stream=True)
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**body, timeout=0.3)
    until = time.monotonic() + 10
    while not scheduler.idle and time.monotonic() < until:
        time.sleep(0.02)
    assert scheduler.idle


def test_the_client_retries_a_full_queue(serve_config, models, endless):
    config = replace(serve_config, models=(str(models["gpt"]),), runs=None, batch=1, queue=1)
    with serving(config) as (site, client), openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=4) as ai:
        lines = []

        def fill(seconds):
            with client.stream("POST", "/v1/completions", json=endless | {"stream": True}) as stream:
                rows = stream.iter_lines()
                lines.append(next(rows))
                time.sleep(seconds)

        threads = [threading.Thread(target=fill, args=(1.5,)) for _ in range(1)]
        for thread in threads:
            thread.start()
        while not lines:
            time.sleep(0.01)
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{site.url}/v1/completions", json={"model": "gpt", "prompt": "a"}, timeout=30)
        )
        waiting.start()
        until = time.monotonic() + 5
        while site.app.state.models._open["gpt"].scheduler.waiting < 1 and time.monotonic() < until:
            time.sleep(0.01)
        answer = ai.completions.create(model="gpt", prompt="b", max_tokens=2)
        assert answer.usage.completion_tokens <= 2
        for thread in (*threads, waiting):
            thread.join()
        statuses = [json.loads(line)["status"] for line in site.log.getvalue().splitlines()]
        assert 429 in statuses and statuses.count(200) >= 2


def test_the_server_answers_what_the_real_schema_would(ai):
    """The client parses strictly when asked for typed objects."""
    raw = ai.chat.completions.with_raw_response.create(**CHAT)
    assert raw.parse().choices[0].finish_reason in ("stop", "length")


# ---- other kinds of models


def test_a_continuation_is_scored_given_a_prompt(client, lm, tokenizer):
    body = {"model": "gpt", "prompt": "The robot", "input": " must obey"}
    answer = client.post("/v1/score", json=body).json()
    before, after = tokenizer.encode("The robot"), tokenizer.encode(" must obey")
    with torch.no_grad():
        rows = lm.model(torch.tensor([[tokenizer.start, *before, *after]]))[0].log_softmax(-1)
    expected = [-float(rows[len(before) + i, token]) for i, token in enumerate(after)]
    assert answer["tokens"] == after and answer["surprisal"] == pytest.approx(expected, abs=1e-3)
    assert answer["logprob"] == pytest.approx(-sum(expected), abs=1e-3)


@pytest.fixture(scope="module")
def heads(serve_config, tmp_path_factory):
    """A server of models that neither generate nor have one of the usual heads."""
    place, pieces = tmp_path_factory.mktemp("heads"), TokenizerConfig(kind="wordpiece", vocab_size=400)
    folders = {
        "pretrained": tiny("bert-tiny", "pretraining", place / "pretrained", pieces),
        "choices": tiny("bert-tiny", "choose", place / "choices", pieces),
        "seq2seq": tiny("transformer-laptop", "next-token", place / "seq2seq", TokenizerConfig(vocab_size=400)),
    }
    with serving(replace(serve_config, models=tuple(map(str, folders.values())), runs=None)) as (_, client):
        yield folders, client


def test_next_sentences_equal_transformers(heads):
    folders, client = heads
    bert = transformers.BertForPreTraining.from_pretrained(folders["pretrained"]).eval()
    tokenizer = load_tokenizer(folders["pretrained"])
    body = {"model": "pretrained", "input": "the robot must obey", "pair": "once upon a time"}
    answer = client.post("/v1/next-sentence", json=body).json()
    ids, segments = tokenizer.add_special_tokens(tokenizer.encode(body["input"]), tokenizer.encode(body["pair"]))
    with torch.no_grad():
        found = bert(torch.tensor([ids]), token_type_ids=torch.tensor([segments])).seq_relationship_logits[0]
    assert answer["tokens"] == ids
    assert answer["follows"] == pytest.approx(float(found.softmax(-1)[0]), abs=1e-5)
    in_python = load(folders["pretrained"]).next_sentence(body["input"], body["pair"])
    assert answer["follows"] == pytest.approx(in_python, abs=1e-6)
    refused = client.post("/v1/next-sentence", json=body | {"model": "choices"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "wrong_model"


def test_embeddings_of_layers_are_those_of_transformers(heads):
    folders, client = heads
    bert = transformers.BertModel.from_pretrained(folders["pretrained"]).eval()
    tokenizer, text = load_tokenizer(folders["pretrained"]), "the robot must obey"
    ids, _ = tokenizer.add_special_tokens(tokenizer.encode(text))
    with torch.no_grad():
        states = bert(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[0][0, 0], states[-1][0, 0]]).tolist()
    body = {"model": "pretrained", "input": text, "pool": "cls", "layers": [0, -1], "dimensions": len(expected)}
    answer = client.post("/v1/embeddings", json=body).json()
    assert answer["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
    for wrong, says in (
        ({"layers": 9, "dimensions": None}, "layers=9 does not exist"),
        ({"dimensions": 3}, "dimensions must be"),
    ):
        refused = client.post("/v1/embeddings", json=body | wrong)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]


def test_choices_and_translations_are_those_of_python(heads):
    folders, client = heads
    body = {"model": "choices", "input": "the robot must", "choices": ["obey the orders", "a little girl"]}
    answer = client.post("/v1/choose", json=body).json()
    expected = load(folders["choices"]).choose(body["input"], body["choices"])
    assert answer["text"] == expected.text and sum(answer["probabilities"]) == pytest.approx(1)
    body = {"model": "seq2seq", "input": ["the robot", "once upon a time"], "max_tokens": 8, "beams": 2}
    answer = client.post("/v1/translate", json=body).json()
    lm = load(folders["seq2seq"])
    for row, source in zip(answer["data"], body["input"], strict=True):
        found = lm.translate(source, beams=2, length_penalty=0.6, max_new_tokens=8, top_k=None)
        assert row["text"] == found.text
    with ThreadPoolExecutor(6) as pool:  # searches share one engine
        again = list(pool.map(lambda _: client.post("/v1/translate", json=body).json(), range(6)))
    assert again == [answer] * 6
    refused = client.post("/v1/translate", json=body | {"max_tokens": 3000})  # of each text; the server writes 4096
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    refused = client.post("/v1/score", json={"model": "seq2seq", "input": "a"})
    assert refused.json()["error"]["message"] == "seq2seq is an encoder-decoder and does not predict tokens"
    for path, given in (("translate", {"input": "a"}), ("choose", {"input": "a", "choices": ["b", "c"]})):
        refused = client.post(f"/v1/{path}", json={"model": "pretrained", **given})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "wrong_model"


@pytest.mark.parametrize("beams", [1, 3])
def test_a_gpt_fine_tuned_to_generate_translates_beside_others(models, serve_config, tmp_path, endless, beams):
    """Its beams take turns with what is generated meanwhile, and with each other's requests."""
    folder = shutil.copytree(models["gpt"], tmp_path / "tuned")
    about = json.loads((folder / "plume.json").read_text()) if (folder / "plume.json").is_file() else {}
    (folder / "plume.json").write_text(json.dumps(about | {"task": {"kind": "generate", "length": 32}}))
    body = {"model": "tuned", "input": ["the robot", "once upon", "a house"], "max_tokens": 6, "beams": beams}
    lm = load(folder, engine="torch")
    options = {"beams": beams, "max_new_tokens": 6}
    expected = [lm.translate(text, **options).text for text in body["input"]]
    config = replace(serve_config, models=(str(folder),), runs=None)
    with serving(config) as (_, client), ThreadPoolExecutor(4) as pool:
        stream = {"model": "tuned", "stream": True, "max_tokens": 100}
        with client.stream("POST", "/v1/completions", json=endless | stream) as beside:
            lines = beside.iter_lines()
            next(lines)
            answers = list(pool.map(lambda _: client.post("/v1/translate", json=body), range(3)))
            assert [line for line in lines if line][-1] == "data: [DONE]"
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert [row["text"] for row in answer.json()["data"]] == expected
