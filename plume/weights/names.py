"""Our tensors under their names and theirs under ours, by the rules of the family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from plume.config import ModelConfig, UserError
from plume.families import Family, Rule, family_of

if TYPE_CHECKING:  # torch takes a second to import, and a config can be read without it
    from torch import Tensor

    from plume.heads import Model


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
    if family.sinusoids is not None and config.positions == "sinusoidal":
        tensors[prefix + family.sinusoids] = sinusoids(config.context, config.width)
    for name in family.zero_biases:
        tensors[name] = torch.zeros(1, config.vocab_size)
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
    left = tidy(theirs, family)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in left) else ""
    known = implied(family, config, prefix)
    ours: dict[str, Tensor] = {}
    missing, wrong = list[str](), list[str]()
    for name in [name for name in known if name in left]:
        if not alike(left.pop(name), known[name]):
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


def alike(a: Tensor, b: Tensor) -> bool:
    import torch

    return a.shape == b.shape and torch.allclose(a.float(), b, atol=1e-5)


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
