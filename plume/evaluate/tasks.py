"""Tasks as data: where the rows are, how a row becomes items, which number is the headline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from plume.config import UserError, did_you_mean
from plume.data.rows import read_rows, suffix_of
from plume.data.web import hub_is_far
from plume.evaluate import made, sets, texts
from plume.evaluate.items import Item, Row
from plume.evaluate.protocols import Protocol

Split = Literal["test", "train"]
Build = Callable[[Row, Protocol], Iterator[Item]]
Read = Callable[[Path], Iterator[Row]]
WORDS_FOR_SPLIT = {"test": ("test", "validation", "valid", "dev", "val"), "train": ("train",)}
TABLES = ("jsonl", "parquet", "csv", "tsv", "json")


def table(path: Path, columns: tuple[str, ...] | None = None) -> Iterator[Row]:
    for line, values in read_rows(path, columns=columns):
        yield Row(values, f"{path} line {line}")


def whole(path: Path) -> Iterator[Row]:
    """The file as one text."""
    yield Row({"text": path.read_text(encoding="utf-8")}, str(path))


def last_bytes(path: Path, count: int) -> Iterator[Row]:
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - count))
        data = stream.read()
    yield Row({"text": data.decode("utf-8", errors="ignore")}, str(path))  # the cut may fall inside a character


def lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield Row({"text": line.rstrip("\n")}, f"{path} line {number}")


def squad_file(path: Path) -> Iterator[Row]:
    if suffix_of(path) != ".json":
        yield from table(path)
        return
    data = json.loads(path.read_text(encoding="utf-8"))
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                row = {"title": article["title"], "context": paragraph["context"], **question}
                yield Row(row, f"{path} question {question['id']}")


def coqa_file(path: Path) -> Iterator[Row]:
    if suffix_of(path) != ".json":
        yield from table(path)
        return
    for talk in json.loads(path.read_text(encoding="utf-8"))["data"]:
        yield Row(talk, f"{path} conversation {talk['id']}")


def book_file(path: Path) -> Iterator[Row]:
    """The Children's Book Test as it was published: twenty numbered lines, then a question, its answer, the options."""
    if suffix_of(path) != ".txt":
        yield from table(path)
        return
    sentences: list[str] = []
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            place, _, rest = line.rstrip("\n").partition(" ")
            where = f"{path} line {number}"
            if place != "21":
                sentences.append(rest)
                continue
            cells = rest.split("\t")
            if len(cells) < 4:
                raise UserError(f"{where}: the question, its answer and the options should be parted by tabs")
            options = cells[3].split("|")
            yield Row({"sentences": sentences, "question": cells[0], "answer": cells[1], "options": options}, where)
            sentences = []


def aligned(path: Path, languages: tuple[str, str]) -> Iterator[Row]:
    """Two files with a line each per sentence, told apart by their last suffix."""
    other = path.with_suffix(f".{languages[1]}")
    if not other.is_file():
        raise UserError(f"{path} has no translation beside it: {other.name} is missing")
    with path.open(encoding="utf-8") as sources, other.open(encoding="utf-8") as targets:
        for number, (source, target) in enumerate(zip_longest(sources, targets), 1):
            if source is None or target is None:
                raise UserError(f"{path} and {other.name} do not have the same number of lines")
            yield Row({"source": source.strip(), "target": target.strip()}, f"{path} line {number}")


@dataclass(frozen=True)
class Task:
    """One benchmark. Files are looked for below the data folder, then the hub is asked."""

    name: str
    build: Build
    _: KW_ONLY
    metric: str = "acc"  # the headline
    kind: Literal["choice", "word", "text", "question", "blank", "judgement"] = "choice"
    folder: str = ""  # below the data folder; unset means the task's name
    files: tuple[str, ...] = ()  # of the split that is scored, beside test.jsonl, validation.parquet and the like
    train: tuple[str, ...] = ()  # of the split that examples are drawn from, beside train.jsonl and the like
    read: Read = table
    hub: str | None = None  # NAME:CONFIG:SPLIT:TRAIN
    make: Callable[[], Iterator[Row]] | None = None  # needs no file
    path: Path | None = None  # the user's own file
    paper_metric: str | None = None  # the headline under gpt2-paper, where another one gives the published number
    filters: bool = False  # a protocol may bar stop words from being the prediction
    last_token: bool = False  # only the last token of the target counts
    measures: tuple[str, ...] = ("exact_match",)  # of generated texts
    draws: bool = False  # the papers draw its answers at random, so that each seed gives another
    people: bool = False  # several people's answers: each of them stands aside once, and the first line counts
    delimiters: Mapping[str, str] = field(default_factory=dict)  # between examples, by protocol, where it has another

    @property
    def causal_only(self) -> bool:
        return self.kind == "question"


