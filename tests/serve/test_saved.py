"""A saved page in a real browser, from disk and offline: it answers as a server of the same 8-bit weights does."""

import base64
import random
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from running import TEXTS, run_server, tiny
from visit import VIEWS, Visit

import plume
from plume.cli.main import main
from plume.config import EngineConfig, ServeConfig, TokenizerConfig
from plume.hf import load_model, save_model
from plume.lm import LM
from plume.text import load_tokenizer

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
TEXT = "The robot must obey the orders given it by the robot"
ASK = """async ([path, bodies]) => {
  const api = (await import('plume/api.js')).createApi(), answers = [];
  for (const body of bodies) answers.push(await api.ask('test', path, body));
  const plain = (_, x) => ArrayBuffer.isView(x) ? [...x].map((v) => Number.isFinite(v) ? v : null) : x;
  return JSON.parse(JSON.stringify(answers, plain));
}"""
KINDS = {
    "gpt": ("gpt2", TokenizerConfig(vocab_size=400), {}),
    "banded": ("gpt3-laptop", TokenizerConfig(kind="bytes"), {"band": 6}),
    "post": ("openai-gpt", TokenizerConfig(kind="characters"), {"width": 96}),
}
LETTERS = "aé中🤖\u0085\ufeff\u00a0\u3000 \t\n\r'sdmtlv1²½Ⅷ-_<|>\u0301\x00"


def dequantised(weight):
    """Written out: groups of 64 columns, the scale a bfloat16 rounded up, codes of 8 bits."""
    found = torch.zeros_like(weight)
    for row in range(len(weight)):
        for at in range(0, weight.shape[1], 64):
            group = weight[row, at : at + 64].double()
            scale = np.float32(max(float(group.abs().max()), 1e-30)) / np.float32(127)
            bits = (int(scale.view(np.uint32)) + 0xFFFF) >> 16 << 16
            scale = float(np.uint32(bits).view(np.float32))
            found[row, at : at + 64] = ((group / scale).round() * scale).float()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each model, and beside it the same with the weights that eight bits leave."""
    place, found = tmp_path_factory.mktemp("saved"), {}
    for name, (preset, tokenizer, more) in KINDS.items():
        found[name] = tiny(preset, "next-token", place / "whole" / name, tokenizer, **more)
        model = load_model(found[name])
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim == 2 and "positions" not in key:
                    parameter.copy_(dequantised(parameter))
        save_model(model, place / "eight_bits" / name, tokenizer=load_tokenizer(found[name]))
    return place


@pytest.fixture(scope="module")
def site(folders):
    places = tuple(str(folders / "eight_bits" / name) for name in KINDS)
    yield from run_server(ServeConfig(models=places, engine=EngineConfig(engine="torch"), batch=4, queue=64))


@pytest.fixture(scope="module")
def pages(browser, folders):
    """A visit to each saved page, without a network."""
    visits = {}
    for name in KINDS:
        file = folders / f"{name}.html"
        main(["explore", str(folders / "whole" / name), "--save", str(file)])
        visits[name] = Visit(browser, SimpleNamespace(url=file.as_uri()), offline=True)
        visits[name].page.goto(f"{file.as_uri()}#text={TEXT.replace(' ', '+')}")
        visits[name].page.wait_for_selector(".candidates .row")
    yield visits
    for visit in visits.values():
        visit.close()


@pytest.fixture(params=KINDS)
def both(request, pages, site):
    """Questions to the page and to the server."""

    def ask(path, *bodies):
        asked = [{"model": request.param, **body} for body in bodies]
        with httpx.Client(base_url=site.url, timeout=60) as client:
            served = [client.post(path, json=body).raise_for_status().json() for body in asked]
        return list(zip(pages[request.param].page.evaluate(ASK, [path, asked]), served, strict=True))

    return ask


def close(page, server, path="answer"):
    """What the server says stands in the page's answer, numbers within 1e-4."""
    if isinstance(server, dict) and {"f32", "u8"} & server.keys():
        raw = base64.b64decode(server.get("f32") or server["u8"])
        values = np.frombuffer(raw, "<f4" if "f32" in server else np.uint8).astype(float)
        shown = np.array([-np.inf if x is None else x for x in page["data"]], float)
        assert page["shape"] == server["shape"], path
        np.testing.assert_allclose(shown, values, atol=1e-4 if "f32" in server else 1, err_msg=path)
    elif isinstance(server, dict):
        for name, value in server.items():
            close(page.get(name), value, f"{path}.{name}")
    elif isinstance(server, list):
        assert len(page) == len(server), path
        for i, (a, b) in enumerate(zip(page, server, strict=True)):
            close(a, b, f"{path}[{i}]")
    elif isinstance(server, float) and page is not None:
        assert page == pytest.approx(server, abs=2e-4, rel=1e-4), path
    else:
        assert page == server, path


