"""Each view of the Explorer in a real browser: what it shows is what the server says."""

import json
import re
from dataclasses import replace

import httpx
import numpy as np
import pytest
from running import run_server
from visit import EVIL, READY, Visit, rows

from plume.util.run_folder import write_recipe

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
expect = playwright.expect


# ---- next


def visible(piece: str) -> str:
    """As the page shows a token: white space and control characters as signs."""
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "\x7f": "\u2421"}
    return "".join(marks.get(c, chr(0x2400 + ord(c)) if c < " " else c) for c in piece)


def test_next_shows_the_servers_ten_and_takes_them_by_key(visit, site):
    visit.open(text="The robot")
    body = {"model": "gpt", "input": "The robot"}
    told = httpx.post(f"{site.url}/v1/next-tokens", json=body).json()
    shown = [visible(piece) for piece in told["candidates"]["pieces"]]
    assert rows(visit) == shown[:10]
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press("3")
    visit.page.wait_for_function("() => location.hash.includes('ids=')")
    visit.settle()
    ids = [*told["tokens"], told["candidates"]["tokens"][2]]
    assert visit.state()["ids"] == ".".join(map(str, ids))
    fresh = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "input": ids}).json()
    assert visit.page.input_value("#text") == fresh["text"]
    assert rows(visit)[0] == visible(fresh["candidates"]["pieces"][0])
    visit.page.keyboard.press("Alt+ArrowLeft")
    expect(visit.page.locator("#text")).to_have_value("The robot")
    visit.page.keyboard.press("Alt+ArrowRight")
    expect(visit.page.locator("#text")).to_have_value(fresh["text"])
    visit.page.keyboard.press("Backspace")
    expect(visit.page.locator("#text")).to_have_value("The robot")


@pytest.mark.parametrize(
    ("temperature", "topk", "topp"), [(1, 0, 1), (0.5, 0, 1), (1.5, 7, 1), (0.8, 0, 0.6), (2, 5, 0.7)]
)
def test_sliders_redraw_the_true_distribution(visit, site, temperature, topk, topp):
    """Against temperature, top-k and top-p written out over the whole vocabulary."""
    visit.open(text="The robot", temperature=temperature, topk=topk, topp=topp)
    told = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "input": "The robot", "k": 400}).json()
    p = np.exp(np.array(told["candidates"]["logits"]) / temperature)
    p /= p.sum()
    if topk:
        p[topk:] = 0
        p /= p.sum()
    kept = int((np.cumsum(p) < topp).sum()) + 1
    p[kept if topp < 1 else len(p) :] = 0
    p /= p.sum()
    figures = visit.page.locator(".candidates .row .number:not(.logit)").all_inner_texts()
    for i, figure in enumerate(figures[:10]):
        assert figure == "cut" if p[i] == 0 else float(figure.rstrip(" %")) == pytest.approx(100 * p[i], abs=0.06)
    rest = p[10:].sum()
    assert figures[10] == "cut" if rest == 0 else float(figures[10].rstrip(" %")) == pytest.approx(100 * rest, abs=0.06)


def test_a_trailing_space_is_explained_and_healed(visit):
    visit.open(text="The robot ")
    visit.page.get_by_text("ends in a space").wait_for()
    visit.page.get_by_role("button", name="remove it").click()
    expect(visit.page.locator("#text")).to_have_value("The robot")
    expect(visit.page.get_by_text("ends in a space")).to_have_count(0)


def test_typing_asks_once_after_a_pause(visit):
    visit.open(text="")
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.post_data) if "next-tokens" in request.url else None)
    visit.page.fill("#text", "")
    visit.page.locator("#text").press_sequentially("Once upon", delay=20)
    visit.page.wait_for_function("() => location.hash.includes('Once+upon')")
    visit.settle()
    assert len(asked) <= 2 and json.loads(asked[-1])["input"] == "Once upon"


def test_a_figure_is_explained(visit):
    visit.open(text="The robot")
    visit.page.hover(".candidates .row >> nth=1")
    side = visit.page.inner_text("#side")
    assert "exp(l / T)" in side and "h · W[" in side


# ---- write


