"""Tasks as data: where the rows are, how a row becomes items, which number is the headline."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, partial
from io import TextIOWrapper
from itertools import starmap
from pathlib import Path
from random import Random
from typing import Any, Literal

from plume.config import UserError, at_home, did_you_mean
from plume.data.tables import open_bytes, read_rows, suffix_of
from plume.evaluate import formats
from plume.evaluate.items import Item, LastWord, ScoringProtocol, TaskRow
from plume.tasks.readers import LocatedRow, aligned_rows, coqa_rows, squad_rows
from plume.util.checkpoint_files import file_hash
from plume.util.files import lines_of
from plume.util.hub import hub_is_offline

Split = Literal["test", "train"]
Build = Callable[[TaskRow, ScoringProtocol], Iterator[Item]]
Read = Callable[[Path], Iterator[TaskRow]]
WORDS_FOR_SPLIT = {"test": ("test", "validation", "valid", "dev", "val"), "train": ("train",)}
TABLES = ("jsonl", "parquet", "csv", "tsv", "json")


def table(path: Path, columns: tuple[str, ...] | None = None) -> Iterator[TaskRow]:
    for line, values in read_rows(path, columns=columns):
        yield TaskRow(values, f"{path} line {line}")


def whole(path: Path) -> Iterator[TaskRow]:
    """The file as one text."""
    with TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as stream:
        yield TaskRow({"text": stream.read()}, str(path))


def last_bytes(path: Path, count: int) -> Iterator[TaskRow]:
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - count))
        data = stream.read()
    yield TaskRow({"text": data.decode("utf-8", errors="ignore")}, str(path))  # the cut may fall inside a character


def lines(path: Path) -> Iterator[TaskRow]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield TaskRow({"text": line.rstrip("\n")}, f"{path} line {number}")


def json_file(path: Path, rows: Callable[[Path], Iterator[LocatedRow]]) -> Iterator[TaskRow]:
    """A .json file in the format of its data set; any other table is in the hub's."""
    located = ((row, where) for where, row in rows(path))
    yield from starmap(TaskRow, located) if suffix_of(path) == ".json" else table(path)


def book_file(path: Path) -> Iterator[TaskRow]:
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
                raise UserError(f"{where}: the question, its answer and the options should be separated by tabs")
            options = cells[3].split("|")
            yield TaskRow({"sentences": sentences, "question": cells[0], "answer": cells[1], "options": options}, where)
            sentences = []


def aligned(path: Path, languages: tuple[str, str]) -> Iterator[TaskRow]:
    """Two files with a line each per sentence, distinguished by their last suffix."""
    other = path.with_suffix(f".{languages[1]}")
    if not other.is_file():
        raise UserError(f"{path} has no translation beside it: {other.name} is missing")
    for where, row in aligned_rows(path, str(other)):
        yield TaskRow({name: text.strip() for name, text in row.items()}, where)


def pairs_file(path: Path) -> Iterator[TaskRow]:
    """Minimal pairs as they are distributed: JSON lines in a zip or tar archive, in a folder, or one file."""
    for name, text in archived(path):
        paradigm = Path(name).stem
        for number, line in enumerate(lines_of(text), 1):
            if line.strip():
                where = f"{path} {name} line {number}"
                yield TaskRow({"UID": paradigm, **json_object(line, where)}, where)


def json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object")
    return value


def json_lines_in(folder: Path) -> list[Path]:
    """Files only: to open a named pipe would wait without an end."""
    return sorted(file for file in folder.rglob("*.jsonl") if is_rows(file.name) and file.is_file())


def archived(path: Path) -> Iterator[tuple[str, str]]:
    """The JSON-lines files of a folder or an archive, by name."""
    if path.is_dir():
        yield from ((file.name, file.read_text(encoding="utf-8")) for file in json_lines_in(path))
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if is_rows(name))
            yield from ((name, archive.read(name).decode()) for name in names)
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda m: m.name):
                if is_rows(member.name) and (opened := archive.extractfile(member)) is not None:
                    yield member.name, opened.read().decode()
    else:
        yield path.name, path.read_text(encoding="utf-8")


