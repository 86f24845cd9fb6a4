"""Walk, Cause and Attribution in a real browser: the numbers on the page are those of hooks on transformers' model."""

import base64
import json

import httpx
import numpy as np
import pytest
import torch
from families import open_in_transformers
from hooked import hooks, recorded, their_answer, their_sites
from running import run_server, tiny
from visit import Visit

from plume.config import EngineConfig, ServeConfig, TokenizerConfig
from plume.tasks.explained_rows import LESSON
from plume.util.run_folder import write_recipe

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
expect = playwright.expect
TEXT, TARGET, LAYER, HEAD, SIZE = "The robot must obey the orders", "it was", 1, 2, 8
PATCH = "The orders must obey the robot"  # as many tokens
CASES = {"gpt": "decoder", "gpt1": "decoder", "labels": "encoder", "seq": "decoder"}
STRIPS = "[...document.querySelectorAll('.walk-picture .strip')].map((strip) => [...strip.values])"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("explored")
    bpe, pieces = TokenizerConfig(vocab_size=400), TokenizerConfig(kind="wordpiece", vocab_size=400)
    return {
        "gpt": tiny("gpt2", "next-token", place / "gpt", bpe),
        "gpt1": tiny("openai-gpt", "next-token", place / "gpt1", TokenizerConfig(kind="gpt1-bpe", vocab_size=400)),
        "labels": tiny("bert-tiny", "classify", place / "labels", pieces, labels=("bad", "good")),
        "spans": tiny("bert-tiny", "span", place / "spans", pieces),
        "choices": tiny("bert-tiny", "choose", place / "choices", pieces),
        "deep": tiny("gpt2", "next-token", place / "deep", bpe, layers=4),
        "seq": tiny("transformer-base", "next-token", place / "seq", bpe),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("many_runs")
    for i in range(30):
        folder = place / f"run{i:02d}"
        folder.mkdir()
        write_recipe(folder, {"train": {"steps": 20}})
        rows = ({"step": step, "loss": 3.0 - step / 20, "tokens": 10 * step, "seconds": step} for step in (10, 20))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module")
def site(folders, runs):
    places = tuple(map(str, folders.values()))
    yield from run_server(ServeConfig(models=places, runs=runs, engine=EngineConfig(engine="torch"), batch=4, queue=64))


def ids_of(site, model, text=TEXT):
    """The tokens that the model is explained on, and its source."""
    body = {"model": model, "input": text, "view": "walk", "layer": LAYER, "head": HEAD}
    if model != "seq":
        return httpx.post(f"{site.url}/v1/explain", json=body).json()["tokens"], None
    body |= {"pair": TARGET}
    stacks = ("decoder", "encoder")
    return [httpx.post(f"{site.url}/v1/explain", json=body | {"stack": stack}).json()["tokens"] for stack in stacks]


def expected(found, stack, kind, pre, at):
    """The vectors of every screen of one sublayer, in the order of the page."""
    name, before = f"{stack}.{LAYER}.{kind}", f"{stack}.{LAYER - 1}.mlp.output"
    of = {part.removeprefix(f"{name}."): value for part, value in found.items() if part.startswith(f"{name}.")}
    inside = f"{stack}.{LAYER}.cross.output" if kind == "mlp" and f"{stack}.{LAYER}.cross.output" in found else None
    inside = inside or f"{stack}.{LAYER}.attention.output"
    x = of["input"] if "input" in of else found[before if kind == "attention" else inside]
    total = of["sum"] if "sum" in of else x + of["update"]
    if kind == "mlp":
        inner = of["norm"] if pre else x
        steps = {"m.up": [inner, of["up"]], "m.act": [of["up"], of["activation"]]}
        steps |= {"m.down": [of["activation"], of["update"]], "m.add": [x, of["update"], total]}
        steps["m.norm"] = [x, inner] if pre else [total, of["output"]]
        return {step: [value[at] for value in values] for step, values in steps.items()}
    part = slice(HEAD * SIZE, (HEAD + 1) * SIZE)
    inner, letter = of["norm"] if pre else x, kind[0]
    after = of["norm"] if "norm" in of else of["output"]
    row = [inner, *(of[n] for n in ("qkv" if kind == "attention" else "q"))]
    steps = {
        "norm": [x, inner] if pre else [total, after],
        "qkv": row,
        "concat": [of["heads"]],
        "project": [of["heads"], of["update"]],
        "add": [x, of["update"], total],
    }
    vectors = {f"{letter}.{step}": [value[at] for value in values] for step, values in steps.items()}
    vectors[f"{letter}.heads"] = [of["q"][at], of["q"][at, part]]
    vectors[f"{letter}.scores"] = [of["q"][at, part], *of["k"][:, part]]
    vectors[f"{letter}.sum"] = [*of["v"][:, part], of["heads"][at, part]]
    return vectors


def last_number(formula):
    return float(formula.replace("−", "-").split("=")[-1].split()[0])


@pytest.mark.parametrize("model", CASES)
def test_every_vector_of_a_block_equals_a_hook(browser, site, folders, model):
    theirs, stack = open_in_transformers(folders[model]), CASES[model]
    tokens, source = ids_of(site, model)
    found = recorded(theirs, tokens, source)
    found |= {"decoder.1.attention.output": found.get("decoder.1.attention.norm")} if model == "gpt1" else {}
    kinds = ("attention", "cross", "mlp") if model == "seq" else ("attention", "mlp")
    vectors = {}
    for kind in kinds:
        vectors |= expected(found, stack, kind, model == "gpt", at=2)
    visit = Visit(browser, site)
    prefix = "d:" if model == "seq" else ""
    first = f"{prefix}b{LAYER}.a.{'norm' if model == 'gpt' else 'qkv'}"
    visit.open(
        "walk", model=model, text=TEXT, pair=TARGET, query=2, head=HEAD, step=first, ready=".walk-picture .strip"
    )
    seen, formulas = {}, {}
    for _ in range(40):
        step = visit.state()["step"].removeprefix(f"{prefix}b{LAYER}.")
        seen[step], formulas[step] = visit.page.evaluate(STRIPS), visit.page.inner_text(".walk-formula")
        visit.page.keyboard.press("ArrowRight")
        visit.page.wait_for_function("step => !location.hash.includes(encodeURIComponent(step))", arg=step)
        visit.settle()
        if f"b{LAYER}." not in visit.state()["step"]:
            break
    for step, values in vectors.items():
        assert len(seen[step]) == len(values), step
        for shown, value in zip(seen[step], values, strict=True):
            np.testing.assert_allclose(shown, value.numpy(), atol=1e-4, err_msg=step)
        if (name := step.split(".")[1]) not in ("heads", "concat", "scores"):  # the formula's own result
            assert last_number(formulas[step]) == pytest.approx(float(values[1 if name == "qkv" else -1][0]), abs=1e-4)
    visit.close()


def test_the_map_of_a_narrow_walk_shows_the_step(browser, site):
    """The first step and the last: each is inside of the part of the map that can be seen."""
    visit = Visit(browser, site, viewport={"width": 390, "height": 800})
    visit.open("walk", model="deep", text="The robot must obey")
    seen = """() => {
        const map = document.querySelector('.walk-map').getBoundingClientRect(),
            step = document.querySelector('.walk-map [aria-current=step]').getBoundingClientRect();
        return step.top >= map.top - 1 && step.bottom <= map.bottom + 1;
    }"""
    assert visit.page.evaluate(seen)
    visit.page.locator(".walk-map button").last.click()
    visit.settle()
    assert visit.page.evaluate(seen)
    visit.close()


@pytest.mark.parametrize(("model", "kind"), [*((name, "attention") for name in CASES), ("seq", "cross")])
def test_scores_masks_and_weights_equal_hooks(browser, site, folders, model, kind):
    theirs, stack = open_in_transformers(folders[model]), CASES[model]
    tokens, source = ids_of(site, model)
    found, at = recorded(theirs, tokens, source), len(tokens) - 1
    q, k = (found[f"{stack}.{LAYER}.{kind}.{n}"][:, HEAD * SIZE : (HEAD + 1) * SIZE].double() for n in "qk")
    products = q @ k.T
    scores = products / SIZE**0.5
    is_masked = stack == "decoder" and kind == "attention"
    masked = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf) if is_masked else scores
    visit = Visit(browser, site)

    def show(step, ready):
        name = f"{'d:' if source else ''}b{LAYER}.{kind[0]}.{step}"
        visit.open("walk", model=model, text=TEXT, pair=TARGET, query=at, head=HEAD, step=name, ready=ready)

    def heats():
        read = "[...document.querySelectorAll('.heat')].map((heat) => [...heat.values].map(String))"
        return [np.array(values, dtype=float).reshape(scores.shape) for values in visit.page.evaluate(read)]

    show("scores", ".walk-table")
    shown = [float(text.replace("−", "-")) for text in visit.page.locator(".walk-table td.number").all_inner_texts()]
    np.testing.assert_allclose(shown, products[at].numpy(), atol=1e-4)
    assert last_number(visit.page.inner_text(".walk-formula")) == pytest.approx(
        float(products[at, 0 if kind == "cross" else at]), abs=1e-4
    )
    show("scale", ".walk-table")
    cells = [text.replace("−", "-") for text in visit.page.locator(".walk-table td.number").all_inner_texts()]
    np.testing.assert_allclose([float(cell) for cell in cells[0::3]], products[at].numpy(), atol=1e-4)
    np.testing.assert_allclose([float(cell) for cell in cells[2::3]], scores[at].numpy(), atol=1e-4)
    if is_masked:
        show("mask", ".heat")
        before, after = heats()
        np.testing.assert_allclose(before, scores.numpy(), atol=1e-4)
        np.testing.assert_allclose(after, masked.numpy(), atol=1e-4)
    show("softmax", ".heat")
    (weights,) = heats()
    np.testing.assert_allclose(weights, masked.softmax(-1).numpy(), atol=1e-4)
    visit.close()