def test_write_streams_stops_and_branches(visit):
    visit.open("write", text="The robot", length=30, seed=4)
    visit.page.keyboard.press("Control+Enter")
    visit.page.locator(".made").nth(10).wait_for()
    expect(visit.page.locator(".controls .primary")).to_have_text("Generate")
    assert visit.page.locator(".branch").count() == 1
    first = visit.page.inner_text(".columns .prose")
    visit.page.locator(".made").nth(3).hover()
    visit.page.locator("#side .row").nth(4).click()
    expect(visit.page.locator(".branch")).to_have_count(2)
    expect(visit.page.locator(".controls .primary")).to_have_text("Generate")
    assert visit.page.inner_text(".columns .prose") != first
    visit.page.locator(".branch").first.click()
    assert visit.page.inner_text(".columns .prose") == first
    visit.page.get_by_role("button", name="take as text").click()
    assert visit.page.input_value("#text").startswith("The robot") and len(visit.page.input_value("#text")) > 15


def test_samples_stand_side_by_side_and_repeat(visit):
    visit.open("write", text="The robot", length=8, samples=3, seed=9)
    texts = []
    for _ in range(2):
        visit.page.click(".controls .primary")
        expect(visit.page.locator(".columns .prose")).to_have_count(3)
        expect(visit.page.locator(".cursor")).to_have_count(0)
        texts.append(visit.page.locator(".columns .prose").all_inner_texts())
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


# ---- the other views


def test_surprise_tells_what_was_expected(visit, site):
    visit.open("surprise", text="The robot must obey")
    told = httpx.post(f"{site.url}/v1/score", json={"model": "gpt", "input": "The robot must obey"}).json()
    classes = visit.page.locator(".mark").evaluate_all("marks => marks.map((mark) => mark.className)")
    for name, rank in zip(classes, told["rank"], strict=True):
        level = 0 if rank < 1 else 1 if rank < 10 else 2 if rank < 100 else 3 if rank < 1000 else 4
        assert f"rank{level}" in name
    assert f"{told['perplexity']:.2f}" in visit.page.inner_text("#view")
    visit.page.locator(".mark").nth(2).click()
    visit.page.get_by_text("Predicted here").wait_for()
    assert visit.page.locator("#side .row").count() == 10


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_attention_shows_heads_and_steps(visit, model):
    visit.open("attention", model=model, text="The robot must obey because it", layer=0, head=0)
    assert visit.page.locator(".heads button").count() == 8
    visit.page.locator(".heads button").nth(6).click()
    visit.settle()
    assert (visit.state()["layer"], visit.state()["head"]) == ("1", "2")
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press(",")
    visit.page.keyboard.press("[")
    visit.settle()
    assert visit.state().get("layer", "0") == "0" and visit.state()["head"] == "1"
    box = visit.page.locator(".matrix canvas").bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.9)
    visit.page.get_by_text("attends to", exact=False).first.wait_for()
    visit.page.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.9)
    visit.page.locator(".steps table").first.wait_for()
    softmax = visit.page.locator(".steps tbody tr td:nth-child(5)").all_inner_texts()
    assert sum(float(x.rstrip(" %")) for x in softmax) == pytest.approx(100, abs=2)
    visit.page.get_by_role("button", name="arcs").click()
    visit.page.locator("svg .arc").first.wait_for(state="attached")
    for word in ("mean of heads", "rollout"):
        visit.page.get_by_role("button", name=word).click()
        visit.settle()


def test_a_long_text_is_shown_by_windows(visit, models, browser, site):
    visit.open("attention", model=EVIL, text="a robot " * 7 + "in time", picture="matrix")
    assert visit.page.locator(".matrix canvas").evaluate("canvas => canvas.width") <= 64


def test_layers_end_with_the_real_answer(visit, site):
    visit.open("layers", text="The robot must obey")
    told = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "input": "The robot must obey"}).json()
    last = visit.page.locator(".grid tbody tr").last.locator("td").last
    assert last.inner_text() == visible(told["candidates"]["pieces"][0])
    last.hover()
    side = visit.page.inner_text("#side")
    assert "attention 2" in side and "norm of the residual" in side


