"""/v1/chat/completions and /v1/responses: messages become a prompt by a named template."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import Response

from plume.config import SamplingConfig
from plume.hf import read_chat_template
from plume.inference.sequences import TokenChoice
from plume.serve.api_errors import ApiError
from plume.serve.completions import DONE
from plume.serve.generation import GeneratedText, TextGeneration, json_logprob, respond, sse
from plume.serve.scheduler import Update
from plume.serve.schemas import ChatMessage, ChatRequest, GenerationRequest, ResponsesRequest, TextOrTokens
from plume.serve.served_models import Served
from plume.tasks.generate import chat_text

PLAIN_STOPS = ("\n\nuser:", "\n\nsystem:", "\n\nassistant:")


# ---- templates ---------------------------------------------------------------------------------------------------


own_template = lru_cache(maxsize=16)(read_chat_template)


def refuse_messages(reason: object) -> NoReturn:
    """What templates call `raise_exception`."""
    raise ApiError(400, f"the model's chat template refuses these messages: {reason}", param="messages")


def template_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it in a template; jinja's own would escape what HTML does not allow."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(served: Served, source: str, messages: Sequence[ChatMessage]) -> str:
    """The prompt by the model's own template, with the functions that transformers gives one."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = template_json
    environment.globals.update(raise_exception=refuse_messages, strftime_now=time.strftime)
    tokenizer = served.lm.tokenizer
    names = {
        "bos_token": "" if tokenizer.start is None else tokenizer.token(tokenizer.start),
        "eos_token": "" if tokenizer.end is None else tokenizer.token(tokenizer.end),
    }
    rows = [{"role": message.role, "content": message.text} for message in messages]
    try:
        return environment.from_string(source).render(messages=rows, add_generation_prompt=True, **names)
    except ApiError:
        raise
    except Exception as error:  # a template may add a number to a text, or ask for a field that no message has
        refuse_messages(error)


class ChatGeneration(TextGeneration):
    """A generation whose prompt comes from messages."""

    def __init__(
        self, served: Served, body: GenerationRequest, messages: Sequence[ChatMessage], config: SamplingConfig,
        request: Request,
    ) -> None:  # fmt: skip
        self.messages, self.template = messages, own_template(served.lm.folder)
        if self.template is None:
            config = replace(config, stop=(*config.stop, *PLAIN_STOPS))
        super().__init__(served, body, [None], config, request)

    def prompt_tokens(self, given: TextOrTokens | None) -> list[int]:
        """Beside the event loop, since a template is a program. Special tokens may stand in one."""
        if self.template is None:
            return self.served.tokens_of(chat_text([(message.role, message.text) for message in self.messages]))
        return self.served.tokens_of(render(self.served, self.template, self.messages), special=True)


def new_tokens(served: Served, given: int | None, samples: int) -> int:
    """As many as were asked for; otherwise what fits into the context and the server's limit."""
    limit = served.config.max_new_tokens // max(1, samples)
    return min(limit, served.lm.config.context) if given is None else given


# ---- chat completions --------------------------------------------------------------------------------------------


async def chat(served: Served, body: ChatRequest, request: Request) -> Response:
    served.generating()
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs")
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top = None if not body.logprobs else 0 if body.top_logprobs is None else body.top_logprobs
    most = new_tokens(served, wanted, body.sampling.sequences)
    config = replace(body.sampling, max_new_tokens=most, logprobs=top)
    return await respond(ChatGeneration(served, body, body.messages, config, request), ChatFormat())


class ChatFormat:
    def whole(self, generation: TextGeneration) -> dict[str, Any]:
        rows = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text.text, "refusal": None},
                "logprobs": token_logprobs(generation, text.choices),
                "finish_reason": text.finish_reason,
            }
            for index, text in enumerate(generation.best())
        ]
        return {**self._head(generation, "chat.completion"), "choices": rows, "usage": generation.usage()}

    def first_events(self, generation: TextGeneration) -> list[str]:
        first = {"role": "assistant", "content": ""}
        return [self._event(generation, text, first, (), None) for text in generation.texts]

    def update_events(self, generation: TextGeneration, text: GeneratedText, update: Update) -> list[str]:
        if not update.text and not update.choices and update.finish_reason is None:
            return []
        delta = {"content": update.text} if update.text or update.choices else {}
        return [self._event(generation, text, delta, update.choices, update.finish_reason)]

    def last_events(self, generation: TextGeneration) -> list[str]:
        if not generation.body.include_usage:
            return [DONE]
        head = self._head(generation, "chat.completion.chunk")
        return [sse({**head, "choices": [], "usage": generation.usage()}), DONE]

    def _head(self, generation: TextGeneration, kind: str) -> dict[str, Any]:
        shape = {"object": kind, "created": generation.created, "model": generation.served.name}
        return {"id": f"chatcmpl-{generation.id}", **shape}

    def _event(
        self, generation: TextGeneration, text: GeneratedText, delta: dict[str, str], choices: Sequence[TokenChoice],
        end: str | None,
    ) -> str:  # fmt: skip
        logprobs = token_logprobs(generation, choices) if choices else None
        choice = {"index": text.index, "delta": delta, "logprobs": logprobs, "finish_reason": end}
        usage = {"usage": None} if generation.body.include_usage else {}
        return sse({**self._head(generation, "chat.completion.chunk"), "choices": [choice], **usage})