@dataclass(frozen=True)
class Source:
    """Rows of one split, and what they were read from."""

    name: str
    hash: str
    rows: Callable[[], Iterable[Row]]


COLA_COLUMNS = ("source", "label", "star", "sentence")
LAMBADA = Task(
    "lambada",
    sets.lambada,
    kind="word",
    filters=True,
    folder="lambada",
    files=("lambada_test*.jsonl", "*test*.jsonl"),
    hub="EleutherAI/lambada_openai:default:test:",
    delimiters={"gpt3-paper": "\n"},
)
WIKITEXT = Task(
    "wikitext-103",
    texts.wikitext,
    kind="text",
    metric="word_perplexity",
    read=whole,
    files=("wiki.test.raw", "wiki.test.tokens"),
)


def two_files(source: str, target: str) -> Task:
    return Task(
        f"multi30k-{source}-{target}",
        partial(sets.translation, languages=(source, target)),
        kind="question",
        metric="bleu",
        measures=("bleu", "chrf"),
        folder="multi30k",
        files=(f"test_2016_flickr.{source}",),
        train=(f"train.{source}",),
        read=partial(aligned, languages=(source, target)),
    )


BUILT_IN: tuple[Task, ...] = (
    LAMBADA,
    replace(LAMBADA, name="lambada-token", last_token=True),
    replace(LAMBADA, name="lambada-fill", build=sets.lambada_fill, kind="blank", metric="exact_match"),
    WIKITEXT,
    replace(WIKITEXT, name="wikitext-2", paper_metric="token_perplexity"),
    Task("ptb", texts.penn, kind="text", metric="word_perplexity", read=whole, files=("ptb.test.txt", "test.txt")),
    Task("enwik8", texts.as_it_is, kind="text", metric="bits_per_byte", files=("enwik8",),
         read=partial(last_bytes, count=5_000_000)),
    Task("text8", texts.as_it_is, kind="text", metric="bits_per_character", files=("text8",),
         read=partial(last_bytes, count=5_000_000)),
    Task("1bw", texts.as_it_is, kind="text", metric="word_perplexity", read=lines,
         files=("news.en.heldout-00000-of-00050", "*heldout*", "test.txt")),
    Task("cbt-cn", sets.childrens_book, folder="cbt", files=("*CN_test*.txt", "cbtest_CN_test*"),
         train=("*CN_train*.txt",), read=book_file, hub="cbt:CN:test:train"),
    Task("cbt-ne", sets.childrens_book, folder="cbt", files=("*NE_test*.txt", "cbtest_NE_test*"),
         train=("*NE_train*.txt",), read=book_file, hub="cbt:NE:test:train"),
    Task("winograd", sets.winograd, hub="lighteval/winograd_wsc:wsc273:test:"),
    Task("winograd-full", sets.winograd_full, folder="winograd", hub="lighteval/winograd_wsc:wsc273:test:"),
    Task("storycloze", sets.story_cloze, hub="LSDSem/story_cloze:2016:test:validation", train=("val*.csv",)),
    Task("hellaswag", sets.hellaswag, metric="acc_norm", files=("hellaswag_val.jsonl",),
         train=("hellaswag_train.jsonl",), hub="Rowan/hellaswag::validation:train"),
    Task("piqa", sets.piqa, metric="acc_norm", hub="baber/piqa::validation:train"),
    Task("arc-easy", sets.arc, metric="acc_norm", files=("ARC-Easy-Test.jsonl",), train=("ARC-Easy-Train.jsonl",),
         hub="allenai/ai2_arc:ARC-Easy:test:train"),
    Task("arc-challenge", sets.arc, metric="acc_norm", files=("ARC-Challenge-Test.jsonl",),
         train=("ARC-Challenge-Train.jsonl",), hub="allenai/ai2_arc:ARC-Challenge:test:train"),
    Task("openbookqa", sets.openbookqa, metric="acc_norm", hub="allenai/openbookqa:main:test:train"),
    Task("boolq", sets.boolq, hub="aps/super_glue:boolq:validation:train"),
    Task("copa", sets.copa, hub="aps/super_glue:copa:validation:train"),
    Task("winogrande", sets.winogrande, files=("dev.jsonl",), train=("train_xl.jsonl",),
         hub="allenai/winogrande:winogrande_xl:validation:train"),
    Task("race", sets.race, hub="EleutherAI/race:high:test:"),
    Task("sst2", sets.sst2, hub="nyu-mll/glue:sst2:validation:train"),
    Task("sst2-gpt1", sets.sst2_gpt1, folder="sst2", hub="nyu-mll/glue:sst2:validation:train"),
    Task("rte", sets.rte, hub="nyu-mll/glue:rte:validation:train"),
    Task("rte-gpt1", sets.rte_gpt1, folder="rte", kind="judgement", hub="nyu-mll/glue:rte:validation:train"),
    Task("cola", sets.cola, metric="mcc", read=partial(table, columns=COLA_COLUMNS),
         hub="nyu-mll/glue:cola:validation:train"),
    Task("cola-gpt1", sets.cola_gpt1, folder="cola", kind="judgement", metric="mcc",
         read=partial(table, columns=COLA_COLUMNS), hub="nyu-mll/glue:cola:validation:train"),
    two_files("en", "de"),
    two_files("de", "en"),
    Task("wmt14-fr-en", partial(sets.translation, languages=("fr", "en")), kind="question", metric="bleu",
         measures=("bleu", "chrf"), hub="wmt/wmt14:fr-en:test:validation"),
    Task("cnn-dailymail", sets.summary, kind="question", metric="rouge1", measures=("rouge1", "rouge2", "rougeL"),
         draws=True, hub="abisee/cnn_dailymail:3.0.0:test:train"),
    Task("nq", sets.natural_question, kind="question", metric="exact_match", measures=("exact_match", "f1"),
         hub="google-research-datasets/nq_open::validation:train", delimiters={"harness": "\n"}),
    Task("triviaqa", sets.trivia_question, kind="question", metric="exact_match", measures=("exact_match", "f1"),
         hub="mandarjoshi/trivia_qa:rc.nocontext:validation:train"),
    Task("squad", sets.squad, kind="question", metric="f1", measures=("f1", "exact_match"), files=("dev-v1.1.json",),
         train=("train-v1.1.json",), read=squad_file, hub="rajpurkar/squad::validation:train"),
    Task("coqa", sets.coqa, kind="question", metric="f1", measures=("f1", "exact_match"), people=True, read=coqa_file,
         files=("coqa-dev-v1.0.json",), train=("coqa-train-v1.0.json",), hub="EleutherAI/coqa::validation:train"),
    *(
        Task(f"arithmetic-{kind}", made.arithmetic, kind="word", make=partial(made.sums, kind))
        for kind in ("2d-plus", "2d-minus", "3d-plus", "3d-minus", "4d-plus", "4d-minus", "5d-plus", "5d-minus",
                     "2d-times", "1d-composite")
    ),
    *(
        Task(f"scramble-{kind}", made.unscramble, kind="word", make=partial(made.scrambles, kind))
        for kind in ("cycle", "anagrams-1", "anagrams-2", "insertion", "reversed")
    ),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in BUILT_IN}


