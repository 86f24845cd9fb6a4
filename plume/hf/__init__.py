"""The model folder, exactly as transformers reads and writes it: config.json, safetensors, tokenizer, model card."""

from plume.hf.checkpoint_model import openable_steps, save_run_config
from plume.hf.config_json import EmbeddingConfig, FolderConfig, read_chat_template, read_config, read_embedding
from plume.hf.model_folder import (
    folder_info,
    gather_tensors,
    load_model,
    load_tokenizer_of,
    model_hash,
    resolve,
    save_model,
    stored_model,
)
from plume.hf.weights import read_tensors, rules_for, weight_files

__all__ = [
    "EmbeddingConfig",
    "FolderConfig",
    "folder_info",
    "gather_tensors",
    "load_model",
    "load_tokenizer_of",
    "model_hash",
    "openable_steps",
    "read_chat_template",
    "read_config",
    "read_embedding",
    "read_tensors",
    "resolve",
    "rules_for",
    "save_model",
    "save_run_config",
    "stored_model",
    "weight_files",
]
