"""Sampling options by name, as `lm.generate(prompt, temperature=0.8)` takes them: those of SamplingConfig."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypedDict

from plume.config import SamplingConfig, UserError, did_you_mean


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingConfig, so that an editor and a type checker know them; a test keeps the two alike."""

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    top_p_rule: Literal["usual", "openai"]
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    logit_bias: dict[int, float]
    stop: str | Sequence[str]
    stop_tokens: int | Sequence[int]
    ignore_end: bool
    n: int
    best_of: int | None
    beams: int
    length_penalty: float
    seed: int | None
    logprobs: int | None
    overflow: Literal["refuse", "truncate", "slide"]
    heal: bool
    speculate: Literal["off", "lookup", "draft"]
    speculate_tokens: int


def with_options(config: SamplingConfig | None, options: SamplingOptions) -> SamplingConfig:
    """A config with options laid over it; an unknown name is refused with the nearest right one."""
    known = {f.name for f in fields(SamplingConfig)}
    given: dict[str, Any] = {**options}
    for name in given:
        if name not in known:
            raise UserError(f"there is no option {name!r}{did_you_mean(name, known)}")
    for name in given.keys() & {"stop", "stop_tokens"}:
        value = given[name]
        given[name] = (value,) if isinstance(value, str | int) else tuple(value)
    return replace(SamplingConfig() if config is None else config, **given)
