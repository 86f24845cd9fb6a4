"""The tour: one story on one text, through the command line, from the text to models that answer.

`make tour` walks it at a laptop's sizes, tests/test_tour.py at small ones; sizes are all that differs. Every step reads
what steps before it wrote, by its folder alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # Python's manual: prose that every machine has
from typing import Any
from urllib.parse import urlencode

VIEWS = {  # of the Explorer -> what is there once it is drawn
    "next": ".candidates .row",
    "write": ".controls .primary",
    "surprise": ".mark",
    "attention": ".matrix canvas",
    "layers": ".grid td",
    "masks": ".words button",
    "tokens": ".piece",
    "runs": "#view svg path",
}
CURVE = "document.querySelector('#view svg path')?.getAttribute('d')"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@dataclass(frozen=True)
class Sizes:
    """All that a hurried walk changes."""

    topics: int  # of the manual that are read
    vocabulary: int
    model: str  # options that make the model smaller
    gpt_steps: int
    bert_steps: int
    student_steps: int
    live_steps: int
    rows: int  # of the labelled file
    tuning: str  # options that make fine-tuning shorter
    questions: int


LAPTOP = Sizes(
    topics=len(topics), vocabulary=2048, model="", gpt_steps=120, bert_steps=300, student_steps=60, live_steps=60,
    rows=2000, tuning="", questions=100,
)  # fmt: skip
SMALL = Sizes(
    topics=12, vocabulary=512, model="--model.layers 2 --model.width 64 --model.context 64",
    gpt_steps=40, bert_steps=40, student_steps=10, live_steps=300,
    rows=120, tuning="--seeds 1 --epochs 1", questions=8,
)  # fmt: skip


@dataclass
class Tour:
    """Where the walk happens, and how its commands are shown and run."""

    folder: Path
    sizes: Sizes

    def tell(self, text: str) -> None:
        print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n# {text}", flush=True)

    def start(self, command: str, **options: Any) -> subprocess.Popen[str]:
        """`plume ...`, shown and begun."""
        words = shlex.split(command)
        print(f"$ {shlex.join(words)}", flush=True)
        return subprocess.Popen([sys.executable, "-m", *words], cwd=self.folder, text=True, **options)

    def run(self, command: str, *, expect: int = 0) -> None:
        """A command from its beginning to its end."""
        code = self.start(command).wait()
        assert code == expect, f"{command} ended with code {code}"

    def wrote(self, *names: str) -> None:
        for name in names:
            assert (self.folder / name).exists(), f"{name} was not written"


def walk(folder: Path, sizes: Sizes) -> None:
    """The whole way."""
    tour = Tour(folder, sizes)
    write_texts(tour)
    prepare(tour)
    pretrain(tour)
    use(tour)
    finetune(tour)
    shrink(tour)
    with serve(tour) as url:
        ask(tour, url)
        look_and_train(tour, url)
    tour.tell(f"That is the house. All of it is in {folder}")


# ---- the texts ---------------------------------------------------------------------------------------------------


def write_texts(tour: Tour) -> None:
    """A text, rows with labels, and questions: all from Python's manual."""
    tour.tell("A text to learn from: Python's own manual; its lines labelled as prose or code; questions about it")
    pages = list(topics.values())[: tour.sizes.topics]
    (tour.folder / "manual.txt").write_text("\n\n".join(pages), encoding="utf-8")
    draw = random.Random(1)
    blocks = [block for page in pages for block in page.split("\n\n") if not block.startswith("***")]
    lines = [("code" if block.startswith("   ") else "prose", line) for block in blocks for line in block.splitlines()]
    rows = [(line.strip(), kind) for kind, line in lines if len(line.split()) > 2]
    with (tour.folder / "lines.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("line", "kind"), *draw.sample(rows, min(tour.sizes.rows, len(rows)))])
    prose = [block.split() for block in blocks if not block.startswith(" ")]
    words = sorted({word for block in prose for word in block if word.isalpha()})
    with (tour.folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        for block in draw.sample([block for block in prose if len(block) > 12], tour.sizes.questions):
            choices = [f" {block[11]}", *(f" {word}" for word in draw.sample(words, 3))]
            file.write(json.dumps({"context": " ".join(block[:11]), "choices": choices, "answer": 0}) + "\n")
    print(f"manual.txt, lines.csv and questions.jsonl in {tour.folder}")


# ---- from text to models -----------------------------------------------------------------------------------------


def prepare(tour: Tour) -> None:
    size = tour.sizes.vocabulary
    tour.tell("Tokens: one tokenizer made on the way, one made beforehand")
    tour.run(f"plume prepare manual.txt --folder data/gpt --validation-fraction 0.1 --tokenizer.vocab-size {size}")
    tour.run(f"plume tokenizer train manual.txt --kind wordpiece --vocab-size {size} --out words")
    tour.run("plume prepare manual.txt --folder data/bert --validation-fraction 0.1 --tokenizer.folder words")
    tour.run('plume tokenizer inspect data/gpt "The class statement"')


def pretrain(tour: Tour) -> None:
    tour.tell("Pretraining: a GPT-2 and a BERT")
    for name, recipe, steps in (
        ("gpt", "gpt2-laptop", tour.sizes.gpt_steps),
        ("bert", "bert-laptop", tour.sizes.bert_steps),
    ):
        places = f"--prepared data/{name} --folder runs/{name}"
        tour.run(f"plume pretrain {recipe} {places} --train.steps {steps} {tour.sizes.model}")
        tour.wrote(f"runs/{name}/model/config.json", f"runs/{name}/loss.png")
    tour.run("plume runs")


def use(tour: Tour) -> None:
    tour.tell("What they have learned: it writes, and both answer questions")
    tour.run('plume generate runs/gpt "The class" --max-new-tokens 40 --top-k 20 --seed 1')
    for name in ("gpt", "bert"):
        tour.run(f"plume evaluate runs/{name} --tasks questions.jsonl --out reports/{name}")
        tour.wrote(f"reports/{name}/report.md")
    tour.run("plume evaluate --compare reports/gpt reports/bert")


def finetune(tour: Tour) -> None:
    tour.tell("Fine-tuning: is a line of the manual prose or code?")
    for name in ("gpt", "bert"):
        tour.run(f"plume finetune runs/{name} --task.train lines.csv --folder runs/{name}-lines {tour.sizes.tuning}")
        tour.wrote(f"runs/{name}-lines/report.md", f"runs/{name}-lines/model/config.json")


def shrink(tour: Tour) -> None:
    tour.tell("Smaller, and elsewhere: a student of half the layers; a file for llama.cpp")
    tour.run(f"plume distill runs/gpt --folder runs/student --train.steps {tour.sizes.student_steps}")
    tour.run("plume export runs/gpt --format gguf --precision int8 --out gpt.gguf")
    tour.wrote("runs/student/model/config.json", "gpt.gguf")


# ---- for others --------------------------------------------------------------------------------------------------


@contextmanager
def serve(tour: Tour) -> Iterator[str]:
    """All models behind one address, until the end of the block."""
    tour.tell("Serving all of them at once")
    models = "runs/gpt runs/bert runs/gpt-lines runs/bert-lines runs/student"
    server = tour.start(f"plume serve {models} --port 0 --access-log access.jsonl", stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None
        said = ""
        while "http://" not in said:
            line = server.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        print(said, end="", flush=True)
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
        yield "http://" + said.rpartition("http://")[2].strip().rstrip("/")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, "the server did not end well"
        print("SIGTERM: the server has finished what it was doing and ended")
    finally:
        server.kill()


def ask(tour: Tour, url: str) -> None:
    from openai import OpenAI

    tour.tell("Asking them with OpenAI's own client")
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    names = {model.id for model in client.models.list()}
    print("models:", ", ".join(sorted(names)))
    assert {"gpt", "bert", "gpt-lines", "bert-lines", "student"} <= names
    for name in ("gpt", "student"):
        answer = client.completions.create(model=name, prompt="The class", max_tokens=20, seed=1, logprobs=1)
        print(f"{name}: The class{answer.choices[0].text!r}")
        assert answer.usage is not None and answer.usage.completion_tokens > 0
    parts = client.completions.create(model="gpt", prompt="The class", max_tokens=20, seed=1, stream=True)
    assert "".join(part.choices[0].text for part in parts if part.choices)
    vectors = client.embeddings.create(model="bert", input=["a function", "a class"]).data
    print(f"bert: {len(vectors)} embeddings of {len(vectors[0].embedding)} numbers")
    for name in ("gpt-lines", "bert-lines"):
        labels = client.post("/classify", body={"model": name, "input": ["for line in file:"]}, cast_to=object)
        print(f"{name}: {json.dumps(labels)[:200]}")


def look_and_train(tour: Tour, url: str) -> None:
    """Every view of the Explorer; then a training that is stopped and goes on while the page watches."""
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        print("no Chromium here, so the tour ends without the Explorer; Debian's package chromium would do")
        return
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 800}, locale="en-US")
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        look(tour, url, page)
        watch_training(tour, url, page)
        browser.close()
    assert not wrong, wrong


def look(tour: Tour, url: str, page: Any) -> None:
    tour.tell("Looking inside: every view of the Explorer")
    (tour.folder / "views").mkdir(exist_ok=True)
    for view, ready in VIEWS.items():
        state = {"view": view, "model": "bert" if view == "masks" else "gpt", "text": "The class statement is used to"}
        page.goto(f"{url}/#{urlencode(state)}")
        page.wait_for_selector(ready, state="attached")
        page.wait_for_function("() => !document.querySelector('.waiting')")
        page.screenshot(path=tour.folder / "views" / f"{view}.png")
        print(f"{url}/#view={view}: views/{view}.png")


def watch_training(tour: Tour, url: str, page: Any) -> None:
    tour.tell("A training is stopped and goes on, and the Explorer shows it live")
    metrics = tour.folder / "runs" / "live" / "metrics.jsonl"
    steps = f"--train.steps {tour.sizes.live_steps} --train.log-every 5"
    command = f"plume pretrain gpt2-laptop --prepared data/gpt --folder runs/live {steps} {tour.sizes.model}"
    with training(tour, command) as first:
        until = time.monotonic() + 120
        while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 2:
            assert first.poll() is None and time.monotonic() < until, "the training did not begin"
            time.sleep(0.1)
        page.goto(f"{url}/#view=runs&runs=live")
        page.wait_for_selector(VIEWS["runs"], state="attached")
        wait_for_growth(page, page.evaluate(CURVE))
        first.send_signal(signal.SIGINT)
        print("^C", flush=True)
    page.wait_for_timeout(2500)  # until the page has seen the last of it
    before = page.evaluate(CURVE)
    with training(tour, "plume pretrain runs/live --resume"):
        wait_for_growth(page, before)
        page.screenshot(path=tour.folder / "views" / "runs-live.png")
    lines = metrics.read_text(encoding="utf-8").splitlines()
    assert max(json.loads(line)["step"] for line in lines) == tour.sizes.live_steps


@contextmanager
def training(tour: Tour, command: str) -> Iterator[subprocess.Popen[str]]:
    """A training under way; behind the block it ends well, finished or stopped."""
    process = tour.start(command)
    try:
        yield process
        assert process.wait(900) in (0, 130), f"{command} did not end well"
    finally:
        process.kill()


def wait_for_growth(page: Any, before: str | None) -> None:
    page.wait_for_function(f"before => {CURVE} !== before", arg=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tour"), help="a tour's folder is emptied first")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.folder.exists() and not (args.folder / "manual.txt").is_file():
        parser.error(f"{args.folder} is no tour's folder, so it is left alone; --folder names another")
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    walk(args.folder.resolve(), SMALL if args.small else LAPTOP)


if __name__ == "__main__":
    main()
