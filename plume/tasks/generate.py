"""A text for a text: translation, summaries, instructions and chat, with an encoder-decoder or a GPT."""

# B pairs, T tokens of a target, S tokens of a source, D model width

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from plume.config import EngineConfig, SamplingConfig, TaskConfig, UserError
from plume.data.batches import IGNORE, Batch, decoder_start, padded
from plume.data.tables import TABLES, Row, Tally, suffix_of
from plume.inference.batcher import Batcher
from plume.inference.beam import beam_search
from plume.inference.engine_factory import engine_for
from plume.inference.sequences import Generation, SequenceState, token_ids
from plume.model.heads import Model
from plume.model.loss import TensorBatch, token_features, token_loss
from plume.model.ragged import LengthGroups
from plume.model.transformer import Transformer
from plume.tasks import metrics
from plume.tasks.baselines import Baseline, each
from plume.tasks.readers import LocatedRow, aligned_rows, table_rows
from plume.tasks.schema import Columns, Example, Prediction, TaskSettings, is_missing, text_value
from plume.tasks.task_kind import RowReader, TaskKind, TaskOptions
from plume.tasks.token_rows import GPT1_TOKENS, Numbers, Truncation, shares
from plume.text import Tokenizer
from plume.util.console import plural

SOURCE, ANSWER, DELIMITER = "{source}", "assistant:", GPT1_TOKENS["delimiter"]
SLOTS = 16  # texts that a GPT writes at a time
LONGER = 50  # tokens that an output may have more than its source, as in the Transformer's paper


class PairRows:
    """Every pair of a set, tokenised; both sides close with the end token, and longer ones are truncated before it."""

    mixed = False

    def __init__(
        self, examples: Sequence[Example], tokenizer: Tokenizer, *, length: int, truncation: Truncation
    ) -> None:
        end = end_token(tokenizer)
        self.start = decoder_start(tokenizer)
        self.truncation = truncation
        self.sources = self._closed(tokenizer, [e.fields["source"] for e in examples], end, length)
        self.targets = self._closed(tokenizer, [e.label or "" for e in examples], end, length)
        self._measure()

    def _measure(self) -> None:
        sizes = [len(a) + len(b) for a, b in zip(self.sources, self.targets, strict=True)]
        self.lengths = np.array(sizes, dtype=np.int64)
        self.firsts = np.arange(len(sizes) + 1)
        self.real_tokens = int(self.lengths.sum())

    def _closed(self, tokenizer: Tokenizer, texts: Sequence[str], end: int, length: int) -> list[list[int]]:
        rows = []
        for ids in tokenizer.encode_batch(texts):
            self.truncation.add(len(ids), length - 1)
            rows.append([*(int(i) for i in ids[: length - 1]), end])
        return rows

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, numbers: Numbers) -> TensorBatch:
        sources, targets = ([side[i] for i in numbers] for side in (self.sources, self.targets))
        lengths, source_lengths = (np.array([len(row) for row in side]) for side in (targets, sources))
        width = int(lengths.max())
        return TensorBatch.of(
            Batch(
                tokens=padded([[self.start, *row[:-1]] for row in targets], width, 0),
                targets=padded(targets, width, IGNORE),
                lengths=lengths,
                source=padded(sources, int(source_lengths.max()), 0),
                source_lengths=source_lengths,
            )
        )

    def part(self, numbers: Numbers, first: int, rows: int, *, step: int = 0, group: int | None = None) -> TensorBatch:
        return self.batch(numbers[first : first + rows])

    def sweep(self, size: int) -> Iterator[TensorBatch]:
        order = np.argsort(self.lengths, kind="stable")
        for first in range(0, len(order), size):
            yield self.batch(order[first : first + size])


