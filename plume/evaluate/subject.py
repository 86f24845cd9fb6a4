"""The model that is evaluated, and each way of asking it: scoring, writing on, filling in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

from plume.config import EvaluateConfig, SamplingConfig, UserError
from plume.evaluate.items import Blank, Item, Question
from plume.evaluate.protocols import TooLong
from plume.evaluate.scoring import MaskedScorer, Scorer, scorer_for
from plume.generate.lm import LM
from plume.text import load_tokenizer
from plume.weights import load_model, model_hash, read_config, resolve

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


class Subject:
    """The model that is evaluated; each way of asking it is opened when first needed."""

    def __init__(self, config: EvaluateConfig) -> None:
        self.config, self.folder = config, resolve(config.model)
        self.hash = model_hash(self.folder)
        self.tokenizer = load_tokenizer(self.folder)
        self.said = read_config(self.folder)

    @property
    def name(self) -> str:
        return str(self.config.model)

    @property
    def identity(self) -> str:
        """What scores depend on beside the request."""
        return f"{self.hash} {self.tokenizer.hash} {self.config.precision}"

    @property
    def masked(self) -> bool:
        return not self.said.model.causal and not self.said.model.decoder_layers

    @cached_property
    def scorer(self) -> Scorer:
        import torch

        from plume.train.ranks import pick_device

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
        from plume.generate.lm import load

        return load(self.folder, device=self.config.device, precision=self.config.precision)

    def write(self, prompts: Sequence[tuple[list[int], SamplingConfig]]) -> list[tuple[str, int]]:
        """Goes on from each prompt, those with the same settings together; the text, and how many tokens it is."""
        found: list[tuple[str, int]] = []
        for sampling, alike in groupby(prompts, key=lambda prompt: prompt[1]):
            written = self.writer.generate_batch([tokens for tokens, _ in alike], sampling)
            found += [(w.text, len(w.tokens)) for w in written]
        return found

    def room(self, item: Question) -> tuple[int, int]:
        """Tokens for the prompt and for the answer, which gets at most half of the context."""
        new = min(item.tokens, self.said.model.context // 2)
        return self.said.model.context - new, new

    def overflows(self, item: Question) -> bool:
        return len(self.tokenizer.encode(item.opening + item.prompt)) > self.room(item)[0]

    @cached_property
    def parameters(self) -> int:
        import torch

        from plume.heads import Model

        with torch.device("meta"):  # shapes alone
            return sum(p.numel() for p in Model(self.said.model, self.said.head, self.said.labels).parameters())


class Writer:
    """Answers in the model's own words: questions together through one engine, blanks one by one."""

    def __init__(self, subject: Subject, task: str, seed: int) -> None:
        self.subject, self.task, self.seed = subject, task, seed

    def answers(self, items: Sequence[Item]) -> list[tuple[str, int]]:
        """What is said to each item, and how many tokens that was."""
        questions = [item for item in items if isinstance(item, Question)]
        if len(questions) < len(items):
            return [self.fill(item) for item in items]
        if self.subject.said.model.decoder_layers:
            return [self.translation(item) for item in questions]
        return self.subject.write([(self.prompt(item), self.sampling(item)) for item in questions])

    def cuts(self, item: Item) -> bool:
        """Whether the item's beginning has to go."""
        if isinstance(item, Question):
            return not self.subject.said.model.decoder_layers and self.subject.overflows(item)
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
            raise UserError(f"{self.task} is no translation, which is all that an encoder-decoder does")
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
