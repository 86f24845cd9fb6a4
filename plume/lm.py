"""LM, what `plume.load` returns: one object for a model, its tokenizer and an engine, for any number of threads."""

# N texts, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import numpy as np

from plume.config import CachePrecision, EngineConfig, EngineKind, EnginePrecision, SamplingConfig, UserError
from plume.config.fields import refuse
from plume.config.recipes import wrong_choices
from plume.hf import folder_info, load_tokenizer_of, read_config, read_embedding, resolve, save_model
from plume.inference import outputs, scoring, sequences
from plume.inference.batcher import Batcher
from plume.inference.beam import beam_search
from plume.inference.engine import Engine
from plume.inference.engine_factory import EngineHandle
from plume.inference.outputs import CandidateList, Pool
from plume.inference.sampler import SamplingOptions, with_options
from plume.inference.scoring import EngineScorer, TextScore
from plume.inference.sequences import Generation, SequenceState, check_ids, check_prompt, token_ids
from plume.inference.speculation import guesser
from plume.text import Tokenizer

if TYPE_CHECKING:
    from plume.explain import Explanation
    from plume.model.heads import Model
    from plume.tasks import Predictor
    from plume.tasks.choose import Choice
    from plume.tasks.classify import Label
    from plume.tasks.generate import GenerateTask
    from plume.tasks.schema import Prediction
    from plume.tasks.span import Answer
    from plume.tasks.tag import TaggedWord

Prompt = str | Sequence[int] | None  # text, token ids, or None for the start token
Prompts = list[str] | list[list[int]] | list[str | None] | tuple[str, ...]
Texts = list[str] | tuple[str, ...]
Result = TypeVar("Result")


