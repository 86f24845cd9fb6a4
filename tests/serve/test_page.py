"""The Explorer as a whole in a real browser: looks, keyboard, links, exports, both languages, and nothing injected."""

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from running import run_server
from visit import ARTEFACTS, EVIL, READY, TEXT, VIEWS, Visit, rows

from plume.serve import new_key

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need the package playwright")
expect = playwright.expect


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
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.candidates button.row')"):
            break
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


@pytest.mark.parametrize("width", [360, *(pytest.param(width, marks=pytest.mark.slow) for width in (1200, 1280))])
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


def test_waiting_for_the_models_is_shown(visit):
    """Counting weights takes a moment at first, and an empty page would look broken."""
    waiting = []
    visit.page.route("**/v1/models", lambda route: waiting.append(route))
    visit.page.goto(f"{visit.site.url}/#view=next&model=gpt&text=robot")
    expect(visit.page.locator("#hint")).to_have_text("Loading the list of models …")
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
            .reduce((said, [pattern, other]) => said.replace(pattern, other),
                'CPU engine, int8 weights, 2 threads, float32 cache of 2.4 MB per slot')"""
    )
    assert said == "CPU 引擎，int8 权重，2 线程，每槽 2.4 MB 的 float32 缓存"
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
    assert sum(sizes) < 160_000 and not math.isnan(sum(sizes))


# ---- accessibility


VIOLATIONS = """async () => (await axe.run(document)).violations.flatMap((rule) =>
    rule.nodes.map((node) => `${rule.id}: ${node.html.slice(0, 200)}\n${node.failureSummary}`))"""


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_in_any_view(browser, site, axe, view, scheme):
    visit = Visit(browser, site, color_scheme=scheme)
    more = {"step": "b1.a.softmax"} if view == "walk" else {"query": 3} if view == "attention" else {}
    visit.open(view, text="The robot must obey", tour="token.1.gpt" if view == "next" else "", **more)
    visit.page.evaluate(f"{axe}; undefined")
    assert visit.page.evaluate(VIOLATIONS) == []
    visit.close()


@pytest.mark.parametrize("view", ["next", "masks", "cause"])
def test_axe_finds_nothing_in_a_masked_model(browser, site, axe, view):
    visit = Visit(browser, site)
    visit.open(view, model="bert", text="The robot must obey", masked="2", ready=".row, .words button, .map button")
    visit.page.evaluate(f"{axe}; undefined")
    assert visit.page.evaluate(VIOLATIONS) == []
    visit.close()
