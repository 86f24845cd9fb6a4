"""A request that generates: prompts become scheduled sequences, and their updates one growing text each."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from plume.config import SamplingConfig
from plume.inference import sampler
from plume.inference.sequences import FaultIsolatedSequence, TokenChoice, fresh_seed
from plume.model.likelihood import log_softmax
from plume.serve.api_errors import ApiError, as_api_error
from plume.serve.scheduler import ScheduledSequence, Update, check
from plume.serve.schemas import GenerationRequest, TextOrTokens
from plume.serve.served_models import Served, dump_json
from plume.text import Tokenizer

ROWS_AT_ONCE = 64  # rows of logits that are read together when a prompt is scored
KEEP_ALIVE = 10.0  # seconds without news after which a stream sends a comment
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Prompt:
    """What one or more samples start from."""

    tokens: list[int]
    echo: str = ""
    choices: tuple[TokenChoice, ...] = ()  # of the echoed tokens, where log-probabilities were asked for


class TokenOffsets:
    """The position in the text, in characters, at which each token begins; part of a character begins where it does."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._streamer, self.characters = tokenizer.streamer(), 0
        for token in before[-8:]:
            self._streamer.push(token)

    def add(self, token: int, *, shown: bool = True) -> int:
        begins = self.characters
        if shown:
            self.characters += len(self._streamer.push(token))
        return begins


@dataclass
class GeneratedText:
    """One text of the response while it grows."""

    index: int
    prompt: Prompt
    seed: int
    offsets: TokenOffsets
    scheduled: ScheduledSequence | None = None  # none where nothing is to be generated
    text: str = ""
    choices: list[TokenChoice] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        known = [c.logprob for c in self.choices if c.logprob is not None]
        return float(np.mean(known)) if known else float("-inf")