@pytest.mark.parametrize("model", CASES)
def test_both_ends_of_the_walk_equal_hooks(browser, site, folders, model):
    theirs, stack = open_in_transformers(folders[model]), CASES[model]
    tokens, source = ids_of(site, model)
    found, prefix = recorded(theirs, tokens, source), "d:" if source else ""
    visit = Visit(browser, site)

    def strips(step):
        visit.open("walk", model=model, text=TEXT, pair=TARGET, query=2, step=prefix + step, ready=".strip")
        return visit.page.evaluate(STRIPS)

    np.testing.assert_allclose(strips("embed")[-1], found[f"{stack}.embedding"][2].numpy(), atol=1e-4)
    assert last_number(visit.page.inner_text(".walk-formula")) == pytest.approx(
        float(found[f"{stack}.embedding"][2, 0]), abs=1e-4
    )
    if model == "gpt":
        stream, hidden = strips("final")
        np.testing.assert_allclose(stream, found["decoder.1.mlp.output"][2].numpy(), atol=1e-4)
        np.testing.assert_allclose(hidden, found["decoder.final_norm"][2].numpy(), atol=1e-4)
    if model != "labels":
        hidden = found["decoder.final_norm" if model == "gpt" else "decoder.1.mlp.output"][2]
        np.testing.assert_allclose(strips("logits")[0], hidden.numpy(), atol=1e-4)
        rows = [row.replace("−", "-").split() for row in visit.page.locator(".walk-table tr").all_inner_texts()]
        shown = [float(next(cell for cell in row[1:] if "." in cell)) for row in rows]
        np.testing.assert_allclose(shown, found["logits"][2].topk(10).values.numpy(), atol=1e-4)
    visit.close()


