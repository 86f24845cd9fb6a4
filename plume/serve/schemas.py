"""The fields of requests. Sampling fields follow SamplingConfig; fields of OpenAI's that have no effect are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from plume.config import SamplingConfig, UserError, did_you_mean
from plume.explain.attribution import Method
from plume.explain.forward_pass import AttentionKind, Stack
from plume.explain.interventions import EditPart, Replacement
from plume.inference.outputs import Pool

CHARACTERS = 1_000_000  # of one text
TOKENS = 200_000  # of one list of token ids
TEXTS = 2048  # of one request
MOST_CHARACTERS = 2000  # of an error message
Text = Annotated[str, StringConstraints(max_length=CHARACTERS)]
ShortText = Annotated[str, StringConstraints(max_length=1000)]
Name = Annotated[str, StringConstraints(max_length=500)]
TextOrTokens = str | list[int]
Layers = Annotated[list[int], Field(max_length=256)]

RENAMED = {  # names that people bring, and the field that is meant
    **dict.fromkeys(("text", "texts", "tokens", "inputs", "context", "sentence", "source", "content"), "input"),
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict", "max_tokens"), "max_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "until"), "stop"),
    "num_return_sequences": "n",
    "prompt": "input",
    "message": "messages",
    "heal": "token_healing",
    "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "top_n": "k",
    "second": "pair",
    "logprobs": "top_logprobs",
}


def field_error(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("field", "{message}", {"field": printable(field), "message": printable(message)})


def printable(text: str) -> str:
    """Text that UTF-8 can carry, not longer than a message should be."""
    return text[:MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()


# ---- texts -------------------------------------------------------------------------------------------------------


def one_text(value: Any) -> TextOrTokens:
    """A text or a list of token ids; the first thing that is wrong is named, however long the list."""
    if isinstance(value, str):
        if len(value) > CHARACTERS:
            raise ValueError(f"the text has {len(value)} characters; at most {CHARACTERS} are read")
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("the text has half of a surrogate pair, which is no character")
        return value
    if not isinstance(value, list):
        raise ValueError(f"must be a text or a list of token ids, not {json_name(value)}")
    if len(value) > TOKENS:
        raise ValueError(f"{len(value)} token ids; at most {TOKENS} are read")
    for token in value:
        if type(token) is not int or not 0 <= token < 2**31:
            raise ValueError(f"{str(token)[:40]!r} is no token id, which is a whole number from 0")
    return value


def many_texts(value: Any) -> list[TextOrTokens]:
    """One or many texts or lists of token ids, always as a list."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    given = value if several else [value]
    if len(given) > TEXTS:
        raise ValueError(f"{len(given)} texts; at most {TEXTS} are read in one request")
    return [one_text(text) for text in given]


def json_name(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", dict: "an object", type(None): "null"}
    return names.get(type(value), "a list")


IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": TOKENS}
STRING: dict[str, Any] = {"type": "string", "maxLength": CHARACTERS}
MANY = {"anyOf": [STRING, IDS, {"type": "array", "items": STRING}, {"type": "array", "items": IDS}]}
OneText = Annotated[TextOrTokens, BeforeValidator(one_text), WithJsonSchema({"anyOf": [STRING, IDS]})]
ManyTexts = Annotated[list[TextOrTokens], BeforeValidator(many_texts), WithJsonSchema(MANY)]
PlainTexts = Text | Annotated[list[Text], Field(min_length=1, max_length=TEXTS)]


# ---- requests ----------------------------------------------------------------------------------------------------


class ApiRequest(BaseModel):
    """What every request has. A field that is neither here nor in OpenAI's schema is an error."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    without_effect: ClassVar[frozenset[str]] = frozenset()  # fields of OpenAI's schema
    _ignored: list[str] = PrivateAttr(default_factory=list)

    model: Name = Field(description="a name that /v1/models lists")

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and have no effect."""
        return self._ignored

    @classmethod
    def names(cls) -> set[str]:
        return set(cls.model_fields)

    @model_validator(mode="wrap")
    @classmethod
    def known_fields(cls, value: Any, handler: Any) -> Any:
        given = list(value) if isinstance(value, dict) else []
        known = cls.names()
        for name in given:
            if name not in known and name not in cls.without_effect:
                other = RENAMED.get(str(name))
                hint = f"; use {other}" if other in known else did_you_mean(str(name)[:100], known)
                raise field_error(str(name), f"there is no field {name}{hint}")
        made = handler(value)
        made._ignored = sorted(name for name in given if name in cls.without_effect)
        return made


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


# ---- sampling ----------------------------------------------------------------------------------------------------

SAMPLING_LIMITS: dict[str, dict[str, Any]] = {  # what one request may cost; values are checked by SamplingConfig
    "temperature": {"le": 100},
    "top_k": {"le": 1_000_000},
    "presence_penalty": {"ge": -10, "le": 10},
    "frequency_penalty": {"ge": -10, "le": 10},
    "repetition_penalty": {"le": 100},
    "no_repeat_ngram": {"le": 1000},
    "min_new_tokens": {"le": 1_000_000},
    "n": {"le": 128},
    "best_of": {"le": 128},
    "logprobs": {"le": 20},
    "seed": {"ge": -(2**63), "lt": 2**64},  # negative ones are answered as what they are modulo 2**64
    "stop": {},
    "stop_tokens": {"max_length": 1000},
    "logit_bias": {"max_length": 1000},
    "top_p": {},
    "min_p": {},
    "typical_p": {},
    "ignore_eos": {},
    "overflow": {},
    "token_healing": {},
}
BIAS = dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-1000, le=1000)]]
JSON_TYPES: dict[str, Any] = {
    "stop": ShortText | Annotated[list[ShortText], Field(max_length=16)],
    "stop_tokens": list[Annotated[int, Field(ge=0, lt=2**31)]],
    "logit_bias": BIAS,
}