class PromptedRows(PairRows):
    """Pairs in one sequence, as a decoder reads them: prompt, target, end token; the prompt is no target."""

    def __init__(self, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        self.sources, self.targets = ([list(row) for row in side] for side in (prompts, targets))
        self._measure()

    def batch(self, numbers: Numbers) -> TensorBatch:
        pairs = [(self.sources[i], self.targets[i]) for i in numbers]
        rows = [[*prompt, *target[:-1]] for prompt, target in pairs]
        answers = [[*[IGNORE] * (len(prompt) - 1), *target] for prompt, target in pairs]
        lengths = np.array([len(row) for row in rows])
        width = int(lengths.max())
        return TensorBatch.of(
            Batch(tokens=padded(rows, width, 0), targets=padded(answers, width, IGNORE), lengths=lengths)
        )


def end_token(tokenizer: Tokenizer) -> int:
    end = tokenizer.separator if tokenizer.end is None else tokenizer.end
    if end is None:
        raise UserError("a generate task needs a tokenizer with an end token, so that an output can end")
    return end


def with_end_token(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with GPT-1's delimiter as its end token where it has none."""
    if tokenizer.end is not None or tokenizer.separator is not None:
        return tokenizer
    grown = tokenizer.with_specials([DELIMITER])
    d = grown.definition
    return Tokenizer(replace(d, roles={**d.roles, "end": grown.special_ids[DELIMITER]}))


class GenerateTask(TaskKind):
    """A text for a text. Beam search takes long, so the loss selects the checkpoint; texts are measured at the end.

    A GPT reads the source, the end token as delimiter, and the target. A template such as `Q: {source} A:` replaces the
    delimiter, and the target follows after a space.
    """

    name = "generate"
    head = "next-token"
    call = 'translate("...")'
    fields = ("source",)
    uses = ("label_smoothing", "beams", "template")
    label_field = "target"
    encoder_decoder = True
    decoder_only = True
    allows_auxiliary = False
    selects_by_metric = False
    overflow = "truncated at their end"

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal, options=options)
        self.truncation = Truncation()
        if settings.template and (len(settings.template) > 1 or SOURCE not in settings.template[0]):
            raise UserError(f"the template of a generate task is one line with {SOURCE} in it")
        if causal and settings.template and 2 * (behind := len(self.closing())) >= settings.length:
            raise UserError(
                f"the template ends in {plural(behind, 'token')} behind {SOURCE}, which task.length={settings.length} "
                "leaves no room for beside a source and a target; shorten them, or take a longer task.length"
            )

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return table.has("source", "target")

    @classmethod
    def reader(cls, path: Path, config: TaskConfig, skipped: Tally) -> RowReader | None:
        if config.targets is not None:
            return lambda path, targets: aligned_rows(path, targets, config.encoding)
        if config.columns or config.kind not in (None, cls.name):
            return None
        first = next(table_rows(path, config, Tally()), None) if suffix_of(path) in TABLES else None
        if first is None or not ("messages" in first[1] or {"instruction", "output"} <= first[1].keys()):
            return None
        return lambda path, targets: chat_rows(table_rows(path, config, skipped), config, skipped)

    @classmethod
    def settings_for(cls, settings: TaskSettings, examples: Sequence[Example]) -> TaskSettings:
        """Sources that are chats end with the words before an answer, so nothing else is put there."""
        chat = all(e.fields["source"].endswith(ANSWER) for e in examples)
        return replace(settings, template=(SOURCE,)) if chat and not settings.template else settings

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> str:
        return text_value(value, column)

    def encode(self, examples: Sequence[Example]) -> PairRows:
        if not self.causal:
            return PairRows(examples, self.tokenizer, length=self.settings.length, truncation=self.truncation)
        template = self.settings.template[0] if self.settings.template else SOURCE
        closing, limit = self.closing(), self.settings.length
        space = " " if self.settings.template and not template[-1:].isspace() else ""
        prompts = self.tokenizer.encode_batch([template.replace(SOURCE, e.fields["source"]) for e in examples])
        targets = self.tokenizer.encode_batch([space + str(e.label or "") for e in examples])
        kept, answers = [], []
        for whole, target in zip(prompts, targets, strict=True):
            prompt = whole.tolist() if self.settings.template else [*whole.tolist(), *closing]
            self.truncation.add(len(prompt) + len(target), limit)
            source, answer = shares([len(prompt), max(len(target), limit // 4)], limit)  # room for an answer
            kept.append(prompt if source == len(prompt) else [*prompt[: source - len(closing)], *closing])
            answers.append([*target[:answer].tolist(), end_token(self.tokenizer)])
        return PromptedRows(kept, answers)

    def closing(self) -> list[int]:
        """The tokens before a target, which a truncated source keeps: the end of the template, or a delimiter."""
        if not self.settings.template:
            return [end_token(self.tokenizer)]
        after = self.settings.template[0].split(SOURCE)[-1]
        return self.tokenizer.encode(after if after else ANSWER)

    def prompt(self, source: str) -> list[int]:
        """What a GPT continues for a source."""
        return list(self.encode([Example({"source": source}, None, "")]).sources[0])

    # -- learning

    def hidden(self, model: Model, batch: TensorBatch) -> Tensor:
        if isinstance(model.body, Transformer):
            assert batch.lengths is not None
            return model.body.read_ragged(LengthGroups(batch.tokens, batch.lengths, None, causal=True))
        return model.body(batch.source, batch.tokens, source_lengths=batch.source_lengths, lengths=batch.lengths)

    def losses(self, model: Model, hidden: Tensor, batch: TensorBatch) -> Tensor:
        flat, targets = hidden.flatten(0, 1), batch.targets.flatten()  # (B * T, D), (B * T,)
        real = (targets != IGNORE).nonzero()[:, 0]
        features, bias = token_features(model, flat[real])
        smoothing = self.options.label_smoothing if model.training else 0.0  # validation measures the plain loss
        size = model.config.vocab_size
        return token_loss(features, model.table, targets[real], vocab_size=size, bias=bias, smoothing=smoothing)

    def count(self, batch: TensorBatch) -> float:
        return float((batch.targets != IGNORE).sum())

    # -- predicting

    def predictions(
        self, model: Model, data: Any, examples: Sequence[Example], batches: Iterator[Any]
    ) -> Iterator[tuple[int, Prediction]]:
        beams, slots = self.options.beams, max(self.options.beams, SLOTS if self.causal else 1)
        engine = engine_for(model.eval(), EngineConfig(engine="auto" if self.causal else "torch", slots=slots))
        batcher = Batcher(engine)
        try:
            if self.causal:
                yield from self.continued(batcher, data, beams)
                return
            for number, example in enumerate(examples):
                source = example.fields["source"]
                limit = len(self.tokenizer.encode(source)) + LONGER
                config = SamplingConfig(beams=beams, length_penalty=0.6, max_new_tokens=limit, temperature=0.0)
                yield number, Prediction(translate(batcher, self.tokenizer, source, config).text, {})
        finally:
            engine.close()

    def continued(self, batcher: Batcher, data: PairRows, beams: int) -> Iterator[tuple[int, Prediction]]:
        """What a GPT writes after each prompt, greedily or by beam search."""
        room = batcher.engine.capacity
        for first in range(0, len(data), SLOTS):
            numbers = range(first, min(first + SLOTS, len(data)))
            configs = {
                n: SamplingConfig(
                    beams=beams,
                    length_penalty=0.6,
                    temperature=0.0,
                    max_new_tokens=max(1, min(len(data.sources[n]) + LONGER, room - len(data.sources[n]))),
                )
                for n in numbers
            }
            if beams > 1:
                found = [beam_search(batcher, self.tokenizer, data.sources[n], configs[n]) for n in numbers]
            else:
                found = greedy(batcher, self.tokenizer, [(data.sources[n], configs[n]) for n in numbers])
            yield from ((n, Prediction(one.text.strip(), {})) for n, one in zip(numbers, found, strict=True))

    def row_error(self, example: Example, prediction: Prediction) -> float:
        return 1.0 - metrics.answer_f1(prediction.value, [example.label])

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        lead = each("first sentence", examples, lambda e: metrics.first_sentences(e.fields["source"], 1))
        return [each("copy of the source", examples, lambda e: e.fields["source"]), lead]

    def metric(self) -> metrics.GenerationMetric:
        return metrics.GenerationMetric()

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value)


def translate(batcher: Batcher, tokenizer: Tokenizer, source: str, config: SamplingConfig) -> Generation:
    """The output of an encoder-decoder for a source text, by beam search; greedy with one beam."""
    context = batcher.engine.config.context
    ids = [*token_ids(tokenizer, source)[: context - 1], end_token(tokenizer)]  # as in training
    return beam_search(batcher, tokenizer, [decoder_start(tokenizer)], config, source=ids)


def greedy(
    batcher: Batcher, tokenizer: Tokenizer, prompts: Sequence[tuple[list[int], SamplingConfig]]
) -> list[Generation]:
    """Continuations of several prompts at once."""
    context, size = batcher.engine.capacity, batcher.engine.config.vocab_size
    sequences = [
        SequenceState(prompt, config, tokenizer=tokenizer, context=context, vocab_size=size, seed=0, sample=0)
        for prompt, config in prompts
    ]
    for _ in batcher.run(sequences):
        pass
    return [sequence.result() for sequence in sequences]


# ---- instructions and chats --------------------------------------------------------------------------------------


def chat_text(messages: Sequence[tuple[str, str]]) -> str:
    """The prompt of a chat for models without a template of their own: `role: content`, blank lines between."""
    return "".join(f"{role}: {content}\n\n" for role, content in messages) + ANSWER


def chat_rows(rows: Iterator[LocatedRow], config: TaskConfig, skipped: Tally) -> Iterator[LocatedRow]:
    for where, row in rows:
        try:
            turns = list(chat_turns(row))
        except UserError as error:
            if not config.skip_bad_rows:
                raise UserError(f"{where}: {error}; correct it, or skip such rows with --task.skip_bad_rows") from None
            skipped.add(str(error), where)
            continue
        if not turns:
            skipped.add("no message of the assistant", where)
        yield from ((where, turn) for turn in turns)


def chat_turns(row: Row) -> Iterator[Row]:
    """A source and target for each answer of a chat, or for an instruction with its input."""
    if "messages" not in row:
        asked = "\n\n".join(str(row[name]) for name in ("instruction", "input") if not is_missing(row.get(name)))
        if not asked:
            raise UserError("the instruction is empty")
        yield {"source": chat_text([("user", asked)]), "target": row.get("output")}
        return
    messages = row["messages"]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and all(isinstance(m.get(name), str) for name in ("role", "content")) for m in messages
    ):
        raise UserError('messages must be a list such as [{"role": "user", "content": "..."}, ...], each with a text')
    turns = [(m["role"], m["content"]) for m in messages]
    for place, (role, content) in enumerate(turns):
        if role == "assistant":
            yield {"source": chat_text(turns[:place]), "target": content}