def test_the_walk_of_a_classifier_ends_at_its_label(browser, site, folders):
    theirs = open_in_transformers(folders["labels"])
    tokens, _ = ids_of(site, "labels")
    with torch.no_grad():
        logits = their_answer(theirs, tokens)
    visit = Visit(browser, site)
    visit.open("walk", model="labels", text=TEXT, step="label", ready=".walk-table")
    assert "mask" not in " ".join(visit.page.locator(".walk-map").all_inner_texts())
    rows = visit.page.locator(".walk-table tr").all_inner_texts()
    for row, name, logit, p in zip(rows, ("bad", "good"), logits, logits.softmax(0), strict=True):
        shown = row.replace("−", "-").split()
        assert shown[0] == name and float(shown[1]) == pytest.approx(float(logit), abs=1e-4)
        assert float(shown[-2]) == pytest.approx(100 * float(p), abs=0.06)
    visit.close()


def test_the_walk_goes_by_keyboard_and_begins_again(browser, site):
    visit = Visit(browser, site)
    visit.open("walk", text=TEXT, step="text")
    page, total = visit.page, 2 * 16 + 3 + 4
    expect(page.locator(".walk-controls .number")).to_have_text(f"1 / {total}")
    page.wait_for_function("document.activeElement.id === 'view'")
    page.keyboard.press("PageDown")
    expect(page.locator(".walk-title")).to_have_text("Block 1 · layer norm")
    page.keyboard.press("End")
    expect(page.locator(".walk-title")).to_have_text("The next token")
    visit.settle()
    page.locator(".walk-picture .primary").click()
    page.wait_for_function("() => location.hash.includes('ids=')")
    expect(page.locator(".walk-controls .number")).to_have_text(f"1 / {total}")
    visit.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_nothing_moves_on_the_whole_walk_of_four_layers(browser, site, locale, width):
    visit = Visit(browser, site, locale=locale, viewport={"width": width, "height": 844})
    visit.open("walk", model="deep", text=TEXT, query=3, step="text")
    parts = [
        ".walk-map",
        ".walk-controls",
        ".token-row",
        *(f".walk-{name}" for name in ("title", "sentence", "formula")),
    ]
    read = """parts => parts.map((part) => { const box = document.querySelector(part).getBoundingClientRect();
        return [part, box.left, box.top]; })"""
    titles, places = [], []
    for _ in range(4 * 16 + 3 + 4):
        visit.settle()
        titles.append(visit.page.inner_text(".walk-controls .number"))
        places.append(visit.page.evaluate(read, [*parts, ".walk-picture"]))
        visit.page.keyboard.press("ArrowRight")
    assert len(set(titles)) == 71
    assert [(title, place) for title, place in zip(titles, places, strict=True) if place != places[0]] == []
    visit.close()


