"""Published numbers of models with known names, and what people found who ran them again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Published:
    task: str
    metric: str
    value: float  # accuracies between 0 and 1
    shots: str  # zero, few, ...
    source: str
    note: str = ""


def _gpt2(ppl: float, acc: float, cn: float, ne: float, w2: float, ptb: float, e8: float, t8: float, w103: float,
          one: float) -> list[Published]:  # fmt: skip
    rows = [
        ("lambada", "perplexity", ppl),
        ("lambada", "acc", acc / 100),
        ("cbt-cn", "acc", cn / 100),
        ("cbt-ne", "acc", ne / 100),
        ("wikitext-2", "token_perplexity", w2),
        ("ptb", "word_perplexity", ptb),
        ("enwik8", "bits_per_byte", e8),
        ("text8", "bits_per_character", t8),
        ("wikitext-103", "word_perplexity", w103),
        ("1bw", "word_perplexity", one),
    ]
    return [Published(task, metric, value, "zero", "GPT-2 paper, table 3") for task, metric, value in rows]


def _rerun(task: str, metric: str, value: float, source: str, note: str = "") -> Published:
    return Published(task, metric, value, "zero", source, note)


HARNESS = "lm-evaluation-harness"
NUMBERS: dict[str, list[Published]] = {
    "gpt2": [
        *_gpt2(35.13, 45.99, 87.65, 83.4, 29.41, 65.85, 1.16, 1.17, 37.50, 75.20),
        _rerun("lambada", "acc", 0.3256, HARNESS, "the whole last word, no filter"),
        _rerun("lambada", "perplexity", 40.06, HARNESS, "the whole last word"),
        _rerun("lambada-token", "acc", 0.4689, "re-runs", "only the last token"),
        _rerun("wikitext-2", "word_perplexity", 37.37, HARNESS),
        _rerun("hellaswag", "acc", 0.2892, HARNESS),
        _rerun("hellaswag", "acc_norm", 0.3114, HARNESS),
    ],
    "gpt2-medium": _gpt2(15.60, 55.48, 92.35, 87.1, 22.76, 47.33, 1.01, 1.06, 26.37, 55.72),
    "gpt2-large": [
        *_gpt2(10.87, 60.12, 93.45, 88.0, 19.93, 40.31, 0.97, 1.02, 22.05, 44.575),
        _rerun("wikitext-2", "token_perplexity", 19.44, "transformers' documentation", "windows do not overlap"),
        _rerun("wikitext-2", "token_perplexity", 16.44, "transformers' documentation", "stride 512"),
    ],
    "gpt2-xl": [
        *_gpt2(8.63, 63.24, 93.30, 89.05, 18.34, 35.76, 0.93, 0.98, 17.48, 42.16),
        _rerun("lambada", "acc", 0.5266, "GPT-2 paper", "without the stop-word filter"),
        _rerun("lambada", "perplexity", 10.63, HARNESS),
        _rerun("winograd", "acc", 0.7070, "GPT-2 paper"),
        _rerun("coqa", "f1", 0.55, "GPT-2 paper"),
        _rerun("nq", "exact_match", 0.041, "GPT-2 paper"),
        _rerun("wmt14-fr-en", "bleu", 11.5, "GPT-2 paper"),
        _rerun("cnn-dailymail", "rouge1", 0.2934, "GPT-2 paper"),
        _rerun("cnn-dailymail", "rouge2", 0.0827, "GPT-2 paper"),
        _rerun("cnn-dailymail", "rougeL", 0.2658, "GPT-2 paper"),
        _rerun("hellaswag", "acc", 0.4004, HARNESS),
        _rerun("hellaswag", "acc_norm", 0.5089, HARNESS),
    ],
    "gpt3-175b": [
        Published(task, metric, value, shots, "GPT-3 paper")
        for task, metric, zero, one, few in (
            ("lambada", "acc", 0.762, 0.725, 0.864),
            ("lambada", "perplexity", 3.00, 3.35, 1.92),
            ("storycloze", "acc", 0.832, 0.847, 0.877),
            ("hellaswag", "acc", 0.789, 0.781, 0.793),
        )
        for shots, value in (("zero", zero), ("one", one), ("few", few))
    ],
}


def published(model: str, task: str) -> list[Published]:
    """What is known of a model by its name: `gpt2`, `openai-community/gpt2`, `models/gpt2-xl`."""
    return [row for row in NUMBERS.get(Path(model).name.lower(), ()) if row.task == task]
