"""/v1/completions in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from plume.inference.sequences import TokenChoice
from plume.serve.api_errors import ApiError
from plume.serve.generation import GeneratedText, TextGeneration, json_logprob, respond, sse
from plume.serve.scheduler import Update
from plume.serve.schemas import CompletionRequest
from plume.serve.served_models import Served

DONE = "data: [DONE]\n\n"


async def complete(served: Served, body: CompletionRequest, request: Request) -> Response:
    if body.suffix:
        raise ApiError(400, "suffix is not supported: these models write forward only", param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens=0 makes sense only with echo=true", param="max_tokens")
    most = 16 if body.max_tokens is None else body.max_tokens
    config = replace(body.sampling, max_new_tokens=max(1, most))
    prompts = [None] if body.prompt is None else body.prompt
    generation = TextGeneration(served, body, prompts, config, request, echo=bool(body.echo), generate=most > 0)
    return await respond(generation, CompletionFormat())


class CompletionFormat:
    def whole(self, generation: TextGeneration) -> dict[str, Any]:
        rows = []
        for index, text in enumerate(generation.best()):
            choices = [*text.prompt.choices, *text.choices]
            rows.append(self._choice(generation, text, index, text.prompt.echo + text.text, choices))
        return {**self._head(generation), "choices": rows, "usage": generation.usage()}

    def first_events(self, generation: TextGeneration) -> list[str]:
        """The echoed prompts."""
        if not generation.echo:
            return []
        return [
            self._event(generation, text, text.prompt.echo, text.prompt.choices, text.finish_reason)
            for text in generation.texts
        ]

    def update_events(self, generation: TextGeneration, text: GeneratedText, update: Update) -> list[str]:
        if not update.text and not update.choices and update.finish_reason is None:
            return []
        return [self._event(generation, text, update.text, update.choices, update.finish_reason)]

    def last_events(self, generation: TextGeneration) -> list[str]:
        if not generation.body.include_usage:
            return [DONE]
        return [sse({**self._head(generation), "choices": [], "usage": generation.usage()}), DONE]

    def _head(self, generation: TextGeneration) -> dict[str, Any]:
        shape = {"object": "text_completion", "created": generation.created, "model": generation.served.name}
        return {"id": f"cmpl-{generation.id}", **shape}

    def _event(
        self,
        generation: TextGeneration,
        text: GeneratedText,
        piece: str,
        choices: Sequence[TokenChoice],
        end: str | None,
    ) -> str:
        choice = self._choice(generation, text, text.index, piece, choices) | {"finish_reason": end}
        usage = {"usage": None} if generation.body.include_usage else {}
        return sse({**self._head(generation), "choices": [choice], **usage})

    def _choice(
        self, generation: TextGeneration, text: GeneratedText, index: int, piece: str, choices: Sequence[TokenChoice]
    ) -> dict[str, Any]:
        logprobs = None if generation.config.logprobs is None else self._logprobs(generation, text, choices)
        reason = text.finish_reason
        return {"text": piece, "index": index, "logprobs": logprobs, "finish_reason": reason, "seed": text.seed}

    def _logprobs(
        self, generation: TextGeneration, text: GeneratedText, choices: Sequence[TokenChoice]
    ) -> dict[str, Any]:
        """Every token with its log-probability, the end token too; offsets are characters of the returned text."""
        spell = generation.served.spell
        tops = [None if c.logprob is None else generation.top(c) for c in choices]
        return {
            "tokens": [spell(c.id) for c in choices],
            "token_logprobs": [json_logprob(c.logprob) for c in choices],
            "top_logprobs": [None if top is None else {spell(i): json_logprob(p) for i, p in top} for top in tops],
            "text_offset": [text.offsets.add(c.id, shown=not generation.is_end(c, text)) for c in choices],
            "token_ids": [c.id for c in choices],
            "top": [[[i, spell(i), json_logprob(p)] for i, p in c.top] for c in choices],
        }