def test_the_same_ten_next_tokens_on_fifty_prompts(both):
    dice, words = random.Random(0), " ".join(TEXTS).split()
    texts = [" ".join(dice.choices(words, k=dice.randint(1, 5)))[:20] for _ in range(50)]
    for page, server in both("/v1/next-tokens", *({"input": text, "k": 10, "temperatures": True} for text in texts)):
        assert page["candidates"]["tokens"] == server["candidates"]["tokens"]
        close(page, server)


def test_texts_are_tokenized_alike(both):
    """Odd white space, parts of characters, combining marks, digits of other scripts."""
    texts = [*TEXTS, *("".join(random.Random(i).choices(LETTERS, k=30)) for i in range(100))]
    answers = both("/v1/tokenize", *({"input": text} for text in texts))
    for page, server in answers:
        close(page, server)
    ids = answers[0][1]["tokens"][:6]
    for page, server in both("/v1/tokenize", *({"input": [token], "merges": True} for token in ids)):
        close(page, server)


@pytest.mark.parametrize("filters", [{"temperature": 0}, {"top_k": 5}, {"temperature": 1.5, "top_p": 0.9}, {}])
def test_a_seed_gives_the_same_text(both, filters):
    asked = ({"prompt": "The robot", "max_tokens": 12, "seed": seed, **filters} for seed in (1, 77, 2**31))
    for page, server in both("/v1/completions", *asked):
        assert page["choices"][0]["text"] == server["choices"][0]["text"]


@pytest.mark.parametrize(
    "question",
    [
        {"view": "heads", "size": 9},
        *({"view": "attention", "layer": 1, "head": 2, "mix": mix} for mix in ("head", "mean", "rollout")),
        {"view": "attention", "layer": 0, "head": 1, "mix": "head", "start": 3, "size": 5},
        {"view": "steps", "layer": 1, "head": 3, "query": 7},
        {"view": "layers", "size": 7},
        *({"view": "walk", "layer": layer, "head": 1, "query": 6} for layer in (-1, 0, 1, 2)),
    ],
    ids=lambda question: "-".join(map(str, question.values())),
)
def test_the_inside_of_the_model_is_the_same(both, question):
    ((page, server),) = both("/v1/explain", {"input": TEXT, **question})
    server.get("shape", {}).pop("vocabulary", None)
    close(page, server)


def test_every_view_opens_from_disk(pages):
    visit = pages["gpt"]
    page = visit.page
    tabs = page.locator("#tabs button").evaluate_all("tabs => tabs.map((tab) => tab.dataset.view)")
    assert tabs == [view for view in VIEWS if view not in ("cause", "attribution", "surprise", "masks", "runs")]
    for view, ready in {"walk": ".strip, .walk-text", "attention": ".matrix canvas", "layers": ".grid td"}.items():
        page.locator(f"#tabs [data-view={view}]").click()
        page.wait_for_selector(ready)
    page.locator("#tabs [data-view=walk]").click()
    for _ in range(2 * 16 + 3 + 3):
        page.keyboard.press("ArrowRight")
        visit.settle()
    playwright.expect(page.locator(".walk-title")).to_have_text("The next token")
    page.locator("#tabs [data-view=write]").click()
    page.locator(".controls .primary").click()
    page.locator(".made").nth(5).wait_for()
    page.locator("#language").click()
    playwright.expect(page.locator("#tabs [data-view=walk]")).not_to_have_text("Walk")


@pytest.mark.parametrize(
    ("preset", "head", "kind", "reason"),
    [
        ("bert-tiny", "masked-token", "wordpiece", "does not predict the next token"),
        ("transformer-base", "next-token", "byte-bpe", "encoder-decoder"),
        ("openai-gpt", "next-token", "gpt1-bpe", "its tokenizer is gpt1-bpe"),
        ("lstm-laptop", "next-token", "byte-bpe", "recurrent"),
    ],
)
def test_other_models_are_refused_with_the_reason(tmp_path, capsys, preset, head, kind, reason):
    more = {"layers": 1, "heads": 1} if "lstm" in preset else {}
    folder = tiny(preset, head, tmp_path / "model", TokenizerConfig(kind=kind, vocab_size=400), **more)
    assert main(["explore", str(folder), "--save", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert reason in said and "--save" in said and not (tmp_path / "page.html").exists()


def test_a_cell_shows_the_explorer_of_any_model(browser, tmp_path):
    """In a frame of a page of this machine, as a notebook is; the server itself refuses frames."""
    folder = tiny("bert-tiny", "masked-token", tmp_path / "bert", TokenizerConfig(kind="wordpiece", vocab_size=400))
    cell = plume.load(folder).explore()
    (tmp_path / "index.html").write_text(cell._repr_html_())
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as notebook:
        threading.Thread(target=notebook.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://localhost:{notebook.server_port}/")
        page.frame_locator("iframe").locator(".candidates .row").first.wait_for()
        page.close()
        notebook.shutdown()
    assert cell.url in repr(cell)
    cell.close()
    assert not cell.thread.is_alive()
    with pytest.raises(plume.UserError, match="in memory"):
        LM(None, load_tokenizer(folder), EngineConfig(), load_model(folder)).explore()
