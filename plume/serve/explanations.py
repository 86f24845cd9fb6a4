"""The views of one text inside a model: heads, attention, steps, layers, walk, interventions, effects, attribution."""

# T tokens, S keys, L layers, H heads, K head width, D model width

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from plume.explain import Edit, Explanation, as_json, head_kinds, packed
from plume.explain.contributions import answer_name, summary_position
from plume.explain.forward_pass import PER_POSITION, as_floats
from plume.model.heads import TOKEN_HEADS
from plume.serve import schemas
from plume.serve.served_models import Served
from plume.tasks import saved_kind
from plume.tasks.multilabel import MultiLabelTask

THUMBNAIL = 24  # cells along one side of a head's small picture
LISTED = 10  # answers shown before and after an intervention


def explain(served: Served, asked: schemas.ExplainRequest) -> dict[str, Any]:
    return View(served, asked).answer()


class View:
    """One request about one row of tokens."""

    def __init__(self, served: Served, asked: schemas.ExplainRequest) -> None:
        self.served, self.asked = served, asked
        if not isinstance(asked.input, str) or not asked.input:
            served.tokens_of(asked.input)  # refuses an empty text and ids outside the vocabulary
        self.text = asked.input
        self.seen = served.explanation(self.text, asked.pair, asked.row)
        self.stack = self.seen.stack if asked.stack is None else asked.stack
        self.seen.check("embedding", None, None, self.stack)

    @cached_property
    def other(self) -> Explanation | None:
        """The text that is patched from."""
        if self.asked.other is None:
            return None
        return self.served.explanation(self.asked.other, self.asked.pair, self.asked.row)

    def answer(self) -> dict[str, Any]:
        seen, asked = self.seen, self.asked
        ids, pieces = tokens_of_stack(seen, self.stack)
        total = len(ids)
        size = min(asked.size, total)
        start = total - size if asked.start is None else min(asked.start, total - size)
        self.window = slice(start, start + size)
        tokenizer = self.served.lm.tokenizer
        payload: dict[str, Any] = {
            "model": self.served.name,
            "text": tokenizer.decode(list(self.text)) if not isinstance(self.text, str) else self.text,
            "view": asked.view,
            "stack": self.stack,
            "tokens": list(ids[self.window]),
            "pieces": list(pieces[self.window]),
            "starts": [bool(x) for x in tokenizer.word_starts(ids)[self.window]],
            "window": {"start": start, "size": size, "total": total},
            "causal": seen.stacks[self.stack].causal,
            "layers": len(seen.stacks[self.stack].blocks),
        }
        if seen.model.kind not in TOKEN_HEADS:
            payload["task_rows"] = len(self.served.rows_of(self.text, asked.pair))
        if asked.kind == "cross" and seen.source is not None:
            payload["keys"] = list((seen.source_pieces or ())[: asked.size])
            payload["key_starts"] = [bool(x) for x in tokenizer.word_starts(seen.source)[: asked.size]]
        return payload | VIEWS[asked.view](self)

    def columns(self) -> slice:
        return slice(0, self.asked.size) if self.asked.kind == "cross" else self.window

    def target(self) -> Any:
        position = self.asked.position
        if self.seen.model.kind not in PER_POSITION:
            position = None
        return self.seen.target(self.asked.index, position)


