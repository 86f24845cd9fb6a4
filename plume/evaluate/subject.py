"""The model that is evaluated: scoring, generating and mask filling, with a store of what is already scored."""

from __future__ import annotations

import hashlib
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import TracebackType

import numpy as np

from plume.config import EvaluateConfig, SamplingConfig, UserError
from plume.evaluate.items import Blank, Item, Question, TooLong
from plume.hf import load_model, model_hash, read_config, resolve
from plume.inference.scoring import Answer, MaskedScorer, Request, Score, Scorer, scorer_for
from plume.lm import LM
from plume.tasks import how_to_ask, saved_kind
from plume.text import load_tokenizer

SCORING = b"2"  # changes with whatever changes a score, so that no older one is taken for it
BLOCK = 2048  # requests looked at together: enough to sort by length, little enough to hold


class ScoreStore:
    """Scores and generated texts by request. Without a file it remembers nothing between runs."""

    def __init__(self, path: Path | None, model: str) -> None:
        self.model = model.encode()
        self.fresh, self.reused = 0, 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.file = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            self.file.execute("PRAGMA journal_mode=WAL")
            self.file.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing, a power cut may
            self.file.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} cannot be used as the store of scores ({error}); move it away") from None

    def __enter__(self) -> ScoreStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def key(self, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(SCORING + self.model, digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def get(self, key: bytes) -> bytes | None:
        row = self.file.execute("SELECT value FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, key: bytes, value: bytes) -> None:
        """Kept at once; a key that is there already would be a defect, and says so."""
        self.file.execute("INSERT INTO scores VALUES (?, ?)", (key, value))

    def scores(self, scorer: Scorer, requests: Sequence[Request]) -> Iterator[Answer]:
        """The score of every request, in any order."""
        unknown: dict[bytes, list[int]] = {}
        for number, request in enumerate(requests):
            key = self.key(b"score", packed(request.context), packed(request.target), bytes([request.filtered]))
            if key in unknown:
                unknown[key].append(number)
            elif (value := self.get(key)) is None:
                unknown[key] = [number]
            else:
                self.reused += 1
                yield number, unpacked(value)
        keys = list(unknown)
        for place, score in scorer.score([requests[unknown[key][0]] for key in keys]):
            self.put(keys[place], as_bytes(score))
            self.fresh += 1
            self.reused += len(unknown[keys[place]]) - 1
            for number in unknown[keys[place]]:
                yield number, score


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def as_bytes(score: Score) -> bytes:
    return score.logprobs.tobytes() + score.best.tobytes() + score.hits.tobytes()


def unpacked(value: bytes) -> Score:
    n = len(value) // 9
    floats = np.frombuffer(value, dtype=np.float32, count=2 * n)
    return Score(floats[:n], floats[n:], np.frombuffer(value, dtype=np.bool_, offset=8 * n))


LENGTH_PENALTY = 0.6  # where the likeliest answer is searched for
# hardly ever what a passage ends with when its last word is asked for
WORDS = """
a about above after again against all am an and any are as at be because been before being below between both but by can
could did do does doing don down during each few for from further had has have having he her here hers herself him
himself his how i if in into is it its itself just ll me more most my myself no nor not now o of off on once only or
other our ours ourselves out over own re s same she should so some such t than that the their theirs them themselves
then there these they this those through to too under until up ve very was we were what when where which while who whom
why will with would you your yours yourself yourselves m d y
"""
MARKS = """. , ; : ! ? ' " ` - -- ... ( ) [ ] ’ ‘ “ ” …"""
STOP_WORDS = frozenset(WORDS.split() + MARKS.split())


def check_head(model: str) -> None:
    """Refuse a model that gives no likelihood of a text, and say what it is for."""
    from plume.model.heads import TOKEN_HEADS

    place = resolve(model)
    head = read_config(place).head
    if head not in TOKEN_HEADS:
        raise UserError(
            f"{model} has a {head} head, and tasks need a language model; labelled rows are measured by "
            f"--task.test FILE of plume finetune; {how_to_ask(head, model, task=saved_kind(place))}"
        )


class Subject:
    """The model that is evaluated; each way of asking it is opened when first needed."""

    def __init__(self, config: EvaluateConfig) -> None:
        self.config, self.folder = config, resolve(config.model)
        self.hash = model_hash(self.folder)
        self.tokenizer = load_tokenizer(self.folder)
        self.folder_config = read_config(self.folder)

    @property
    def name(self) -> str:
        return str(self.config.model)

    @property
    def identity(self) -> str:
        """What scores depend on beside the request."""
        return f"{self.hash} {self.tokenizer.hash} {self.config.precision}"

    @property
    def masked(self) -> bool:
        return not self.folder_config.model.causal and not self.folder_config.model.decoder_layers

    @cached_property
    def scorer(self) -> Scorer:
        import torch

        from plume.util.devices import pick_device

        device = str(pick_device(self.config.device))
        model = load_model(self.folder, device=device, dtype=getattr(torch, self.config.precision))
        return scorer_for(model, self.tokenizer, batch_tokens=self.config.batch_tokens, banned=self.stop_tokens())

    def stop_tokens(self) -> Iterator[int]:
        """Tokens that are a stop word, with or without the blank before it."""
        for token, piece in enumerate(self.tokenizer.piece_table):
            if piece.decode(errors="replace").strip().lower() in STOP_WORDS:
                yield token

    @cached_property
    def writer(self) -> LM:
        from plume.lm import load

        return load(self.folder, device=self.config.device, precision=self.config.precision)

    def write(self, prompts: Sequence[tuple[list[int], SamplingConfig]]) -> list[tuple[str, int]]:
        """The continuation of each prompt and its number of tokens; prompts with the same settings are batched."""
        found: list[tuple[str, int]] = []
        for sampling, alike in groupby(prompts, key=lambda prompt: prompt[1]):
            written = self.writer.generate_batch([tokens for tokens, _ in alike], sampling)
            found += [(w.text, len(w.tokens)) for w in written]
        return found

    def room(self, item: Question) -> tuple[int, int]:
        """Tokens for the prompt and for the answer, which gets at most half of the context."""
        new = min(item.tokens, self.folder_config.model.context // 2)
        return self.folder_config.model.context - new, new

    def overflows(self, item: Question) -> bool:
        return len(self.tokenizer.encode(item.opening + item.prompt)) > self.room(item)[0]

    @cached_property
    def parameters(self) -> int:
        from plume.model.unfilled import unfilled

        config = self.folder_config
        return sum(p.numel() for p in unfilled(config.model, config.head, config.labels).parameters())


class AnswerGenerator:
    """Answers in the model's own words: questions together through one engine, blanks one by one."""

    def __init__(self, subject: Subject, task: str, seed: int) -> None:
        self.subject, self.task, self.seed = subject, task, seed

    def answers(self, items: Sequence[Item]) -> list[tuple[str, int]]:
        """The answer to each item, and its number of tokens."""
        questions = [item for item in items if isinstance(item, Question)]
        if len(questions) < len(items):
            return [self.fill(item) for item in items]
        if self.subject.folder_config.model.decoder_layers:
            return [self.translation(item) for item in questions]
        return self.subject.write([(self.prompt(item), self.sampling(item)) for item in questions])

    def cuts(self, item: Item) -> bool:
        """Whether the item's beginning has to go."""
        if isinstance(item, Question):
            return not self.subject.folder_config.model.decoder_layers and self.subject.overflows(item)
        before, _, _, spare = self.blank(item)
        return len(before) > spare

    def sampling(self, item: Question) -> SamplingConfig:
        return SamplingConfig(
            max_new_tokens=self.subject.room(item)[1],
            temperature=0.0 if item.top_k == 1 else 1.0,
            top_k=item.top_k,
            beams=item.beams,
            length_penalty=LENGTH_PENALTY,
            stop=item.stop,
            seed=self.seed,
        )

    def prompt(self, item: Question) -> list[int]:
        return self.subject.tokenizer.encode(item.opening + item.prompt)[-self.subject.room(item)[0] :]

    def translation(self, item: Question) -> tuple[str, int]:
        if not item.source:
            raise UserError(f"{self.task} is no translation task, and an encoder-decoder only translates")
        written = self.subject.writer.translate(item.source)
        return written.text, len(written.tokens)

    def blank(self, item: Item) -> tuple[list[int], list[int], list[int], int]:
        """The tokens before, in and after the gap, and how many of those before have room."""
        assert isinstance(item, Blank)
        bare = item.before.rstrip()  # a blank before the gap belongs to the word in it
        parts = (bare, item.before[len(bare) :] + item.answer, item.after)
        before, gap, after = map(self.subject.tokenizer.encode, parts)
        spare = self.subject.scorer.room - len(gap) - len(after)
        if spare < 1:
            raise TooLong(len(gap) + len(after), self.subject.scorer.room)
        return before, gap, after, spare

    def fill(self, item: Item) -> tuple[str, int]:
        """As many masks as the answer has tokens."""
        scorer = self.subject.scorer
        assert isinstance(scorer, MaskedScorer)
        before, gap, after, spare = self.blank(item)
        before = before[-spare:]
        filled = scorer.fill([*before, *[scorer.mask] * len(gap), *after])
        return self.subject.tokenizer.decode(filled[len(before) : len(before) + len(gap)]).strip(), len(gap)
