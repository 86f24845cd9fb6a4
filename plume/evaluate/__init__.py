"""Evaluation: scoring, tasks as data, protocols with names, few-shot, contamination, reports, comparison, sweeps."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from plume.config import EvaluateConfig, SweepConfig, build

if TYPE_CHECKING:
    from plume.evaluate.report import Report


def evaluate(config: EvaluateConfig) -> Report:
    """Measure a model on tasks; with an `out` folder, write the report there and go on where an earlier run stopped."""
    from plume.evaluate.evaluation import run_all

    return run_all(config)


def sweep(config: SweepConfig) -> dict[str, Any]:
    """Train several sizes on the same data and write one report of loss against size and compute."""
    from plume.evaluate.scaling import run_sweep

    return run_sweep(config)


class _Door(ModuleType):
    """`plume.evaluate(...)` is both this package and its main function."""

    def __call__(self, config: EvaluateConfig | None = None, **fields: Any) -> Report:
        return evaluate(build(EvaluateConfig, fields) if config is None else config)


sys.modules[__name__].__class__ = _Door
