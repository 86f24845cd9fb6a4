"""The Explorer in a real browser: every view, the keyboard, links, exports, both languages, and nothing injected."""

import json
import math
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest
from conftest import Running, run_server

from plume.serve import new_key

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
expect = playwright.expect
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
EVIL = "<script>alert(1)</script>"
TEXT = "The robot must obey </script><b>human beings</b> because it"
VIEWS = ("next", "write", "surprise", "attention", "layers", "masks", "tokens", "runs")
READY = {
    "next": ".candidates .row",
    "write": ".controls .primary",
    "surprise": ".mark",
    "attention": ".matrix canvas",
    "layers": ".grid td",
    "masks": ".words button, .empty",
    "tokens": ".piece",
    "runs": "#view svg path",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium; Debian's package chromium would do")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(models, runs_folder, serve_config) -> Iterator[Running]:
    places = (str(models["gpt"]), str(models["bert"]), f"{EVIL}={models['other']}")
    yield from run_server(replace(serve_config, models=places))


class Visit:
    """A page that fails the test when anything goes wrong in it, or when it talks to anybody else."""

    def __init__(self, browser, site, **options) -> None:
        self.site = site
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, "locale": "en-US"} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.wrong: list[str] = []
        self.allow = ""
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append("a dialog opened"), dialog.dismiss()))
        self.page.on("request", self.check)

    def check(self, request) -> None:
        if not request.url.startswith((self.site.url, "data:", "blob:")):
            self.wrong.append(f"asked {request.url}")

    def open(
        self, view: str = "next", *, model: str = "gpt", text: str = TEXT, ready: str | None = None, **state: object
    ) -> "Visit":
        self.page.goto(f"{self.site.url}/#{urlencode({'view': view, 'model': model, 'text': text, **state})}")
        self.page.wait_for_selector(READY[view] if ready is None else ready)
        self.page.wait_for_function("() => !document.querySelector('.waiting')")
        return self

    def state(self) -> dict[str, str]:
        from urllib.parse import parse_qsl

        return dict(parse_qsl(self.page.evaluate("location.hash").lstrip("#")))

    def settle(self) -> None:
        self.page.wait_for_timeout(80)
        self.page.wait_for_function("() => !document.querySelector('.waiting')")

    def close(self) -> None:
        self.context.close()
        bad = [line for line in self.wrong if not (self.allow and re.search(self.allow, line))]
        assert not bad, bad


@pytest.fixture
def visit(browser, site) -> Iterator[Visit]:
    visit = Visit(browser, site)
    yield visit
    visit.close()


# ---- every view, as pictures


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_every_view_draws_without_a_complaint(browser, site, look):
    options = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": {"viewport": {"width": 360, "height": 740}}}
    visit = Visit(browser, site, **options[look])
    ARTEFACTS.mkdir(exist_ok=True)
    for view in VIEWS:
        visit.open(view, model="bert" if view == "masks" else "gpt", masked="1")
        visit.page.screenshot(path=ARTEFACTS / f"page-{view}-{look}.png")
        wide = visit.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{view} is {wide} pixels too wide"
    visit.close()


def test_colours_can_be_read(visit):
    """Words on what they stand on: a contrast of at least 4.5 to 1, in both looks."""
    visit.open()
    script = """() => {
      const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      const light = (name) => {
        const probe = document.body.appendChild(document.createElement('i'));
        probe.style.color = `var(--${name})`;
        const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((v) => linear(v / 255));
        probe.remove();
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const pairs = [['ink', 'paper'], ['muted', 'paper'], ['muted', 'raised'], ['accent', 'paper'], ['accent', 'wash'],
        ['ink', 'wash'], ['muted', 'wash'], ['warn', 'raised'], ...[0, 1, 2, 3, 4].map((i) => ['ink', `rank${i}`])];
      return pairs.map(([a, b]) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return [`${a} on ${b}`, (x + 0.05) / (y + 0.05)];
      });
    }"""
    for scheme in ("light", "dark"):
        visit.page.evaluate(f"document.documentElement.style.colorScheme = '{scheme}'")
        for name, contrast in visit.page.evaluate(script):
            assert contrast >= 4.5, f"{name} in {scheme}: {contrast:.2f}"


