"""The model folder, exactly as transformers reads and writes it: config.json, safetensors, tokenizer, model card."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import ModelConfig, UserError
from plume.families import ROBERTA, Family, Rule, family_called, family_of
from plume.files import aside, read_json, write_json, write_text

if TYPE_CHECKING:  # torch takes a second to import, and a config can be read without it
    import torch
    from torch import Tensor

    from plume.heads import Model
    from plume.text import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000


# ---- names and tensors -------------------------------------------------------------------------------------------


def rules_for(family: Family, config: ModelConfig, head: str, prefix: str) -> Iterator[Rule]:
    """One rule per tensor. Names are built from the config, never parsed out of a file."""
    for rule in family.body:
        layers = config.decoder_layers if rule.ours.startswith("decoder.") else config.layers
        for i in range(layers if "{}" in rule.ours else 1):
            yield Rule(
                f"body.{rule.ours}".replace("{}", str(i)), prefix + rule.theirs.replace("{}", str(i)), rule.transposed
            )
    for rule in family.heads[head][1]:
        yield Rule(f"head.{rule.ours}", rule.theirs, rule.transposed)


def implied(family: Family, config: ModelConfig, prefix: str) -> dict[str, Tensor]:
    """Tensors that their format wants and our config already determines."""
    import torch

    from plume.model import sinusoids

    tensors: dict[str, Tensor] = {}
    if not config.attention_bias:
        for rule in rules_for(family, config, "next-token", prefix):
            if re.search(r"(attn|cross)\.inner\.(q|k|v|out)\.bias$", rule.ours):
                tensors[rule.theirs] = torch.zeros(config.width)
    if family.model_type == "openai-gpt" and config.positions == "sinusoidal":
        tensors[prefix + "positions_embed.weight"] = sinusoids(config.context, config.width)
    if family.model_type == "marian":
        tensors["final_logits_bias"] = torch.zeros(1, config.vocab_size)
    return tensors


def to_hf(model: Model) -> dict[str, Tensor]:
    """Our tensors under their names; rows that only pad the vocabulary are left out."""
    import torch

    family, config = family_of(model.config), model.config
    prefix = "" if model.kind == "bare" else family.prefix
    left = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    left.pop("body.decoder.embed.tokens.weight", None)  # the encoder's, once more
    theirs = implied(family, config, prefix)
    for rule in rules_for(family, config, model.kind, prefix):
        if rule.theirs in theirs:
            continue
        tensor = torch.cat([left.pop(name) for name in rule.parts()])
        if rule.ours.endswith("embed.tokens.weight"):
            tensor = tensor[: config.vocab_size]
        theirs[rule.theirs] = (tensor.T if rule.transposed else tensor).contiguous()
    assert not left, f"no rule for {list(left)}"
    return theirs


def from_hf(theirs: Mapping[str, Tensor], family: Family, config: ModelConfig, head: str) -> dict[str, Tensor]:
    """Their tensors under our names. What is missing, left over or of another shape is named in one error."""
    import torch

    left = tidy(theirs, family)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in left) else ""
    known = implied(family, config, prefix)
    ours: dict[str, Tensor] = {}
    missing, wrong = list[str](), list[str]()
    for name, value in known.items():
        if (tensor := left.pop(name, None)) is None:
            continue
        if tensor.shape != value.shape or not torch.allclose(tensor.float(), value, atol=1e-5):
            wrong.append(f"{name} should be what the config implies, but is not")
    for rule in rules_for(family, config, head, prefix):
        if rule.theirs in known:
            continue
        if (tensor := left.pop(rule.theirs, None)) is None:
            missing.append(rule.theirs)
            continue
        tensor = tensor.T if rule.transposed else tensor
        ours |= zip(rule.parts(), tensor.chunk(len(rule.parts())), strict=True)
    others = {rule.theirs for kind in family.heads for rule in rules_for(family, config, kind, prefix)}
    foreign = [name for name in left if name not in others and name not in {prefix + n for n in others}]
    if missing or foreign or wrong:
        raise UserError(
            f"not a {config.layers}-layer {family.model_type} checkpoint with a {head} head"
            f"\n  it lacks: {some(missing)}\n  it also has: {some(foreign)}"
            + "".join(f"\n  {sentence}" for sentence in wrong)
        )
    return ours


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def tidy(theirs: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Without the buffers of old files, old names made new, and each tied tensor under its one name."""
    import torch

    left: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        if not re.search(family.buffers, name):
            new_name = re.sub(r"\bgamma$", "weight", re.sub(r"\bbeta$", "bias", name))
            left[new_name] = tensor
    prefixed = any(name.startswith(family.prefix) for name in left)
    for second, first in family.ties.items():
        if second not in left:
            continue
        first = first if first.startswith(("cls.", "lm_head.")) or not prefixed else family.prefix + first
        tensor = left.pop(second)
        if first in left and not torch.equal(left[first], tensor):
            raise UserError(f"{second} differs from {first}: a model whose tables are not tied cannot be opened here")
        left[first] = tensor
    return left


