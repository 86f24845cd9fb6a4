"""A student against its teacher: speed and loss, and the same student trained without one.

    python -m benchmarks.distill [--text FILE] [--steps 600] [--student-layers 2]

A character model is trained on the text, then a student of fewer layers from it; both read the same held-out tenth.
Without a text it is Shakespeare's, or Python's source.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.results import ROOT, Row, made_text, real, report
from plume.config import DataConfig, DistillConfig, PretrainConfig, TokenizerConfig, build, read_recipe
from plume.hf import load_model
from plume.model.heads import Model
from plume.train.distill import distill
from plume.train.pretrain import pretrain


@torch.inference_mode()
def seconds(model: Model, tokens: torch.Tensor) -> float:
    began = time.process_time()
    model(tokens)
    return time.process_time() - began


def speed_ratio(teacher: Model, student: Model, rounds: int = 30) -> float:
    """How many times faster the student reads, the median of turns; processor time, so that neighbours count less."""
    tokens = torch.randint(0, teacher.config.vocab_size, (16, teacher.config.context))
    turns = [(seconds(teacher, tokens), seconds(student, tokens)) for _ in range(rounds)]
    return statistics.median(a / b for a, b in turns[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=real("data", "tinyshakespeare", "input.txt"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--student-steps", type=int, default=300)
    parser.add_argument("--student-layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = build(PretrainConfig, read_recipe(ROOT / "recipes" / "gpt2-char.toml"))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if args.text is None:
            args.text = place / "text.txt"
            args.text.write_text(made_text(1_000_000), encoding="utf-8")
        data = DataConfig(
            paths=(str(args.text),),
            folder=place / "data",
            tokenizer=TokenizerConfig(kind="characters"),
            validation_fraction=0.1,
            split="tail",
            workers=1,
        )
        train = replace(recipe.train, steps=args.steps, validation_rows=512)
        teacher = pretrain(replace(recipe, folder=place / "teacher", data=data, train=train))
        shorter = replace(train, steps=args.student_steps)
        result = distill(
            DistillConfig(
                teacher=str(teacher.model),
                folder=place / "student",
                train=shorter,
                layers=args.student_layers,
                prepared=place / "data",
            )
        )
        small = replace(recipe.model, layers=args.student_layers)
        alone = pretrain(replace(recipe, folder=place / "alone", model=small, data=data, train=shorter))
        torch.set_num_threads(1)
        ratio = speed_ratio(load_model(teacher.model), load_model(place / "student" / "model"))
    layers = f"{args.student_layers} layers of {recipe.model.layers}"
    alone_loss = alone.outcome.validation
    assert alone_loss is not None
    report(
        Row(
            key="speed",
            what=f"a student of {layers}: speed of reading, against its teacher",
            figure=ratio,
            at_least=1.8,
        ),
        Row(
            key="loss",
            what="its loss above its teacher's",
            figure=result.student_loss - result.teacher_loss,
            unit="nats",
            digits=3,
            detail=f"teacher {result.teacher_loss:.4f}, student {result.student_loss:.4f}",
        ),
        Row(
            key="worth",
            what="loss that the teacher saves, against the same student without one",
            figure=alone_loss - result.student_loss,
            unit="nats",
            digits=3,
            detail=f"without a teacher {alone_loss:.4f}",
        ),
    )


if __name__ == "__main__":
    main()
