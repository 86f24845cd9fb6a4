"""Plume's models as a model of lm-evaluation-harness, so that all of its tasks run on them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM as HarnessLM
from lm_eval.api.registry import register_model

from plume.config import EvaluateConfig, SamplingConfig, UserError
from plume.evaluate.items import TooLong, find_protocol, request
from plume.evaluate.subject import ScoreStore, Subject
from plume.evaluate.task_run import TaskResult
from plume.inference.scoring import Request, pair, windows
from plume.tasks.metrics import Metric

NEW_TOKENS = 256  # of a generation task that does not say


@register_model("plume")
class PlumeLM(HarnessLM):  # type: ignore[misc]
    """The three calls of the harness. `lm_eval.simple_evaluate(model=PlumeLM("runs/demo"), tasks=[...])`."""

    def __init__(self, pretrained: str | Subject, batch_size: object = None, device: str = "auto") -> None:
        super().__init__()
        config = EvaluateConfig(model=str(pretrained), tasks=("-",), device=device)
        self.subject = pretrained if isinstance(pretrained, Subject) else Subject(config)
        path = None if self.subject.config.out is None else self.subject.config.out / "scores.sqlite"
        self.store = ScoreStore(path, self.subject.identity)
        self.tokens = 0

    @property
    def tokenizer_name(self) -> str:
        return self.subject.tokenizer.hash

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        scorer = self.subject.scorer
        made: list[Request] = []
        for context, continuation in (r.args for r in requests):
            tokens = pair(context, continuation, scorer.tokenizer, "joint")
            try:
                made.append(request(*tokens, scorer)[0])
            except TooLong as error:
                raise UserError(f"{continuation[:60]!r}: {error}") from None
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(made)
        for number, score in self.store.scores(scorer, made):
            self.tokens += len(score.logprobs)
            answers[number] = (score.total, score.greedy)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        scorer = self.subject.scorer
        totals = [0.0] * len(requests)
        for number, (text,) in enumerate(r.args for r in requests):
            pieces = list(windows(scorer.tokenizer.encode(text), scorer))
            for _, score in self.store.scores(scorer, pieces):
                self.tokens += len(score.logprobs)
                totals[number] += score.total
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        if self.subject.masked:
            raise UserError(f"{self.subject.name} is a masked model and does not write; leave this task out")
        jobs: list[tuple[list[int], SamplingConfig]] = []
        for prompt, options in (r.args for r in requests):
            room = self.subject.folder_config.model.context - self.new_tokens(options)
            jobs.append((self.subject.tokenizer.encode(prompt)[-room:], self.sampling(options)))
        written = self.subject.write(jobs)
        self.tokens += sum(count for _, count in written)
        return [text for text, _ in written]

    def new_tokens(self, options: dict[str, Any]) -> int:
        limit, context = int(options.get("max_gen_toks", NEW_TOKENS)), self.subject.folder_config.model.context
        if limit >= context:
            raise UserError(f"{limit} new tokens do not fit into a context of {context}")
        return limit

    def sampling(self, options: dict[str, Any]) -> SamplingConfig:
        until = options.get("until", ())
        return SamplingConfig(
            max_new_tokens=self.new_tokens(options),
            temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
            top_k=None,
            stop=tuple(s for s in ([until] if isinstance(until, str) else until) if s),
            seed=0,
        )


def run_harness(names: Sequence[str], subject: Subject, config: EvaluateConfig) -> list[TaskResult]:
    """Tasks of the harness by its own names, or by the files that describe one in its way."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks._yaml_loader import load_yaml

    results: list[TaskResult] = []
    for name in names:
        began, model = time.monotonic(), PlumeLM(subject)
        try:
            task = load_yaml(name) if name.endswith(".yaml") else name
            found = simple_evaluate(
                model=model, tasks=[task], num_fewshot=config.shots, limit=config.limit,
                fewshot_random_seed=config.seed, bootstrap_iters=100, log_samples=True, verbosity="ERROR",
            )  # fmt: skip
        except UserError:
            raise
        except Exception as error:  # an unknown task, no network, anything in a task's own code
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"harness:{name} cannot be run: {reason}") from None
        finally:
            model.store.file.close()
        seconds = round(time.monotonic() - began, 3)
        results += [
            as_result(task, values, found, model, config, seconds)
            for task, values in found["results"].items()
            if any("," in key for key in values)  # a group may have no figures of its own
        ]
    return results


def as_result(
    task: str, values: dict[str, Any], found: dict[str, Any], model: PlumeLM, config: EvaluateConfig, seconds: float
) -> TaskResult:
    metrics: dict[str, Metric] = {}
    for key, value in values.items():
        name, _, how = key.partition(",")
        if how and isinstance(value, int | float) and not name.endswith("_stderr"):
            error = values.get(f"{name}_stderr,{how}")
            label = name if how == "none" else f"{name}/{how}"
            metrics[label] = Metric(float(value), float(error) if isinstance(error, int | float) else None)
    samples = found.get("samples", {}).get(task, [])
    seen = hashlib.sha256("".join(s["doc_hash"] for s in samples).encode()).hexdigest()[:16]
    subject, shots = model.subject, int(found.get("n-shot", {}).get(task, config.shots))
    return TaskResult(
        task=f"harness:{task}", model=subject.name, model_hash=subject.hash, parameters=subject.parameters,
        data="as the harness reads it", data_hash=seen, protocol=find_protocol("harness").as_dict(),
        shots=shots, seed=config.seed, headline="acc_norm" if "acc_norm" in metrics else next(iter(metrics)),
        metrics=metrics, items=len(samples), tokens=model.tokens, cut=0, skipped=0, scored=model.store.fresh,
        reused=model.store.reused, seconds=seconds, by_position={}, calibration={},
    )  # fmt: skip
