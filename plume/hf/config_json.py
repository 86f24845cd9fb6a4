"""config.json of a model folder: read into a ModelConfig, and written as transformers expects it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from plume.config import ModelConfig, UserError
from plume.hf.families import (
    FAMILIES,
    Family,
    check_head,
    family_named,
    family_of,
    family_with_class,
    family_with_tensors,
)
from plume.hf.weights import tensor_shapes
from plume.util.files import read_json, write_json

if TYPE_CHECKING:
    from plume.model.heads import Model
    from plume.text import Tokenizer

TYPES = {f.name: str(f.type) for f in fields(ModelConfig)}
LARGEST = {"layers": 10_000, "decoder_layers": 10_000}  # of other sizes: what 31 bits hold
LARGEST_SINUSOIDS = 1 << 27  # numbers in a table of positions that no file holds
Pooling = Literal["mean", "cls", "max"]
CHAT_TEMPLATE = "chat_template.jinja"
PROBLEM_TYPES = {"multilabel": "multi_label_classification", "number": "regression"}
LABELLED = ("classify", "similarity", "tag")  # heads that answer with labels


@dataclass(frozen=True)
class FolderConfig:
    """What config.json says: the stack, its head, the head's labels, the end tokens, and the file as it is."""

    model: ModelConfig
    family: Family
    head: str
    labels: tuple[str, ...]
    end_ids: tuple[int, ...] | None  # None: the folder names none
    raw: Mapping[str, Any]