def task_called(name: str, fields: dict[str, str] | None = None) -> Task:
    """A built-in task, `NAME=FILE` for one with its rows elsewhere, or the user's own file of rows or text."""
    known, _, elsewhere = name.partition("=")
    if known in TASKS:
        return replace(TASKS[known], path=Path(elsewhere).expanduser(), make=None) if elsewhere else TASKS[known]
    path = Path(name).expanduser()
    if path.is_file():
        return own_task(path, fields or {})
    hint = did_you_mean(known, TASKS)
    raise UserError(f"there is no task and no file {name!r}{hint or '; all tasks: ' + ', '.join(TASKS)}")


def own_task(path: Path, fields: dict[str, str]) -> Task:
    """What the first row holds says what kind of task it is; a plain text is scored as it is."""
    name = path.name.removesuffix("".join(path.suffixes))
    if suffix_of(path).removeprefix(".") not in TABLES:
        return Task(name, texts.as_it_is, kind="text", metric="token_perplexity", path=path, read=whole)
    read = partial(renamed, fields=fields)
    first = next(iter(read(path)), None)
    if first is None:
        raise UserError(f"{path} holds no rows")
    if "choices" in first or ("answer" in first and "text" not in first):
        return Task(name, sets.own_choice, path=path, read=read)
    if "answer" in first:
        return Task(name, sets.own_blank, kind="blank", metric="exact_match", path=path, read=read)
    if "target" in first:
        return Task(name, sets.own_text, kind="word", path=path, read=read)
    if "text" in first:
        return Task(name, texts.as_it_is, kind="text", metric="token_perplexity", path=path, read=read)
    raise UserError(
        f"{first.where}: a row should have context, choices and answer; or context and target; or text and answer; or "
        f"text. There are {', '.join(map(repr, first))}; --context-field, --choices-field and --answer-field name yours"
    )