def sampling_adapters() -> dict[str, TypeAdapter[Any]]:
    """A reader for each sampling field, from the types of SamplingConfig."""
    types = get_type_hints(SamplingConfig) | JSON_TYPES
    found: dict[str, TypeAdapter[Any]] = {}
    for name, limits in SAMPLING_LIMITS.items():
        limited: Any = Annotated[types[name], Field(**limits)] if limits else types[name]
        nullable: Any = limited | None
        found[name] = TypeAdapter(nullable, config=ConfigDict(allow_inf_nan=False))
    return found


ADAPTERS = sampling_adapters()


def read_sampling(given: Mapping[str, Any]) -> SamplingConfig:
    """The sampling fields of a request. What is missing or null has OpenAI's default: all tokens, temperature 1."""
    values: dict[str, Any] = {"top_k": None, "max_new_tokens": None}
    for name in given.keys() & ADAPTERS.keys():
        try:
            value = ADAPTERS[name].validate_python(given[name])
        except ValidationError as error:
            raise field_error(name, f"{name}: {error.errors()[0]['msg']}") from None
        if value is not None:
            values[name] = value
    if values.get("top_k") == 0:
        values["top_k"] = None
    if values.get("temperature", 1.0) < 1e-3 and values["temperature"] > 0:
        values["temperature"] = 0.0
    if "seed" in values:
        values["seed"] &= 0xFFFF_FFFF_FFFF_FFFF
    if "stop" in values:
        values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    values["stop_tokens"] = tuple(values.get("stop_tokens", ()))
    values["logit_bias"] = {int(token): bias for token, bias in values.get("logit_bias", {}).items()}
    try:
        return SamplingConfig(**values)
    except UserError as error:
        name = str(error).partition("=")[0].split()[0]
        raise field_error(name if name in ADAPTERS else "sampling", str(error)) from None


def sampling_schema(schema: dict[str, Any], request: type[Any]) -> None:
    """The sampling fields in the OpenAPI document."""
    known = request.names()
    schema["properties"] = {name: value for name, value in schema["properties"].items() if name in known}
    for each in fields(SamplingConfig):
        if each.name in ADAPTERS.keys() & known:
            described = {**ADAPTERS[each.name].json_schema(), "description": each.metadata["help"]}
            schema["properties"].setdefault(each.name, described)


