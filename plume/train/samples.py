"""A few words from a model in training: a continuation, a filled gap or a translation. No cache, no options."""

# T tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch

from plume.config import TrainConfig
from plume.data import Batch, decoder_start
from plume.inference.outputs import token_logits
from plume.model.heads import Model
from plume.model.loss import TensorBatch
from plume.text import Tokenizer

TOP = 40  # likeliest tokens that are drawn from


def continuation(tokenizer: Tokenizer, config: TrainConfig) -> Callable[[Model], str]:
    """A continuation of the prompt, drawn with the same random numbers every time."""

    def sample(model: Model) -> str:
        device = model.table.device
        ids = tokenizer.encode(config.sample_prompt)
        if not ids:
            ids = [0 if tokenizer.start is None else tokenizer.start]
        random = torch.Generator().manual_seed(config.seed)
        for _ in range(config.sample_tokens):
            hidden = model.body(torch.tensor([ids[-model.config.context :]], device=device))
            logits = model.read(hidden[:, -1])[0].float().cpu()  # (V,)
            best = logits.topk(min(TOP, len(logits)))
            pick = torch.multinomial(best.values.softmax(dim=0), 1, generator=random)
            ids.append(int(best.indices[pick]))
            if ids[-1] == tokenizer.end:
                break
        return tokenizer.decode(ids, skip_special=True)

    return sample


def filled_gaps(tokenizer: Tokenizer, batch: Batch) -> Callable[[Model], str]:
    """A row of the validation set with the model's token at the masked places: [token], or [token|true] when wrong."""

    def sample(model: Model) -> str:
        assert batch.positions is not None and batch.lengths is not None
        row = TensorBatch.of(batch).to(model.table.device)
        assert row.positions is not None
        logits = token_logits(model, row.tokens, row.positions, row.segments, row.lengths)  # (N, V)
        filled = logits.argmax(dim=-1).tolist()
        pieces = [tokenizer.decode([token]) for token in batch.tokens[0, : int(batch.lengths[0])].tolist()]
        for place, mine, true in zip(batch.positions.tolist(), filled, batch.targets.tolist(), strict=True):
            words = [tokenizer.decode([token]).strip() for token in dict.fromkeys([mine, true])]
            pieces[place] = f" [{'|'.join(words)}]"
        return (" " if tokenizer.kind == "wordpiece" else "").join(pieces)

    return sample


def translation(tokenizer: Tokenizer, batch: Batch, length: int) -> Callable[[Model], str]:
    """The source of a validation pair and the model's likeliest words for it, one at a time."""

    def sample(model: Model) -> str:
        assert batch.source is not None
        source = torch.from_numpy(batch.source).to(model.table.device)
        ids = [decoder_start(tokenizer)]
        ends = {tokenizer.end, tokenizer.separator}
        while len(ids) <= min(length, model.config.context - 1) and not (len(ids) > 1 and ids[-1] in ends):
            logits = model(source, torch.tensor([ids], device=source.device))
            ids.append(int(logits[0, -1].argmax()))
        given, written = (tokenizer.decode(row, skip_special=True) for row in (batch.source[0].tolist(), ids))
        return f"{given} => {written}"

    return sample