# ---- next


def visible(piece: str) -> str:
    """As the page shows a token: white space and control characters as signs."""
    marks = {" ": "·", "\n": "⏎", "\t": "⇥", "\x7f": "\u2421"}
    return "".join(marks.get(c, chr(0x2400 + ord(c)) if c < " " else c) for c in piece)


def rows(visit) -> list[str]:
    return [text.strip() for text in visit.page.locator(".candidates .row .token").all_inner_texts()]


def test_next_shows_the_servers_ten_and_takes_them_by_key(visit, site):
    visit.open(text="The robot")
    body = {"model": "gpt", "text": "The robot"}
    told = httpx.post(f"{site.url}/v1/next-tokens", json=body).json()
    shown = [visible(piece) for piece in told["candidates"]["pieces"]]
    assert rows(visit) == shown[:10]
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press("3")
    visit.page.wait_for_function("() => location.hash.includes('ids=')")
    visit.settle()
    ids = [*told["tokens"], told["candidates"]["tokens"][2]]
    assert visit.state()["ids"] == ".".join(map(str, ids))
    fresh = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "tokens": ids}).json()
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
    told = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "text": "The robot", "k": 400}).json()
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
    assert len(asked) <= 2 and json.loads(asked[-1])["text"] == "Once upon"


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
    expect(visit.page.locator(".controls .primary")).to_have_text("Write")
    assert visit.page.locator(".branch").count() == 1
    first = visit.page.inner_text(".columns .prose")
    visit.page.locator(".made").nth(3).hover()
    visit.page.locator("#side .row").nth(4).click()
    expect(visit.page.locator(".branch")).to_have_count(2)
    expect(visit.page.locator(".controls .primary")).to_have_text("Write")
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
    told = httpx.post(f"{site.url}/v1/score", json={"model": "gpt", "text": "The robot must obey"}).json()
    classes = visit.page.locator(".mark").evaluate_all("marks => marks.map((mark) => mark.className)")
    for name, rank in zip(classes, told["rank"], strict=True):
        level = 0 if rank < 1 else 1 if rank < 10 else 2 if rank < 100 else 3 if rank < 1000 else 4
        assert f"rank{level}" in name
    assert f"{told['perplexity']:.2f}" in visit.page.inner_text("#view")
    visit.page.locator(".mark").nth(2).click()
    visit.page.get_by_text("Expected here").wait_for()
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
    visit.page.get_by_text("looks at", exact=False).first.wait_for()
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
    told = httpx.post(f"{site.url}/v1/next-tokens", json={"model": "gpt", "text": "The robot must obey"}).json()
    last = visit.page.locator(".grid tbody tr").last.locator("td").last
    assert last.inner_text() == visible(told["candidates"]["pieces"][0])
    last.hover()
    side = visit.page.inner_text("#side")
    assert "attention 2" in side and "length of the residual" in side


def test_masks_are_pressed_and_filled(visit):
    visit.open("masks", model="bert", text="The robot must obey.")
    visit.page.get_by_role("button", name="robot", exact=True).click()
    visit.page.locator(".fills .row").first.wait_for()
    chosen = visit.page.locator(".fills .row .token").nth(2).inner_text()
    visit.page.locator(".fills .row").nth(2).click()
    expect(visit.page.locator("#text")).to_have_value(f"The {chosen} must obey.")
    visit.page.select_option("#model", "gpt")
    visit.page.get_by_text("This view needs").wait_for()


def test_tokens_show_ids_bytes_and_merges(visit, site):
    visit.open("tokens", text="The robot 你好")
    told = httpx.post(f"{site.url}/v1/tokenize", json={"model": "gpt", "text": "The robot 你好"}).json()
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
    with (runs_folder / "first" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 50, "loss": 1.0, "tokens": 5000, "seconds": 25}) + "\n")
    visit.page.wait_for_function(
        "before => document.querySelector('#view svg path').getAttribute('d') !== before", arg=before
    )
    assert "Once upon <b>a</b>" in visit.page.inner_text("#view")
    visit.page.get_by_role("checkbox", name="second").check()
    visit.page.wait_for_function("() => document.querySelectorAll('#view svg path.c1').length > 0")
    for word in ("time", "steps", "log"):
        visit.page.get_by_role("button", name=word, exact=True).click()


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