def read_config(folder: Path, architecture: str | None = None) -> FolderConfig:
    """The config of a folder; `architecture`, a class of transformers, stands in for what the file does not say."""
    raw = read_json(folder / "config.json")
    try:
        if architecture is not None:
            raw = raw | {"architectures": [architecture]}
        family = find_family(raw, folder)
        model = ModelConfig(**our_values(raw, family))
        head = find_head(raw, family, folder)
        check_head(family, model, head)
        return FolderConfig(model, family, head, find_labels(raw, head), find_end_ids(raw, family, model, folder), raw)
    except (TypeError, UserError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None


def our_values(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Their fields under our names; one error for everything that is not supported."""
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
        named = key if raw.get(key) is not None else family.aliases.get(key, key)
        if raw.get(named) is not None:
            values[ours] = raw[named]
            problems += wrong_value(ours, named, raw[named])
    names = {theirs: ours for ours, theirs in family.activations.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    activation = values.get("activation", next(iter(family.activations.values())))  # its class assumes the first
    if activation not in names:
        problems.append(f"{family.keys['activation']}={activation!r} is not one of {', '.join(names)}")
    rate, pad = raw.get(family.dropouts[0], 0.1), raw.get("pad_token_id", 1)
    problems += wrong_value("dropout", family.dropouts[0], rate)
    if family.positions_after_pad:
        problems += wrong_value("first_position", "pad_token_id", pad)
    if problems:
        raise UserError("; ".join(problems))
    values |= {"activation": names[activation], "dropout": float(rate)}
    if family.positions_after_pad:
        values["first_position"] = pad + 1
        values["context"] = values["context"] - values["first_position"]
    context, width = values.get("context", 0), values.get("width", 0)
    if values.get("mlp_width") == 4 * width:
        values["mlp_width"] = None
    if values.get("positions") == "sinusoidal" and context * width > LARGEST_SINUSOIDS:
        raise UserError(f"a context of {context} with width {width} is too large for sinusoids")
    return values


def wrong_value(ours: str, key: str, value: Any) -> list[str]:
    """Why a value of theirs cannot be that field of ours: another type, not finite, or absurdly large."""
    kind = TYPES[ours]
    if kind.startswith("int"):
        if isinstance(value, bool) or not isinstance(value, int):
            return [f"{key}={value!r} is not a whole number"]
        most = LARGEST.get(ours, 2**31 - 1)
        return [f"{key}={value} is not between 0 and {most}"] if not 0 <= value <= most else []
    if kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)):
        return [f"{key}={value!r} is not a finite number"]
    return [f"{key}={value!r} is neither true nor false"] if kind == "bool" and not isinstance(value, bool) else []


# ---- what the file leaves open -----------------------------------------------------------------------------------


def find_family(raw: Mapping[str, Any], folder: Path) -> Family:
    """By model_type, else by the class in architectures, else by the names of the tensors."""
    if raw.get("model_type") is not None:
        return family_named(raw["model_type"])
    found = family_with_class(named_class(raw))
    found = family_with_tensors(tensor_shapes(folder)) if found is None else found
    if found is None:
        known = ", ".join(family.model_type for family in FAMILIES)
        raise UserError(
            f"model_type is missing, and the tensors do not tell it; it is one of {known}: add it, or import the "
            "folder with --architecture, for example plume import FOLDER --out NEW --architecture BertForMaskedLM"
        )
    return found


def named_class(raw: Mapping[str, Any]) -> str | None:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def find_head(raw: Mapping[str, Any], family: Family, folder: Path) -> str:
    """Plume's own entry where there is one; else the class that transformers would open; else what the tensors fit."""
    if raw.get("plume_head") in family.heads:
        return str(raw["plume_head"])
    architecture = named_class(raw)
    for head, (name, _) in family.heads.items():
        if name == architecture:
            return head
    names = set(tensor_shapes(folder))
    fitting = [
        (len(rules), -place, head)
        for place, (head, (_, rules)) in enumerate(family.heads.items())
        if head not in ("bare", "similarity") and all(rule.theirs in names for rule in rules)
    ]
    return max(fitting)[2] if fitting else "bare"


def find_labels(raw: Mapping[str, Any], head: str) -> tuple[str, ...]:
    """The labels' names; num_labels counts where it and id2label disagree, as in transformers."""
    named, count = raw.get("id2label"), raw.get("num_labels")
    try:
        labels = tuple(str(name) for _, name in sorted((int(i), n) for i, n in (named or {}).items()))
        count = None if count is None else int(count)
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"id2label={named!r} or num_labels={count!r} is not what transformers writes") from None
    if head in LABELLED and (not labels or (count is not None and count != len(labels))):
        return tuple(f"LABEL_{i}" for i in range(2 if count is None else count))
    return labels


def find_end_ids(raw: Mapping[str, Any], family: Family, model: ModelConfig, folder: Path) -> tuple[int, ...] | None:
    """The tokens that end a generation: of generation_config.json, else of config.json."""
    path, value = folder / "generation_config.json", raw.get("eos_token_id")
    if path.is_file():
        value = read_json(path).get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < model.vocab_size]
    if wrong and ids != [family.end_token]:  # what the class assumes is written even where the vocabulary is smaller
        raise UserError(f"eos_token_id={value!r} is not in the vocabulary of {model.vocab_size} tokens")
    return tuple(i for i in ids if i not in wrong) or None


# ---- sentence-transformers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a folder of sentence-transformers makes one vector of a text."""

    pool: Pooling
    normalize: bool
    max_tokens: int | None  # of a text with its special tokens


