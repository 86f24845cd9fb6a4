"""The one training loop: gradients over parts and ranks, the update, and all that happens between two updates.

What a task provides (pretraining, fine-tuning and distillation each have their own):

    objective.parts            names of the parts of the loss with their weights; a part of weight 0 is only measured
    objective.counts(batch)    how many targets each part has, (K,): known before any loss is computed
    objective.totals(model, batch)   each part's summed loss, (K,)
    batches.rows(step)         sequences in the batch of a step
    batches.part(step, first, rows)  some of its rows; a pure function, so that resuming needs no state

The loss is the weighted sum of total / count, each count taken over the whole batch: over all micro-batches and ranks.
A batch has `tokens` (B, ...) and `to(device)`; the loop knows nothing else of it.
"""

# K parts of the loss

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from plume.config import TrainConfig, UserError
from plume.train.checkpoint import Checkpoints
from plume.train.distribute import Distributed, Ranks, distribute, is_lost_connection, report_failed_rank
from plume.train.first_weights import FirstWeights
from plume.train.microbatches import Batches, Microbatches, Seekable
from plume.train.optim import Optimizers, rate, same_mesh, total_norm, whole
from plume.train.training_log import TrainingLog
from plume.util.console import leave_terminal, plural
from plume.util.devices import Precision, is_out_of_memory
from plume.util.run_folder import CHECKPOINTS


class Objective(Protocol):
    parts: Mapping[str, float]

    def counts(self, batch: Any) -> Tensor: ...

    def totals(self, model: Any, batch: Any) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what."""

    model: Any  # a plume.model.heads.Model, or anything that its objective understands
    first_weights: FirstWeights | None = None  # of a model that was built on the meta device
    objective: Objective
    train: Batches
    validation: Batches | None = None
    data: str | None = None  # a fingerprint of what is read; a run is resumed on the same
    allow_other_data: bool = False
    sample: Callable[[Any], str] | None = None  # a text that shows what the model can do
    bytes_per_token: float | None = None  # of the validation text, for its loss in bits per byte
    unigram_loss: float | None = None  # first part of the loss of a model that knows token frequencies alone
    lr_scale: Callable[[str], float] = lambda name: 1.0  # of the learning rate, by parameter name
    evaluate: Callable[[Any], float] | None = None  # score of the model, lower is better; unset means validation loss
    short_rows: Sequence[tuple[int, float]] = ()  # of the first sequences: how many have which share of the length
    patience: int | None = None  # validations without a better one after which to stop
    before_step: Callable[[int], None] | None = None  # such as to unfreeze a layer; a pure function of the step
    find_unused_parameters: bool = False  # there may be steps in which some parameters get no gradient


@dataclass(frozen=True)
class Outcome:
    """How a run ended. The model holds the best weights when keep_best is on, otherwise the last."""

    step: int
    finished: bool  # False when it was interrupted before its last step
    loss: float  # of training, averaged since the log line before the last
    validation: float | None
    parts: dict[str, float]  # of the validation loss, or else of the training loss, where it has several
    best_step: int | None
    tokens: int
    seconds: float


class Best(NamedTuple):
    """The best validation so far; lower is better. Of equal scores, such as accuracies, the lower loss decides."""

    score: float
    step: int
    loss: float = math.inf  # checkpoints of earlier versions have none


class NonFiniteError(UserError):
    """The loss or the gradient is NaN or infinite; the weights are those before the step."""


class LossModule(nn.Module):
    """Model and objective as one module, so that whatever wraps it for many ranks sees one forward."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> Tensor:
        return self.objective.totals(self.model, batch)  # (K,)