# ---- the frame


def test_everything_by_keyboard(visit):
    visit.open(text="The robot")
    page = visit.page
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    seen = ["next"]
    for _ in VIEWS:
        page.keyboard.press("Shift+ArrowRight")
        page.wait_for_function(
            "view => !location.hash.includes(`view=${view}`)", arg=seen[-1] if seen[-1] != "next" else "none"
        )
        seen.append(visit.state().get("view", "next"))
        visit.settle()
    assert tuple(seen[:-1]) == VIEWS and seen[-1] == "next"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text"
    page.wait_for_selector(".candidates .row")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className || document.activeElement.type"))
    assert any("row" in name for name in reached)
    page.keyboard.press("Enter")
    page.wait_for_function("() => location.hash.includes('ids=')")


def test_a_link_shows_the_same_picture(browser, site, visit):
    visit.open("attention", ready=".attention svg .word", layer=1, head=3, picture="arcs", query=2)
    link, picture = visit.page.url, visit.page.inner_html(".attention svg")
    other = Visit(browser, site)
    other.page.goto(link)
    other.page.wait_for_selector(".attention svg .word")
    other.settle()
    assert other.page.inner_html(".attention svg") == picture
    other.close()


def test_pictures_and_data_can_be_taken_away(visit):
    for view in ("next", "attention", "layers"):
        visit.open(view)
        found = {}
        for kind in ("svg", "png", "json"):
            with visit.page.expect_download() as download:
                visit.page.click(f"#save-{kind}")
            found[kind] = Path(download.value.path()).read_bytes()
        svg = ET.fromstring(found["svg"])
        assert svg.tag.endswith("svg") and len(list(svg.iter())) > 20
        assert found["png"][:8] == b"\x89PNG\r\n\x1a\n" and len(found["png"]) > 4000
        assert json.loads(found["json"])["answer"]["model"] == "gpt"


def test_chinese_and_english_say_the_same_things(visit):
    visit.open()
    visit.page.click("#language")
    expect(visit.page.locator("#tabs button").first).to_have_text("下一词")
    visit.page.screenshot(path=ARTEFACTS / "page-next-zh.png")
    both = visit.page.evaluate(
        "Promise.all(['en', 'zh'].map(async (l) => Object.entries((await import(`/static/words/${l}.js`)).default)))"
    )
    english, chinese = (dict(words) for words in both)
    assert english.keys() == chinese.keys()
    for name, words in english.items():
        if isinstance(words, str):
            assert set(re.findall(r"\{\w+\}", words)) == set(re.findall(r"\{\w+\}", chinese[name])), name
    visit.page.click("#language")
    expect(visit.page.locator("#tabs button").first).to_have_text("Next")