def test_each_row_of_a_task_can_be_chosen(browser, site):
    """Each choice is a row of its own."""
    visit = Visit(browser, site)
    visit.open("next", model="choices", text="The robot", pair="was made\nmust obey", ready=".answers .row")
    first = visit.page.locator(".token-row button").all_inner_texts()
    visit.page.locator("#row").select_option("1")
    visit.settle()
    second = visit.page.locator(".token-row button").all_inner_texts()
    assert "made" in "".join(first) and "obey" in "".join(second) and visit.state()["row"] == "1"
    visit.page.locator("#tabs [data-view=walk]").click()
    visit.page.wait_for_selector(".walk-picture > *")
    assert visit.page.locator(".token-row button").all_inner_texts() == second
    visit.open("cause", model="choices", text="The robot", pair="was made\nmust obey")
    expect(visit.page.locator("#row option")).to_have_count(2)
    for model in ("gpt", "labels"):
        visit.open("cause", model=model, text=TEXT)
        visit.page.wait_for_selector(".row.shift")
        expect(visit.page.locator("#row-field")).to_be_hidden()
    visit.close()


def stream_site(theirs, stack, layer):
    """Where transformers' model holds the residual stream that enters a block, or leaves the last one."""
    if hasattr(getattr(theirs, "transformer", None), "ln_f"):
        return theirs.transformer.h[layer] if layer < 2 else theirs.transformer.ln_f, "input", slice(None)
    return their_sites(theirs)[f"{stack}.{layer - 1}.mlp.output" if layer else f"{stack}.embedding"]


