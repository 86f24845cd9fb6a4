"""The one training loop: gradients over parts and ranks, the update, and all that happens between two updates.

What a task brings (pretraining, fine-tuning and distillation each bring their own):

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plume.config import TrainConfig, UserError
from plume.train.checkpoint import Checkpoints
from plume.train.devices import Precision, is_out_of_memory
from plume.train.distribute import Distributed, distribute
from plume.train.feed import Batches, Feed
from plume.train.optim import Optimizers, rate, same_mesh, total_norm, whole
from plume.train.progress import Progress
from plume.train.ranks import Ranks


class Objective(Protocol):
    parts: Mapping[str, float]

    def counts(self, batch: Any) -> Tensor: ...

    def totals(self, model: Any, batch: Any) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained on what."""

    model: Any  # a plume.heads.Model, or anything that its objective understands
    objective: Objective
    train: Batches
    validation: Batches | None = None
    sample: Callable[[Any], str] | None = None  # a text that shows what the model can do
    floor: float | None = None  # what the first part gives to a model that knows only how frequent each token is
    share: Callable[[str], float] = lambda name: 1.0  # of the learning rate, by parameter name
    judge: Callable[[Any], float] | None = None  # of the model, lower is better; unset means the validation loss
    patience: int | None = None  # validations without a better one after which to stop
    before_step: Callable[[int], None] | None = None  # such as to unfreeze a layer; a pure function of the step
    some_rest: bool = False  # there may be steps in which not every parameter gets a gradient


@dataclass(frozen=True)
class Outcome:
    """How a run ended. The model holds the best weights when keep_best is on, otherwise the last."""

    step: int
    finished: bool  # False when it was asked to stop before its last step
    loss: float  # of training, averaged since the log line before the last
    validation: float | None
    best_step: int | None
    tokens: int
    seconds: float


class NonFinite(UserError):
    """The loss or the gradient is no number any more; the weights are as they were before the step."""


