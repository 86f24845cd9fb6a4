"""From raw text to a pretrained, fine-tuned, measured, served and explorable language model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plume.data.prepare import prepare as prepare
    from plume.generate.lm import load as load
    from plume.generate.translating import finetune as finetune
    from plume.train.distill import distill as distill
    from plume.train.pretrain import pretrain as pretrain

__version__ = "0.1.0"
_HOMES = {
    "distill": "plume.train.distill",
    "finetune": "plume.generate.translating",
    "load": "plume.generate.lm",
    "prepare": "plume.data.prepare",
    "pretrain": "plume.train.pretrain",
}
__all__ = ["distill", "finetune", "load", "prepare", "pretrain"]


def __getattr__(name: str) -> Any:
    if name == "evaluate":  # a package that can be called
        return import_module("plume.evaluate")
    if name not in _HOMES:
        raise AttributeError(f"plume has no {name!r}")
    return getattr(import_module(_HOMES[name]), name)
