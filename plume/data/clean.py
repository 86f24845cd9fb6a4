"""Which documents stay: length, language, quality, domain, score, and no run of words from an evaluation text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from plume.config import CleanConfig, DataConfig, UserError
from plume.data.documents import Document, read_documents
from plume.data.pool import Result, Task, run_stage
from plume.data.shards import mapped
from plume.data.sources import optional
from plume.data.tables import Tally
from plume.util.files import aside
from plume.util.hashing import UNSPACED, mixed, ngram_hashes, run_hashes, separated, word_hashes

SAMPLED_WORDS = 1000  # of a document's beginning, by which its quality is judged
NO_LANGUAGE = "zxx"  # ISO 639-2 for no linguistic content
LANGUAGE_CHARACTERS = 1000  # of a document's beginning, by which its language is identified
RUN = 5  # words
FUNCTIONS = 128
ROWS = 8  # of a band: two documents meet when all rows of some band agree
AT_ONCE = 1 << 22  # keys sorted at a time, which bounds the memory of a worker to about 200 MB
PAIRS_AT_ONCE = 1 << 14  # signatures compared at a time
_random = np.random.Generator(np.random.Philox(key=20260101))
FACTORS = _random.integers(1, 1 << 64, FUNCTIONS, dtype=np.uint64) | np.uint64(1)  # (P,)
OFFSETS = _random.integers(0, 1 << 64, FUNCTIONS, dtype=np.uint64)
Keys = npt.NDArray[np.uint64]
HeldOut = dict[int, npt.NDArray[np.uint64]]
SHORTEST_CONTAINED = 5  # words of an evaluation text from which it is searched for inside documents


class Cleaner:
    """Gives the reason to leave a document out, the cheapest test first."""

    def __init__(self, config: CleanConfig, held_out: HeldOut | None = None) -> None:
        self.config, self.held_out = config, held_out or {}
        if config.languages:
            check_languages(config.languages)
        self.domains = tuple(d.lower().removeprefix("www.") for d in config.drop_domains)

    def reason(self, document: Document) -> str | None:
        c, text = self.config, document.text
        if (domain := self.dropped_domain(document.url)) is not None:
            return f"domain {domain}"
        if c.min_score is not None and (document.score is None or document.score < c.min_score):
            return "no score" if document.score is None else f"score below {c.min_score:g}"
        if len(text) < c.min_characters:
            return f"shorter than {c.min_characters} characters"
        if c.max_characters is not None and len(text) > c.max_characters:
            return f"longer than {c.max_characters} characters"
        if c.languages and (language := language_of(text)) not in c.languages:
            return f"language {language}"
        if c.quality and (fault := quality_problem(text)) is not None:
            return f"quality: {fault}"
        if any(contains_held_out(side, self.held_out, c.decontaminate_ngram) for side in document.sides):
            return f"shares {c.decontaminate_ngram} words with an evaluation text"
        return None

    def dropped_domain(self, url: str | None) -> str | None:
        if url is None or not self.domains:
            return None
        host = host_of(url)
        return next((d for d in self.domains if host == d or host.endswith(f".{d}")), None)


def host_of(url: str) -> str:
    try:
        return (urlsplit(url if "//" in url else f"//{url}").hostname or "").removeprefix("www.")
    except ValueError:
        return ""


def language_of(text: str) -> str:
    """The ISO 639-1 code of a text's language as py3langid identifies it, or `other` for a text without words."""
    label = optional("py3langid", "clean.languages", "language").classify(text[:LANGUAGE_CHARACTERS])[0]
    return "other" if label == NO_LANGUAGE or not any(map(str.isalpha, text[:LANGUAGE_CHARACTERS])) else str(label)


def check_languages(wanted: Sequence[str]) -> None:
    """Refuse a language that the identifier does not know."""
    known = {label for label, _ in optional("py3langid", "clean.languages", "language").rank("text")}
    for language in wanted:
        if language not in known - {NO_LANGUAGE}:
            raise UserError(f"languages: {language!r} is not a language that can be identified, such as en, zh or ja")