class Trainer:
    """One run of one task. `run` starts it, or resumes it from the newest valid checkpoint in its folder."""

    def __init__(self, task: Task, config: TrainConfig, folder: Path, ranks: Ranks, precision: Precision) -> None:
        self.task, self.config, self.ranks, self.folder, self.precision = task, config, ranks, folder, precision
        self.weights = torch.tensor(list(task.objective.parts.values()), device=ranks.device)  # (K,)
        first = task.first_weights
        model = task.model.to(ranks.device) if first is None else task.model
        self.distributed: Distributed = distribute(
            LossModule(model, task.objective),
            config,
            ranks,
            precision,
            find_unused_parameters=task.find_unused_parameters,
            fill=None if first is None else lambda module: first.fill(module, model, ranks.device),
        )
        self.task = replace(task, first_weights=None)  # nothing keeps the files they come from open
        self.microbatches = Microbatches(task.train, config, ranks, self.distributed)
        self.optimizers = Optimizers(task.model, config, task.lr_scale, ranks, precision.dtype)
        self.logger = TrainingLog(folder, config, ranks, list(task.objective.parts))
        self.logger.bytes_per_token = task.bytes_per_token
        background = ranks.device.type != "cpu" if config.async_checkpoints is None else config.async_checkpoints
        self.checkpoints = Checkpoints(
            folder / CHECKPOINTS, ranks, keep_last=config.keep_last, print=self.logger.print, background=background
        )
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.best: Best | None = None
        self.worse = 0  # validations since the best
        self.validation: float | None = None
        self.validation_parts: dict[str, float] = {}  # of the weights that the run would end with
        self.early = False  # stopped for lack of improvement
        self.stop_requested = self.stop = False  # by a signal to this process; on all ranks
        self.written = False  # whether every rank has written its part of the checkpoint under way
        self.sums = torch.zeros(2, len(self.weights), device=ranks.device, dtype=torch.float64)  # totals, counts

    # -- the run

    def run(self, *, resume: bool) -> Outcome:
        if resume:
            self.restore()
        self.task.model.train()
        with self.stopping(), self.logger.live(self.step):
            try:
                self.train()
            except RuntimeError as error:
                if not self.ranks.many or not is_lost_connection(error):
                    raise
                report_failed_rank(self.ranks, error, self.step, max(self.checkpoints.steps(), default=None))
        if self.done:
            self.choose_weights()
        else:
            self.logger.print(f"interrupted at step {self.step}, checkpoint saved; continue with --resume")
        loss = self.logger.last_loss
        best_step = None if self.best is None else self.best.step
        validation = self.best.score if self.config.keep_best and self.best is not None else self.validation
        parts = self.validation_parts if self.validation_parts else self.logger.last_parts
        return Outcome(self.step, self.done, loss, validation, parts, best_step, self.tokens, self.seconds)

    def train(self) -> None:
        began, before = time.perf_counter(), self.seconds
        timing, now = self.logger.time_left, began
        timing.short = self.task.short_rows
        timing.validation_rows = 0 if self.task.validation is None else self.task.validation.rows(0)
        while not self.done and not self.stop:
            self.update()
            now, last = time.perf_counter(), now
            timing.updated(self.step, now - last)
            self.seconds = before + now - began
            self.stop |= self.stop_requested and not self.ranks.many
            self.between()
            now, last = time.perf_counter(), now
            timing.paused(self.step, now - last)
        self.checkpoints.finish()

    def choose_weights(self) -> None:
        """At the end: those of the best step, the mean of several steps, or simply the last."""
        if self.config.keep_best and self.best is not None and self.best.step != self.step:
            if self.checkpoints.problem(self.best.step) is None:
                self.checkpoints.load(self.best.step, self.tensors())
                self.logger.print(f"restored the best checkpoint (step {self.best.step})")
            else:
                self.logger.print(f"the best checkpoint (step {self.best.step}) is corrupt; keeping the last weights")
                self.best, self.validation_parts = None, self.by_part(self.measure())
        if self.config.average_checkpoints > 1:
            self.average_weights()

    @property
    def done(self) -> bool:
        return self.step >= self.config.steps or self.early

    def between(self) -> None:
        """After an update: log, validate, show samples, save; each when it is due."""
        config = self.config
        if self.written:
            self.checkpoints.commit()
        often = max(1, config.steps // 10) if config.validate_every is None else config.validate_every
        if self.due(config.log_every):
            self.log()
        improved = self.task.validation is not None and self.due(often) and self.validate()
        if self.task.sample is not None and not self.distributed.sharded and self.due(config.sample_every, often):
            self.show_sample()
        if self.due(config.checkpoint_every, often) or self.early or self.stop or (improved and config.keep_best):
            self.save()

    def due(self, every: int | None, otherwise: int = 1) -> bool:
        """Whether this step is one of every so many, or the last."""
        return self.step % (otherwise if every is None else every) == 0 or self.step >= self.config.steps

    # -- one update

    def update(self) -> None:
        """One step: the same global batch whatever the number of ranks and micro-batches."""
        if self.task.before_step is not None:
            self.task.before_step(self.step)
        while True:
            try:
                totals, counts = self.gradients()
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.shrink(reason)  # outside the handler, which would keep the failed step's tensors alive
        norm = total_norm(self.optimizers.gradients())
        if not math.isfinite(norm):
            raise NonFiniteError(self.why_not_finite(norm, totals))
        self.clip(norm)
        self.optimizers.step(rate(self.step, self.config))
        self.optimizers.zero_grad()
        self.sums[0] += totals
        self.sums[1] += counts
        self.logger.norm = norm
        self.step += 1

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of the loss of the whole batch; (K,) totals of this rank and (K,) counts of all."""
        parts = self.microbatches.load(self.step)
        counts = torch.stack([self.task.objective.counts(batch) for _, batch in parts]).sum(dim=0)
        tokens = sum(b.tokens.numel() for _, b in parts)
        local = torch.tensor([float(self.stop_requested), float(self.checkpoints.written), tokens])
        summed = self.ranks.sum(torch.cat([counts, local]).to(self.ranks.device, torch.float64))
        counts = summed[:-3]
        self.stop, self.written = bool(summed[-3] > 0), bool(summed[-2] == self.ranks.size)
        scale = self.weights * self.ranks.size / counts.clamp(min=1)  # ranks are averaged where we want their sum
        totals = torch.zeros_like(counts)
        for number, (first, batch) in enumerate(parts):
            torch.manual_seed(mixed(self.config.seed, self.step, first))
            with self.distributed.sync(number == len(parts) - 1), self.precision.context():
                part = self.distributed.module(batch.to(self.ranks.device))  # (K,)
                (part * scale.to(part.dtype)).sum().backward()
            totals += part.detach()
        self.tokens += int(summed[-1]) * self.distributed.replicas // self.ranks.size
        return totals, counts

    def shrink(self, reason: str) -> None:
        """Out of memory: the same step again with smaller micro-batches."""
        self.optimizers.zero_grad()
        rows = self.microbatches.shrink(self.step, reason)
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self.logger.print(f"out of memory at step {self.step}: micro_batch reduced to {rows}, same batch")

    def clip(self, norm: float) -> None:
        if norm > self.config.grad_clip:
            for together in same_mesh(self.optimizers.gradients()):
                torch._foreach_mul_(together, self.config.grad_clip / (norm + 1e-6))

    def why_not_finite(self, norm: float, totals: Tensor) -> str:
        broken = [
            name
            for p, name in self.optimizers.names.items()
            if p.grad is not None and not bool(whole(p.grad).isfinite().all())
        ]
        what = "loss" if not bool(totals.isfinite().all()) else "gradient"
        rows = self.task.train.rows(self.step)
        return (
            f"the {what} is not finite at step {self.step} (batch {self.step}, {plural(rows, 'sequence')}, "
            f"seed {self.config.seed}); gradient norm {norm}, first in {', '.join(broken[:3]) or 'no single tensor'}. "
            f"The weights were not changed; the last checkpoint is valid. A lower lr than {self.config.lr:g} "
            f"or a longer warm-up than {plural(self.config.warmup_steps, 'step')} usually helps"
        )

    # -- between updates

    def log(self) -> None:
        sums = self.sums.clone()
        self.ranks.sum(sums[0])
        means = sums[0] / sums[1].clamp(min=1)  # (K,)
        self.sums.zero_()
        loss = float((means * self.weights).sum())
        self.logger.log(
            step=self.step,
            loss=loss,
            parts=means.tolist(),
            rate=rate(max(0, self.step - 1), self.config),
            tokens=self.tokens,
            seconds=self.seconds,
        )
        sanity = self.config.steps // 2 if self.config.unigram_check_step is None else self.config.unigram_check_step
        self.logger.check_sanity(self.step, self.task.unigram_loss, by=sanity)

    @torch.no_grad()
    def validate(self) -> bool:
        """Measure the loss on the held-out rows; True when it is the lowest so far."""
        means = self.measure()
        self.validation = float((means * self.weights).sum())
        score = self.validation if self.task.evaluate is None else self.evaluated(self.task.evaluate)
        best, found = self.best, (score, self.validation)
        improved = best is None or math.isnan(best.score) or found < (best.score, best.loss)
        if improved:
            self.best = Best(score, self.step, self.validation)
        if improved or not self.config.keep_best:
            self.validation_parts = self.by_part(means)
        self.worse = 0 if improved and not math.isnan(score) else self.worse + 1
        if self.task.patience is not None and self.worse >= self.task.patience:
            self.logger.print(f"early stopping, step {self.step}: no improvement in {plural(self.worse, 'validation')}")
            self.early = True
        self.logger.validated(self.step, self.validation, means.tolist(), score, best=self.worse == 0)
        return improved

    def by_part(self, means: Tensor) -> dict[str, float]:
        """The parts of a loss that has several."""
        return dict(zip(self.task.objective.parts, means.tolist(), strict=True)) if len(means) > 1 else {}

    def evaluated(self, evaluate: Callable[[Any], float]) -> float:
        self.task.model.eval()
        found = evaluate(self.task.model)
        score = torch.tensor(found if self.ranks.main else 0.0, dtype=torch.float64, device=self.ranks.device)
        self.task.model.train()
        self.ranks.sum(score)  # the main rank's: all must come to the same decision
        return float(score)

    @torch.no_grad()
    def measure(self) -> Tensor:
        """(K,) means over the validation rows, the same rows with the same masks each time."""
        assert self.task.validation is not None
        sums = torch.zeros(2, len(self.weights), device=self.ranks.device, dtype=torch.float64)
        self.task.model.eval()
        rows = self.task.validation.rows(0)
        few = rows < self.distributed.replicas  # then every rank measures them all, and the mean is the same
        together = self.microbatches.rows(0, self.task.validation)
        for first, count in [(0, rows)] if few else self.microbatches.share(rows, together):
            batch = self.task.validation.part(0, first, count)
            with self.precision.context():
                sums[0] += self.distributed.module(batch.to(self.ranks.device))
            sums[1] += self.task.objective.counts(batch).to(sums.device)
        self.distributed.reshard()
        self.task.model.train()
        self.ranks.sum(sums)
        return sums[0] / sums[1].clamp(min=1)

    def show_sample(self) -> None:
        if self.ranks.main and self.task.sample is not None:
            self.task.model.eval()
            with torch.no_grad():
                self.logger.sample(self.step, self.task.sample(self.task.model))
            self.task.model.train()
        self.ranks.barrier()

    # -- saving and restoring

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step changes."""
        weights = {f"model/{name}": p.detach() for name, p in self.task.model.named_parameters()}
        return weights | {f"optimizer/{name}": t for name, t in self.optimizers.state().items()}

    def save(self) -> None:
        pending = self.sums.clone()
        self.ranks.sum(pending[0])
        state = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "micro_batch": self.microbatches.limit,
            "configured_micro_batch": self.config.micro_batch,
            "validation": self.validation,
            "validation_parts": self.validation_parts,
            "best": self.best,
            "worse": self.worse,
            "early": self.early,
            "ranks": self.ranks.size,
            "data": self.task.data,
            "rows": self.task.train.position(self.step) if isinstance(self.task.train, Seekable) else None,
            "over": self.task.train.over(self.step) if isinstance(self.task.train, Seekable) else None,
            "precision": self.precision.name,
            "loss": self.logger.last_loss,
            "sums": pending.tolist(),
        }
        best = self.best.step if self.best is not None and self.config.keep_best else None
        self.checkpoints.save(self.step, self.tensors(), state, best=best)

    def average_weights(self) -> None:
        """The mean of the weights of the last checkpoints, the present one among them."""
        weights = {name: tensor for name, tensor in self.tensors().items() if name.startswith("model/")}
        others = [
            step
            for step in self.checkpoints.steps()[-self.config.average_checkpoints : -1]
            if self.checkpoints.problem(step) is None
        ]
        mean = {name: tensor.clone() for name, tensor in weights.items()}
        for number, step in enumerate(others, start=2):
            self.checkpoints.load(step, weights)
            for name, tensor in weights.items():
                mean[name] += (tensor - mean[name]) / number
        for name, tensor in weights.items():
            tensor.copy_(mean[name])
        self.logger.print(f"averaged the weights of {plural(len(others) + 1, 'checkpoint')}")

    def restore(self) -> None:
        step = self.checkpoints.latest()
        if step is None:
            self.logger.print("no valid checkpoint found; starting from scratch")
            self.checkpoints.drop_after(-1)
            self.logger.restart(0)
            return
        state = self.checkpoints.load(step, self.tensors())
        if state["data"] != self.task.data and not self.task.allow_other_data:
            raise UserError(
                f"{self.folder} was trained on other data ({state['data']}, now {self.task.data}); resume with the "
                "data of the run, or with --allow-changes to continue on this data from the next unread row"
            )
        if isinstance(self.task.train, Seekable) and state["rows"] is not None:
            self.task.train.seek(step, state["rows"], state.get("over", ()))  # older checkpoints have none
        self.checkpoints.drop_after(step)
        self.step, self.tokens, self.seconds = step, state["tokens"], state["seconds"]
        best = None if state["best"] is None else Best(*state["best"])
        lost = self.config.keep_best and best is not None and best.step not in self.checkpoints.steps()
        self.best = None if lost else best
        self.validation, self.worse, self.early = state["validation"], state["worse"], state["early"]
        self.validation_parts = state["validation_parts"]
        self.logger.last_loss = state["loss"]
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.sums[0] *= self.ranks.main  # the totals of all ranks are now the main rank's
        if state["ranks"] == self.ranks.size and state["configured_micro_batch"] == self.config.micro_batch:
            self.microbatches.micro_batch, self.microbatches.tokens = state["micro_batch"]  # also when halved
        if self.config.precision == "auto":
            self.precision = replace(self.precision, name=state["precision"])  # measured anew it might be another
            self.optimizers.multiply_in(self.precision.dtype)
        self.logger.restart(step)
        self.logger.print(f"resuming from step {step}")

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """SIGTERM, Ctrl-C and a terminal that is closed end the run after the step under way, with a checkpoint.

        A second SIGTERM or Ctrl-C ends it at once. A closed terminal sends several signals.
        """
        numbers = [signal.SIGTERM, signal.SIGINT]
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # nohup ignores it
            numbers.append(hangup)

        def request_stop(number: int, frame: FrameType | None) -> None:
            if number == hangup:
                leave_terminal()
            elif self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True

        kept = {}
        try:
            for number in numbers:
                kept[number] = signal.signal(number, request_stop)
        except ValueError:  # not the main thread: whoever runs us there handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)


def mixed(seed: int, step: int, row: int) -> int:
    """A seed of its own for every row of every step."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + row * 0x94D049BB133111EB) % (1 << 63)