def is_batch(value: Any) -> bool:
    """Whether a list, array or column holds texts, any number of them; a list of token ids is one text."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return False
    first = next(iter(value), None)
    return isinstance(first, str) or not (isinstance(first, int) or getattr(first, "ndim", None) == 0)


def for_each(value: Any, one: Callable[[Any], Result]) -> Any:
    """One result for one text, a list of results for a list of texts."""
    return [one(each) for each in value] if is_batch(value) else one(value)


class LM:
    """A model, its tokenizer and an engine. Weights are read when they are first needed.

    Every method may be called from several threads at once. What takes one text also takes a list of texts and then
    returns a list; `stream`, and what takes two texts of different roles (next_sentence, choose, answer), takes one.
    """

    def __init__(
        self, folder: Path | None, tokenizer: Tokenizer, engine_config: EngineConfig, model: Model | None = None
    ) -> None:
        self.folder, self.tokenizer, self.engine_config = folder, tokenizer, engine_config
        self._handle = EngineHandle(folder, engine_config, model)
        if model is not None:
            self.config, self.head, self.labels = model.config, model.kind, model.labels
        elif folder is not None:
            found = read_config(folder)
            self.config, self.head, self.labels = found.model, found.head, found.labels

    def __repr__(self) -> str:
        return f"LM({'in memory' if self.folder is None else str(self.folder)!r}, {self.head})"

    # -- the parts

    @property
    def engine(self) -> Engine:
        return self.batcher.engine

    @property
    def batcher(self) -> Batcher:
        return self._handle.batcher

    @batcher.setter
    def batcher(self, batcher: Batcher) -> None:
        self._handle.batcher = batcher

    @property
    def draft(self) -> Batcher:
        """The smaller model of speculate=draft."""
        return self._handle.draft

    @property
    def model(self) -> Model:
        """The torch model. After training it, every method uses the trained weights."""
        return self._handle.model

    @property
    def inference_model(self) -> Model:
        """The torch model for predictions: hidden states of encoders come from the CPU engine where it is used."""
        return self._handle.inference_model

    @property
    def encoder_name(self) -> str:
        """What computes the hidden states of a model that does not continue text."""
        return f"CPU engine, {self.engine_config.precision} weights" if self._handle.encodes else "torch"

    def pause_with(self, pause: Callable[[], None]) -> None:
        """Let an encoder call this before each part of its work."""
        self._handle.pause = pause

    def save(self, folder: str | Path) -> Path:
        """Write the model, with the weights it has now, and its tokenizer as a Hugging Face model folder."""
        info = folder_info(self.folder)
        return save_model(self.model, folder, tokenizer=self.tokenizer, info=info, settings_of=self.folder)

    def close(self) -> None:
        """Free the engine's threads and memory."""
        self._handle.close()

    # -- generating

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt."""
        if prompt is None:
            start = scoring.start_tokens(self.tokenizer)
            if not start:
                raise UserError("this tokenizer has no start token, so a prompt is needed")
            return list(start)
        if isinstance(prompt, str) and not prompt:
            raise UserError(sequences.EMPTY_PROMPT)
        return token_ids(self.tokenizer, prompt)

    @overload
    def generate(
        self, prompt: Prompt = None, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompt: Prompts, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> list[Generation]: ...
    def generate(
        self, prompt: Any = None, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Generation | list[Generation]:
        """Continue a prompt, or a list of prompts. Takes a SamplingConfig, its fields by name, or both."""
        if is_batch(prompt):
            return self.generate_batch(prompt, config, **options)
        return self.generate_batch([prompt], config, **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> list[Generation]:
        """Continue many prompts together; each gets what it would get alone."""
        settings = with_options(config, options)
        if settings.beams > 1:
            self._check_generates()
            return [beam_search(self.batcher, self.tokenizer, self.encode(p), settings) for p in prompts]
        groups = [self.start(prompt, settings) for prompt in prompts]
        for _ in self.batcher.run([sequence for group in groups for sequence in group]):
            pass
        return [best_of([sequence.result() for sequence in group], settings) for group in groups]

    def start(self, prompt: Prompt, config: SamplingConfig) -> list[SequenceState]:
        """The sequences of one prompt, for a batcher."""
        self._check_generates()
        tokens, seed = self.encode(prompt), sequences.fresh_seed(config)
        return [self._sequence(tokens, config, seed, sample) for sample in range(config.sequences)]

    def _sequence(self, tokens: list[int], config: SamplingConfig, seed: int, sample: int) -> SequenceState:
        sequence = SequenceState(
            tokens,
            config,
            tokenizer=self.tokenizer,
            context=self.engine.capacity,
            vocab_size=self.config.vocab_size,
            seed=seed,
            sample=sample,
        )
        sequence.guess = guesser(config, lambda: self.draft, seed, sample, sequence.prompt_length)
        return sequence

    def stream(
        self, prompt: Prompt = None, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Iterator[str]:
        """The same as generate, piece by piece, never with a part of a character."""
        settings = with_options(config, options)
        if is_batch(prompt) or settings.n != 1 or settings.beams != 1 or settings.best_of is not None:
            raise UserError("only a single sample of one prompt can be streamed; leave n, best_of and beams out")
        return self._pieces(*self.start(prompt, settings))

    def _pieces(self, sequence: SequenceState) -> Iterator[str]:
        for _ in self.batcher.run([sequence]):
            if piece := sequence.news():
                yield piece
        if piece := sequence.news():  # another thread's step has finished it
            yield piece

    def _check_generates(self) -> None:
        encoder_decoder = self.config.decoder_layers > 0
        if self.head == "next-token" and not encoder_decoder:
            return
        from plume.tasks import how_to_ask, saved_kind  # and with it torch

        place = "MODEL" if self.folder is None else str(self.folder)
        use = how_to_ask(self.head, place, encoder_decoder=encoder_decoder, task=saved_kind(self.folder))
        what = "is an encoder-decoder" if encoder_decoder else f"has a {self.head} head and does not write text"
        raise UserError(f"this model {what}; {use}")

    @overload
    def translate(
        self, source: str, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Generation: ...
    @overload
    def translate(
        self, source: list[str], config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> list[Generation]: ...
    def translate(
        self, source: Any, config: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Generation | list[Generation]:
        """What an encoder-decoder, or a GPT that was fine-tuned to generate, writes for a source text.

        By beam search, or greedily with beams=1.
        """
        from plume.tasks.generate import translate

        likeliest = SamplingConfig(beams=4, length_penalty=0.6, temperature=0.0)
        settings = with_options(likeliest if config is None else config, options)
        if self.prompts is not None:
            return self.generate(for_each(source, self.prompts.prompt), settings)
        if not self.config.decoder_layers:
            raise UserError("only an encoder-decoder or a GPT fine-tuned to generate translates; use generate")
        found: Any = for_each(source, lambda text: translate(self.batcher, self.tokenizer, text, settings))
        return found

    @cached_property
    def prompts(self) -> GenerateTask | None:
        """What makes prompts of source texts, for a GPT that was fine-tuned to generate."""
        from plume.tasks import saved_settings
        from plume.tasks.generate import GenerateTask

        settings = saved_settings(self.folder)
        if self.config.decoder_layers or settings is None or settings.kind != GenerateTask.name:
            return None
        return GenerateTask(settings, self.tokenizer, causal=True)

    # -- predictions and likelihoods

    @overload
    def next_tokens(self, prompt: Prompt = None, k: int = 10) -> CandidateList: ...
    @overload
    def next_tokens(self, prompt: Prompts, k: int = 10) -> list[CandidateList]: ...
    def next_tokens(self, prompt: Any = None, k: int = 10) -> CandidateList | list[CandidateList]:
        """The k likeliest next tokens with their probabilities."""
        if k < 1:
            raise UserError(f"k={k} must be at least 1, for example 10")
        self._check_generates()

        def one(text: Prompt) -> CandidateList:
            batcher, tokens = self.batcher, self.encode(text)
            check_prompt(tokens, self.config.vocab_size, batcher.engine.capacity)
            return outputs.likeliest(self.tokenizer, batcher.logits_for(tokens)[-1], k)

        found: CandidateList | list[CandidateList] = for_each(prompt, one)
        return found

    @overload
    def suggest(self, text: str, n: int = 3) -> list[str]: ...
    @overload
    def suggest(self, text: Texts, n: int = 3) -> list[list[str]]: ...
    def suggest(self, text: Any, n: int = 3) -> list[str] | list[list[str]]:
        """Whole words that may come next, or complete the last one, as a keyboard suggests them."""
        if n < 1:
            raise UserError(f"n={n} must be at least 1, for example 3")
        self._check_generates()

        def one(each: Any) -> list[str]:
            if not isinstance(each, str):
                raise UserError(f"expected a text, not {each!r}")
            begun = each[-1:].isalnum() or each.endswith(" ")  # most tokens of words begin with their space
            config = SamplingConfig(temperature=0, max_new_tokens=8, token_healing=begun)
            sequence = self._sequence(self.encode(each), config, seed=0, sample=0)
            return outputs.suggest(self.batcher, self.tokenizer, sequence, n)

        found: list[str] | list[list[str]] = for_each(text, one)
        return found

    @overload
    def score(
        self, text: str | Sequence[int], *, given: str | Sequence[int] | None = None, stride: int | None = None
    ) -> TextScore: ...
    @overload
    def score(
        self, text: Prompts, *, given: str | Sequence[int] | None = None, stride: int | None = None
    ) -> list[TextScore]: ...
    def score(
        self, text: Any, *, given: str | Sequence[int] | None = None, stride: int | None = None
    ) -> TextScore | list[TextScore]:
        """Log-probability, rank and entropy of each token of a text, after what is `given`.

        A long text is read in windows that overlap; `stride` is how far each moves, half of the context unless set.
        A masked model predicts each token from all others.
        """
        stride = max(1, self.config.context // 2) if stride is None else stride
        scorer = self.scorer()

        def one(each: str | Sequence[int]) -> TextScore:
            before, tokens = self._split(each, given)
            if not tokens:
                raise UserError("the text is empty, so there is nothing to score")
            check_ids([*before, *tokens], min(self.config.vocab_size, self.tokenizer.vocab_size))
            return scoring.score_text(scorer, tokens, given=before, stride=stride)

        found: TextScore | list[TextScore] = for_each(text, one)
        return found

    def scorer(self) -> scoring.Scorer:
        """What scores tokens with this model: its CPU engine for a GPT, the model itself otherwise."""
        if self.head == "next-token" and not self.config.decoder_layers:
            return EngineScorer(self.batcher.logits_for, self.tokenizer, self.batcher.engine.capacity)
        return scoring.scorer_for(self.inference_model, self.tokenizer, details=True)

    def _split(
        self, text: str | Sequence[int], given: str | Sequence[int] | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Ids before and of a text; two texts are tokenized jointly, as `plume evaluate` does."""
        if isinstance(text, str) and isinstance(given, str):
            return scoring.pair(given, text, self.tokenizer, "joint")
        return [] if given is None else token_ids(self.tokenizer, given), token_ids(self.tokenizer, text)

    @overload
    def explain(self, text: str | Sequence[int], pair: str | None = None, *, row: int = 0) -> Explanation: ...
    @overload
    def explain(self, text: Prompts, pair: str | None = None, *, row: int = 0) -> list[Explanation]: ...
    def explain(self, text: Any, pair: str | None = None, *, row: int = 0) -> Explanation | list[Explanation]:
        """What happens inside the model on the tokens that its task makes of a text (and a second one)."""
        from plume.tasks.explained_rows import explain_text

        model = self.model
        found: Explanation | list[Explanation] = for_each(
            text, lambda one: explain_text(model, self.tokenizer, self.folder, one, pair, row)
        )
        return found

    def explore(self) -> Any:
        """The Explorer of this model: a notebook shows it in the cell; `close()` ends its server."""
        import plume

        if self.folder is None:
            raise UserError("a model in memory is explored from a folder: plume.load(lm.save(folder)).explore()")
        return plume._cell_page(self.folder)

    # -- encoders

    @overload
    def fill_mask(self, text: str | Sequence[int], k: int = 5) -> list[CandidateList]: ...
    @overload
    def fill_mask(self, text: Prompts, k: int = 5) -> list[list[CandidateList]]: ...
    def fill_mask(self, text: Any, k: int = 5) -> list[CandidateList] | list[list[CandidateList]]:
        """For each mask in the text, the k likeliest tokens there."""
        model = self.inference_model
        found: list[CandidateList] | list[list[CandidateList]] = for_each(
            text, lambda one: outputs.fill_mask(model, self.tokenizer, one, k)
        )
        return found

    def next_sentence(self, first: str | Sequence[int], second: str | Sequence[int]) -> float:
        """The probability that the second text follows the first, of a model that was pretrained on such pairs."""
        return outputs.next_sentence(self.inference_model, self.tokenizer, first, second)[0]

    def embed(
        self,
        texts: str | Sequence[Any],
        *,
        pool: Pool | None = None,
        layers: int | Sequence[int] | None = None,
        batch: int = 16,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A vector for a text, (D,), or for each of a list of texts, (N, D).

        `pool`: mean, cls, max, or the family's own summary; unset: as modules.json says (sentence-transformers), else
        the mean. `layers` counts from 0, the embeddings; unset: the last; vectors of several are concatenated.
        """
        many: Any = list(texts) if (several := is_batch(texts)) else [texts]
        settings = None if self.folder is None else read_embedding(self.folder)
        model = self.inference_model if layers is None else self.model
        found = outputs.embed(model, self.tokenizer, many, pool=pool, batch=batch, layers=layers, settings=settings)
        return found if several else found[0]

    # -- fine-tuned heads

    @cached_property
    def predictor(self) -> Predictor:
        """What answers with the head that fine-tuning put on this model."""
        from plume.tasks import Predictor

        return Predictor(self.inference_model, self.tokenizer, self.folder)

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> list[Prediction]:
        """The prediction for each row of fields, for whatever kind of task the model was fine-tuned."""
        return self.predictor.predict(rows)

    def evaluate(self, path: str | Path) -> dict[str, float]:
        """The metrics of a fine-tuned model over a labelled file of its task."""
        return self.predictor.evaluate(path)

    @overload
    def classify(self, texts: str, pairs: str | None = None) -> Label | float: ...
    @overload
    def classify(self, texts: Texts, pairs: Texts | None = None) -> list[Label] | list[float]: ...
    def classify(self, texts: Any, pairs: Any = None) -> Any:
        """A label for a text, or for a text with its pair; a number where the model was trained on numbers."""
        if isinstance(texts, str):
            return self.predictor.classify([texts], None if pairs is None else [pairs])[0]
        return self.predictor.classify(texts, pairs)

    @overload
    def similarity(self, first: str, second: str) -> Label | float: ...
    @overload
    def similarity(self, first: Texts, second: Texts) -> list[Label] | list[float]: ...
    def similarity(self, first: Any, second: Any) -> Any:
        """How similar two texts are: as it was fine-tuned, or else the cosine of their vectors."""
        if isinstance(first, str):
            return self.similarity([first], [second])[0]
        if self.head in ("classify", "similarity"):
            return self.predictor.classify(first, second)
        if len(first) != len(second):
            raise UserError(f"{len(first)} texts and {len(second)} others; each needs one")
        a, b = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (self.embed(first), self.embed(second)))
        return [float(cosine) for cosine in (a * b).sum(axis=1)]

    def choose(self, context: str, choices: Sequence[str], *, question: str | None = None) -> Choice:
        """Which candidate continues a context, or answers a question about it."""
        return self.predictor.choose(context, choices, question)

    @overload
    def tag(self, sentences: str) -> list[TaggedWord]: ...
    @overload
    def tag(self, sentences: list[str] | list[list[str]]) -> list[list[TaggedWord]]: ...
    def tag(self, sentences: Any) -> list[TaggedWord] | list[list[TaggedWord]]:
        """A tag for every word of a sentence."""
        return self.predictor.tag([sentences])[0] if isinstance(sentences, str) else self.predictor.tag(sentences)

    def answer(self, *, question: str, context: str) -> Answer:
        """The part of the context that answers the question."""
        return self.predictor.answer(question, context)


def best_of(results: Sequence[Generation], config: SamplingConfig) -> Generation:
    """The first of the n to be returned, carrying all of them."""
    if config.best_of is not None:
        results = sorted(results, key=lambda r: -r.mean_logprob)[: config.n]
    return results[0] if len(results) == 1 else replace(results[0], samples=tuple(results))


def load(
    name: str | Path,
    *,
    engine: EngineKind = "auto",
    precision: EnginePrecision = "float32",
    device: str = "auto",
    threads: int | None = None,
    slots: int = 8,
    cache_precision: CachePrecision = "float32",
    compile: bool = False,
    draft: str | Path | None = None,
) -> LM:
    """Open a model folder, a run folder or a hub name."""
    place = None if draft is None else Path(draft)
    settings = EngineConfig(
        engine=engine,
        precision=precision,
        device=device,
        threads=threads,
        slots=slots,
        cache_precision=cache_precision,
        compile=compile,
        draft=place,
    )
    return open_lm(name, settings)


def open_lm(name: str | Path, engine: EngineConfig) -> LM:
    """The same with an engine's config."""
    refuse(wrong_choices(engine))
    folder = resolve(name)
    return LM(folder, load_tokenizer_of(folder), engine)