def test_masks_are_pressed_and_filled(visit):
    visit.open("masks", model="bert", text="The robot must obey.")
    visit.page.get_by_role("button", name="robot", exact=True).click()
    visit.page.locator(".fills .row").first.wait_for()
    chosen = visit.page.locator(".fills .row .token").nth(2).inner_text()
    visit.page.locator(".fills .row").nth(2).click()
    expect(visit.page.locator("#text")).to_have_value(f"The {chosen} must obey.")
    visit.page.select_option("#model", "gpt")
    visit.page.get_by_text("This view needs").wait_for()


def test_an_answer_about_the_model_shown_before_is_dropped(visit):
    held = []
    visit.open("masks", model="bert", text="The robot must obey.")
    visit.page.route("**/v1/tokenize", lambda route: held.append(route))
    visit.page.fill("#text", "The robot obeys.")
    visit.page.wait_for_function("() => document.querySelector('#view').classList.contains('waiting')")
    visit.page.select_option("#model", "gpt")
    visit.page.get_by_text("This view needs").wait_for()
    for route in held:
        with visit.page.expect_response("**/v1/tokenize"):
            route.continue_()
    visit.settle()
    assert held and visit.page.get_by_text("This view needs").is_visible()


def hold(visit, pattern, held, when=lambda request: True):
    """Keep the answers to some requests back until they are let go."""
    visit.page.route(pattern, lambda route: held.append(route) if when(route.request) else route.continue_())


def let_go(visit, held, pattern):
    for route in held:
        with visit.page.expect_response(pattern):
            route.continue_()
    visit.settle()


def ask_for_merges(visit):
    visit.page.locator(".pieces .piece").first.hover()
    visit.page.wait_for_function("() => document.querySelector('#side pre')")


def ask_for_expectations(visit):
    visit.page.locator(".mark").nth(3).click()


@pytest.mark.parametrize(
    ("view", "endpoint", "within", "ask"),
    [
        ("tokens", "**/v1/tokenize", "merges", ask_for_merges),
        ("surprise", "**/v1/next-tokens", "", ask_for_expectations),
    ],
)
def test_a_late_answer_does_not_replace_what_is_said_of_another_view(visit, view, endpoint, within, ask):
    held = []
    visit.open(view, text="The robot must obey")
    hold(visit, endpoint, held, lambda request: within in request.post_data)
    ask(visit)
    visit.until(lambda: held)
    visit.page.get_by_role("tab", name="Write", exact=True).click()
    visit.page.wait_for_selector(READY["write"])
    said = visit.page.inner_text("#side")
    let_go(visit, held, endpoint)
    assert held and visit.page.inner_text("#side") == said


def test_a_view_that_loads_late_does_not_replace_the_one_chosen_after_it(visit):
    held = []
    visit.open("next")
    hold(visit, "**/views/layers.js", held)
    visit.page.get_by_role("tab", name="Layers", exact=True).click()
    visit.until(lambda: held)
    visit.page.get_by_role("tab", name="Tokens", exact=True).click()
    visit.page.wait_for_selector(READY["tokens"])
    let_go(visit, held, "**/views/layers.js")
    assert held and visit.page.locator(READY["tokens"]).first.is_visible()


def test_a_text_written_while_the_page_begins_is_kept(visit):
    held = []
    hold(visit, "**/v1/completions", held)
    visit.page.goto(f"{visit.site.url}/#model=gpt&view=next")
    visit.until(lambda: held)
    visit.page.fill("#text", "The robot obeys")
    visit.page.wait_for_function("() => location.hash.includes('The+robot+obeys')")
    let_go(visit, held, "**/v1/completions")
    visit.page.wait_for_selector(READY["next"])
    expect(visit.page.locator("#text")).to_have_value("The robot obeys")


def test_a_text_written_while_another_model_is_awaited_is_kept(visit):
    held = []
    visit.open("next", text="The robot")
    visit.page.fill("#text", "")
    visit.settle()
    hold(visit, "**/v1/completions", held)
    visit.page.select_option("#model", EVIL)
    visit.until(lambda: held)
    visit.page.fill("#text", "it obeys")
    visit.page.wait_for_function("() => location.hash.includes('it+obeys')")
    let_go(visit, held, "**/v1/completions")
    expect(visit.page.locator("#text")).to_have_value("it obeys")