class Edited:
    """Logits of transformers' model with one part replaced, as the map of Cause does it."""

    def __init__(self, theirs, stack, tokens, source, other) -> None:
        self.theirs, self.stack, self.given, self.other = theirs, stack, (tokens, source), other

    def site(self, part, layer):
        kind = {"head": "attention.heads", "cross_head": "cross.heads", "mlp": "mlp.update"}.get(part)
        return stream_site(self.theirs, self.stack, layer) if kind is None else (
            their_sites(self.theirs)[f"{self.stack}.{layer}.{kind}"])  # fmt: skip

    def logits(self, part=None, value="zero", layer=0, item=0):
        if part is None:
            return self.run({}, lambda name, x: None)
        seen = {}
        site = {"here": self.site(part, layer)}
        for name, given in (("own", self.given), ("other", self.other)):
            self.run(site, lambda _, x, name=name: seen.__setitem__(name, x.clone()), given)
        new = {"zero": 0 * seen["own"], "mean": seen["own"].mean(1, keepdim=True).expand_as(seen["own"])}
        new = new.get(value, seen["other"])
        where = (slice(None), slice(None), slice(item * SIZE, (item + 1) * SIZE))
        where = where if "head" in part else (slice(None), item)

        def change(_, x):
            x = x.clone()
            x[where] = new[where]
            return x

        return self.run(site, change)

    def run(self, sites, change, given=None):
        with torch.no_grad(), hooks(sites, change):
            found = their_answer(self.theirs, *(self.given if given is None else given))
        return found if found.dim() == 1 else found[-1]


@pytest.mark.parametrize("model", CASES)
def test_maps_of_effects_and_shifts_equal_edits_by_hooks(browser, site, folders, model):
    """Zero, mean and another text's values, at heads, MLPs and the residual stream: every cell of every map."""
    theirs, tokens_of = open_in_transformers(folders[model]), [ids_of(site, model, text) for text in (TEXT, PATCH)]
    edited = Edited(theirs, CASES[model], *tokens_of[0], tokens_of[1])
    count, before = len(tokens_of[0][0]), edited.logits()
    best = int(before.argmax())
    visit = Visit(browser, site)
    combinations = [("head", "zero"), ("head", "mean"), ("head", "patch"), ("mlp", "mean"), ("residual", "patch")]
    for part, value in [*combinations, *([("cross_head", "patch")] if model == "seq" else [])]:
        letter, state = part[0], {"part": part, "value": value, "patch": PATCH if value == "patch" else ""}
        visit.open("cause", model=model, text=TEXT, pair=TARGET, edits=f"{letter}1.2", ready=".row.shift", **state)
        visit.page.wait_for_selector(".map button")
        cells = visit.page.locator(".map button").evaluate_all("all => all.map((cell) => Number(cell.dataset.value))")
        shape = {"mlp": (2, count), "residual": (3, count)}.get(part, (2, 4))
        first = 1 if (part, model) == ("residual", "seq") else 0  # their embedding has no place of its own there
        after = [edited.logits(part, value, i, j) for i in range(first, shape[0]) for j in range(shape[1])]
        own = [float(x[best] - x.mean()) - float(before[best] - before.mean()) for x in after]
        found = np.array(cells).reshape(shape)[first:].ravel()
        np.testing.assert_allclose(found, own, atol=1e-4, err_msg=f"{part} {value}")
        shown = visit.page.locator(".row.shift").evaluate_all(
            "rows => rows.map((row) => [Number(row.dataset.before), Number(row.dataset.after)])"
        )
        top, changed = before.topk(min(10, len(before))).indices, edited.logits(part, value, 1, 2)
        expected = torch.stack([before[top], changed[top]], 1).numpy()
        np.testing.assert_allclose(shown[: len(top)], expected, atol=1e-4, err_msg=f"{part} {value}")
    visit.close()