def is_rows(name: str) -> bool:
    return name.endswith(".jsonl") and not Path(name).name.startswith(".")


# ---- synthetic rows: GPT-3's arithmetic and scrambled words ------------------------------------------------------

ITEMS = 2000  # of each, as in the paper
SEED = 3
SIGNS = {"plus": "+", "minus": "-", "times": "*"}


def sums(name: str) -> Iterator[TaskRow]:
    """Rows of one kind: 2d-plus to 5d-plus, 2d-minus to 5d-minus, 2d-times, 1d-composite."""
    random, (digits, kind) = Random(f"{SEED} {name}"), name.split("-")
    top = 10 ** int(digits[0])
    for number in range(1, ITEMS + 1):
        a, b, c = (random.randrange(top) for _ in range(3))
        if kind == "composite":
            first, second = random.choices(("+", "-", "*"), k=2)
            question, answer = f"{a}{first}({b}{second}{c})", calculate(a, first, calculate(b, second, c))
        else:
            question, answer = f"{a} {kind} {b}", calculate(a, SIGNS[kind], b)
        yield TaskRow({"question": question, "answer": str(answer)}, f"{name} item {number}")


def calculate(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def arithmetic(row: TaskRow, protocol: ScoringProtocol) -> Iterator[LastWord]:
    question = f"What is {row.text('question')}?"
    asked = f"Question: {question}\nAnswer:" if protocol.name == "harness" else f"Q: {question}\n\nA:"
    yield LastWord(where=row.where, context=asked, word=" " + row.text("answer"))


@cache
def words() -> tuple[str, ...]:
    """Frequent English words: those of the manual that comes with Python, so that no file is needed."""
    from pydoc_data.topics import topics

    found = Counter(re.findall(r"\b[a-z]{5,14}\b", "\n".join(topics.values())))
    return tuple(sorted(found, key=lambda w: (-found[w], w))[:ITEMS])


def scrambles(name: str) -> Iterator[TaskRow]:
    """Rows of one kind: cycle, anagrams-1, anagrams-2, insertion, reversed."""
    random = Random(f"{SEED} {name}")
    for number, word in enumerate(words(), 1):
        yield TaskRow({"scrambled": scramble(word, name, random), "word": word}, f"{name} item {number}")


def scramble(word: str, kind: str, random: Random) -> str:
    if kind == "reversed":
        return word[::-1]
    if kind == "cycle":
        at = random.randrange(1, len(word))
        return word[at:] + word[:at]
    if kind == "insertion":
        return "".join(letter + random.choice(" .!/-") for letter in word[:-1]) + word[-1]
    kept = int(kind[-1])  # letters that stay in their places at either end
    inner = list(word[kept : len(word) - kept])
    random.shuffle(inner)
    return word[:kept] + "".join(inner) + word[len(word) - kept :]


def unscramble(row: TaskRow, protocol: ScoringProtocol) -> Iterator[LastWord]:
    asked = f"Please unscramble the letters into a word, and write that word:\n{row.text('scrambled')} ="
    yield LastWord(where=row.where, context=asked, word=" " + row.text("word"))


# ---- the registry ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvalTask:
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
    make: Callable[[], Iterator[TaskRow]] | None = None  # needs no file
    path: Path | None = None  # the user's own file
    paper_metric: str | None = None  # the headline under gpt2-paper, where another one gives the published number
    pages: bool = False  # a long text has documents of its own, which protocols may score one by one
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
class RowSource:
    """Rows of one split, and what they were read from."""

    name: str
    hash: str
    rows: Callable[[], Iterable[TaskRow]]


COLA_COLUMNS = ("source", "label", "star", "sentence")
LAMBADA = EvalTask(
    "lambada",
    formats.lambada,
    kind="word",
    filters=True,
    folder="lambada",
    files=("lambada_test*.jsonl", "*test*.jsonl"),
    hub="EleutherAI/lambada_openai:default:test:",
    delimiters={"gpt3-paper": "\n"},
)
WIKITEXT = EvalTask(
    "wikitext-103",
    formats.wikitext,
    pages=True,
    kind="text",
    metric="word_perplexity",
    read=whole,
    files=("wiki.test.raw", "wiki.test.tokens"),
)


def two_files(source: str, target: str) -> EvalTask:
    return EvalTask(
        f"multi30k-{source}-{target}",
        partial(formats.translation, languages=(source, target)),
        kind="question",
        metric="bleu",
        measures=("bleu", "chrf"),
        folder="multi30k",
        files=(f"test_2016_flickr.{source}",),
        train=(f"train.{source}",),
        read=partial(aligned, languages=(source, target)),
    )


BUILT_IN: tuple[EvalTask, ...] = (
    LAMBADA,
    replace(LAMBADA, name="lambada-token", last_token=True),
    replace(LAMBADA, name="lambada-fill", build=formats.lambada_fill, kind="blank", metric="exact_match"),
    WIKITEXT,
    replace(WIKITEXT, name="wikitext-2", paper_metric="token_perplexity"),
    EvalTask("ptb", formats.penn, kind="text", metric="word_perplexity", read=whole,
         files=("ptb.test.txt", "test.txt")),
    EvalTask("enwik8", formats.raw_text, kind="text", metric="bits_per_byte", files=("enwik8",),
         read=partial(last_bytes, count=5_000_000)),
    EvalTask("text8", formats.raw_text, kind="text", metric="bits_per_character", files=("text8",),
         read=partial(last_bytes, count=5_000_000)),
    EvalTask("1bw", formats.raw_text, kind="text", metric="word_perplexity", read=lines,
         files=("news.en.heldout-00000-of-00050", "*heldout*", "test.txt")),
    EvalTask("cbt-cn", formats.childrens_book, folder="cbt", files=("*CN_test*.txt", "cbtest_CN_test*"),
         train=("*CN_train*.txt",), read=book_file, hub="cbt:CN:test:train"),
    EvalTask("cbt-ne", formats.childrens_book, folder="cbt", files=("*NE_test*.txt", "cbtest_NE_test*"),
         train=("*NE_train*.txt",), read=book_file, hub="cbt:NE:test:train"),
    EvalTask("winograd", formats.winograd, hub="lighteval/winograd_wsc:wsc273:test:"),
    EvalTask("winograd-full", formats.winograd_full, folder="winograd", hub="lighteval/winograd_wsc:wsc273:test:"),
    EvalTask("storycloze", formats.story_cloze, hub="LSDSem/story_cloze:2016:test:validation", train=("val*.csv",)),
    EvalTask("hellaswag", formats.hellaswag, metric="acc_norm", files=("hellaswag_val.jsonl",),
         train=("hellaswag_train.jsonl",), hub="Rowan/hellaswag::validation:train"),
    EvalTask("piqa", formats.piqa, metric="acc_norm", hub="baber/piqa::validation:train"),
    EvalTask("arc-easy", formats.arc, metric="acc_norm", files=("ARC-Easy-Test.jsonl",),
         train=("ARC-Easy-Train.jsonl",), hub="allenai/ai2_arc:ARC-Easy:test:train"),
    EvalTask("arc-challenge", formats.arc, metric="acc_norm", files=("ARC-Challenge-Test.jsonl",),
         train=("ARC-Challenge-Train.jsonl",), hub="allenai/ai2_arc:ARC-Challenge:test:train"),
    EvalTask("openbookqa", formats.openbookqa, metric="acc_norm", hub="allenai/openbookqa:main:test:train"),
    EvalTask("boolq", formats.boolq, hub="aps/super_glue:boolq:validation:train"),
    EvalTask("copa", formats.copa, hub="aps/super_glue:copa:validation:train"),
    EvalTask("winogrande", formats.winogrande, files=("dev.jsonl",), train=("train_xl.jsonl",),
         hub="allenai/winogrande:winogrande_xl:validation:train"),
    EvalTask("blimp", partial(formats.minimal_pair, between=" "), read=pairs_file,
         files=("BLiMP.zip", "*.zip", "data")),
    EvalTask("zhoblimp", formats.minimal_pair, read=pairs_file, files=("ZhoBLiMP.tar.gz", "*.tar.gz", "ZhoBLiMP")),
    EvalTask("race", formats.race, hub="EleutherAI/race:high:test:"),
    EvalTask("sst2", formats.sst2, hub="nyu-mll/glue:sst2:validation:train"),
    EvalTask("sst2-gpt1", formats.sst2_gpt1, folder="sst2", hub="nyu-mll/glue:sst2:validation:train"),
    EvalTask("rte", formats.rte, hub="nyu-mll/glue:rte:validation:train"),
    EvalTask("rte-gpt1", formats.rte_gpt1, folder="rte", kind="judgement", hub="nyu-mll/glue:rte:validation:train"),
    EvalTask("cola", formats.cola, metric="mcc", read=partial(table, columns=COLA_COLUMNS),
         hub="nyu-mll/glue:cola:validation:train"),
    EvalTask("cola-gpt1", formats.cola_gpt1, folder="cola", kind="judgement", metric="mcc",
         read=partial(table, columns=COLA_COLUMNS), hub="nyu-mll/glue:cola:validation:train"),
    two_files("en", "de"),
    two_files("de", "en"),
    EvalTask("wmt14-fr-en", partial(formats.translation, languages=("fr", "en")), kind="question", metric="bleu",
         measures=("bleu", "chrf"), hub="wmt/wmt14:fr-en:test:validation"),
    EvalTask("cnn-dailymail", formats.summary, kind="question", metric="rouge1",
         measures=("rouge1", "rouge2", "rougeL"), draws=True, hub="abisee/cnn_dailymail:3.0.0:test:train"),
    EvalTask("nq", formats.natural_question, kind="question", metric="exact_match", measures=("exact_match", "f1"),
         hub="google-research-datasets/nq_open::validation:train", delimiters={"harness": "\n"}),
    EvalTask("triviaqa", formats.trivia_question, kind="question", metric="exact_match",
         measures=("exact_match", "f1"), hub="mandarjoshi/trivia_qa:rc.nocontext:validation:train"),
    EvalTask("squad", formats.squad, kind="question", metric="f1", measures=("f1", "exact_match"),
         files=("dev-v1.1.json",), train=("train-v1.1.json",), read=partial(json_file, rows=squad_rows),
         hub="rajpurkar/squad::validation:train"),
    EvalTask("coqa", formats.coqa, kind="question", metric="f1", measures=("f1", "exact_match"), people=True,
         read=partial(json_file, rows=coqa_rows), files=("coqa-dev-v1.0.json",), train=("coqa-train-v1.0.json",),
         hub="EleutherAI/coqa::validation:train"),
    *(
        EvalTask(f"arithmetic-{kind}", arithmetic, kind="word", make=partial(sums, kind))
        for kind in ("2d-plus", "2d-minus", "3d-plus", "3d-minus", "4d-plus", "4d-minus", "5d-plus", "5d-minus",
                     "2d-times", "1d-composite")
    ),
    *(
        EvalTask(f"scramble-{kind}", unscramble, kind="word", make=partial(scrambles, kind))
        for kind in ("cycle", "anagrams-1", "anagrams-2", "insertion", "reversed")
    ),
)  # fmt: skip
TASKS: dict[str, EvalTask] = {task.name: task for task in BUILT_IN}


def find_task(name: str, fields: dict[str, str] | None = None) -> EvalTask:
    """A built-in task, `NAME=FILE` for one with its rows elsewhere, or the user's own file of rows or text."""
    known, _, elsewhere = name.partition("=")
    if known in TASKS:
        return replace(TASKS[known], path=at_home(elsewhere), make=None) if elsewhere else TASKS[known]
    path = at_home(name)
    if path.is_file():
        return own_task(path, fields or {})
    if elsewhere and at_home(elsewhere).is_file():
        raise UserError(f"{known!r} is no task here, and NAME=FILE has the rows of one; rows of your own: {elsewhere}")
    hint = did_you_mean(known, TASKS)
    raise UserError(f"there is no task and no file {name!r}{hint or '; all tasks: ' + ', '.join(TASKS)}")


def own_task(path: Path, fields: dict[str, str]) -> EvalTask:
    """What the first row holds says what kind of task it is; a plain text is scored as it is."""
    name = path.name.removesuffix("".join(path.suffixes))
    if suffix_of(path).removeprefix(".") not in TABLES:
        return EvalTask(name, formats.raw_text, kind="text", metric="token_perplexity", path=path, read=whole)
    read = partial(renamed, fields=fields)
    first = next(iter(read(path)), None)
    if first is None:
        raise UserError(f"{path} holds no rows")
    if "choices" in first or ("answer" in first and "text" not in first):
        return EvalTask(name, formats.own_choice, path=path, read=read)
    if "answer" in first:
        return EvalTask(name, formats.own_blank, kind="blank", metric="exact_match", path=path, read=read)
    if "target" in first:
        return EvalTask(name, formats.own_text, kind="word", path=path, read=read)
    if "text" in first:
        return EvalTask(name, formats.raw_text, kind="text", metric="token_perplexity", path=path, read=read)
    raise UserError(
        f"{first.where}: a row should have context, choices and answer; or context and target; or text and answer; or "
        f"text. There are {', '.join(map(repr, first))}; --context-field, --choices-field and --answer-field name yours"
    )


def renamed(path: Path, fields: dict[str, str]) -> Iterator[TaskRow]:
    """Rows whose fields the user calls otherwise, under our names."""
    for row in table(path):
        named = {ours: row[theirs] for ours, theirs in fields.items() if theirs in row}
        yield TaskRow({name: value for name, value in row.items() if name not in fields} | named, row.where)


# ---- finding the rows --------------------------------------------------------------------------------------------


def find_rows(task: EvalTask, split: Split, data: Path | None) -> RowSource | None:
    """The rows of one split; None when there is no such split."""
    if task.make is not None:
        return None if split == "train" else synthetic_source(task.make)
    if task.path is not None:
        return file_source(task, task.path) if split == "test" else None
    if (path := find_file(task, split, data)) is not None:
        return file_source(task, path)
    if task.hub is not None and (source := hub_source(task, split, data)) is not None:
        return source
    if split == "train":
        return None
    raise UserError(f"{missing(task, data)}, and it has no copy on the hub")


def missing(task: EvalTask, data: Path | None) -> str:
    folder = task.folder or task.name
    wanted = [*task.files, "test.jsonl"][0]
    place = "no data folder was given" if data is None else f"{data} has no {folder}/{wanted}"
    return f"no data found for {task.name}: {place}; name it with --data FOLDER or --tasks {task.name}=FILE"


def find_file(task: EvalTask, split: Split, data: Path | None) -> Path | None:
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


def file_source(task: EvalTask, path: Path) -> RowSource:
    if not path.is_file() and not (path.is_dir() and task.read is pairs_file):
        raise UserError(f"there is no file {path}")
    digests = [file_hash(file) for file in ([path] if path.is_file() else json_lines_in(path))]
    digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return RowSource(str(path), digest[:16], lambda: task.read(path))


def synthetic_source(make: Callable[[], Iterator[TaskRow]]) -> RowSource:
    digest = hashlib.sha256()
    for row in make():
        digest.update(json.dumps(row, sort_keys=True).encode())
    return RowSource("synthetic", digest.hexdigest()[:16], make)


def hub_source(task: EvalTask, split: Split, data: Path | None) -> RowSource | None:
    assert task.hub is not None
    name, config, test, train = task.hub.split(":")
    wanted = test if split == "test" else train
    if not wanted:
        return None
    far = hub_is_offline()
    try:
        import datasets

        rows = datasets.load_dataset(name, config or None, split=wanted)
    except ImportError:
        raise UserError(f"{missing(task, data)}; the hub's copy needs: pip install 'plume-lm[hub]'") from None
    except Exception as error:  # the library raises anything, most often that there is no network
        if split == "train":
            return None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = "the hub is unreachable" if far else reason
        raise UserError(f"{missing(task, data)}; {name} cannot be loaded from the hub: {reason}") from None
    label = f"hub:{name}:{config}:{wanted}"
    digest = hashlib.sha256(f"{label} {rows._fingerprint}".encode()).hexdigest()[:16]
    return RowSource(label, digest, lambda: (TaskRow(row, f"{label} row {n}") for n, row in enumerate(rows, 1)))