class GenerationRequest(ApiRequest):
    """A request that generates text."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, json_schema_extra=sampling_schema)

    defaults: ClassVar[Mapping[str, Any]] = {}  # sampling fields whose default is not OpenAI's
    left_out: ClassVar[frozenset[str]] = frozenset()  # fields of other requests that would have no effect on this one

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)

    @classmethod
    def names(cls) -> set[str]:
        return (set(cls.model_fields) | ADAPTERS.keys()) - {"sampling"} - cls.left_out

    @model_validator(mode="before")
    @classmethod
    def with_sampling(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        own = {n: given for n, given in value.items() if n not in cls.model_fields and given is not None}
        return {**value, "sampling": read_sampling({**cls.defaults, **own})}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: ManyTexts | None = Field(
        default=None, description="text or token ids, one or many; unset samples from the start token"
    )
    max_tokens: int | None = Field(default=16, ge=0, le=1_000_000)
    echo: bool | None = False
    suffix: str | None = Field(default=None, description="refused: these models write forward only")
    user: ShortText | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "input_text", "output_text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[ContentPart], Field(max_length=256)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return "" if self.content is None else self.content


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
SHARED_WITHOUT_EFFECT = frozenset(
    (
        "metadata", "moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "tool_choice", "tools", "user",
    )
)  # fmt: skip


class ChatRequest(GenerationRequest):
    without_effect: ClassVar[frozenset[str]] = SHARED_WITHOUT_EFFECT | {
        "audio", "function_call", "functions", "modalities", "prediction", "reasoning_effort", "response_format",
        "verbosity", "web_search_options",
    }  # fmt: skip

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class ResponsesRequest(GenerationRequest):
    left_out: ClassVar[frozenset[str]] = frozenset(("n", "best_of", "logprobs"))
    without_effect: ClassVar[frozenset[str]] = SHARED_WITHOUT_EFFECT | {
        "access_programs", "context_management", "image", "include", "max_tool_calls", "reasoning", "text", "truncation"
    }  # fmt: skip

    input: Text | Messages
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    previous_response_id: Name | None = Field(default=None, description="refused: nothing is stored")
    conversation: Any = Field(default=None, description="refused: nothing is stored")
    background: bool | None = Field(default=None, description="refused when true: nothing is stored")
    prompt: Any = Field(default=None, description="refused: no prompts are stored")


class EmbeddingRequest(ApiRequest):
    input: ManyTexts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(default=None, ge=1, le=100_000)
    pool: Pool | None = Field(default=None, description="how hidden states become one vector; unset: as in Python")
    layers: int | Layers | None = Field(default=None, description="0: embeddings, -1: the last; unset: the last")
    user: ShortText | None = None


class TextRequest(ApiRequest):
    """A request about one text."""

    input: OneText = Field(description="a text, or token ids, which are taken as they are")


class ScoreRequest(TextRequest):
    prompt: OneText | None = Field(default=None, description="what stands before the text and is not scored")


class NextTokensRequest(TextRequest):
    k: int = Field(default=10, ge=1, le=1000)
    temperatures: bool = Field(default=False, description="also the log-sum of the others at 0.05, 0.10, ... 2.00")
    temperature: float | None = Field(default=None, ge=0, le=100, description="also how many tokens the filters keep")
    top_k: int | None = Field(default=None, ge=1, le=10_000_000)
    top_p: float | None = Field(default=None, gt=0, le=1)


class FillMaskRequest(TextRequest):
    k: int = Field(default=10, ge=1, le=1000)


class TokenizeRequest(TextRequest):
    merges: bool = Field(default=False, description="also how the merges build the first token, step by step")


class EditRequest(BaseModel):
    """One intervention: what is replaced, where, and by what."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    part: EditPart
    layer: int = Field(ge=0, le=10_000)
    head: int | None = Field(default=None, ge=0, le=10_000)
    positions: Annotated[list[int], Field(max_length=4096)] | None = Field(default=None, description="unset: all")
    value: Replacement = "zero"
    stack: Stack | None = None


class ExplainRequest(TextRequest):
    view: Literal[
        "heads", "attention", "steps", "layers", "walk", "labels", "kinds", "cause", "effects", "attribution"
    ] = "heads"
    pair: Text | None = Field(
        default=None, description="second text; context of a question; choices, one a line; or the target so far"
    )
    row: int = Field(default=0, ge=0, le=10_000, description="which of the rows that the task makes of the text")
    stack: Stack | None = Field(default=None, description="of an encoder-decoder")
    kind: AttentionKind = Field(default="attention", description="self-attention or cross-attention")
    layer: int = Field(
        default=0, ge=-1, le=10_000, description="walk: -1 is the embedding, the number of layers the end"
    )
    head: int = Field(default=0, ge=0, le=10_000)
    mix: Literal["head", "mean", "rollout"] = "head"
    query: int = Field(default=0, ge=0, le=1_000_000, description="the position of the query token")
    index: int | None = Field(
        default=None, ge=0, le=10_000_000, description="token or label explained; unset: the largest"
    )
    position: int | None = Field(default=None, ge=0, le=1_000_000, description="where it is explained; unset: the last")
    edits: Annotated[list[EditRequest], Field(max_length=64)] = []
    part: EditPart = "head"
    value: Replacement = "zero"
    other: Text | None = Field(default=None, description="the text that is patched from")
    method: Method = "integrated_gradients"
    start: int | None = Field(default=None, ge=0, le=1_000_000, description="first position shown; unset shows the end")
    size: int = Field(default=64, ge=1, le=128, description="how many positions are shown")


class ClassifyRequest(ApiRequest):
    input: PlainTexts
    pair: PlainTexts | None = Field(default=None, description="second texts, for models of pairs")


class TagRequest(ApiRequest):
    input: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=1000)]], Field(min_length=1, max_length=4096)
    ] = Field(description="the words of one sentence")


class PredictRequest(ApiRequest):
    input: Annotated[list[dict[Name, Text | int | float | list[Text] | None]], Field(min_length=1, max_length=256)] = (
        Field(description="rows with the fields of the model's task; others, such as a label, are ignored")
    )


class AnswerRequest(ApiRequest):
    input: Text = Field(description="the text that has the answer")
    question: Text


class ChooseRequest(ApiRequest):
    input: Text = Field(description="the context")
    choices: Annotated[list[Text], Field(min_length=2, max_length=64)]
    question: Text | None = None


class NextSentenceRequest(ApiRequest):
    input: Text = Field(description="the first sentence")
    pair: Text = Field(description="the sentence that may follow it")


class TranslateRequest(GenerationRequest):
    defaults: ClassVar[Mapping[str, Any]] = {"temperature": 0.0}
    left_out: ClassVar[frozenset[str]] = frozenset(("stream", "stream_options", "n", "best_of", "logprobs"))

    input: PlainTexts
    max_tokens: int | None = Field(default=None, ge=1, le=100_000)
    beams: int = Field(default=4, ge=1, le=16)
    length_penalty: float = Field(default=0.6, ge=0, le=10)
