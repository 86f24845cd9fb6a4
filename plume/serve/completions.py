"""/v1/completions: from a request to sequences in the scheduler, and from their moves to OpenAI's answers."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from plume.config import SamplingConfig
from plume.generate import sampling
from plume.generate.continuation import Choice, fresh_seed
from plume.serve.errors import ApiError, as_api_error
from plume.serve.models import Served
from plume.serve.scheduler import Insulated, Move, Ticket
from plume.serve.schemas import CompletionRequest

ROWS = 64  # rows of logits that are looked at together when a prompt is scored


def sampling_config(asked: CompletionRequest) -> SamplingConfig:
    """The request in the generator's words. What is null has OpenAI's default."""
    stops = [] if asked.stop is None else [asked.stop] if isinstance(asked.stop, str) else asked.stop
    bias = {} if asked.logit_bias is None else {int(token): value for token, value in asked.logit_bias.items()}
    return SamplingConfig(
        max_new_tokens=16 if asked.max_tokens is None else max(1, asked.max_tokens),
        temperature=1.0 if asked.temperature is None else asked.temperature if asked.temperature > 1e-3 else 0.0,
        top_k=None if asked.top_k in (None, 0) else asked.top_k,
        top_p=None if asked.top_p in (None, 1.0) else asked.top_p,
        min_p=asked.min_p,
        typical_p=asked.typical_p,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        presence_penalty=0.0 if asked.presence_penalty is None else asked.presence_penalty,
        frequency_penalty=0.0 if asked.frequency_penalty is None else asked.frequency_penalty,
        logit_bias=bias,
        stop=tuple(stops),
        n=1 if asked.n is None else asked.n,
        best_of=asked.best_of,
        seed=None if asked.seed is None else asked.seed & 0xFFFF_FFFF_FFFF_FFFF,
        logprobs=asked.logprobs,
        overflow=asked.overflow,
        heal=asked.heal,
    )


def check(asked: CompletionRequest, limit: int, prompts: int) -> None:
    if asked.suffix:
        raise ApiError(400, "suffix is not supported: these models write forward only", param="suffix")
    n = 1 if asked.n is None else asked.n
    samples = n if asked.best_of is None else max(n, asked.best_of)
    if asked.best_of is not None and asked.best_of < n:
        raise ApiError(400, f"best_of={asked.best_of} must be at least n={asked.n}", param="best_of")
    if asked.stream and asked.best_of is not None and asked.best_of > n:
        raise ApiError(400, "best_of cannot be streamed: the best is known only at the end", param="best_of")
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(400, "max_tokens=0 makes sense only with echo=true", param="max_tokens")
    wanted = (16 if asked.max_tokens is None else asked.max_tokens) * samples * prompts
    if wanted > limit:
        raise ApiError(
            400, f"{wanted} new tokens are asked for, over all samples; this server gives {limit}", param="max_tokens"
        )


@dataclass
class Answer:
    """One choice of the response while it grows."""

    index: int
    ticket: Ticket | None  # None when nothing is to be written
    echoed: Echo | None
    seed: int
    text: str = ""
    choices: list[Choice] = field(default_factory=list)
    finish_reason: str | None = None
    offset: int = 0  # characters before the next token

    @property
    def mean_logprob(self) -> float:
        known = [c.logprob for c in self.choices if c.logprob is not None]
        return float(np.mean(known)) if known else float("-inf")


@dataclass(frozen=True)
class Echo:
    """A prompt to be repeated, with what the model thought of it."""

    text: str
    choices: tuple[Choice, ...]  # empty when no log-probabilities were asked for


class Completion:
    """One request under way."""

    def __init__(self, served: Served, asked: CompletionRequest, client: str) -> None:
        self.served, self.asked, self.client = served, asked, client
        self.scheduler = served.writing()
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        prompts = self._prompts()
        check(asked, served.config.max_new_tokens, len(prompts))
        self.config = sampling_config(asked)
        wanted, room = self.config.sequences * len(prompts), self.scheduler.room
        if wanted > room:
            raise ApiError(400, f"{wanted} sequences are asked for; this server takes {room}", param="n")
        self.prompts = prompts
        self.news: asyncio.Queue[tuple[Answer, Move]] = asyncio.Queue()
        self.answers: list[Answer] = []
        self.prompt_tokens = sum(len(p) for p in prompts)

    def _prompts(self) -> list[list[int]]:
        given = self.asked.prompt
        many: Sequence[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        encode = self.served.tokens_of
        return [encode(p, None, start=True) if isinstance(p, str | None) else encode(None, p, start=True) for p in many]

    # -- starting

    async def begin(self) -> None:
        """Score what is to be echoed, then put every sequence in line."""
        seed, loop = fresh_seed(self.config), asyncio.get_running_loop()
        deadline = time.monotonic() + self.served.config.timeout
        for prompt in self.prompts:
            echoed = await self._echo(prompt) if self.asked.echo else None
            for sample in range(self.config.sequences):
                answer = Answer(len(self.answers), None, echoed, seed)
                self.answers.append(answer)
                if self.asked.max_tokens == 0:
                    answer.finish_reason = "length"
                    continue

                def tell(move: Move, answer: Answer = answer) -> None:
                    loop.call_soon_threadsafe(self.news.put_nowait, (answer, move))

                answer.ticket = Ticket(self._continuation(prompt, seed, sample), self.client, deadline, tell)
        if self.tickets:
            self.scheduler.submit(self.tickets)

    @property
    def tickets(self) -> list[Ticket]:
        return [answer.ticket for answer in self.answers if answer.ticket is not None]

    def _continuation(self, prompt: list[int], seed: int, sample: int) -> Insulated:
        lm = self.served.lm
        return Insulated(
            prompt, self.config, tokenizer=lm.tokenizer, context=self.served.engine.capacity,
            vocab_size=lm.config.vocab_size, seed=seed, sample=sample,
        )  # fmt: skip

    async def _echo(self, prompt: list[int]) -> Echo:
        self.served.check_length(prompt)
        choices = () if self.asked.logprobs is None else await self.served.think(lambda: self._score(prompt))
        return Echo(self.served.lm.tokenizer.decode(prompt), tuple(choices))

    def _score(self, prompt: list[int]) -> list[Choice]:
        """What the model thought of each token of the prompt; of the first one nothing."""
        lm, choices = self.served.lm, [Choice(prompt[0])]
        vocabulary = min(lm.config.vocab_size, lm.tokenizer.vocab_size)
        k = 0 if self.asked.logprobs is None else self.asked.logprobs
        for at in range(1, len(prompt), ROWS):
            until = min(at + ROWS, len(prompt))
            for token, row in zip(prompt[at:until], lm.runner.look(prompt[: until - 1], until - at), strict=True):
                known = sampling.log_softmax(row[:vocabulary])
                top = sampling.largest(known, k) if k else ()
                choices.append(Choice(token, float(known[token]), tuple((int(i), float(known[i])) for i in top)))
        return choices

    # -- going on

    async def moves(self) -> AsyncIterator[tuple[Answer, Move]]:
        left = len(self.tickets)
        while left:
            answer, move = await self.news.get()
            if move.error is not None:
                raise move.error
            answer.text += move.text
            answer.choices += move.choices
            if move.finish_reason is not None:
                answer.finish_reason = move.finish_reason
                left -= 1
            yield answer, move

    def give_up(self) -> None:
        self.scheduler.cancel([t for t in self.tickets if t.continuation.finish_reason is None])

    async def whole(self) -> dict[str, Any]:
        async for _ in self.moves():
            pass
        chosen = self._best()
        rows = []
        for index, answer in enumerate(chosen):
            echo = answer.echoed
            text = ("" if echo is None else echo.text) + answer.text
            rows.append(self._choice(answer, index, text, [*(echo.choices if echo else ()), *answer.choices]))
        return {**self._head(), "choices": rows, "usage": self.usage()}

    def _best(self) -> list[Answer]:
        if self.config.best_of is None:
            return self.answers
        kept = list[Answer]()
        for at in range(0, len(self.answers), self.config.best_of):
            group = self.answers[at : at + self.config.best_of]
            kept += sorted(group, key=lambda a: -a.mean_logprob)[: self.config.n]
        return kept

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events; a failure on the way is the last of them."""
        options = self.asked.stream_options
        try:
            for answer in self.answers:
                if answer.echoed is not None:
                    last = answer.finish_reason
                    yield self._event(answer, answer.echoed.text, answer.echoed.choices, last)
            async for answer, move in self.moves():
                if move.text or move.choices or move.finish_reason is not None:
                    yield self._event(answer, move.text, move.choices, move.finish_reason)
            if options is not None and options.include_usage:
                yield sse({**self._head(), "choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"
        except Exception as error:
            told = as_api_error(error)
            if told.status == 500:
                traceback.print_exception(error)
            yield sse(told.body())
        finally:
            self.give_up()

    # -- the shape of answers

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.served.name}

    def _event(self, answer: Answer, text: str, choices: Sequence[Choice], finish_reason: str | None) -> str:
        return sse({**self._head(), "choices": [self._choice(answer, answer.index, text, choices, finish_reason)]})

    def _choice(
        self, answer: Answer, index: int, text: str, choices: Sequence[Choice], finish_reason: str | None = None
    ) -> dict[str, Any]:
        reason = answer.finish_reason if not self.asked.stream else finish_reason
        logprobs = None if self.asked.logprobs is None else self._logprobs(answer, choices)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason, "seed": answer.seed}

    def _logprobs(self, answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
        """Token by token; the end token is not one of them, since it is no part of the text."""
        end, spell = self.served.lm.tokenizer.end, self.served.spell
        known = [c for c in choices if c.id != end or c.logprob is None]
        offsets = []
        for choice in known:
            offsets.append(answer.offset)
            answer.offset += len(spell(choice.id))
        return {
            "tokens": [spell(c.id) for c in known],
            "token_logprobs": [number(c.logprob) for c in known],
            "top_logprobs": [{spell(i): number(p) for i, p in c.top} if c.logprob is not None else None for c in known],
            "text_offset": offsets,
            "token_ids": [c.id for c in known],
            "top": [[[i, spell(i), number(p)] for i, p in c.top] for c in known],
        }

    def usage(self) -> dict[str, int]:
        written = sum(len(answer.choices) for answer in self.answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }


def number(logprob: float | None) -> float | None:
    """A log-probability that JSON can carry: what is impossible has a very small one."""
    return None if logprob is None else max(round(logprob, 6), -9999.0)


def sse(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def complete(served: Served, asked: CompletionRequest, request: Request, client: str) -> Response:
    completion = Completion(served, asked, client)
    request.state.completion = completion
    await completion.begin()
    if asked.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(completion.events(), media_type="text/event-stream", headers=headers)
    answer = asyncio.create_task(completion.whole())
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(answer.result())
    finally:
        gone.cancel()
        answer.cancel()
        completion.give_up()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
