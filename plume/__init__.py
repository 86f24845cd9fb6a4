"""From raw text to a pretrained, fine-tuned, evaluated, served and explorable language model.

    lm = plume.load("runs/demo")                                         generate, score, embed, classify, explain
    plume.prepare(paths=["book.txt"], folder="data/book")                texts to token shards
    plume.pretrain(folder="runs/a", model="gpt2-laptop", steps=500)      shards to a model
    plume.finetune(model="runs/a", train="rows.csv", folder="runs/b")    a model and labelled rows to a classifier
    plume.distill(teacher="runs/a", folder="runs/c", steps=500)          a smaller student
    plume.evaluate(model="runs/a", tasks=["lambada"])                    scores on tasks
    plume.sweep(...), plume.plan(model="gpt2")                           several sizes; costs before a run
    plume.reproduce(experiment="gpt1-layers", minutes=30)                a paper's experiment in small

Each takes one config (plume.PretrainConfig, ...) or its fields by keyword; a field that only one section has needs no
section name. Names are imported when they are first used.
"""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.util import places

if TYPE_CHECKING:
    from plume.config import (
        AdaptConfig,
        CleanConfig,
        DataConfig,
        DistillConfig,
        EngineConfig,
        EvaluateConfig,
        FinetuneConfig,
        MaskingConfig,
        ModelConfig,
        ObjectiveConfig,
        PlanConfig,
        PretrainConfig,
        ReproduceConfig,
        SamplingConfig,
        SweepConfig,
        TaskConfig,
        TokenizerConfig,
        TrainConfig,
        UserError,
    )
    from plume.data.prepare import Prepared, prepare
    from plume.evaluate import evaluate, sweep
    from plume.evaluate.report import EvaluationReport
    from plume.inference.sequences import Generation
    from plume.lab.runner import reproduce
    from plume.lm import LM, load
    from plume.plan import Plan, plan
    from plume.train.distill import DistillResult, distill
    from plume.train.finetune import FinetuneResult, finetune
    from plume.train.pretrain import RunResult, pretrain

__version__ = "0.1.0"
_HOMES = {  # configs are in plume.config
    "plume.data.prepare": ("Prepared", "prepare"),
    "plume.evaluate": ("evaluate", "sweep"),
    "plume.evaluate.report": ("EvaluationReport",),
    "plume.inference.sequences": ("Generation",),
    "plume.lab.runner": ("reproduce",),
    "plume.lm": ("LM", "load"),
    "plume.plan": ("Plan", "plan"),
    "plume.train.distill": ("DistillResult", "distill"),
    "plume.train.finetune": ("FinetuneResult", "finetune"),
    "plume.train.pretrain": ("RunResult", "pretrain"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "LM",
    "AdaptConfig",
    "CleanConfig",
    "DataConfig",
    "DistillConfig",
    "DistillResult",
    "EngineConfig",
    "EvaluateConfig",
    "EvaluationReport",
    "FinetuneConfig",
    "FinetuneResult",
    "Generation",
    "MaskingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "Plan",
    "PlanConfig",
    "Prepared",
    "PretrainConfig",
    "ReproduceConfig",
    "RunResult",
    "SamplingConfig",
    "SweepConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrainConfig",
    "UserError",
    "distill",
    "evaluate",
    "finetune",
    "load",
    "plan",
    "prepare",
    "pretrain",
    "reproduce",
    "sweep",
]


def _find_places_to_write() -> None:
    """Where compiled code and font lists are kept: by the package, in the user's cache, or else in a temporary folder.

    numba refuses to work without any, and reads where it is when it is imported.
    """
    cache, package = places.cache_root(), Path(__file__).parent
    usual = {"NUMBA_CACHE_DIR": [package], "MPLCONFIGDIR": []}
    if cache is not None:
        usual = {"NUMBA_CACHE_DIR": [package, cache / "numba"], "MPLCONFIGDIR": [cache / "matplotlib"]}
    for name, found in usual.items():
        if name not in os.environ and not any(map(places.writable, found)):
            os.environ[name] = str(places.own_folder(tempfile.gettempdir()))


_find_places_to_write()


def _cell_page(folder: Path) -> Any:
    """What LM.explore returns: the server lies in a layer below that of LM."""
    from plume.serve import CellPage

    return CellPage(folder)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from plume.config import did_you_mean

        raise AttributeError(f"plume has no {name!r}{did_you_mean(name, __all__)}")
    home = import_module(_HOME_OF.get(name, "plume.config"))
    return home if home.__name__ == f"plume.{name}" else getattr(home, name)  # a module that can be called


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