def test_contributions_on_the_page_are_each_heads_part_of_the_logit(browser, site, folders):
    """Written out over transformers' weights; with embedding, MLPs and biases they add up to the logit."""
    theirs = open_in_transformers(folders["gpt"])
    tokens, _ = ids_of(site, "gpt")
    found, norm, table = recorded(theirs, tokens), theirs.transformer.ln_f, theirs.lm_head.weight.detach()
    stream, logits = found["decoder.1.mlp.output"][-1], found["logits"][-1]
    divisor = (stream.var(correction=0) + norm.eps).sqrt()
    row = (table[int(logits.argmax())] - table.mean(0)) * norm.weight.detach() / divisor
    own = []
    for layer, block in enumerate(theirs.transformer.h):
        for columns in (slice(head * SIZE, (head + 1) * SIZE) for head in range(4)):
            update = found[f"decoder.{layer}.attention.heads"][-1, columns] @ block.attn.c_proj.weight.detach()[columns]
            own.append(float((update - update.mean()) @ row))
    visit = Visit(browser, site)
    visit.open("cause", text=TEXT, map="contribution")
    cells = visit.page.locator(".map button").evaluate_all("all => all.map((cell) => Number(cell.dataset.value))")
    np.testing.assert_allclose(cells, own, rtol=1e-3, atol=1e-4)
    visit.page.get_by_role("button", name="kind", exact=True).click()
    visit.open("layers", text=TEXT)
    visit.page.locator(".grid tbody tr").last.locator("td").last.hover()
    figures = [float(text.replace("−", "-")) for text in visit.page.locator("#side .diverge .number").all_inner_texts()]
    assert sum(figures) == pytest.approx(float(logits.max() - logits.mean()), abs=0.01 * len(figures))
    visit.close()


@pytest.mark.parametrize("model", ["gpt", "labels", "spans", "seq"])
def test_attribution_sums_to_the_difference(browser, site, model):
    visit = Visit(browser, site)
    visit.open("attribution", model=model, text=TEXT, pair=TARGET)
    values = visit.page.locator(".mark.signed").evaluate_all("marks => marks.map((mark) => Number(mark.dataset.value))")
    sums = visit.page.inner_text(".walk-formula").replace("−", "-")
    total, difference = float(sums.split("\n")[0].split("=")[1]), float(sums.split("=")[-1].split("(")[0])
    assert sum(values) == pytest.approx(total, abs=1e-3) and total == pytest.approx(difference, rel=0.02, abs=1e-3)
    visit.page.get_by_role("button", name="words", exact=True).click()
    visit.page.get_by_role("button", name="gradient × input").click()
    visit.settle()
    visit.close()


def test_fine_tuned_models_are_shown_on_their_tokens(browser, site):
    visit = Visit(browser, site)
    visit.open("next", model="labels", text=TEXT, ready=".answers .row")
    tokens = visit.page.locator(".token-row button").all_inner_texts()
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]"
    assert "bad" in visit.page.inner_text(".answers") and visit.page.locator("#pair").is_hidden()
    visit.open("next", model="spans", text="Where?", pair="The robot must obey", ready=".answers .row")
    assert visit.page.locator(".token-row button").all_inner_texts().count("[SEP]") == 2
    expect(visit.page.locator("#pair")).to_have_value("The robot must obey")
    visit.open("attention", model="seq", text=TEXT, pair=TARGET, stack="cross", ready=".matrix canvas")
    tokens, source = ids_of(site, "seq")
    assert visit.page.locator(".matrix canvas").evaluate("c => [c.height, c.width]") == [len(tokens), len(source)]
    visit.page.get_by_role("button", name="words", exact=True).click()
    visit.close()