def test_tokens_show_ids_bytes_and_merges(visit, site):
    visit.open("tokens", text="The robot 你好")
    told = httpx.post(f"{site.url}/v1/tokenize", json={"model": "gpt", "input": "The robot 你好"}).json()
    assert visit.page.locator(".piece sub").all_inner_texts() == [str(i) for i in told["tokens"]]
    visit.page.locator(".pieces .piece").first.hover()
    visit.page.get_by_text("Merges, one by one").wait_for()
    assert told["bytes"][0] in visit.page.inner_text("#side").replace(" ", "")


def test_two_models_are_compared(visit):
    visit.open("tokens", text="The robot", other=EVIL)
    expect(visit.page.locator("section h2")).to_have_text(["gpt", EVIL])
    visit.page.locator(".differs").first.wait_for()
    visit.page.select_option("#other", "gpt")
    visit.settle()
    expect(visit.page.locator(".differs")).to_have_count(0)


def test_runs_are_drawn_and_followed(visit, runs_folder):
    visit.open("runs", runs="first")
    path = visit.page.locator("#view svg path").first
    before = path.get_attribute("d")
    metrics = runs_folder / "first" / "metrics.jsonl"
    kept = metrics.read_text()  # the folder is that of all tests
    metrics.write_text(kept + json.dumps({"step": 50, "loss": 1.0, "tokens": 5000, "seconds": 25}) + "\n")
    visit.page.wait_for_function(
        "before => document.querySelector('#view svg path').getAttribute('d') !== before", arg=before
    )
    assert "Once upon <b>a</b>" in visit.page.inner_text("#view")
    visit.page.get_by_role("checkbox", name="second").check()
    visit.page.wait_for_function("() => document.querySelectorAll('#view svg path.c1').length > 0")
    for word in ("time", "steps", "log"):
        visit.page.get_by_role("button", name=word, exact=True).click()
    metrics.write_text(kept)


def test_runs_of_other_tokenizers_are_compared_in_bits_per_byte(browser, models, serve_config, tmp_path):
    kinds = {"letters": ("next-token", "a"), "words": ("next-token", "b"), "bert": ("pretraining", "b")}
    for name, (head, tokenizer) in kinds.items():
        (tmp_path / name / "checkpoints" / "model").mkdir(parents=True)
        write_recipe(tmp_path / name, {"train": {"steps": 20}})
        about = {"head": head, "tokenizer_hash": tokenizer}
        (tmp_path / name / "checkpoints" / "model" / "plume.json").write_text(json.dumps(about))
        rows = [{"step": step, "loss": 9 - step / 10, "tokens": step, "seconds": step} for step in (10, 20)]
        bits = {} if head == "pretraining" else {"validation_bits_per_byte": 2.0}
        rows += [{"step": 20, "validation_loss": 7.5, **bits}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    running = run_server(replace(serve_config, models=(str(models["gpt"]),), runs=tmp_path))
    visit = Visit(browser, next(running))
    visit.open("runs", runs="letters")
    notes, bits = visit.page.locator("#view p.muted"), visit.page.locator("#view svg[aria-label^='bits per byte']")
    expect(notes).to_have_count(0)
    visit.page.get_by_role("checkbox", name="words").check()
    expect(notes).to_have_text([re.compile("different tokenizers.*nats per token are not comparable")])
    expect(bits.locator("path")).to_have_count(2)
    visit.page.get_by_role("checkbox", name="letters").uncheck()
    expect(notes).to_have_count(0)
    expect(bits).to_have_count(0)
    visit.page.get_by_role("checkbox", name="bert").check()
    expect(notes).to_have_text([re.compile("bert: the loss of masked tokens")])
    visit.close()
    next(running, None)


def test_curves_of_any_numbers_are_drawn(visit):
    """Nothing yet, one point, zeros on a log scale, gaps: a picture each, and few ticks."""
    visit.open()
    script = """async () => {
      const { curves } = await import('/static/draw.js');
      const tries = [[], [5], [0, 0], [null, 3, null, 4], [1e-9, 1, 1e9], [5.01, 5.02], [NaN, 2]];
      return tries.flatMap((y) => [true, false].map((log) =>
        curves({ lines: [{ x: [...y.keys()], y, kind: 'c0' }], width: 300, log }).querySelectorAll('text').length));
    }"""
    counts = visit.page.evaluate(script)
    assert all(0 < count < 30 for count in counts), counts
