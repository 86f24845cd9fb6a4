"""One object for a model folder: generate, stream, next_tokens, suggest, score, fill_mask, embed."""

# N texts, D model width

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from plume.config import EngineConfig, SamplingConfig, UserError
from plume.generate import looking, sampling
from plume.generate.continuation import Continuation, Generation, Guess, check_ids, fit_prompt, fresh_seed, healing
from plume.generate.engine import Engine
from plume.generate.looking import Candidate, Score, TokenScore
from plume.generate.opening import engine_for, open_engine
from plume.generate.options import SamplingOptions, with_options
from plume.generate.runner import Runner
from plume.generate.speculate import Draft, check_draft, look_up
from plume.text import Tokenizer, load_tokenizer
from plume.weights import load_model, read_config, resolve

if TYPE_CHECKING:
    from plume.explain import Explanation
    from plume.heads import Model
    from plume.train.predict import Answer, Choice, Label, Predictor, TaggedWord

Prompt = str | Sequence[int] | None  # text, token ids, or None for the start token

CALLS = {  # how a model with this head is asked
    "next-token": 'generate("...")',
    "masked-token": 'fill_mask("... [MASK] ...")',
    "pretraining": 'fill_mask("... [MASK] ...")',
    "classify": 'classify(["..."])',
    "similarity": 'similarity(["..."], ["..."])',
    "choose": 'choose("...", ["...", "..."])',
    "tag": 'tag(["..."])',
    "span": 'answer(question="...", context="...")',
    "bare": 'embed(["..."])',
}


def how_to_ask(head: str, place: str, *, two_stacks: bool = False) -> str:
    """Where a model answers, and with which words in Python. Choices and translations are not asked over HTTP."""
    call = 'translate("...")' if two_stacks else CALLS[head]
    served = "" if two_stacks or head == "choose" else f", or over HTTP: plume serve {shlex.quote(place)}"
    return f"ask it in Python: plume.load({place!r}).{call}{served}"