def tokens_of_stack(seen: Explanation, stack: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if stack == "encoder" and seen.source is not None and seen.source_pieces is not None:
        return seen.source, seen.source_pieces
    return seen.tokens, seen.pieces


# ---- attention


def heads_view(view: View) -> dict[str, Any]:
    """Every head as a small picture, and where its attention goes."""
    seen, asked = view.seen, view.asked
    scores = seen.head_scores(kind=asked.kind, stack=asked.stack)
    weights = [seen.attention(i, kind=asked.kind, stack=asked.stack) for i in range(len(scores.first))]
    pictures = np.stack([small(w[:, view.window, view.columns()]) for w in weights])
    whole = np.clip(np.rint(255 * pictures), 0, 255).astype(np.uint8)  # (L, H, n, m)
    shown = {"shape": list(whole.shape), "u8": base64.b64encode(whole.tobytes()).decode("ascii")}
    return {"scores": as_json(scores), "thumbnails": shown}


def small(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(H, T, S) made at most THUMBNAIL wide; each cell is the largest of those it stands for."""
    for axis in (1, 2):
        width = weights.shape[axis]
        if width > THUMBNAIL:
            edges = [width * i // THUMBNAIL for i in range(THUMBNAIL)]
            weights = np.maximum.reduceat(weights, edges, axis=axis)
    return weights


def attention_view(view: View) -> dict[str, Any]:
    seen, asked = view.seen, view.asked
    match asked.mix:
        case "head":
            weights = seen.attention(asked.layer, asked.head, kind=asked.kind, stack=asked.stack)
        case "mean":
            weights = seen.mean_attention(asked.layer, kind=asked.kind, stack=asked.stack)
        case "rollout":
            weights = seen.rollout(asked.layer, stack=asked.stack)
    matrix = packed(weights[view.window, view.columns()], "f32")
    return {"layer": asked.layer, "head": asked.head, "mix": asked.mix, "matrix": matrix}


def steps_view(view: View) -> dict[str, Any]:
    seen, asked = view.seen, view.asked
    steps = seen.steps(asked.layer, asked.head, asked.query, kind=asked.kind, stack=asked.stack)
    columns = view.columns()
    shown = [i for i, position in enumerate(steps.keys) if columns.start <= position < columns.stop]
    payload = as_json(steps)
    for name in ("keys", "pieces", "k", "v", "scores", "scaled", "weights"):
        payload[name] = [payload[name][i] for i in shown]
    return {"layer": asked.layer, "head": asked.head, "steps": payload | {"all_keys": len(steps.keys)}}


def layers_view(view: View) -> dict[str, Any]:
    seen, window = view.seen, view.window
    parts = seen.contributions()
    names = ("embedding", "attention", "cross", "mlp", "bias", "head", "total")
    lists = {name: as_json(getattr(parts, name)[..., window]) for name in names}
    named = {"pieces": list(parts.names[window]), "answer": parts.answer[window].tolist()}
    lens = as_json(seen.lens(5, window.start, window.stop))
    return {"lens": lens, "norms": as_json(seen.norms()[:, window]), "contributions": {**lists, **named}}


# ---- the walk


def walk_view(view: View) -> dict[str, Any]:
    """Every number of one block (layer), of the embedding (layer -1) or of the end (layer L), at one position."""
    seen, asked = view.seen, view.asked
    ids, _ = tokens_of_stack(seen, view.stack)
    at = min(asked.query, len(ids) - 1)  # a page asks before it knows how long the text is
    config = seen.model.config
    shape = {"width": config.width, "heads": config.heads, "head_width": config.head_width, "mlp": config.ffn_width,
             "vocabulary": config.vocab_size, "context": config.context, "norm": config.norm,
             "activation": config.activation, "embed_scale": seen.stacks[view.stack].embed.scale}  # fmt: skip
    common = {"layer": asked.layer, "head": asked.head, "query": at, "shape": shape, "read_from": read_from(view)}
    if asked.layer < 0:
        return common | {"parts": embedding_parts(view, at)}
    if asked.layer < len(seen.stacks[view.stack].blocks):
        source = {"source_pieces": list((seen.source_pieces or ())[: asked.size])}
        return common | source | {"parts": block_parts(view, asked.layer, at)}
    return common | end_of_walk(view, at)


def read_from(view: View) -> int:
    """The position that a page shows first: where the head reads, the mask, or the last token of a causal stack."""
    seen, (ids, _) = view.seen, tokens_of_stack(view.seen, view.stack)
    kind = seen.model.kind
    if view.stack == seen.stack and kind not in (*PER_POSITION, "bare"):
        return summary_position(seen)
    if seen.mask is not None and seen.mask in ids:
        return ids.index(seen.mask)
    if seen.stacks[view.stack].causal or seen.source is not None:
        return len(ids) - 1
    return int(seen.logits[:, 0].argmax()) if kind == "span" else min(1, len(ids) - 1)  # 0 is a special token


def row(view: View, part: str, layer: int | None, at: int) -> dict[str, Any]:
    return packed(view.seen.activation(part, layer=layer, stack=view.asked.stack)[at], "f32")


def embedding_parts(view: View, at: int) -> dict[str, Any]:
    embed = view.seen.stacks[view.stack].embed
    names = ["token_rows", "position_rows", *(["segment_rows"] if embed.segments is not None else []), "embedding"]
    return {name: row(view, name, None, at) for name in names}


def block_parts(view: View, layer: int, at: int) -> dict[str, Any]:
    """The parts of each sublayer by name. Those of attention are of the chosen head where it has its own."""
    seen, asked = view.seen, view.asked
    seen.check("attention.weights", layer, asked.head, view.stack)
    kinds = [kind for kind in ("attention", "cross") if f"{view.stack}.{layer}.{kind}.q" in seen.sites]
    names = [f"{kind}.{part}" for kind in [*kinds, "mlp"] for part in ("input", "norm", "update", "sum", "output")]
    inner = [f"{kind}.{part}" for kind in kinds for part in ("q", "k", "v", "heads")]
    wanted = [*names, *inner, "mlp.up", "mlp.activation"]
    seen.record([f"{view.stack}.{layer}.{name}" for name in wanted])  # one forward pass for all
    parts = {name: row(view, name, layer, at) for name in [*names, "mlp.up", "mlp.activation"]}
    for kind in kinds:
        columns = view.window if kind == "attention" else slice(0, asked.size)
        for part in ("q", "heads"):  # of all heads, side by side: (D,)
            whole = seen.activation(f"{kind}.{part}", layer=layer, stack=asked.stack)  # (H, T, K)
            parts[f"{kind}.{part}"] = packed(whole[:, at].reshape(-1), "f32")
        for part in ("k", "v"):
            whole = seen.activation(f"{kind}.{part}", layer=layer, stack=asked.stack)
            parts[f"{kind}.{part}"] = packed(whole[asked.head, columns], "f32")  # (S, K)
            if kind == "attention":
                parts[f"{kind}.{part}_row"] = packed(whole[:, at].reshape(-1), "f32")
        for part in ("products", "scores", "masked", "weights"):
            whole = seen.activation(f"{kind}.{part}", layer=layer, head=asked.head, stack=asked.stack)
            parts[f"{kind}.{part}"] = packed(whole[view.window, columns], "f32")  # (T, S)
    return parts


def end_of_walk(view: View, at: int) -> dict[str, Any]:
    """From the last block to the answer: final norm, what the head reads, its logits."""
    seen, model = view.seen, view.seen.model
    if view.stack != seen.stack:
        return {"parts": {"hidden": row(view, "mlp.output", len(seen.stacks[view.stack].blocks) - 1, at)}}
    read = at if model.kind in PER_POSITION else summary_position(seen)
    parts = {
        "stream": row(view, "mlp.output", seen.layers - 1, read),
        "hidden": packed(as_floats(seen.hidden[read]), "f32"),
    }
    payload: dict[str, Any] = {"parts": parts, "read_at": read, "answers": answers(view)}
    if (summary := getattr(model.head, "summary", None)) is not None and model.kind not in TOKEN_HEADS:
        with torch.no_grad():
            parts["summary"] = packed(as_floats(summary(seen.hidden[None].to(model.table.dtype))[0]), "f32")
    if model.kind in TOKEN_HEADS:
        payload["candidates"] = as_json(seen.next_tokens(LISTED, at))
        if model.kind == "next-token":
            parts["row"] = packed(as_floats(model.table[payload["candidates"]["tokens"][0]]), "f32")
    return payload


def answers(view: View) -> list[dict[str, Any]]:
    """Each label, tag or answer end with logit and probability; empty for a head that predicts tokens or nothing."""
    seen, kind = view.seen, view.seen.model.kind
    if kind in TOKEN_HEADS or kind == "bare":
        return []
    if kind == "span":
        chances = seen.logits.softmax(0)  # over positions
        return [
            {"name": name, "position": int(best), "logit": as_json(float(seen.logits[best, i])),
             "probability": as_json(float(chances[best, i]))}
            for i, (name, best) in enumerate(zip(("start", "end"), seen.logits.argmax(0), strict=True))
        ]  # fmt: skip
    if kind == "choose":
        rows = view.served.rows_of(view.text, view.asked.pair)
        scores = [float(view.served.explanation(view.text, view.asked.pair, i).logits) for i in range(len(rows))]
        logits, names = torch.tensor(scores), [str(i + 1) for i in range(len(rows))]
    else:
        logits = label_logits(view)
        names = [answer_name(seen, i) for i in range(len(logits))]
    chances = probabilities(view, logits) if len(logits) > 1 else torch.full((1,), torch.nan)
    return [
        {"name": name, "logit": as_json(float(logit)), "probability": as_json(float(p))}
        for name, logit, p in zip(names, logits, chances, strict=True)
    ]


def probabilities(view: View, logits: torch.Tensor) -> torch.Tensor:
    return logits.sigmoid() if is_multilabel(view) else logits.softmax(0)


def is_multilabel(view: View) -> bool:
    return saved_kind(view.served.lm.folder) == MultiLabelTask.name


def label_logits(view: View) -> torch.Tensor:
    """The logits of labels or tags; a pair that is read in both orders sums its rows' summaries."""
    seen = view.seen
    if seen.model.kind == "tag":
        return seen.logits[min(view.asked.query, len(seen.tokens) - 1)]
    count = len(view.served.rows_of(view.text, view.asked.pair))
    if seen.model.kind != "similarity" or count == 1:
        return seen.logits.reshape(-1)
    head: Any = seen.model.head
    with torch.no_grad():
        hidden = [view.served.explanation(view.text, view.asked.pair, i).hidden for i in range(count)]
        summaries = [head.summary(h[None].to(seen.model.table.dtype)) for h in hidden]
        return head.score(torch.stack(summaries).sum(0))[0].float()


def labels_view(view: View) -> dict[str, Any]:
    """What a fine-tuned head answers, and the row of tokens that it reads."""
    return {"answers": answers(view), "row": view.asked.row, "read_from": read_from(view)}


# ---- cause


def kinds_view(view: View) -> dict[str, Any]:
    return as_json(head_kinds(view.seen.model))


def cause_view(view: View) -> dict[str, Any]:
    """The distribution before and after interventions."""
    seen, asked = view.seen, view.asked
    edits = [Edit(part=e.part, layer=e.layer, head=e.head, value=e.value, stack=e.stack,
                  positions=None if e.positions is None else tuple(e.positions)) for e in asked.edits]  # fmt: skip
    after = seen.edited(*edits, other=view.other)
    target = view.target()
    return {"target": target_of(view, target)} | compare(view, seen, after, target.position)


def compare(view: View, seen: Explanation, after: Explanation, position: int | None) -> dict[str, Any]:
    before_logits, after_logits = (x.logits if position is None else x.logits[position] for x in (seen, after))
    before_logits, after_logits = before_logits.reshape(-1), after_logits.reshape(-1)
    count = min(LISTED, len(before_logits))
    listed = list(dict.fromkeys(i for x in (before_logits, after_logits) for i in x.topk(count).indices.tolist()))
    if seen.model.kind == "span":  # each end is a distribution over positions
        everywhere = [x.logits.softmax(0) for x in (seen, after)]
        p, q = everywhere[0][position], everywhere[1][position]
    else:
        p, q = everywhere = [probabilities(view, x) for x in (before_logits, after_logits)]
    is_score = len(before_logits) == 1  # no distribution
    rows = [
        {"index": i, "name": answer_name(seen, i), "before": None if is_score else as_json(float(p[i])),
         "after": None if is_score else as_json(float(q[i])),
         "logit_before": as_json(float(before_logits[i])), "logit_after": as_json(float(after_logits[i]))}
        for i in listed
    ]  # fmt: skip
    whole = not is_score and not is_multilabel(view)
    return {"rows": rows, "divergence": as_json(divergence(*everywhere)) if whole else None}


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Kullback-Leibler divergence in nats; of several distributions, the sum."""
    return float((p * (p.clamp_min(1e-30).log() - q.clamp_min(1e-30).log())).sum())


def target_of(view: View, target: Any) -> dict[str, Any]:
    logit = float(view.seen.target_logit(view.seen.hidden[None], target)[0].detach())
    return {"index": target.index, "position": target.position, "name": answer_name(view.seen, target.index),
            "logit": as_json(logit), "centred": target.centred}  # fmt: skip


def effects_view(view: View) -> dict[str, Any]:
    """The effect of each head (or position) on the target, and each head's direct contribution to it."""
    seen, asked, target = view.seen, view.asked, view.target()
    found = seen.effects(
        asked.part, asked.value, index=target.index, position=target.position, other=view.other, stack=asked.stack
    )
    parts = seen.contributions(target.index)
    at = summary_position(seen) if target.position is None else target.position
    own = parts.cross_heads if asked.part == "cross_head" else parts.heads
    shares = {
        name: as_json(getattr(parts, name)[..., at])
        for name in ("embedding", "attention", "cross", "mlp", "bias", "head", "total")
    }
    return {
        "target": target_of(view, target),
        "effect": as_json(found.effect),
        "heads": as_json(own[..., at]) if view.stack == seen.stack else None,
        "contributions": shares,
    }


def attribution_view(view: View) -> dict[str, Any]:
    target = view.target()
    found = view.seen.attribution(view.asked.method, index=target.index, position=target.position)
    source = (
        None
        if view.seen.source is None
        else {"pieces": list(view.seen.source_pieces or ()), "tokens": list(view.seen.source)}
    )
    return {"target": target_of(view, target), "attribution": as_json(found), "source": source}


VIEWS: dict[str, Callable[[View], dict[str, Any]]] = {
    "heads": heads_view,
    "attention": attention_view,
    "steps": steps_view,
    "layers": layers_view,
    "walk": walk_view,
    "labels": labels_view,
    "kinds": kinds_view,
    "cause": cause_view,
    "effects": effects_view,
    "attribution": attribution_view,
}