# ---- config.json -------------------------------------------------------------------------------------------------


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
    problems = [
        f"{key}={raw[key]!r} is not supported, only {value!r}"
        for key, value in family.constants.items()
        if raw.get(key, value) != value
    ]
    values: dict[str, Any] = {**family.behaves}
    for ours, key in family.keys.items():
        if raw.get(key) is not None:
            values[ours] = raw[key]
    names = {theirs: ours for ours, theirs in family.activations.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    activation = values.get("activation", next(iter(family.activations.values())))  # its class assumes the first
    if activation not in names:
        problems.append(f"{family.keys['activation']}={activation!r} is not one of {', '.join(names)}")
    if problems:
        raise UserError(f"{folder / 'config.json'}: " + "; ".join(problems))
    values["activation"] = names[activation]
    values["dropout"] = float(raw.get(family.dropouts[0], 0.1))
    if family is ROBERTA:
        values["first_position"] = int(raw.get("pad_token_id", 1)) + 1
        values["context"] = values["context"] - values["first_position"]
    if values.get("hidden") == 4 * values.get("width", 0):
        values["hidden"] = None
    try:
        model = ModelConfig(**values)
    except (TypeError, UserError) as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    architecture = next(iter(raw.get("architectures") or []), None)
    head = next((kind for kind, (name, _) in family.heads.items() if name == architecture), "bare")
    if raw.get("plume_head") in family.heads:
        head = raw["plume_head"]
    labels = tuple(str(name) for _, name in sorted((int(i), n) for i, n in (raw.get("id2label") or {}).items()))
    if head in ("classify", "similarity", "tag") and not labels:
        labels = tuple(f"LABEL_{i}" for i in range(int(raw.get("num_labels", 2))))
    return FolderConfig(model, family, head, labels, raw)


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
    if family is ROBERTA:
        values |= {"max_position_embeddings": config.context + config.first_position}
    if family.model_type == "marian":
        values |= {
            "decoder_attention_heads": config.heads,
            "decoder_ffn_dim": config.mlp_width,
            "decoder_vocab_size": config.vocab_size,
            "forced_eos_token_id": None,
        }
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
    if family is ROBERTA:
        if tokenizer is not None and pad != config.first_position - 1:
            raise UserError(
                f"first_position={config.first_position} must be the padding token's id plus one; that id is {pad}: "
                f"transformers counts RoBERTa's positions from there; first_position={(pad or 0) + 1} would do"
            )
        pad = config.first_position - 1
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": pad}
    if family.model_type == "marian":  # its class takes no None; 0 is what it assumes itself
        ids = {key: 0 if value is None else value for key, value in ids.items()}
        ids["decoder_start_token_id"] = ids["bos_token_id"]
    return ids


# ---- reading and writing -----------------------------------------------------------------------------------------


def resolve(name: str | Path) -> Path:
    """The model folder that a path, a run folder or a hub name stands for."""
    path = Path(name).expanduser()
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    if path.exists():
        raise UserError(f"{path} has no config.json, so it is not a model folder")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
        raise UserError(f"there is no folder {path}")
    return download(str(name))


def download(name: str) -> Path:
    """A model of the hub, from huggingface_hub's cache or the network, with its progress bar and offline mode."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.txt", "pytorch_model*.bin"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"there is no folder {name}, and the hub cannot give it: {reason}") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json on the hub, so it is not a model folder")
    return folder


def weight_files(folder: Path) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            files = sorted({folder / name for name in read_json(index)["weight_map"].values()})
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                raise UserError(f"{folder} is incomplete: {some(absent)} named in {index.name} is not there")
            return files
    raise UserError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, RuntimeError, ValueError, EOFError, OSError) as error:
            raise UserError(f"{file} is damaged or truncated: {str(error).splitlines()[0]}") from None
        except Exception as error:  # unpickling raises anything
            raise UserError(f"{file} holds more than tensors, so it is not opened: {type(error).__name__}") from None
    return tensors


def load_model(
    folder: str | Path,
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Model:
    """The model of a folder. With another `head` than the folder's, only the stack is taken and the head is fresh."""
    import torch

    from plume.heads import Model

    place = resolve(folder)
    said = read_config(place)
    kind = said.head if head is None else head
    fresh = kind != said.head or (labels is not None and tuple(labels) != said.labels)
    with torch.device("meta"):
        model = Model(said.model, said.head, said.labels)
    try:
        state = from_hf(read_tensors(place), said.family, said.model, said.head)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [
        f"{name} is {tuple(tensor.shape)} in the file, {tuple(shapes[name])} by config.json"
        for name, tensor in state.items()
        if tensor.shape != shapes[name]
    ]
    if wrong:
        raise UserError(f"{place}: the weights do not fit config.json\n  " + "\n  ".join(wrong[:5]))
    model.load_state_dict(state, strict=False, assign=True)
    if said.model.decoder_layers:
        model.body.tie()  # type: ignore[operator]
    if fresh:
        body, model = model.body, Model(said.model, kind, () if labels is None else labels)
        model.body = body
    return model.to(device=device, dtype=torch.float32 if dtype is None else dtype).eval()


def save_model(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    info: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a whole model folder aside, then put it in place: never half a folder, never a mix of two."""
    place = Path(folder).expanduser()
    if place.exists() and not (place / "config.json").is_file() and any(place.iterdir()):
        raise UserError(f"{place} is not empty and not a model folder, so it is left alone; name another folder")
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only vocab_size={model.config.vocab_size}"
        )
    with aside(place) as new:
        write_json(new / "config.json", to_hf_config(model, tokenizer))
        write_tensors(to_hf(model), new, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(new)
        about = {"head": model.kind, "tokenizer_hash": None if tokenizer is None else tokenizer.hash, **(info or {})}
        write_json(new / "plume.json", about)
        write_text(new / "README.md", model_card(model, about))
    return place


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.cpu()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def model_card(model: Model, about: Mapping[str, Any]) -> str:
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    rows = [f"| {name} | {value} |" for name, value in about.items() if isinstance(value, str | int | float)]
    return "\n".join(
        [
            "---\nlibrary_name: transformers\ntags: [plume]\n---",
            f"# A {family_of(config).model_type} model with a {model.kind} head",
            f"{parameters:,} parameters: {config.layers} layers, width {config.width}, {config.heads} heads, "
            f"context {config.context}, vocabulary {config.vocab_size}. Trained with Plume.",
            "Text that it writes is synthetic: label it so where people will read it.",
            "| | |\n|---|---|\n" + "\n".join(rows),
            f"```python\nimport plume\nlm = plume.load({'this-folder'!r})\n```\n",
        ]
    ).replace("\n#", "\n\n#")


def model_hash(folder: str | Path) -> str:
    """One short name for what a folder computes: its config and its weights."""
    place, digest = resolve(folder), hashlib.sha256()
    for file in [place / "config.json", *weight_files(place)]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
