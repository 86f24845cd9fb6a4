"""What a model is and what a run does, as plain frozen data: fields, presets, recipes, overrides. No torch here."""

from plume.config.data import CleanConfig, DataConfig, TokenizerConfig
from plume.config.errors import UserError, did_you_mean
from plume.config.evaluate import EvaluateConfig, SweepConfig
from plume.config.finetune import AdaptConfig, FinetuneConfig, TaskConfig
from plume.config.generate import DecodeBenchConfig, EngineConfig, ExportConfig, GenerateConfig, SamplingConfig
from plume.config.model import ModelConfig
from plume.config.plan import DemoConfig, PlanConfig
from plume.config.presets import PRESETS, preset
from plume.config.serve import ServeConfig
from plume.config.tables import RECIPE, build, describe, find_recipe, parse_overrides, read_recipe, with_overrides
from plume.config.train import (
    DistillConfig,
    MaskingConfig,
    ObjectiveConfig,
    PretrainConfig,
    TrainConfig,
    trained_like,
)

__all__ = [
    "PRESETS",
    "RECIPE",
    "AdaptConfig",
    "CleanConfig",
    "DataConfig",
    "DecodeBenchConfig",
    "DemoConfig",
    "DistillConfig",
    "EngineConfig",
    "EvaluateConfig",
    "ExportConfig",
    "FinetuneConfig",
    "GenerateConfig",
    "MaskingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "PlanConfig",
    "PretrainConfig",
    "SamplingConfig",
    "ServeConfig",
    "SweepConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrainConfig",
    "UserError",
    "build",
    "describe",
    "did_you_mean",
    "find_recipe",
    "parse_overrides",
    "preset",
    "read_recipe",
    "trained_like",
    "with_overrides",
]