class TextGeneration:
    """One request under way."""

    def __init__(
        self,
        served: Served,
        body: GenerationRequest,
        prompts: Sequence[TextOrTokens | None],
        config: SamplingConfig,
        request: Request,
        *,
        echo: bool = False,
        generate: bool = True,
    ) -> None:
        self.served, self.body, self.config, self.echo, self.generate = served, body, config, echo, generate
        self.client, self.deadline = request.state.client, request.state.deadline
        self.scheduler = served.generating()
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self._check(len(prompts))
        self._given = prompts
        self._news: asyncio.Queue[tuple[GeneratedText, Update]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.texts: list[GeneratedText] = []
        request.state.generation = self

    def _check(self, prompts: int) -> None:
        config, limit = self.config, self.served.config.max_new_tokens
        if self.body.stream and config.best_of is not None and config.best_of > config.n:
            raise ApiError(400, "best_of cannot be streamed: the best is known only at the end", param="best_of")
        each = self.served.lm.config.context if config.max_new_tokens is None else config.max_new_tokens
        if each * config.sequences * prompts > limit and config.max_new_tokens is not None:
            message = f"{each * config.sequences * prompts} new tokens over all samples; this server generates {limit}"
            raise ApiError(400, message, param="max_tokens")
        wanted = config.sequences * prompts
        if wanted > self.scheduler.capacity:
            raise ApiError(400, f"{wanted} sequences; this server takes {self.scheduler.capacity}", param="n")

    # -- starting

    async def start(self) -> None:
        """Tokenize and score the prompts beside the event loop, then queue every sequence.

        The reading submits them before it ends: between the two the model would be idle, and might be closed.
        """
        await self.served.read(self._prepare, self.client, self.deadline)

    def _prepare(self) -> None:
        self._add_texts()
        if self.scheduled:
            with self.scheduler.changed:  # a request that is cancelled here is so before or after, never in between
                check()
                self.scheduler.submit(self.scheduled)

    def _add_texts(self) -> None:
        seed = fresh_seed(self.config)
        for given in self._given:
            tokens = self.prompt_tokens(given)
            prompt = self._echoed(tokens) if self.echo else Prompt(tokens)
            for sample in range(self.config.sequences):
                offsets = TokenOffsets(self.served.lm.tokenizer, () if self.echo else tokens)
                text = GeneratedText(len(self.texts), prompt, seed, offsets)
                if self.generate:
                    text.scheduled = self._schedule(text, tokens, seed, sample)
                else:
                    text.finish_reason = "length"
                self.texts.append(text)

    def prompt_tokens(self, given: TextOrTokens | None) -> list[int]:
        return self.served.tokens_of(given, start=True, param="prompt")

    def _schedule(self, text: GeneratedText, tokens: list[int], seed: int, sample: int) -> ScheduledSequence:
        def report(update: Update) -> None:
            self._loop.call_soon_threadsafe(self._news.put_nowait, (text, update))

        lm = self.served.lm
        sequence = FaultIsolatedSequence(
            tokens, self.config, tokenizer=lm.tokenizer, context=self.served.engine.capacity,
            vocab_size=lm.config.vocab_size, seed=seed, sample=sample,
        )  # fmt: skip
        return ScheduledSequence(sequence, self.client, self.deadline, report)

    def _echoed(self, tokens: list[int]) -> Prompt:
        self.served.check_length(tokens)
        choices = [] if self.config.logprobs is None else self._score(tokens, self.config.logprobs)
        return Prompt(tokens, self.served.lm.tokenizer.decode(tokens), tuple(choices))

    def _score(self, prompt: list[int], k: int) -> list[TokenChoice]:
        """Log-probabilities of each token of the prompt; the first has none."""
        lm, choices = self.served.lm, [TokenChoice(prompt[0])]
        vocabulary = self.served.vocabulary
        for at in range(1, len(prompt), ROWS_AT_ONCE):
            until = min(at + ROWS_AT_ONCE, len(prompt))
            for token, row in zip(
                prompt[at:until], lm.batcher.logits_for(prompt[: until - 1], until - at), strict=True
            ):
                known = log_softmax(row[:vocabulary])
                top = sampler.largest(known, k) if k else ()
                choices.append(TokenChoice(token, float(known[token]), tuple((int(i), float(known[i])) for i in top)))
        return choices

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        return [text.scheduled for text in self.texts if text.scheduled is not None]

    # -- under way

    async def updates(self) -> AsyncIterator[tuple[GeneratedText, Update] | None]:
        """What is new of each text until all have ended; None when nothing has come for a while."""
        left = len(self.scheduled)
        while left:
            try:
                text, update = await asyncio.wait_for(self._news.get(), KEEP_ALIVE)
            except TimeoutError:
                yield None
                continue
            if update.error is not None:
                raise update.error
            text.text += update.text
            text.choices += update.choices
            if update.finish_reason is not None:
                text.finish_reason = update.finish_reason
                left -= 1
            yield text, update

    def cancel(self) -> None:
        self.scheduler.cancel([r for r in self.scheduled if r.sequence.finish_reason is None])

    def best(self) -> list[GeneratedText]:
        """The n texts of each prompt that are returned."""
        if self.config.best_of is None:
            return self.texts
        kept = list[GeneratedText]()
        for at in range(0, len(self.texts), self.config.best_of):
            group = self.texts[at : at + self.config.best_of]
            kept += sorted(group, key=lambda text: -text.mean_logprob)[: self.config.n]
        return kept

    def usage(self) -> dict[str, int]:
        prompt = sum(len(text.prompt.tokens) for text in self.texts[:: self.config.sequences])
        completion = sum(len(text.choices) for text in self.texts)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    # -- tokens

    def is_end(self, choice: TokenChoice, text: GeneratedText) -> bool:
        """Whether a token ended the text, and so is no part of it."""
        ends = () if text.scheduled is None else text.scheduled.sequence.ends
        return bool(text.choices) and choice is text.choices[-1] and choice.id in ends and text.finish_reason == "stop"

    def top(self, choice: TokenChoice) -> list[tuple[int, float]]:
        """The likeliest tokens, the sampled one always among them."""
        assert choice.logprob is not None
        found = list(choice.top)
        if choice.id not in [token for token, _ in found]:
            found.append((choice.id, choice.logprob))
        return found


class ResponseFormat(Protocol):
    """How one API writes what was generated."""

    def whole(self, generation: TextGeneration) -> dict[str, Any]: ...

    def first_events(self, generation: TextGeneration) -> list[str]: ...

    def update_events(self, generation: TextGeneration, text: GeneratedText, update: Update) -> list[str]: ...

    def last_events(self, generation: TextGeneration) -> list[str]: ...


async def respond(generation: TextGeneration, form: ResponseFormat) -> Response:
    """Generate, as one JSON object or as server-sent events. A client that disconnects cancels it."""
    await generation.start()
    if generation.body.stream:
        events = stream_events(generation, form)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
    async for _ in generation.updates():
        pass
    content = await asyncio.to_thread(lambda: dump_json(form.whole(generation)))
    return Response(content, media_type="application/json")


async def stream_events(generation: TextGeneration, form: ResponseFormat) -> AsyncIterator[str]:
    """Server-sent events; a failure on the way is the last of them."""
    try:
        for event in form.first_events(generation):
            yield event
        async for news in generation.updates():
            if news is None:
                yield ": keep-alive\n\n"
                continue
            for event in form.update_events(generation, *news):
                yield event
        for event in form.last_events(generation):
            yield event
    except Exception as error:
        yield sse(as_api_error(error).body())


def sse(value: Any, event: str | None = None) -> str:
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def json_logprob(logprob: float | None) -> float | None:
    """A log-probability that JSON can carry: minus infinity becomes a very small number."""
    return None if logprob is None else max(round(logprob, 6), -9999.0)