class LM:
    """A model, its tokenizer and an engine. Weights are read when they are first needed."""

    def __init__(
        self,
        folder: Path | None,
        tokenizer: Tokenizer,
        engine_config: EngineConfig,
        model: Model | None = None,
    ) -> None:
        assert (folder is None) != (model is None)
        self.folder, self.tokenizer, self.engine_config = folder, tokenizer, engine_config
        if model is not None:
            self.__dict__["model"] = model
            self.config, self.head, self.labels = model.config, model.kind, model.labels
        elif folder is not None:
            said = read_config(folder)
            self.config, self.head, self.labels = said.model, said.head, said.labels

    def __repr__(self) -> str:
        return f"LM({'in memory' if self.folder is None else str(self.folder)!r}, {self.head})"

    # -- the parts

    @cached_property
    def engine(self) -> Engine:
        if self.folder is None:
            return engine_for(self.model, self.engine_config)
        return open_engine(self.folder, self.engine_config)

    @cached_property
    def runner(self) -> Runner:
        return Runner(self.engine)

    @cached_property
    def model(self) -> Model:
        """The torch model; the CPU engine does without it."""
        assert self.folder is not None
        return load_model(self.folder)

    @cached_property
    def draft(self) -> Runner:
        """What writes ahead, with a slot for each text under way."""
        if self.engine_config.draft is None:
            raise UserError("speculate=draft needs a draft model; name its folder with draft=")
        engine = open_engine(self.engine_config.draft, replace(self.engine_config, draft=None))
        check_draft(self.engine, engine)
        return Runner(engine)

    def close(self) -> None:
        """Give back the engines' threads."""
        if "engine" in self.__dict__:
            self.__dict__.pop("engine").close()
        if "draft" in self.__dict__:
            self.__dict__.pop("draft").engine.close()
        self.__dict__.pop("runner", None)

    # -- writing

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids that a prompt stands for."""
        if prompt is None:
            start = self.tokenizer.end if self.tokenizer.start is None else self.tokenizer.start
            if start is None:
                raise UserError("this tokenizer has no start token, so a prompt is needed")
            return [start]
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty; leave it out for a sample from the start token")
            return self.tokenizer.encode(prompt)
        return [int(i) for i in prompt]

    def generate(
        self, prompt: Prompt = None, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Generation:
        """Continue a prompt. Takes a SamplingConfig, its fields by name, or both."""
        return self.generate_batch([prompt], with_options(config, options))[0]

    def generate_batch(self, prompts: Sequence[Prompt], config: SamplingConfig | None = None) -> list[Generation]:
        """Continue many prompts together; each gets what it would get alone."""
        config = SamplingConfig() if config is None else config
        if config.beams > 1:
            from plume.generate.beam import beam_search

            return [beam_search(self, self.encode(prompt), config) for prompt in prompts]
        groups = [self.start(prompt, config) for prompt in prompts]
        for _ in self.runner.run([c for group in groups for c in group]):
            pass
        return [best_of([c.result() for c in group], config) for group in groups]

    def start(self, prompt: Prompt, config: SamplingConfig) -> list[Continuation]:
        """The continuations of one prompt, to be given to a runner."""
        self._check_writes()
        tokens, seed = self.encode(prompt), fresh_seed(config)
        return [self._continuation(tokens, config, seed, sample) for sample in range(config.sequences)]

    def _continuation(self, tokens: list[int], config: SamplingConfig, seed: int, sample: int) -> Continuation:
        continuation = Continuation(
            tokens,
            config,
            tokenizer=self.tokenizer,
            context=self.engine.capacity,
            vocab_size=self.config.vocab_size,
            seed=seed,
            sample=sample,
        )
        continuation.guess = self._guess(config, continuation)
        return continuation

    def _guess(self, config: SamplingConfig, continuation: Continuation) -> Guess | None:
        if config.speculate == "draft":
            prompt_length, sample = continuation.prompt_length, continuation.sample
            return Draft(self.draft, config, seed=continuation.seed, sample=sample, prompt_length=prompt_length)
        return look_up if config.speculate == "lookup" else None

    def stream(
        self, prompt: Prompt = None, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Iterator[str]:
        """The same as generate, piece by piece, never with a part of a character."""
        settings = with_options(config, options)
        if settings.n != 1 or settings.beams != 1 or settings.best_of is not None:
            raise UserError("only a single sample can be streamed; leave n, best_of and beams out")
        (continuation,) = self.start(prompt, settings)
        return self._pieces(continuation)

    def _pieces(self, continuation: Continuation) -> Iterator[str]:
        for _ in self.runner.run([continuation]):
            if piece := continuation.news():
                yield piece
        if piece := continuation.news():  # another stream's step has ended it
            yield piece

    def _check_writes(self) -> None:
        place = "MODEL" if self.folder is None else str(self.folder)
        if self.head != "next-token":
            raise UserError(
                f"this model has a {self.head} head and does not write text; {how_to_ask(self.head, place)}"
            )
        if self.config.decoder_layers:
            raise UserError(f"this model answers to a source text; {how_to_ask(self.head, place, two_stacks=True)}")

    def translate(
        self, source: str, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Generation:
        """What an encoder-decoder answers to a source text, by beam search (or greedily with beams=1)."""
        from plume.data.pairs import decoder_start
        from plume.generate.beam import beam_search
        from plume.train.translate import closing

        if not self.config.decoder_layers:
            raise UserError("only an encoder-decoder translates; use generate")
        usual = SamplingConfig(beams=4, length_penalty=0.6) if config is None else config
        settings = with_options(usual, options)
        ids = [*self.encode(source)[: self.config.context - 1], closing(self.tokenizer)]  # as in training
        return beam_search(self, [decoder_start(self.tokenizer)], settings, source=ids)

    # -- looking

    def next_tokens(self, prompt: Prompt = None, k: int = 10) -> list[Candidate]:
        """The k likeliest next tokens with their probabilities."""
        if k < 1:
            raise UserError(f"k={k} must be at least 1, for example 10")
        self._check_writes()
        tokens = self._fitting(self.encode(prompt))
        return looking.likeliest(self.tokenizer, self.runner.look(tokens)[-1], k)

    def _fitting(self, tokens: list[int]) -> list[int]:
        return fit_prompt(tokens, SamplingConfig(), self.engine.capacity + 1, self.config.vocab_size)

    def text_of(self, id: int) -> str:
        return looking.text_of(self.tokenizer, id)

    def suggest(self, text: str, n: int = 3) -> list[str]:
        """Whole words that may come next, or complete the last one, as a keyboard suggests them."""
        if n < 1:
            raise UserError(f"n={n} must be at least 1, for example 3")
        self._check_writes()
        config = SamplingConfig(temperature=0, max_new_tokens=8, heal=not text.endswith((" ", "\n")), n=1)
        first = self._continuation(self.encode(text), config, seed=0, sample=0)
        if first.owed:
            allowed = np.array(healing(self.tokenizer).starting_with(first.owed))
        else:
            allowed = np.arange(min(self.tokenizer.vocab_size, self.config.vocab_size))
        logits = self.runner.look(first.tokens)[-1]
        best = allowed[sampling.largest(logits[allowed], min(4 * n, len(allowed)))]
        words = list[str]()
        for token in best:
            word = self._finish_word(first.tokens, int(token), first.owed)
            if word.strip() and word not in words:
                words.append(word)
            if len(words) == n:
                break
        return words

    def _finish_word(self, tokens: list[int], token: int, owed: bytes) -> str:
        """The token and what most likely follows until a new word begins."""
        word = [token]
        while len(word) < 8 and len(tokens) + len(word) < self.engine.capacity:
            logits = self.runner.look([*tokens, *word])[-1][: self.tokenizer.vocab_size]
            following = int(np.argmax(logits))
            opens = bool(self.tokenizer.word_starts([word[-1], following])[1])
            if opens or not self.text_of(following).strip(" \n\t.,;:!?\"'()"):
                break
            word.append(following)
        spelled = self.tokenizer.decode_bytes(word)
        return spelled[len(owed) :].decode(errors="replace") if spelled.startswith(owed) else ""

    def score(self, text: str | Sequence[int], *, stride: int | None = None) -> Score:
        """Log-probability, rank and entropy of each token. Long texts are read in windows that overlap."""
        self._check_writes()
        tokens = self.encode(text)
        if not tokens:
            raise UserError("there is no text to score")
        check_ids(tokens, self.config.vocab_size)
        start = self.tokenizer.end if self.tokenizer.start is None else self.tokenizer.start
        window = [start, *tokens] if start is not None else tokens
        if len(window) < 2:
            raise UserError("one token alone cannot be scored: this tokenizer has no start token")
        context = self.engine.capacity
        stride = context // 2 if stride is None else stride
        if not 1 <= stride < context:
            raise UserError(f"stride={stride} must lie between 1 and {context - 1}, for example {context // 2}")
        scores, done = list[TokenScore](), 1
        while done < len(window):
            begin = 0 if done < context else done - (context - stride)
            part = window[begin : begin + context]
            scores += looking.score_window(self.tokenizer, self.runner.look, part, done - begin)
            done = begin + len(part)
        return Score(tuple(scores))

    def explain(self, text: str | Sequence[int]) -> Explanation:
        """What happens inside on this text: attention, the numbers of each head, the lens, surprise."""
        explaining = import_module("plume.explain")  # a later room, which builds on this one
        explained: Explanation = explaining.explain_text(self.model, self.tokenizer, self.encode(text))
        return explained

    # -- encoders

    def fill_mask(self, text: str, k: int = 5) -> list[list[Candidate]]:
        """For each mask in the text, the k likeliest tokens there."""
        return looking.fill_mask(self.model, self.tokenizer, text, k)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pool: Literal["mean", "summary"] = "mean",
        batch: int = 16,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One vector per text (or its ids): the mean of the last hidden states, or the family's own summary. (N, D)"""
        return looking.embed(self.model, self.tokenizer, texts, pool=pool, batch=batch)

    # -- fine-tuned heads

    @cached_property
    def predictor(self) -> Predictor:
        """What answers with the head that fine-tuning put on this model."""
        from plume.train.predict import Predictor

        return Predictor(self.model, self.tokenizer, self.folder)

    def classify(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Label] | list[float]:
        """A label for each text, or for each text with its pair; a number where the model was trained on numbers."""
        return self.predictor.classify(texts, pairs)

    def similarity(self, first: Sequence[str], second: Sequence[str]) -> list[Label] | list[float]:
        """How alike two texts are, pair by pair: as it was fine-tuned, or else the cosine of their vectors."""
        if self.head in ("classify", "similarity"):
            return self.predictor.classify(first, second)
        if len(first) != len(second):
            raise UserError(f"{len(first)} texts and {len(second)} others; each needs one")
        a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (self.embed(first), self.embed(second)))
        return [float(cosine) for cosine in (a * b).sum(axis=1)]

    def choose(self, context: str, choices: Sequence[str], *, question: str | None = None) -> Choice:
        """Which candidate goes on a context, or answers a question about it."""
        return self.predictor.choose(context, choices, question)

    def tag(self, sentences: Sequence[str | Sequence[str]]) -> list[list[TaggedWord]]:
        """A tag for every word of every sentence."""
        return self.predictor.tag(sentences)

    def answer(self, *, question: str, context: str) -> Answer:
        """The stretch of the context that answers the question."""
        return self.predictor.answer(question, context)


def best_of(results: Sequence[Generation], config: SamplingConfig) -> Generation:
    """The first of the n to be returned, carrying all of them."""
    if config.best_of is not None:
        results = sorted(results, key=lambda r: -r.mean_logprob)[: config.n]
    return results[0] if len(results) == 1 else replace(results[0], samples=tuple(results))


def load(
    name: str | Path,
    *,
    engine: Literal["auto", "cpu", "torch"] = "auto",
    precision: Literal["float32", "int8", "bfloat16", "float16"] = "float32",
    device: str = "auto",
    threads: int | None = None,
    slots: int = 8,
    compile: bool = False,
    draft: str | Path | None = None,
) -> LM:
    """Open a model folder, a run folder or a hub name."""
    folder = resolve(name)
    settings = EngineConfig(
        engine=engine,
        precision=precision,
        device=device,
        threads=threads,
        slots=slots,
        compile=compile,
        draft=None if draft is None else Path(draft),
    )
    return LM(folder, load_tokenizer(folder), settings)