def quality_problem(text: str) -> str | None:
    """What makes a text unlike prose, if anything: limits in the manner of published web corpora."""
    words = separated(text[: 8 * SAMPLED_WORDS]).split()[:SAMPLED_WORDS]
    letters = sum(any(c.isalpha() for c in w) for w in words)
    spaced = [w for w in words if UNSPACED.match(w) is None]
    mean = sum(map(len, spaced)) / max(1, len(spaced))
    symbols = sum(text.count(s) for s in ("#", "...", "…", "{", "}"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if 2 * len(spaced) >= len(words) and not 3 <= mean <= 10:
        return "word length"
    if letters < 0.8 * len(words):
        return "few words with letters"
    if symbols > 0.1 * len(separated(text).split()):
        return "symbols"
    if len(lines) > 10 and sum(line.startswith(("•", "-", "*")) for line in lines) > 0.9 * len(lines):
        return "bullets"
    if len(lines) > 10 and len(set(lines)) < 0.7 * len(lines):
        return "repeated lines"
    return None


def contains_held_out(text: str, held_out: HeldOut, length: int) -> bool:
    """Whether a text shares a run of `length` words with an evaluation text, or contains a shorter one as a whole."""
    words = word_hashes(text)
    for size, known in held_out.items():
        if size < min(length, SHORTEST_CONTAINED) and len(words) != size:
            continue  # a few words are everywhere: they must be the whole document
        runs = ngram_hashes(words, size)
        if len(runs) and (known[np.minimum(np.searchsorted(known, runs), len(known) - 1)] == runs).any():
            return True
    return False


def held_out_index(config: DataConfig) -> HeldOut:
    """By length, the sorted hashes of runs of words in the evaluation texts; a text shorter than a run is one run."""
    length, found = config.clean.decontaminate_ngram, defaultdict[int, list[npt.NDArray[np.uint64]]](list)
    for path in config.clean.decontaminate:
        tally = Tally()
        texts = replace(config, paths=(path,), weights=(), targets=(), target_field=None)
        count = 0
        for document in read_documents(texts, tally):
            words = word_hashes(document.text)
            if len(words):
                count += 1
                found[min(length, len(words))].append(ngram_hashes(words, length))
        if not count:
            raise UserError(f"decontaminate: no evaluation text is found in {path}{tally.reasons()}")
    return {size: np.unique(np.concatenate(runs)) for size, runs in found.items()}


def signature(*sides: str) -> npt.NDArray[np.uint32]:
    """Of a text, or of both sides of a pair, (P,).

    Two signatures agree in about the share of runs of words that the texts have in common; those of pairs in about the
    product of the shares of both sides.
    """
    found = smallest_hashes(sides[0])
    for side in sides[1:]:
        found = mixed(found + smallest_hashes(side))
    return (found >> np.uint64(32)).astype(np.uint32)


def smallest_hashes(text: str) -> Keys:
    """The smallest value of each hash function over the text's runs of words, (P,)."""
    runs = run_hashes(text, RUN)
    smallest = np.full(FUNCTIONS, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(runs), 4096):
        block = runs[start : start + 4096]
        np.minimum(smallest, (FACTORS[:, None] * block + OFFSETS[:, None]).min(axis=1), out=smallest)  # (P, R)
    return smallest


def sorted_keys(hashes: list[int], signatures: list[npt.NDArray[np.uint32]]) -> tuple[Keys, npt.NDArray[np.uint32]]:
    """(the keys of each band, sorted; which entry each is of): the text's own hash, then the bands of the signature."""
    rows = [np.array(hashes, np.uint64)]
    if signatures:
        table = np.array(signatures)  # (N, P)
        for band in range(0, FUNCTIONS, ROWS):
            key = np.zeros(len(table), np.uint64)
            for column in range(band, band + ROWS):
                key = mixed(key + table[:, column])
            rows.append(key)
    order = np.array([np.argsort(row, kind="stable") for row in rows]).reshape(len(rows), -1)
    return np.take_along_axis(np.array(rows), order, axis=1), order.astype(np.uint32)


def find_duplicates(config: DataConfig, work: Path, entries: list[int]) -> None:
    """Write the mask `dropped`: which entries of all pieces repeat an earlier one."""
    if config.clean.duplicates == "keep":
        return
    total = sum(entries)
    shares = max(1, -(-total // AT_ONCE))
    bands = 1 + (FUNCTIONS // ROWS if config.clean.duplicates == "near" else 0)
    tasks = [
        {"band": band, "share": share, "shares": shares, "size": 12 * total // shares}
        for band in range(bands)
        for share in range(shares)
    ]
    results = run_stage(
        DuplicateFinder, (work, entries, config.clean.near_threshold), tasks, config, title="find duplicates"
    )
    with aside(work / "dropped") as hidden:
        hidden.write_bytes(b"")
        with hidden.open("r+b") as stream:
            stream.truncate(total)
        if total:
            mask = np.memmap(hidden, np.bool_, "r+", shape=(total,))
            for result in results:
                mask[np.load(result["repeats"])] = True
            mask.flush()


class DuplicateFinder:
    """Finds the entries whose key in one band is that of an earlier entry, for a share of the keys."""

    def __init__(self, work: Path, entries: list[int], threshold: float) -> None:
        self.work, self.entries, self.threshold = work, entries, threshold
        self.edges = np.cumsum([0, *entries])

    def __call__(self, task: Task) -> Result:
        firsts, repeats = same_keys(*self.keys(task["band"], task["share"], task["shares"]))
        if task["band"]:  # in a band of the signature the keys of different texts may agree
            order = np.argsort(firsts)  # neighbours are in few files
            firsts, repeats = firsts[order], repeats[order]
            alike = [
                self.agreement(firsts[low : low + PAIRS_AT_ONCE], repeats[low : low + PAIRS_AT_ONCE]) >= self.threshold
                for low in range(0, len(firsts), PAIRS_AT_ONCE)
            ]
            repeats = repeats[np.concatenate(alike)] if alike else repeats
        file = self.work / f"repeats-{task['band']:02}-{task['share']:05}.npy"
        np.save(file, np.unique(repeats))
        return {"size": task["size"], "repeats": str(file)}

    def keys(self, band: int, share: int, shares: int) -> tuple[Keys, npt.NDArray[np.int64]]:
        """(keys of the share, the entries they are of), piece after piece; one file is open at a time."""
        low, high = (np.uint64((1 << 64) * s // shares if s < shares else (1 << 64) - 1) for s in (share, share + 1))
        keys, entries = list[Keys](), list[npt.NDArray[np.int64]]()
        for piece, count in enumerate(self.entries):
            if count:
                rows = mapped(self.work / f"{piece:05}.keys", "<u8").reshape(-1, count)[band]
                start = int(np.searchsorted(rows, low))
                stop = count if share + 1 == shares else int(np.searchsorted(rows, high))
                order = mapped(self.work / f"{piece:05}.order", "<u4").reshape(-1, count)[band, start:stop]
                keys.append(np.array(rows[start:stop]))
                entries.append(self.edges[piece] + order.astype(np.int64))
        return np.concatenate(keys), np.concatenate(entries)

    def agreement(self, firsts: npt.NDArray[np.int64], repeats: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.asarray((self.signatures(firsts) == self.signatures(repeats)).mean(axis=1))

    def signatures(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        found = np.empty((len(entries), FUNCTIONS), np.uint32)
        pieces = np.searchsorted(self.edges, entries, side="right") - 1
        for piece in np.unique(pieces):
            mine = pieces == piece
            table = mapped(self.work / f"{piece:05}.signatures", "<u4").reshape(-1, FUNCTIONS)
            found[mine] = table[entries[mine] - self.edges[piece]]
        return found


def same_keys(keys: Keys, entries: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first entry with a key, later entry with it) for all keys that repeat; entries are in order for each key."""
    order = np.argsort(keys, kind="stable")
    keys, entries = keys[order], entries[order]
    new = np.ones(len(keys), np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    first = entries[np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))]
    return first[~new], entries[~new]