def test_the_tab_of_the_view_is_in_sight_on_a_phone(browser, site):
    visit = Visit(browser, site, viewport={"width": 360, "height": 740})
    for view in VIEWS:
        visit.open(view, model="bert" if view == "masks" else "gpt", masked="1")
        box = visit.page.locator(f"#tabs [data-view={view}]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, f"{view} is out of sight: {box}"
    visit.close()


@pytest.mark.parametrize("width", [360, 1200, 1280])
def test_the_page_does_not_jump_while_it_fills(browser, site, width):
    """As browsers count it: what moved, by how far, without the reader having done anything."""
    visit = Visit(browser, site, viewport={"width": width, "height": 740})
    visit.page.add_init_script(
        """window.jumps = []; new PerformanceObserver((list) => list.getEntries().forEach((entry) => {
            if (!entry.hadRecentInput) jumps.push(entry.value);
        })).observe({ type: 'layout-shift', buffered: true })"""
    )
    for view in ("next", "surprise", "layers", "tokens"):
        visit.page.goto("about:blank")
        visit.open(view, text="robot")
        moved = visit.page.evaluate("jumps.reduce((sum, value) => sum + value, 0)")
        assert moved < 0.05, f"{view} moved by {moved:.3f}"
    visit.close()


def test_a_wait_for_the_models_is_said(visit):
    """Counting weights takes a moment at first, and an empty page would look broken."""
    waiting = []
    visit.page.route("**/v1/models", lambda route: waiting.append(route))
    visit.page.goto(f"{visit.site.url}/#view=next&model=gpt&text=robot")
    expect(visit.page.locator("#hint")).to_have_text("Asking for the models …")
    waiting[0].continue_()
    visit.page.wait_for_selector(READY["next"])
    expect(visit.page.locator("#hint")).to_have_text("")


def test_a_single_point_has_an_axis_that_can_be_read(visit):
    visit.open()
    labels = visit.page.evaluate(
        """async () => {
            const { curves } = await import('/static/draw.js');
            const drawn = curves({ lines: [{ x: [6144], y: [7412], kind: '' }], width: 300 });
            return [...drawn.querySelectorAll('text')].map((text) => text.textContent);
        }"""
    )
    assert len(labels) >= 3 and len(set(labels)) == len(labels), labels


def test_the_footer_and_a_refusal_are_said_in_chinese(visit):
    visit.allow = "400"
    visit.open()
    visit.page.click("#language")
    expect(visit.page.locator("#facts")).to_contain_text("torch（cpu），float32")
    said = visit.page.evaluate(
        """async () => (await import('/static/words/zh.js')).default.engine
            .reduce((said, [pattern, other]) => said.replace(pattern, other), 'CPU engine, int8 weights, 2 threads')"""
    )
    assert said == "CPU 引擎，int8 权重，2 线程"
    for view in ("next", "attention", "layers"):
        visit.open(view, ready="#hint.warn", text="the robot " * 100)
        expect(visit.page.locator("#hint")).to_have_text("文本超出了模型 64 个词元的上下文。")


def test_names_and_tokens_are_never_markup(visit):
    """A model called like a script and a text full of tags: both are only shown."""
    for view in VIEWS:
        visit.open(view, model=EVIL, text=TEXT)
        assert visit.page.locator("#view script, #side script, #head script, #view b").count() == 0
    assert EVIL in visit.page.inner_text("#model")


def test_a_server_that_does_not_answer_is_named_and_the_picture_stays(browser, models, serve_config):
    running = run_server(replace(serve_config, models=(str(models["gpt"]),), runs=None))
    site = next(running)
    visit = Visit(browser, site)
    visit.allow = "ERR_CONNECTION_REFUSED"
    visit.open(text="The robot")
    with pytest.raises(StopIteration):
        next(running)
    before = rows(visit)
    visit.page.fill("#text", "The robots")
    visit.page.get_by_text("cannot be reached").wait_for()
    assert rows(visit) == before
    visit.close()


def test_a_key_is_asked_for_where_one_is_needed(browser, models, serve_config):
    key, hashed = new_key()
    running = run_server(replace(serve_config, models=(str(models["gpt"]),), runs=None, keys=(hashed,)))
    site = next(running)
    visit = Visit(browser, site)
    visit.allow = "401"
    visit.page.goto(f"{site.url}/#text=The+robot")
    visit.page.locator("dialog input").fill(key)
    visit.page.get_by_role("button", name="Use this key").click()
    visit.page.wait_for_selector(READY["next"])
    visit.page.goto(f"{site.url}/docs")
    visit.page.get_by_role("button", name="Try").first.click()
    expect(visit.page.locator(".trial pre").first).to_contain_text("200")
    visit.close()
    with pytest.raises(StopIteration):
        next(running)


def test_the_page_is_small(site):
    """No build, no outside file, and not much of it."""
    names = {"/"} | set(re.findall(r'(?:src|href)="(/static/[^"]+)"', httpx.get(site.url).text))
    sizes = [len(httpx.get(site.url + name).content) for name in names]
    assert sum(sizes) < 120_000 and not math.isnan(sum(sizes))
