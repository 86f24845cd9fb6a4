"""Fine-tuning with the generator at hand, so that an encoder-decoder's texts can be measured too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plume.config import EngineConfig, FinetuneConfig, SamplingConfig
from plume.generate.lm import LM
from plume.text import Tokenizer

if TYPE_CHECKING:
    from plume.heads import Model
    from plume.train.finetune import FinetuneResult

LONGER = 50  # tokens that a text may have more than its source, as in the Transformer's paper


def write_texts(model: Model, tokenizer: Tokenizer, sources: Sequence[str], beams: int) -> list[str]:
    """What an encoder-decoder answers to each source, by beam search."""
    model.eval()
    lm = LM(None, tokenizer, EngineConfig(engine="torch", slots=max(beams, 1)), model=model)
    try:
        texts = []
        for source in sources:
            limit = len(tokenizer.encode(source)) + LONGER
            config = SamplingConfig(beams=beams, length_penalty=0.6, max_new_tokens=limit, temperature=0.0)
            texts.append(lm.translate(source, config).text)
        return texts
    finally:
        lm.close()


def finetune(config: FinetuneConfig) -> FinetuneResult:
    """Fine-tune a pretrained model on labelled rows: plume.finetune and `plume finetune`."""
    from plume.train.finetune import finetune as run

    return run(config, writer=write_texts)
