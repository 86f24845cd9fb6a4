"""Which documents stay: length, language, quality, domain, score, and no run of words from an evaluation text."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from plume.config import CleanConfig, DataConfig
from plume.data.readers import read_documents
from plume.data.web import Document
from plume.data.words import run_hashes

JUDGED_WORDS = 1000  # language and quality are judged by a document's beginning
# The commonest words that tell a language from its neighbours.
COMMON = {
    "en": "the of and to in is that was for with as his he it be at by had not are but from have they which",
    "de": "der die und den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er",
    "fr": "de la le et les des en un du une que est pour qui dans par plus pas au sur ne se ce il sont avec",
    "es": "de la que el en los se del las un por con una su para es al lo como más pero sus le ya fue",
    "it": "di che il la per un del non una le si con dei da nel alla sono gli della come più anche ma ha",
    "pt": "de que do da em um para com uma os no se na por mais as dos como mas ao foi das seu sua ele não",
    "nl": "de van het een en in is dat op te zijn met voor niet aan er die om ook als bij maar door naar",
}
LANGUAGES = {language: frozenset(words.split()) for language, words in COMMON.items()}
LETTER_WORD = re.compile(r"[^\W\d_]+")


class Cleaner:
    """Gives the reason to leave a document out, the cheapest test first."""

    def __init__(self, config: CleanConfig, held_out: npt.NDArray[np.uint64] | None) -> None:
        self.config, self.held_out = config, held_out
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
        if c.quality and (fault := fault_of(text)) is not None:
            return f"quality: {fault}"
        if self.held_out is not None and shares_run(text, self.held_out, c.held_out_words):
            return f"shares {c.held_out_words} words with an evaluation text"
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
    """The language whose commonest words are the most frequent in a text, or `other`."""
    words = [w.lower() for w in LETTER_WORD.findall(text[: 8 * JUDGED_WORDS])][:JUDGED_WORDS]
    if not words:
        return "other"
    hits = {language: sum(w in common for w in words) for language, common in LANGUAGES.items()}
    best = max(hits, key=hits.__getitem__)
    return best if hits[best] >= 0.08 * len(words) else "other"


def fault_of(text: str) -> str | None:
    """What makes a text unlike prose, if anything: limits in the manner of published web corpora."""
    words = text[: 8 * JUDGED_WORDS].split()[:JUDGED_WORDS]
    letters = sum(any(c.isalpha() for c in w) for w in words)
    mean = sum(map(len, words)) / max(1, len(words))
    symbols = sum(text.count(s) for s in ("#", "...", "…", "{", "}"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 3 <= mean <= 10:
        return "word length"
    if letters < 0.8 * len(words):
        return "few words with letters"
    if symbols > 0.1 * len(text.split()):
        return "symbols"
    if len(lines) > 10 and sum(line.startswith(("•", "-", "*")) for line in lines) > 0.9 * len(lines):
        return "bullets"
    if len(lines) > 10 and len(set(lines)) < 0.7 * len(lines):
        return "repeated lines"
    return None


def shares_run(text: str, held_out: npt.NDArray[np.uint64], length: int) -> bool:
    runs = run_hashes(text, length)
    if not len(held_out) or not len(runs):
        return False
    places = np.searchsorted(held_out, runs)
    return bool((held_out[np.minimum(places, len(held_out) - 1)] == runs).any())


def held_out_index(config: DataConfig) -> npt.NDArray[np.uint64]:
    """Hashes of all runs of words in the evaluation texts, sorted; a text shorter than a run counts as one."""
    texts = replace(config, paths=config.clean.held_out, weights=(), targets=(), target_field=None)
    found = [run_hashes(d.text, config.clean.held_out_words) for d in read_documents(texts)]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
