"""Evaluation: scoring, tasks as data, protocols with names, few-shot, contamination, reports, comparison, sweeps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from plume.config import CallableModule, EvaluateConfig, SweepConfig, takes_fields

if TYPE_CHECKING:
    from plume.evaluate.report import EvaluationReport


@takes_fields(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> EvaluationReport:
    """Measure a model on tasks; with an `out` folder, write the report there and continue an earlier run."""
    from plume.evaluate.evaluation import run_all

    return run_all(config)


@takes_fields(SweepConfig)
def sweep(config: SweepConfig) -> dict[str, Any]:
    """Train several sizes on the same data and write one report of loss against size and compute."""
    from plume.evaluate.size_sweep import run_sweep

    return run_sweep(config)


sys.modules[__name__].__class__ = CallableModule  # plume.evaluate(...) is this package and its function
