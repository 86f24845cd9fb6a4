"""The page is steady: nothing moves, no focus is lost, no late module is missed; and answers have their names."""

import json

import httpx
import numpy as np
import pytest
import torch
from families import open_in_transformers
from running import run_server, tiny
from visit import READY, SETTLED, Visit

from plume.config import EngineConfig, ServeConfig, TokenizerConfig
from plume.util.run_folder import write_recipe

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
expect = playwright.expect
TEXT, PAIR = "The robot must obey the orders", "it was made"
CHOICES = "it was made\nit was a human being"
LABEL = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    place = tmp_path_factory.mktemp("steady")
    pieces = TokenizerConfig(kind="wordpiece", vocab_size=400)
    return models | {
        "choices": tiny("bert-tiny", "choose", place / "choices", pieces),
        "bare": tiny("bert-tiny", "bare", place / "bare", pieces),
        "seq": tiny("transformer-base", "next-token", place / "seq", TokenizerConfig(vocab_size=400)),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("steady_runs")
    for name in ("first", "second"):
        (place / name).mkdir()
        write_recipe(place / name, {"train": {"steps": 99}})
        (place / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0, "tokens": 10, "seconds": 1}))
    return place


@pytest.fixture(scope="module")
def site(folders, runs):
    places = tuple(str(folders[name]) for name in ("gpt", "bert", "labels", "tags", "spans", "choices", "bare", "seq"))
    yield from run_server(ServeConfig(models=places, runs=runs, engine=EngineConfig(engine="torch"), batch=4, queue=64))


def explained(site, **body):
    return httpx.post(f"{site.url}/v1/explain", json=body, timeout=60).raise_for_status().json()


# ---- nothing moves


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
@pytest.mark.parametrize("width", [360, 768, 1280, 1600])
def test_no_sentence_moves_what_is_below_it(browser, site, locale, width):
    """The longest sentence of a walk takes more lines than the others at some widths."""
    visit = Visit(browser, site, locale=locale, viewport={"width": width, "height": 800})
    visit.open("walk", text=TEXT, query=3, step="text")
    read = """() => ['.walk-title', '.walk-sentence', '.walk-formula', '.walk-picture'].map((part) =>
        [part, document.querySelector(part).getBoundingClientRect().top + scrollY])"""
    first, lines = visit.page.evaluate(read), set()
    for pressed in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "PageDown", "End", "Home"):
        visit.page.keyboard.press(pressed)
        visit.settle()
        assert visit.page.evaluate(read) == first, visit.page.inner_text(".walk-title")
        lines.add(len(visit.page.inner_text(".walk-sentence")))
    assert len(lines) > 3
    visit.close()


@pytest.mark.parametrize(("view", "step"), [("cause", ""), ("walk", "b0.a.softmax")])
def test_two_models_side_by_side_have_room(browser, site, view, step):
    """Every head's effect is in sight, and no count is broken into lines."""
    visit = Visit(browser, site)
    visit.open(view, text=TEXT, other="gpt", **({"step": step} if step else {}))
    if view == "cause":
        cut = visit.page.locator(".effect-map").evaluate_all(
            "all => all.map((map) => map.scrollWidth - map.clientWidth)"
        )
        assert len(cut) == 2 and max(cut) <= 0
    else:
        sizes = visit.page.locator(".walk-controls .number").evaluate_all(
            "all => all.map((box) => [box.offsetHeight, parseFloat(getComputedStyle(box).lineHeight)])"
        )
        assert len(sizes) == 2 and all(high < 1.5 * line for high, line in sizes)
    visit.close()


# ---- focus and keys