def read_embedding(folder: Path) -> EmbeddingConfig | None:
    """What modules.json says of pooling, normalisation and length; None where there is no such file."""
    root = folder.parent if folder.name == "0_Transformer" else folder
    if not (root / "modules.json").is_file():
        return None
    try:
        modules = json.loads((root / "modules.json").read_text(encoding="utf-8"))
        paths = {str(module["type"]).split(".")[-1]: root / module["path"] for module in modules}
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{root / 'modules.json'} is not a list of modules: {error!r}") from None
    if unknown := paths.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UserError(f"{root / 'modules.json'}: the module {', '.join(sorted(unknown))} is not supported")
    pooling = read_json(paths["Pooling"] / "config.json") if "Pooling" in paths else {"pooling_mode": "mean"}
    old_names = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}  # one true or false for each
    modes = [
        old_names.get(key.removeprefix("pooling_mode_"), key)
        for key, value in pooling.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    mode: Any = pooling.get("pooling_mode", modes[0] if len(modes) == 1 else modes)
    if mode not in get_args(Pooling):
        raise UserError(f"{paths['Pooling']}: pooling mode {mode!r} is not one of {', '.join(get_args(Pooling))}")
    return EmbeddingConfig(mode, "Normalize" in paths, longest_text(folder, root))


def longest_text(folder: Path, root: Path) -> int | None:
    for path, key in (
        (root / "sentence_bert_config.json", "max_seq_length"),
        (folder / "tokenizer_config.json", "model_max_length"),
    ):
        value = read_json(path).get(key) if path.is_file() else None
        if isinstance(value, int) and 0 < value < 1 << 30:  # unset is written as a very large number
            return value
    return None


def write_embedding(embedding: EmbeddingConfig, folder: Path, width: int) -> None:
    """The files that `read_embedding` reads, in the form that every version of sentence-transformers takes."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if embedding.normalize else {})
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds.items())
    ]
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    modes = {f"pooling_mode_{name}": pool == embedding.pool for pool, name in names.items()}
    for path in filter(None, kinds.values()):
        (folder / path).mkdir()
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    limit = {"max_seq_length": embedding.max_tokens, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limit)


def read_chat_template(folder: Path | None) -> str | None:
    """The chat template that a model folder brings, in the places where transformers writes it."""
    if folder is None:
        return None
    if (file := folder / CHAT_TEMPLATE).is_file():
        return file.read_text(encoding="utf-8")
    file = folder / "tokenizer_config.json"
    found = read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(found, list):  # several with names; the others are for tools and documents
        found = next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


# ---- writing -----------------------------------------------------------------------------------------------------


def to_hf_config(model: Model, tokenizer: Tokenizer | None) -> dict[str, Any]:
    family, config = family_of(model.config), model.config
    check_head(family, config, model.kind)
    values: dict[str, Any] = {
        "architectures": [family.heads[model.kind][0]],
        "model_type": family.model_type,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        **family.constants,
        **dict.fromkeys(family.dropouts, config.dropout),
    }
    for ours, key in family.keys.items():
        values[key] = getattr(config, ours)
    values[family.keys["activation"]] = family.activations[config.activation]
    if "mlp_width" in family.keys:
        values[family.keys["mlp_width"]] = config.ffn_width
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


def problem_type(head: str, task: Mapping[str, Any] | None) -> dict[str, str]:
    """The field by which transformers chooses between softmax, sigmoid and the number itself."""
    kind = None if task is None else "number" if task.get("target") == "number" else task.get("kind")
    return {"problem_type": PROBLEM_TYPES[kind]} if kind in PROBLEM_TYPES and head in ("classify", "similarity") else {}


def special_ids(family: Family, config: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Ids that transformers needs; without a padding token the end token pads, so that batches work there."""
    roles = {} if tokenizer is None else tokenizer.specials
    start, end = roles.get("start", roles.get("classify")), roles.get("end", roles.get("separator"))
    pad = roles.get("pad", end)
    if family.positions_after_pad:
        if roles and pad != config.first_position - 1:
            fits = 1 if pad is None else pad + 1
            raise UserError(
                f"first_position={config.first_position} must be the padding token's id plus one; that id is {pad}: "
                f"transformers counts RoBERTa's positions from there; use first_position={fits}"
            )
        pad = config.first_position - 1
    ids: dict[str, Any] = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    if tokenizer is not None and tokenizer.ends not in ((), (roles.get("end"),)):
        ids["eos_token_id"] = tokenizer.ends[0] if len(tokenizer.ends) == 1 else list(tokenizer.ends)
    if family.needs_ids:
        ids = {key: 0 if value is None else value for key, value in ids.items()}
        ids["decoder_start_token_id"] = ids["bos_token_id"]
    return ids