def token_logprobs(generation: TextGeneration, choices: Sequence[TokenChoice]) -> dict[str, Any] | None:
    if generation.config.logprobs is None:
        return None
    rows = [
        named_token(generation, c.id, c.logprob) | {"top_logprobs": [named_token(generation, i, p) for i, p in c.top]}
        for c in choices
    ]
    return {"content": rows, "refusal": None}


def named_token(generation: TextGeneration, token: int, logprob: float | None) -> dict[str, Any]:
    raw = generation.served.lm.tokenizer.piece_bytes(token)
    return {"token": generation.served.spell(token), "logprob": json_logprob(logprob), "bytes": list(raw)}


# ---- responses ---------------------------------------------------------------------------------------------------


async def responses(served: Served, body: ResponsesRequest, request: Request) -> Response:
    served.generating()
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if getattr(body, name):
            raise ApiError(400, f"{name} needs a server that stores responses; send all messages as input", param=name)
    messages = [ChatMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if body.instructions:
        messages = [ChatMessage(role="system", content=body.instructions), *messages]
    most = new_tokens(served, body.max_output_tokens, 1)
    config = replace(body.sampling, max_new_tokens=most, n=1, best_of=None, logprobs=body.top_logprobs)
    return await respond(ChatGeneration(served, body, messages, config, request), ResponsesFormat())


class ResponsesFormat:
    """Stateless: nothing is stored, so a response's id cannot be used again."""

    def __init__(self) -> None:
        self.number = -1

    def whole(self, generation: TextGeneration) -> dict[str, Any]:
        (text,) = generation.best()
        return self._response(generation, self._status(text), [self._item(generation, text, self._status(text))])

    def first_events(self, generation: TextGeneration) -> list[str]:
        (text,) = generation.texts
        started = self._response(generation, "in_progress", [])
        place = {"output_index": 0, "item_id": f"msg_{generation.id}", "content_index": 0}
        return [
            self._event("response.created", {"response": started}),
            self._event("response.in_progress", {"response": started}),
            self._event(
                "response.output_item.added",
                {"output_index": 0, "item": self._item(generation, text, "in_progress") | {"content": []}},
            ),
            self._event("response.content_part.added", {**place, "part": self._part(generation, "", ())}),
        ]

    def update_events(self, generation: TextGeneration, text: GeneratedText, update: Update) -> list[str]:
        found = token_logprobs(generation, update.choices)
        logprobs = found["content"] if found else []
        if not update.text and not logprobs:
            return []
        place = {"output_index": 0, "item_id": f"msg_{generation.id}", "content_index": 0}
        return [self._event("response.output_text.delta", {**place, "delta": update.text, "logprobs": logprobs})]

    def last_events(self, generation: TextGeneration) -> list[str]:
        (text,) = generation.texts
        status = self._status(text)
        place = {"output_index": 0, "item_id": f"msg_{generation.id}", "content_index": 0}
        item = self._item(generation, text, status)
        (part,) = item["content"]
        logprobs = part.get("logprobs", [])
        done = {"response": self._response(generation, status, [item])}
        return [
            self._event("response.output_text.done", {**place, "text": text.text, "logprobs": logprobs}),
            self._event("response.content_part.done", {**place, "part": part}),
            self._event("response.output_item.done", {"output_index": 0, "item": item}),
            self._event(f"response.{status}", done),
        ]

    def _event(self, name: str, fields: dict[str, Any]) -> str:
        self.number += 1
        return sse({"type": name, "sequence_number": self.number, **fields}, name)

    def _status(self, text: GeneratedText) -> str:
        return "completed" if text.finish_reason == "stop" else "incomplete"

    def _part(self, generation: TextGeneration, text: str, choices: Sequence[TokenChoice]) -> dict[str, Any]:
        found = token_logprobs(generation, choices)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": found["content"] if found else []}

    def _item(self, generation: TextGeneration, text: GeneratedText, status: str) -> dict[str, Any]:
        part = self._part(generation, text.text, text.choices)
        shape = {"type": "message", "role": "assistant", "status": status}
        return {"id": f"msg_{generation.id}", **shape, "content": [part]}

    def _response(self, generation: TextGeneration, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        usage, config = generation.usage(), generation.config
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": f"resp_{generation.id}",
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "model": generation.served.name,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": getattr(generation.body, "instructions", None),
            "max_output_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "truncation": "disabled",
            "metadata": {},
            "usage": None if status == "in_progress" else counts,
        }