class LossModule(nn.Module):
    """Model and objective as one module, so that whatever wraps it for many ranks sees one forward."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> Tensor:
        return self.objective.totals(self.model, batch)  # (K,)


class Trainer:
    """One run of one task. `run` starts it, or continues it from the newest whole checkpoint in its folder."""

    def __init__(self, task: Task, config: TrainConfig, folder: Path, ranks: Ranks, precision: Precision) -> None:
        self.task, self.config, self.ranks, self.folder, self.precision = task, config, ranks, folder, precision
        self.weights = torch.tensor(list(task.objective.parts.values()), device=ranks.device)  # (K,)
        module = LossModule(task.model.to(ranks.device), task.objective)
        self.distributed: Distributed = distribute(module, config, ranks, precision, some_rest=task.some_rest)
        self.feed = Feed(task.train, config, ranks, self.distributed)
        self.optimizers = Optimizers(task.model, config, task.share)
        self.progress = Progress(folder, config, ranks, list(task.objective.parts))
        self.checkpoints = Checkpoints(folder / "checkpoints", ranks, keep_last=config.keep_last, say=self.progress.say)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.best: tuple[float, int] | None = None  # lowest validation loss (or what the judge says), step
        self.worse = 0  # validations since then
        self.validation: float | None = None
        self.early = False  # whether patience has run out
        self.asked = self.stop = False  # to end the run: by a signal here, and as all ranks agree
        self.sums = torch.zeros(2, len(self.weights), device=ranks.device, dtype=torch.float64)  # totals, counts

    # -- the run

    def run(self, *, resume: bool) -> Outcome:
        if resume:
            self.restore()
        self.task.model.train()
        with self.stopping(), self.progress.live(self.step):
            began, before = time.perf_counter(), self.seconds
            while not self.done and not self.stop:
                self.update()
                self.seconds = before + time.perf_counter() - began
                self.stop |= self.asked and not self.ranks.many
                self.between()
        if self.done:
            self.choose_weights()
        else:
            self.progress.say(f"stopped after step {self.step}, as asked; --resume goes on from here")
        loss = self.progress.last_loss
        best_step = None if self.best is None else self.best[1]
        validation = None if self.best is None else self.best[0] if self.config.keep_best else self.validation
        return Outcome(self.step, self.done, loss, validation, best_step, self.tokens, self.seconds)

    def choose_weights(self) -> None:
        """At the end: those of the best step, the mean of several steps, or simply the last."""
        if self.config.keep_best and self.best is not None and self.best[1] != self.step:
            if self.checkpoints.whole(self.best[1]):
                self.checkpoints.load(self.best[1], self.tensors())
                self.progress.say(f"the weights of step {self.best[1]} are the best in validation: they are kept")
            else:
                self.progress.say(f"the weights of step {self.best[1]} were the best, but are damaged")
        if self.config.average > 1:
            self.average_weights()

    @property
    def done(self) -> bool:
        return self.step >= self.config.steps or self.early

    def between(self) -> None:
        """After an update: log, validate, show samples, save; each when it is due."""
        config = self.config
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
            raise NonFinite(self.why_not_finite(norm, totals))
        self.clip(norm)
        self.optimizers.step(rate(self.step, self.config))
        self.optimizers.zero_grad()
        self.sums[0] += totals
        self.sums[1] += counts
        self.progress.norm = norm
        self.step += 1

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of the loss of the whole batch; (K,) totals of this rank and (K,) counts of all."""
        parts = self.feed.load(self.step)
        counts = torch.stack([self.task.objective.counts(batch) for _, batch in parts]).sum(dim=0)
        told = torch.cat([counts, torch.tensor([float(self.asked), sum(b.tokens.numel() for _, b in parts)])])
        told = self.ranks.sum(told.to(self.ranks.device, torch.float64))
        counts = told[:-2]
        self.stop = bool(told[-2] > 0)
        scale = self.weights * self.ranks.size / counts.clamp(min=1)  # ranks are averaged where we want their sum
        totals = torch.zeros_like(counts)
        for number, (first, batch) in enumerate(parts):
            torch.manual_seed(mixed(self.config.seed, self.step, first))
            with self.distributed.sync(number == len(parts) - 1), self.precision.context():
                part = self.distributed.module(batch.to(self.ranks.device))  # (K,)
                (part * scale.to(part.dtype)).sum().backward()
            totals += part.detach()
        self.tokens += int(told[-1]) * self.distributed.replicas // self.ranks.size  # split matrices see the same rows
        return totals, counts

    def shrink(self, reason: str) -> None:
        """Out of memory: the same step again with smaller micro-batches."""
        self.optimizers.zero_grad()
        rows = self.feed.shrink(self.step, reason)
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self.progress.say(f"out of memory at step {self.step}: now {rows} sequences at a time, same batch")

    def clip(self, norm: float) -> None:
        if norm > self.config.clip:
            for together in same_mesh(self.optimizers.gradients()):
                torch._foreach_mul_(together, self.config.clip / (norm + 1e-6))

    def why_not_finite(self, norm: float, totals: Tensor) -> str:
        broken = [
            name
            for p, name in self.optimizers.names.items()
            if p.grad is not None and not bool(whole(p.grad).isfinite().all())
        ]
        what = "loss" if not bool(totals.isfinite().all()) else "gradient"
        rows = self.task.train.rows(self.step)
        return (
            f"the {what} is not finite at step {self.step} (batch {self.step}, {rows} sequences, "
            f"seed {self.config.seed}); gradient norm {norm}, first in {', '.join(broken[:3]) or 'no single tensor'}. "
            f"The weights were not changed; the last checkpoint is whole. A lower lr than {self.config.lr:g} "
            f"or a longer warm-up than {self.config.warmup_steps} steps usually helps"
        )

    # -- between updates

    def log(self) -> None:
        sums = self.sums.clone()
        self.ranks.sum(sums[0])
        means = sums[0] / sums[1].clamp(min=1)  # (K,)
        self.sums.zero_()
        loss = float((means * self.weights).sum())
        self.progress.log(
            step=self.step,
            loss=loss,
            parts=means.tolist(),
            rate=rate(max(0, self.step - 1), self.config),
            tokens=self.tokens,
            seconds=self.seconds,
        )
        sanity = self.config.steps // 2 if self.config.sanity_step is None else self.config.sanity_step
        self.progress.check_sanity(self.step, self.task.floor, by=sanity)

    @torch.no_grad()
    def validate(self) -> bool:
        """Measure the loss on the held-out rows; True when it is the lowest so far."""
        means = self.measure()
        self.validation = float((means * self.weights).sum())
        score = self.validation if self.task.judge is None else self.judged(self.task.judge)
        improved = self.best is None or score < self.best[0]
        if improved:
            self.best = (score, self.step)
        self.worse = 0 if improved else self.worse + 1
        if self.task.patience is not None and self.worse >= self.task.patience:
            self.progress.say(f"no better after {self.worse} validations: stopping early at step {self.step}")
            self.early = True
        self.progress.validated(self.step, self.validation, means.tolist(), score)
        return improved

    def judged(self, judge: Callable[[Any], float]) -> float:
        self.task.model.eval()
        found = judge(self.task.model)
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
        for first, count in [(0, rows)] if few else self.feed.share(rows):
            batch = self.task.validation.part(0, first, count)
            with self.precision.context():
                sums[0] += self.distributed.module(batch.to(self.ranks.device))
            sums[1] += self.task.objective.counts(batch).to(sums.device)
        self.task.model.train()
        self.ranks.sum(sums)
        return sums[0] / sums[1].clamp(min=1)

    def show_sample(self) -> None:
        if self.ranks.main and self.task.sample is not None:
            self.task.model.eval()
            with torch.no_grad():
                self.progress.sample(self.step, self.task.sample(self.task.model))
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
            "micro_batch": self.feed.micro_batch,
            "asked_micro_batch": self.config.micro_batch,
            "validation": self.validation,
            "best": self.best,
            "worse": self.worse,
            "early": self.early,
            "ranks": self.ranks.size,
            "precision": self.precision.name,
            "loss": self.progress.last_loss,
            "sums": pending.tolist(),
        }
        best = self.best[1] if self.best is not None and self.config.keep_best else None
        self.checkpoints.save(self.step, self.tensors(), state, best=best)

    def average_weights(self) -> None:
        """The mean of the weights of the last checkpoints, the present one among them."""
        weights = {name: tensor for name, tensor in self.tensors().items() if name.startswith("model/")}
        others = [step for step in self.checkpoints.steps()[-self.config.average : -1] if self.checkpoints.whole(step)]
        mean = {name: tensor.clone() for name, tensor in weights.items()}
        for number, step in enumerate(others, start=2):
            self.checkpoints.load(step, weights)
            for name, tensor in weights.items():
                mean[name] += (tensor - mean[name]) / number
        for name, tensor in weights.items():
            tensor.copy_(mean[name])
        self.progress.say(f"the weights are the mean of {len(others) + 1} checkpoints")

    def restore(self) -> None:
        step = self.checkpoints.latest()
        if step is None:
            self.progress.say("there is no whole checkpoint: starting from the beginning")
            self.checkpoints.drop_after(-1)
            self.progress.restart(0)
            return
        state = self.checkpoints.load(step, self.tensors())
        self.checkpoints.drop_after(step)
        self.step, self.tokens, self.seconds = step, state["tokens"], state["seconds"]
        kept = state["best"] is not None and state["best"][1] in self.checkpoints.steps()
        self.best = (state["best"][0], state["best"][1]) if kept else None
        self.validation, self.worse, self.early = state["validation"], state["worse"], state["early"]
        self.progress.last_loss = state["loss"]
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
        self.sums[0] *= self.ranks.main  # the totals of all ranks are now the main rank's
        if state["ranks"] == self.ranks.size and state["asked_micro_batch"] == self.config.micro_batch:
            self.feed.micro_batch = state["micro_batch"]  # also when halved: the same sums in the same order
        if self.config.precision == "auto":
            self.precision = replace(self.precision, name=state["precision"])  # measured anew it might be another
        self.progress.restart(step)
        self.progress.say(f"going on from step {step}")

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run after the step under way, with a checkpoint; a second one ends it at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True

        kept = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                kept[number] = signal.signal(number, ask)
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