# ---- faults mended


@pytest.mark.slow
def test_thirty_runs_ticked_and_unticked_leave_the_page_alive(browser, site):
    visit = Visit(browser, site)
    open_now, most = set(), [0]
    visit.page.on("request", lambda r: (open_now.add(r), most.append(len(open_now))) if "/v1/" in r.url else None)
    for event in ("requestfinished", "requestfailed"):
        visit.page.on(event, lambda request: open_now.discard(request))
    visit.open("runs", text=TEXT)
    for i in range(30):
        box = visit.page.get_by_role("checkbox", name=f"run{i:02d}")
        before = box.is_checked()
        for wanted in (not before, before):
            box.click()
            expect(box).to_be_checked(checked=wanted)
    assert max(most) <= 2
    visit.page.locator("#tabs [data-view=next]").click()
    visit.page.wait_for_selector(".candidates .row")
    visit.close()


@pytest.mark.parametrize(("temperature", "topk", "topp"), [(2, 0, 0.95), (1, 300, 1), (2, 320, 0.9), (9, 0, 1)])
def test_filters_past_the_listed_tokens_agree_with_the_sampler(browser, site, temperature, topk, topp):
    """Against the filters written out over the whole vocabulary; a temperature out of range is bounded."""
    visit = Visit(browser, site)
    visit.open(text=TEXT, temperature=temperature, topk=topk, topp=topp)
    answer = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "input": TEXT, "k": 400}).json()
    p = np.exp(np.array(answer["candidates"]["logits"]) / min(temperature, 2))
    p[topk or len(p) :] = 0
    p /= p.sum()
    kept = int((np.cumsum(p) < topp).sum()) + 1 if topp < 1 else len(p)
    p[kept:] = 0
    p /= p.sum()
    figures = visit.page.locator(".candidates .row .number:not(.logit)").all_inner_texts()
    shown = [float(figure.rstrip(" %")) for figure in figures]
    np.testing.assert_allclose(shown, [*(100 * p[:10]), 100 * p[10:].sum()], atol=0.06)
    visit.close()


def test_a_token_past_the_context_can_be_chosen(browser, site):
    visit = Visit(browser, site)
    visit.open("surprise", text="the robot must obey " * 30)
    assert visit.page.locator(".mark").count() > 80
    visit.page.locator(".mark").nth(75).click()
    visit.page.get_by_text("Predicted here").wait_for()
    visit.close()


def test_all_keys_and_all_numbers_of_a_head_are_shown(browser, site):
    visit = Visit(browser, site)
    visit.open("attention", text=TEXT + " given it by human beings", query=12, ready=".steps tbody tr")
    strips = visit.page.evaluate("[...document.querySelectorAll('.steps .strip')].map((strip) => strip.values.length)")
    assert len(strips) == 2 + 2 * 13 and set(strips) == {SIZE}
    visit.close()


