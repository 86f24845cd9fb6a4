"""Made-up stories, small models and rows that the tests of evaluation share."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


from plume.config import PRESETS

ANIMALS = {"cat": "milk", "dog": "bones", "horse": "hay", "bird": "seeds", "mouse": "cheese", "bear": "honey"}
PLACES = ["house", "garden", "forest", "stable", "river", "kitchen"]


def sentence(draw: random.Random) -> str:
    animal = draw.choice(list(ANIMALS))
    return f"The {animal} went to the {draw.choice(PLACES)} and, because it was hungry, it ate {ANIMALS[animal]}."


def story(seed: int, sentences: int) -> str:
    draw = random.Random(seed)
    return " ".join(sentence(draw) for _ in range(sentences))


def small(tokenizer, **more):
    return replace(
        PRESETS["gpt2"], vocab_size=tokenizer.vocab_size, context=64, layers=2, heads=4, width=32, dropout=0.0, **more
    )


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def harness_task(folder: Path, file: str, row: dict, shots: int = 0):
    """A task of the harness by its own description, pointed at one local row, which is its example too."""
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    rows = str(write_rows(folder / "row.jsonl", [row]))
    config = dict(load_yaml(Path(lm_eval.tasks.__file__).parent / f"{file}.yaml"))
    split = config.get("test_split") or config.get("validation_split")
    config |= {"dataset_path": "json", "dataset_name": None}
    config |= {"dataset_kwargs": {"data_files": {split: rows, "shots": rows}}}
    config |= {"training_split": None, "validation_split": None, "test_split": split, "fewshot_split": "shots"}
    task = ConfigurableTask(config=config | {"num_fewshot": shots})
    task.build_all_requests(limit=1, rank=0, world_size=1)
    return task
