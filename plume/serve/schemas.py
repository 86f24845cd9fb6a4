"""What requests may say. An unknown field is an error; numbers and lists have limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from plume.config import did_you_mean

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, StringConstraints(max_length=1_000_000)]
Tokens = Annotated[list[TokenId], Field(max_length=200_000)]
Name = Annotated[str, StringConstraints(max_length=500)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: Name = Field(description="a name that /v1/models lists")

    @model_validator(mode="before")
    @classmethod
    def known_fields(cls, value: Any) -> Any:
        unknown = [str(name) for name in value if name not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            hint = did_you_mean(unknown[0], cls.model_fields)
            raise PydanticCustomError(
                "unknown_field", "there is no field {field}{hint}", {"field": unknown[0], "hint": hint}
            )
        return value


class About(Request):
    """A request about one text, given as text or as token ids."""

    text: Text | None = Field(default=None, description="the text; or give tokens")
    tokens: Tokens | None = Field(default=None, description="the text as token ids, which are taken as they are")

    @model_validator(mode="after")
    def one_of_two(self) -> About:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class CompletionRequest(Request):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=256)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=256)]
        | None
    ) = Field(default=None, description="text or token ids, one or many; unset samples from the start token")
    max_tokens: int | None = Field(default=16, ge=0, le=1_000_000)
    temperature: float | None = Field(default=1.0, ge=0, le=100)
    top_p: float | None = Field(default=1.0, ge=1e-6, le=1)
    n: int | None = Field(default=1, ge=1, le=128)
    best_of: int | None = Field(default=None, ge=1, le=128)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = False
    stop: (
        Annotated[str, StringConstraints(max_length=1000)]
        | Annotated[list[Annotated[str, StringConstraints(max_length=1000)]], Field(max_length=16)]
        | None
    ) = None
    presence_penalty: float | None = Field(default=0.0, ge=-10, le=10)
    frequency_penalty: float | None = Field(default=0.0, ge=-10, le=10)
    logit_bias: (
        dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-1000, le=1000)]] | None
    ) = Field(default=None, max_length=1000)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    suffix: str | None = Field(default=None, description="refused: these models write forward only")
    user: Annotated[str, StringConstraints(max_length=1000)] | None = None
    # beyond OpenAI's
    top_k: int | None = Field(
        default=None, ge=0, le=1_000_000, description="only the k likeliest; 0 or unset means all"
    )
    min_p: float | None = Field(default=None, ge=1e-6, le=1)
    typical_p: float | None = Field(default=None, ge=1e-6, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    heal: bool = Field(default=False, description="let the first token complete a word that the prompt's end has cut")
    overflow: Literal["refuse", "truncate", "slide"] = "refuse"


class EmbeddingRequest(Request):
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=2048)]
        | Annotated[Tokens, Field(min_length=1)]
        | Annotated[list[Annotated[Tokens, Field(min_length=1)]], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(default=None, ge=1, le=100_000)
    user: Annotated[str, StringConstraints(max_length=1000)] | None = None


class ScoreRequest(About):
    """Log-probability, rank and entropy of every token."""


class NextTokensRequest(About):
    k: int = Field(default=10, ge=1, le=1000)
    temperatures: bool = Field(default=False, description="also the log-sum of the others at 0.05, 0.10, ... 2.00")


class FillMaskRequest(About):
    k: int = Field(default=10, ge=1, le=1000)


class TokenizeRequest(About):
    merges: bool = Field(default=False, description="also how the merges build the text's first piece, step by step")


class ExplainRequest(About):
    view: Literal["heads", "attention", "steps", "layers"] = "heads"
    layer: int = Field(default=0, ge=0, le=10_000)
    head: int = Field(default=0, ge=0, le=10_000)
    mix: Literal["head", "mean", "rollout"] = "head"
    query: int = Field(default=0, ge=0, le=1_000_000, description="the place of the token that asks")
    start: int | None = Field(default=None, ge=0, le=1_000_000, description="first place shown; unset shows the end")
    size: int = Field(default=64, ge=1, le=128, description="how many places are shown")


class TextsRequest(Request):
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=2048)]
    pair: Text | Annotated[list[Text], Field(min_length=1, max_length=2048)] | None = Field(
        default=None, description="second texts, for models of pairs"
    )


class TagRequest(Request):
    input: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=1000)]], Field(min_length=1, max_length=4096)
    ] = Field(description="the words of one sentence")


class AnswerRequest(Request):
    question: Text
    context: Text
