"""Beam search: the likeliest texts instead of drawn ones, for GPTs and for encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plume.config import SamplingConfig, UserError
from plume.inference import sampler
from plume.inference.batcher import Batcher
from plume.inference.engine import Engine, Feed
from plume.inference.sequences import Generation, check_prompt, fit_prompt
from plume.model.likelihood import log_softmax
from plume.text import Tokenizer


@dataclass(frozen=True)
class Beam:
    """One text under way in a slot, with the log-probability of each of its new tokens."""

    slot: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()  # the likeliest at each place, where they are asked for
    total: float = 0.0  # what the search compares: penalties and bans included

    def rating(self, penalty: float) -> float:
        return float(self.total / max(1, len(self.logprobs)) ** penalty)


def beam_search(
    batcher: Batcher,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    config: SamplingConfig,
    *,
    source: Sequence[int] | None = None,
) -> Generation:
    """The n likeliest continuations found; `source` is the text that an encoder-decoder translates."""
    engine, count = batcher.engine, config.beams
    if count > engine.slots:
        raise UserError(f"beams={count} needs slots={count}; this engine was opened with slots={engine.slots}")
    if config.unsearched or config.n > count:  # with beams=1 SamplingConfig cannot know of the search
        wrong = config.unsearched if config.unsearched else f"n={config.n}"
        raise UserError(f"an encoder-decoder writes its likeliest text (beams={count}) and cannot use {wrong}")
    known = min(engine.config.vocab_size, tokenizer.vocab_size)
    tokens = fit_prompt(prompt, config, engine.capacity, known)
    with batcher.exclusive() as engine:
        if source is not None:
            from plume.inference.torch_engine import TorchEngine

            assert isinstance(engine, TorchEngine), "encoder-decoders run on torch"
            check_prompt(source, known, engine.capacity)
            engine.encode(0, source)
        search = Search(engine, tokenizer, config, tokens, after=() if source is not None else tokens[-8:])
        feeds, beams = [Feed(0, tokens)], [Beam(0, tuple(tokens))]
        while beams:
            logits = engine.step(feeds)
            beams = search.advance(beams, logits)
            feeds = [Feed(beam.slot, beam.tokens[-1:]) for beam in beams]
    return search.result()


class Search:
    """Beams after a prompt; a text is spelled as it follows the tokens `after`, which a translation has none of."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: SamplingConfig,
        prompt: Sequence[int],
        *,
        after: Sequence[int] = (),
    ) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.prompt_length, self.after = len(prompt), after
        self.ends = frozenset((*config.stop_tokens, *(() if config.ignore_eos else tokenizer.ends)))
        self.finished: list[tuple[Beam, str]] = []  # with the reason, best first
        room = engine.capacity - len(prompt)
        self.limit = room if config.max_new_tokens is None else min(room, config.max_new_tokens)

    def advance(self, beams: list[Beam], logits: Any) -> list[Beam]:
        """One token further; the beams that continue, each already in its slot."""
        following = list[tuple[Beam, Beam]]()
        children = self._children(beams, logits)
        if not children:  # everything is banned
            for beam in beams:
                self._finish(beam, "length")
            return []
        for rank, (parent, child) in enumerate(children):
            if child.tokens[-1] in self.ends:
                if rank < self.config.beams:
                    self._finish(child, "stop")
            elif (cut := self._stopped(child)) is not None:
                self._finish(cut, "stop")
            elif len(following) < self.config.beams:
                following.append((parent, child))
        if following and len(following[0][1].logprobs) >= self.limit:
            for _, child in following:
                self._finish(child, "length")
            return []
        if self._hopeless([child for _, child in following]):
            return []
        return self._seat(beams, following)

    def _children(self, beams: list[Beam], logits: Any) -> list[tuple[Beam, Beam]]:
        """The likeliest extensions of all beams together, twice as many as beams since some of them end."""
        found = list[tuple[Beam, Beam]]()
        for beam, row in zip(beams, logits, strict=True):
            row = row[: self.tokenizer.vocab_size]
            model = log_softmax(row)
            best = () if not self.config.logprobs else sampler.largest(model, self.config.logprobs)
            top = tuple((int(i), float(model[i])) for i in best)
            scores = sampler.penalised(model, self.config, beam.tokens, self.prompt_length, self.ends)
            for i in sampler.largest(scores, min(2 * self.config.beams, len(scores))):
                if np.isneginf(scores[i]):
                    continue
                child = Beam(
                    beam.slot,
                    (*beam.tokens, int(i)),
                    (*beam.logprobs, float(model[i])),
                    (*beam.tops, top),
                    beam.total + float(scores[i]),
                )
                found.append((beam, child))
        found.sort(key=lambda pair: -pair[1].total)
        return found[: 2 * self.config.beams]

    def _stopped(self, beam: Beam) -> Beam | None:
        """The beam when it has just come to a stop text."""
        return beam if self._stops(self._text(new := beam.tokens[self.prompt_length :]), new) else None

    def _stops(self, text: str, new: Sequence[int]) -> list[int]:
        """Where stop texts begin; those that end before the minimum number of tokens do not count."""
        least = self.config.min_new_tokens
        if not self.config.stop or len(new) < least:
            return []
        early = len(self._text(new[: least - 1])) if least > 1 else 0
        return [at for s in self.config.stop if (at := text.find(s, max(0, early - len(s) + 1))) >= 0]

    def _text(self, tokens: Sequence[int]) -> str:
        streamer = self.tokenizer.streamer()
        for token in self.after:
            streamer.push(token)
        return "".join(map(streamer.push, tokens)) + streamer.flush()

    def _finish(self, beam: Beam, reason: str) -> None:
        self.finished.append((beam, reason))
        self.finished.sort(key=lambda pair: -pair[0].rating(self.config.length_penalty))
        del self.finished[self.config.beams :]

    def _hopeless(self, beams: list[Beam]) -> bool:
        """Whether no running beam can still pass the worst of enough finished ones."""
        if not beams:
            return True
        if len(self.finished) < self.config.beams:
            return False
        length = len(beams[0].logprobs) if self.config.length_penalty <= 0 else self.limit
        best = float(max(beam.total for beam in beams) / max(1, length) ** self.config.length_penalty)
        return best <= self.finished[-1][0].rating(self.config.length_penalty)

    def _seat(self, beams: list[Beam], following: list[tuple[Beam, Beam]]) -> list[Beam]:
        """A parent's first child stays in its slot, the others get copies in slots that nobody needs any more."""
        kept = {parent.slot for parent, _ in following}
        free = [slot for slot in range(self.config.beams) if slot not in kept]
        taken, seated = set[int](), list[Beam]()
        for parent, child in following:
            slot = parent.slot
            if slot in taken:
                slot = free.pop()
                self.engine.copy(parent.slot, slot, self.engine.length(parent.slot))
            taken.add(slot)
            seated.append(replace(child, slot=slot))
        return seated

    def result(self) -> Generation:
        results = [self._generation(beam, reason) for beam, reason in self.finished[: self.config.n]]
        assert results, "a search always ends with a beam"
        return results[0] if len(results) == 1 else replace(results[0], samples=tuple(results))

    def _generation(self, beam: Beam, reason: str) -> Generation:
        new = beam.tokens[self.prompt_length :]
        shown = new[:-1] if new and new[-1] in self.ends else new
        text = self._text(shown)
        cuts = self._stops(text, new)
        return Generation(
            text=text[: min(cuts)] if cuts else text,
            tokens=new,
            finish_reason=reason,
            logprobs=beam.logprobs,
            top_logprobs=beam.tops if self.config.logprobs else None,
            prompt_tokens=self.prompt_length,
            seed=0 if self.config.seed is None else self.config.seed,
        )