def test_a_chosen_button_keeps_the_focus(browser, site):
    """Views draw their buttons anew; whoever goes by keyboard stays where they were."""
    visit = Visit(browser, site)
    page = visit.page
    visit.open("walk", text=TEXT, step="b0.a.qkv")
    page.locator(".token-row button").nth(2).focus()
    page.keyboard.press("Enter")
    visit.settle()
    assert (
        visit.state()["query"] == "2" and page.evaluate(LABEL) == page.locator(".token-row button").nth(2).inner_text()
    )
    visit.open("cause", text=TEXT)
    page.locator(".map button").nth(5).focus()
    name = page.evaluate(LABEL)
    page.keyboard.press("Enter")
    visit.settle()
    assert visit.state()["edits"] == "h1.1" and page.evaluate(LABEL) == name
    page.mouse.click(5, 700)  # a click on nothing takes the focus away, and it stays away
    page.keyboard.press("]")
    visit.settle()
    assert page.evaluate("document.activeElement.closest('#view *') === null")
    visit.close()


def test_the_boxes_of_runs_stay_while_figures_come(browser, site, runs):
    """A box that is replaced between press and release would lose the click."""
    visit = Visit(browser, site)
    visit.open("runs", text=TEXT, runs="first", ready="#view input[type=checkbox]")
    with visit.page.expect_response("**/v1/runs"):
        pass
    visit.page.wait_for_function(SETTLED)
    box = visit.page.get_by_role("checkbox", name="second")
    box.focus()
    box.evaluate("box => { window.kept = box; }")
    with (runs / "second" / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 7, "loss": 2.0, "tokens": 70, "seconds": 7}))
    with visit.page.expect_response("**/v1/runs"):
        pass
    visit.page.wait_for_function(SETTLED)
    assert visit.page.evaluate("window.kept.isConnected && document.activeElement === window.kept")
    visit.page.keyboard.press("Space")
    visit.settle()
    assert box.is_checked() and visit.state()["runs"].split("~") == ["first", "second"]
    visit.close()


def test_generation_starts_however_late_its_view_is_loaded(browser, site):
    visit, held = Visit(browser, site), []
    visit.open("next", text="The robot", length=5)
    visit.page.route("**/views/write.js", lambda route: held.append(route))
    visit.page.keyboard.press("Control+Enter")
    visit.until(lambda: held)
    with visit.page.expect_response("**/v1/completions"):
        held[0].continue_()
    visit.page.locator(".made").nth(4).wait_for()
    visit.close()


def test_contributions_and_kinds_are_offered_for_heads_only(browser, site):
    visit = Visit(browser, site)
    visit.open("cause", text=TEXT, map="kind")
    expect(visit.page.locator(".cause h2").first).to_have_text("Kind of each head")
    visit.page.get_by_role("button", name="MLP", exact=True).click()
    expect(visit.page.locator(".cause h2").first).to_have_text("Effect on the logit")
    expect(visit.page.get_by_role("button", name="kind", exact=True)).to_be_hidden()
    visit.close()


# ---- names and numbers


def test_the_walk_follows_the_token_that_the_head_reads(browser, site):
    visit = Visit(browser, site)
    chosen = visit.page.locator(".token-row [aria-pressed=true]")
    for model, text, token in (
        ("labels", TEXT, "[CLS]"),
        ("bert", "The [MASK] must", "[MASK]"),
        ("gpt", "The robot", "·robot"),
    ):
        visit.open("walk", model=model, text=text, step="b1.a.qkv")
        expect(chosen).to_have_text(token)
    visit.open("next", model="seq", text=TEXT, pair=PAIR, ready=".answers .row")
    assert chosen.inner_text() == visit.page.locator(".token-row button").last.inner_text() != "<|endoftext|>"
    visit.open("walk", model="seq", text=TEXT, pair=PAIR, step="d:text")
    expect(visit.page.locator(".walk-title")).to_have_text("Decoder · Text")
    expect(visit.page.locator(".walk-text")).to_have_text(PAIR)
    expect(visit.page.locator(".walk-formula")).to_contain_text(f"{len(PAIR)} characters")
    visit.open("walk", model="bare", text=TEXT, step="memory")
    expect(visit.page.locator(".walk-sentence")).to_contain_text("has no head")
    visit.open("walk", model="labels", text=TEXT, step="embed")
    expect(visit.page.locator(".walk-sentence")).to_contain_text("segment table")
    visit.close()