CELLS = """[...document.querySelectorAll('.steps .strip')].flatMap((strip) => {
  const canvas = strip.querySelector('canvas'), context = canvas.getContext('2d');
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  return [...strip.values].map((value, i) => [value, ...pixels.slice(4 * i, 4 * i + 3)]);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_signed_values_have_two_hues(browser, site, scheme):
    """Orange below zero and blue above, stronger the further from it."""
    visit = Visit(browser, site)
    visit.page.emulate_media(color_scheme=scheme)
    visit.open("attention", text=TEXT, query=3, ready=".steps tbody tr")
    values, red, _, blue = np.array(visit.page.evaluate(CELLS), dtype=float).T
    far = np.abs(values) >= 0.5 * np.abs(values).max()
    assert (values[far] < 0).any() and (values[far] > 0).any()
    assert (red - blue)[far & (values < 0)].min() > 40 and (blue - red)[far & (values > 0)].min() > 40
    seen = np.abs(red - blue) > 12  # others are near the paper
    assert seen.sum() > 20 and ((blue > red) == (values > 0))[seen].all()
    visit.close()


@pytest.mark.parametrize("model", ["gpt", "labels", "spans", "seq"])
def test_the_first_screen_is_never_empty(browser, site, model):
    visit = Visit(browser, site)
    visit.page.goto(f"{site.url}/#model={model}")
    visit.page.wait_for_selector(".candidates .row")
    assert visit.page.input_value("#text")
    visit.close()


def test_an_english_gpt_opens_on_what_it_attends_to(browser, tmp_path):
    """In words, in the head whose "it" attends to "robot" most, against all heads of the server."""
    folder = tiny("gpt2", "next-token", tmp_path / "english", TokenizerConfig(vocab_size=500), texts=[LESSON] * 4)
    running = run_server(ServeConfig(models=(str(folder),), engine=EngineConfig(engine="torch")))
    english = next(running)
    visit = Visit(browser, english)
    visit.page.goto(english.url)
    visit.page.wait_for_selector("svg .arc", state="attached")
    state = visit.state()
    assert (state["text"], state["view"], state["group"]) == (LESSON, "attention", "words")
    ask = {"model": "english", "input": LESSON, "view": "attention"}
    at = LESSON.split().index("it")  # this tokenizer cuts no word before it
    weights = {}
    for layer, head in ((i, j) for i in range(2) for j in range(4)):
        body = ask | {"layer": layer, "head": head}
        matrix = httpx.post(f"{english.url}/v1/explain", json=body).json()["matrix"]
        values = np.frombuffer(base64.b64decode(matrix["f32"]), "<f4").reshape(matrix["shape"])
        weights[layer, head] = values[at, 1]
    chosen = (int(state.get("layer", 0)), int(state.get("head", 0)))
    assert int(state["query"]) == at and weights[chosen] > max(weights.values()) - 1 / 255
    expect(visit.page.locator("svg .word.lit").first).to_contain_text("it")
    expect(visit.page.locator("#hint")).to_contain_text("robot")
    visit.page.locator("#language").click()
    expect(visit.page.locator("#hint")).to_contain_text("注意力头")
    visit.page.locator(".heads button").nth(0 if chosen != (0, 0) else 1).click()
    expect(visit.page.locator("#hint")).to_be_empty()
    visit.close()
    assert next(running, None) is None


# ---- tours


@pytest.mark.parametrize("model", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("labels", "seq"))])
def test_every_tour_plays_on_every_model(browser, site, model):
    visit = Visit(browser, site)
    visit.open("next", model=model, text=TEXT, pair=TARGET)
    page, sentences = visit.page, set()
    for tour in range(5):
        page.locator("#tours").click()
        page.locator(".tour-list button").nth(tour).click()
        for _ in range(12):
            visit.settle()
            english = page.inner_text("#tour p")
            page.locator("#language").click()
            expect(page.locator("#tour p")).not_to_have_text(english)
            visit.settle()
            assert page.inner_text("#tour p") not in sentences and english not in sentences
            sentences |= {english, page.inner_text("#tour p")}
            page.locator("#language").click()
            expect(page.locator("#tour p")).to_have_text(english)
            if page.locator("#tour .primary").is_disabled():
                break
            page.keyboard.press("n")
            expect(page.locator("#tour p")).not_to_have_text(english)
        assert len(page.inner_text("#view").strip()) > 20
    page.reload()
    expect(page.locator("#tour p")).to_have_text(english)
    page.locator("#tour [data-by='-1']").click() if page.locator("#tour [data-by='-1']").is_enabled() else None
    page.get_by_role("button", name="End the tour").click()
    expect(page.locator("#tour")).to_be_hidden()
    visit.close()
