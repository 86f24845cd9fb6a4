"""Which loss is normal: runs of several sizes on several texts, and a fitted line (python -m benchmarks.loss_band).

What is fitted is loss / unigram entropy, so that texts and tokenizers can be compared; its logarithm is taken as linear
in the logarithms of the tokens read and of the block weights. `plume/train/expectations.py` has what came of it; --fit
only fits runs that are there already.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.results import real
from plume.config import PRESETS, DataConfig, PretrainConfig, TokenizerConfig, TrainConfig
from plume.data.documents import read_documents
from plume.data.tables import Tally
from plume.train.budget import HEAD_WIDTH, with_size
from plume.train.pretrain import pretrain
from plume.util.run_folder import read_metrics

SHAPES = ((2, 64, "byte-bpe", 1024), (2, 64, "bytes", 257), (3, 96, "byte-bpe", 2048), (4, 128, "byte-bpe", 4096))
TEXTS = {
    "python": "python:stdlib",
    "english": "english/novels.jsonl.zst",
    "chinese": "chinese/classical-modern.jsonl.zst",
}
CHARACTERS = 4_000_000  # of each text


def text(name: str, folder: Path) -> Path | None:
    """The beginning of one of the texts as a file; None where it is not there."""
    file = folder / f"{name}.txt"
    source = TEXTS[name] if ":" in TEXTS[name] else real("data", *TEXTS[name].split("/"))
    if source is None or file.exists():
        return file if file.exists() else None
    found, read = [], 0
    for document in read_documents(DataConfig(paths=(str(source),), folder=folder, text_field=field(name)), Tally()):
        found.append(document.text)
        read += len(document.text)
        if read > CHARACTERS:
            break
    file.write_text("\n\n".join(found), encoding="utf-8")
    return file


def field(name: str) -> str:
    return "modern" if name == "chinese" else "text"


def train(name: str, shape: tuple[int, int, str, int], tokens: int, folder: Path) -> None:
    layers, width, kind, vocabulary = shape
    run = folder / f"{name}-{layers}x{width}-{kind}"
    file = text(name, folder)
    if file is None or (run / "unigram.json").exists():
        return
    model = replace(PRESETS["gpt2-laptop"], layers=layers, width=width, heads=width // HEAD_WIDTH, context=128,
                    vocab_size=vocabulary, dropout=0.0)  # fmt: skip
    data = DataConfig(
        paths=(str(file),),
        folder=folder / f"data-{run.name}",
        tokenizer=TokenizerConfig(kind=kind, vocab_size=vocabulary),  # type: ignore[arg-type]
    )
    plain = PretrainConfig(folder=run, data=data, model=model, train=TrainConfig(steps=1, weight_decay=0.0))
    config = with_size(plain, model, 16, tokens // (16 * 128))
    result = pretrain(replace(config, overwrite=True, train=replace(config.train, log_every=10)))
    (run / "unigram.json").write_text(json.dumps({"unigram": result.unigram, "blocks": 12 * layers * width**2}))


def points(folder: Path) -> list[tuple[str, float, float, float]]:
    """Run, tokens, weights of the blocks, and loss over that of the frequencies, of every log line."""
    found = list[tuple[str, float, float, float]]()
    for run in sorted(folder.glob("*/unigram.json")):
        about = json.loads(run.read_text())
        found += [
            (run.parent.name, row["tokens"], about["blocks"], row["loss"] / about["unigram"])
            for row in read_metrics(run.parent)
            if row.get("tokens", 0) >= 60_000
        ]
    return found


def fit(found: list[tuple[str, float, float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of 1, log tokens and log weights; and the residuals of each run under a fit without it."""
    names = np.array([name for name, *_ in found])
    x = np.array([[1.0, np.log(t / 1e6), np.log(n / 1e6)] for _, t, n, _ in found])
    y = np.log([ratio for *_, ratio in found])
    left_out = np.concatenate(
        [y[names == n] - x[names == n] @ np.linalg.lstsq(x[names != n], y[names != n])[0] for n in np.unique(names)]
    )
    return np.linalg.lstsq(x, y)[0], left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/loss-band"))
    parser.add_argument("--tokens", type=int, default=800_000)
    parser.add_argument("--fit", action="store_true", help="only fit the runs that are there")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        for name in TEXTS:
            if not arguments.fit:
                train(name, shape, arguments.tokens, arguments.folder)
    coefficients, residuals = fit(points(arguments.folder))
    print("1, log(tokens / 1e6), log(weights / 1e6):", coefficients.round(4).tolist())
    print("residuals of runs left out, 0, 5, 50, 95, 100 %:", np.percentile(residuals, [0, 5, 50, 95, 100]).round(3))


if __name__ == "__main__":
    main()
