"""The model folder, exactly as transformers reads and writes it: config.json, safetensors, tokenizer, model card."""

from plume.weights.folder import load_model, model_hash, read_tensors, resolve, save_model
from plume.weights.folder_config import FolderConfig, read_config
from plume.weights.names import rules_for

__all__ = [
    "FolderConfig",
    "load_model",
    "model_hash",
    "read_config",
    "read_tensors",
    "resolve",
    "rules_for",
    "save_model",
]
