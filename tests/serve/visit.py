"""A visit to the Explorer in a real browser."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
# the shell has no windows, menus and extensions, and takes two fifths of the processor time
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
EVIL = "<script>alert(1)</script>"
TEXT = "The robot must obey </script><b>human beings</b> because it"
VIEWS = (
    *("next", "write", "walk", "attention", "layers", "cause", "attribution", "surprise", "masks", "tokens", "runs"),
)
LIMIT = 120_000  # milliseconds that a condition may take on a machine that does much else
SETTLED = """() => {
    const view = document.querySelector('#view');
    return view?.getAttribute('aria-busy') === 'false' && view.dataset.shown === location.hash;
}"""
READY = {
    "next": ".candidates .row",
    "write": ".controls .primary",
    "walk": ".walk-picture > *",
    "cause": ".map button",
    "attribution": ".mark.signed",
    "surprise": ".mark",
    "attention": ".matrix canvas",
    "layers": ".grid td",
    "masks": ".words button, .empty",
    "tokens": ".piece",
    "runs": "#view svg path",
}


class Visit:
    """A page that fails the test when anything goes wrong in it, or when it talks to anybody else."""

    def __init__(self, browser, site, **options) -> None:
        self.site = site
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, "locale": "en-US"} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT)
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
        self.settle()
        self.page.wait_for_selector(READY[view] if ready is None else ready)
        return self

    def state(self) -> dict[str, str]:
        return dict(parse_qsl(self.page.evaluate("location.hash").lstrip("#")))

    def settle(self) -> None:
        """Until the page shows what its address says, and has asked and drawn all that belongs to it."""
        self.page.wait_for_function(SETTLED)

    def until(self, condition: Callable[[], object]) -> None:
        """Until something outside of the page is so; the browser's events are handled meanwhile."""
        for _ in range(LIMIT // 20):
            if condition():
                return
            self.page.wait_for_timeout(20)
        raise AssertionError("the condition was not met in time")

    def close(self) -> None:
        self.context.close()
        bad = [line for line in self.wrong if not (self.allow and re.search(self.allow, line))]
        assert not bad, bad


def rows(visit: Visit) -> list[str]:
    """The tokens that are offered next."""
    return [text.strip() for text in visit.page.locator(".candidates .row .token").all_inner_texts()]
