"""config.json of a model folder: read into a ModelConfig, and written as transformers wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import ModelConfig, UserError
from plume.families import Family, family_called, family_of
from plume.files import read_json

if TYPE_CHECKING:
    from plume.heads import Model
    from plume.text import Tokenizer


@dataclass(frozen=True)
class FolderConfig:
    """What config.json says: the stack, its head, the head's labels, and the file as it is."""

    model: ModelConfig
    family: Family
    head: str
    labels: tuple[str, ...]
    raw: Mapping[str, Any]


def read_config(folder: Path) -> FolderConfig:
    raw = read_json(folder / "config.json")
    family = family_called(str(raw.get("model_type")))
    try:
        model = ModelConfig(**our_values(raw, family))
    except (TypeError, UserError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    head = head_of(raw, family)
    labels = tuple(str(name) for _, name in sorted((int(i), n) for i, n in (raw.get("id2label") or {}).items()))
    if head in ("classify", "similarity", "tag") and not labels:
        labels = tuple(f"LABEL_{i}" for i in range(int(raw.get("num_labels", 2))))
    return FolderConfig(model, family, head, labels, raw)


def our_values(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Their fields under our names; one error for all that no model of ours does."""
    problems = [
        f"{key}={raw[key]!r} is not supported, only {value!r}"
        for key, value in family.constants.items()
        if raw.get(key, value) != value
    ]
    problems += [
        f"{key}={raw[key]!r} is not supported beside {family.keys[ours]}={raw[family.keys[ours]]!r}"
        for key, ours in family.second_keys.items()
        if raw.get(key) is not None and raw.get(family.keys[ours], raw[key]) != raw[key]
    ]
    values: dict[str, Any] = {**family.assumes, **family.behaves}
    for ours, key in family.keys.items():
        if raw.get(key) is not None:
            values[ours] = raw[key]
    names = {theirs: ours for ours, theirs in family.activations.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    activation = values.get("activation", next(iter(family.activations.values())))  # its class assumes the first
    if activation not in names:
        problems.append(f"{family.keys['activation']}={activation!r} is not one of {', '.join(names)}")
    if problems:
        raise UserError("; ".join(problems))
    values["activation"] = names[activation]
    values["dropout"] = float(raw.get(family.dropouts[0], 0.1))
    if family.positions_after_pad:
        values["first_position"] = int(raw.get("pad_token_id", 1)) + 1
        values["context"] = values["context"] - values["first_position"]
    if values.get("hidden") == 4 * values.get("width", 0):
        values["hidden"] = None
    return values


def head_of(raw: Mapping[str, Any], family: Family) -> str:
    """Our own word where the folder has one; else the class that transformers would open it with tells."""
    if raw.get("plume_head") in family.heads:
        return str(raw["plume_head"])
    architecture = next(iter(raw.get("architectures") or []), None)
    return next((kind for kind, (name, _) in family.heads.items() if name == architecture), "bare")


def to_hf_config(model: Model, tokenizer: Tokenizer | None) -> dict[str, Any]:
    family, config = family_of(model.config), model.config
    values: dict[str, Any] = {
        "architectures": [family.heads[model.kind][0]],
        "model_type": family.model_type,
        "dtype": "float32",
        **family.constants,
        **dict.fromkeys(family.dropouts, config.dropout),
    }
    for ours, key in family.keys.items():
        values[key] = getattr(config, ours)
    values[family.keys["activation"]] = family.activations[config.activation]
    if "hidden" in family.keys:
        values[family.keys["hidden"]] = config.mlp_width
    if family.positions_after_pad:
        values[family.keys["context"]] = config.context + config.first_position
    values |= {key: values[family.keys[ours]] for key, ours in family.second_keys.items()}
    values |= family.written
    if model.kind == "similarity":
        values["plume_head"] = model.kind  # transformers has no class of its own for it
    if model.labels:
        values["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
        values["label2id"] = {label: i for i, label in enumerate(model.labels)}
    return values | special_ids(family, config, tokenizer)


def special_ids(family: Family, config: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Ids that transformers wants to know of; without a padding token the end stands in, so that batches work there."""
    roles = {} if tokenizer is None else tokenizer.specials
    start, end = roles.get("start", roles.get("classify")), roles.get("end", roles.get("separator"))
    pad = roles.get("pad", end)
    if family.positions_after_pad:
        if tokenizer is not None and pad != config.first_position - 1:
            fits = 1 if pad is None else pad + 1
            raise UserError(
                f"first_position={config.first_position} must be the padding token's id plus one; that id is {pad}: "
                f"transformers counts RoBERTa's positions from there; first_position={fits} would do"
            )
        pad = config.first_position - 1
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    if family.needs_ids:
        ids = {key: 0 if value is None else value for key, value in ids.items()}
        ids["decoder_start_token_id"] = ids["bos_token_id"]
    return ids