def renamed(path: Path, fields: dict[str, str]) -> Iterator[Row]:
    """Rows whose fields the user calls otherwise, under our names."""
    theirs = {their: our for our, their in fields.items()}
    for row in table(path):
        yield Row({theirs.get(name, name): value for name, value in row.items()}, row.where)


# ---- finding the rows --------------------------------------------------------------------------------------------


def find(task: Task, split: Split, data: Path | None) -> Source | None:
    """The rows of one split; None when there is no such split."""
    if task.make is not None:
        return None if split == "train" else made_source(task.make)
    if task.path is not None:
        return file_source(task, task.path) if split == "test" else None
    if (path := find_file(task, split, data)) is not None:
        return file_source(task, path)
    if task.hub is not None and (source := hub_source(task, split, data)) is not None:
        return source
    if split == "train":
        return None
    raise UserError(f"{missing(task, data)}, and it has no copy on the hub")


def missing(task: Task, data: Path | None) -> str:
    folder = task.folder or task.name
    wanted = [*task.files, "test.jsonl"][0]
    place = "no data folder was given" if data is None else f"{data} has no {folder}/{wanted}"
    return f"the rows of {task.name} are not here: {place}; --data FOLDER or --tasks {task.name}=FILE names them"


def find_file(task: Task, split: Split, data: Path | None) -> Path | None:
    if data is None:
        return None
    if not data.is_dir():
        raise UserError(f"data={data} is not a folder")
    folder, words = data / (task.folder or task.name), WORDS_FOR_SPLIT[split]
    if split == "test" and task.hub is not None and task.hub.split(":")[2].startswith("validation"):
        words = (*words[1:], *words[:1])  # its test split has no labels
    usual = [f"{word}.{kind}" for word in words for kind in TABLES]
    for pattern in (*(task.files if split == "test" else task.train), *usual):
        if found := sorted(folder.glob(pattern)):
            return found[0]
    return None


def file_source(task: Task, path: Path) -> Source:
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    return Source(str(path), digest, lambda: task.read(path))


def made_source(make: Callable[[], Iterator[Row]]) -> Source:
    digest = hashlib.sha256()
    for row in make():
        digest.update(json.dumps(row, sort_keys=True).encode())
    return Source("made", digest.hexdigest()[:16], make)


def hub_source(task: Task, split: Split, data: Path | None) -> Source | None:
    assert task.hub is not None
    name, config, test, train = task.hub.split(":")
    wanted = test if split == "test" else train
    if not wanted:
        return None
    far = hub_is_far()
    try:
        import datasets

        rows = datasets.load_dataset(name, config or None, split=wanted)
    except ImportError:
        raise UserError(f"{missing(task, data)}; the hub's copy needs: pip install 'plume-lm[hub]'") from None
    except Exception as error:  # the library raises anything, most often that there is no network
        if split == "train":
            return None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = "the hub is out of reach" if far else reason
        raise UserError(f"{missing(task, data)}; and the hub's {name} cannot be had: {reason}") from None
    label = f"hub:{name}:{config}:{wanted}"
    digest = hashlib.sha256(f"{label} {rows._fingerprint}".encode()).hexdigest()[:16]
    return Source(label, digest, lambda: (Row(row, f"{label} row {n}") for n, row in enumerate(rows, 1)))
