"""Fine-tuning speed against transformers' Trainer: the same model folder, rows, batch and optimiser, round by round.

    python -m benchmarks.finetune [--data FOLDER] [--preset bert-mini] [--steps 60] [--rounds 3]

The folder holds sst2; without one, rows are made of Python's manual. Examples per second of each round are printed, and
the median of the rounds' ratios. Time on the clock is what counts on a machine that does nothing else; processor time,
with --threads 1, is fairer on a busy one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Row, real, report
from plume.config import PRESETS, FinetuneConfig, TaskConfig, TokenizerConfig
from plume.hf import save_model
from plume.model.heads import Model
from plume.tasks.token_rows import Grouped
from plume.text.tokenizer_training import train_tokenizer
from plume.train.distribute import Ranks
from plume.train.finetune import build_model, make_objective, train_config
from plume.train.finetune_plan import FinetunePlan, make_plan
from plume.train.loop import Task, Trainer
from plume.util.devices import choose_precision

CPU = torch.device("cpu")


def labelled_lines(data: Path | None) -> list[str]:
    """Sentence, tab, 0 or 1: of SST-2, or sentences of Python's manual of about the same lengths."""
    if data is not None:
        lines = (data / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    else:
        from pydoc_data.topics import topics

        words, draw, lines = " ".join(topics.values()).split(), random.Random(1), []
        while words:
            count = draw.randint(1, 20)
            lines.append(f"{' '.join(words[:count])}\t{count % 2}")
            del words[:count]
    random.Random(0).shuffle(lines)
    return lines


def base_folder(preset: str, texts: list[str], place: Path) -> Path:
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=8000), texts)
    torch.manual_seed(0)
    config = replace(PRESETS[preset], vocab_size=tokenizer.vocab_size, context=128)
    return save_model(Model(config, "masked-token"), place / "base", tokenizer=tokenizer)


def now() -> tuple[float, float]:
    """Seconds on the clock, and seconds of processor time."""
    return time.perf_counter(), time.process_time()


def rates(examples: int, began: tuple[float, float], ended: tuple[float, float]) -> tuple[float, float]:
    return examples / (ended[0] - began[0]), examples / (ended[1] - began[1])


def plume_speed(plan: FinetunePlan, steps: int, folder: Path) -> tuple[float, float]:
    """Examples per second of the loop, by either time; the first step warms up."""
    model, _ = build_model(plan, seed=0)
    batches = Grouped(plan.train, plan.config.batch, seed=0)
    settings = replace(train_config(plan, steps, 0, causal=False), steps=steps, keep_best=False)
    clock: list[tuple[float, float]] = []
    task = Task(
        model=model,
        objective=make_objective(plan),
        train=batches,
        before_step=lambda step: clock.append(now()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(task, settings, folder, Ranks(device=CPU), choose_precision(CPU, "float32"))
    trainer.run(resume=False)
    done = sum(len(batches.numbers(step)) for step in range(1, steps - 1))
    return rates(done, clock[1], clock[steps - 1])


def trainer_speed(
    folder: Path, rows: list[tuple[str, int]], batch: int, steps: int, place: Path, sampling: str
) -> tuple[float, float]:
    """The same of transformers' Trainer, with texts tokenised beforehand and padded batch by batch."""
    import transformers

    clock: list[tuple[float, float]] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.append(now())

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=128)
    items = [{**{name: encoded[name][i] for name in encoded}, "labels": label} for i, (_, label) in enumerate(rows)]
    settings = transformers.TrainingArguments(
        output_dir=str(place),
        per_device_train_batch_size=batch,
        max_steps=steps,
        train_sampling_strategy=sampling,
        learning_rate=1e-4,
        weight_decay=0.01,
        warmup_steps=steps // 10,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=items,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        callbacks=[Watch()],
    )
    trainer.train()
    return rates((steps - 2) * batch, clock[1], clock[steps - 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=real("data"))
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--preset", default="bert-mini")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = labelled_lines(args.data)[: args.rows]
    rows = [(text, int(label)) for text, label in (line.split("\t") for line in lines)]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
        (place / "dev.tsv").write_text("\n".join(["sentence\tlabel", *lines[:100]]) + "\n", encoding="utf-8")
        folder = base_folder(args.preset, [text for text, _ in rows], place)
        task = TaskConfig(train=str(place), name="sst2")
        plan = make_plan(FinetuneConfig(model=str(folder), task=task, folder=place / "run", batch=args.batch, lr=1e-4))
        ratios: list[tuple[float, float]] = []
        for turn in range(args.rounds):
            ours = plume_speed(plan, args.steps, place / f"run-{turn}")
            theirs = max(
                trainer_speed(folder, rows, args.batch, args.steps, place / f"their-{turn}-{sampling}", sampling)
                for sampling in ("random", "group_by_length")
            )
            ratios.append((ours[0] / theirs[0], ours[1] / theirs[1]))
            print(
                f"round {turn}: plume {ours[0]:.1f} examples/s, Trainer {theirs[0]:.1f}, ratio {ratios[-1][0]:.2f}; "
                f"by processor time {ratios[-1][1]:.2f}",
                flush=True,
            )
    clocks, processors = (statistics.median(r[i] for r in ratios) for i in (0, 1))
    report(
        Row(
            key="speed",
            what="fine-tuning a small BERT: examples/s against transformers' Trainer, the faster of its samplings",
            figure=clocks,
            at_least=1.3,
            detail=f"rounds {', '.join(f'{r[0]:.2f}' for r in ratios)}; by processor time {processors:.2f}",
        )
    )


if __name__ == "__main__":
    main()