def test_the_ends_of_a_span_are_distributions_over_positions(browser, site, folders):
    """Against transformers: not a softmax over start and end at one position."""
    body = {"model": "spans", "input": TEXT, "pair": PAIR}
    tokens = explained(site, **body, view="labels")["tokens"]
    kinds = [0] * (tokens.index(tokens[-1]) + 1)
    kinds += [1] * (len(tokens) - len(kinds))
    with torch.no_grad():
        theirs = open_in_transformers(folders["spans"])(torch.tensor([tokens]), token_type_ids=torch.tensor([kinds]))
    starts, ends = (logits[0].softmax(0) for logits in (theirs.start_logits, theirs.end_logits))
    found = explained(site, **body, view="cause", position=4, edits=[])
    by_name = {row["name"]: row["before"] for row in found["rows"]}
    np.testing.assert_allclose([by_name["start"], by_name["end"]], [starts[4], ends[4]], atol=1e-5)
    visit = Visit(browser, site)
    visit.open("next", model="spans", text=TEXT, pair=PAIR, ready=".answers .row")
    piece = visit.page.locator(".token-row button").nth(int(starts.argmax())).inner_text()
    assert visit.page.locator(".answers .token").first.inner_text() == f"start: {piece}"
    visit.close()


def test_a_single_score_has_no_probability(browser, site):
    """Choices are compared with each other; one of them alone has a logit only, and its own words as a name."""
    visit = Visit(browser, site)
    visit.open("next", model="choices", text=TEXT, pair=CHOICES, ready=".answers .row")
    assert visit.page.locator(".answers .token").all_inner_texts() == CHOICES.split("\n")
    visit.open("cause", model="choices", text=TEXT, pair=CHOICES, row=1, edits="h1.1", ready=".row.shift")
    row = visit.page.locator(".row.shift")
    assert row.locator(".token").inner_text() == CHOICES.split("\n")[1]
    before, after = (float(x.replace("−", "-")) for x in row.locator(".number").inner_text().split(" → "))
    for shown, name in ((before, "data-before"), (after, "data-after")):
        assert shown == pytest.approx(float(row.get_attribute(name)), abs=1e-3)
    visit.close()


def test_figures_are_written_plainly(browser, site):
    visit = Visit(browser, site)
    visit.open(text=TEXT)
    script = """async () => {
        const { bar, clipped, fixed, percent, strip } = await import('/static/draw.js');
        const rows = (count) => {
            const { width, height } = strip(new Float32Array(count)).querySelector('canvas');
            return [height, width];
        };
        return {
            percents: [0.5, 6e-5, 1e-9, 0].map(percent),
            minus: fixed(-1.5),
            names: [clipped('<|endoftext|>', 12), clipped('robot', 12)],
            strips: [64, 192, 768, 1600, 163].map(rows),
            none: [0, 0.1].map((p) => bar(p).firstChild.matches('[data-none]')),
        };
    }"""
    assert visit.page.evaluate(script) == {
        "percents": ["50.0 %", "0.006 %", "< 0.0001 %", "0 %"],
        "minus": "−1.50",
        "names": ["<|endoftext…", "robot"],
        "strips": [[1, 64], [2, 96], [6, 128], [10, 160], [2, 128]],
        "none": [True, False],
    }
    visit.close()


def test_every_view_is_ready_when_it_says_so(browser, site):
    """What is awaited everywhere: the page is not busy, and shows what its address says."""
    visit = Visit(browser, site)
    visit.open("next", text="The robot")
    for view, ready in READY.items():
        if view not in ("masks", "runs"):  # a model that fills masks, and runs, are chosen in them
            visit.page.evaluate("view => { location.hash = `view=${view}&model=gpt&text=The+robot+must`; }", view)
            visit.settle()
            assert visit.page.locator(ready).count() > 0, view
    visit.close()
