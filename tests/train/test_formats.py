"""docs/formats.md names every field of the files that Plume writes, and no other."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from test_train_pretrain import small

from plume.data.shards import Manifest, Shard
from plume.evaluate.report import EvaluationReport
from plume.evaluate.task_run import TaskResult
from plume.train.assessment import Assessment
from plume.train.finetune import FinetuneResult, SeedResult
from plume.train.pretrain import pretrain
from plume.util.run_folder import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def first_cells(section: str) -> set[str]:
    """The fields that the tables of a section define."""
    rows = re.findall(r"^\| (`.*?) \|", SECTIONS[section], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def words(section: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", SECTIONS[section]))


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


@pytest.mark.parametrize("recipe", ["gpt2-laptop", "bert-laptop"])
def test_of_a_run(tmp_path, recipe):
    some = {"train.steps": "4", "train.log_every": "1", "train.validate_every": "2"}
    run = pretrain(small(recipe, tmp_path, **some))
    found = {name.removeprefix("validation_") for row in read_metrics(run.folder) for name in row}
    told = {name.removeprefix("validation_") for name in words("metrics.jsonl")}
    assert found - told == set()
    rare = {"validation_loss", "validation_bits_per_byte", "tokens_per_second", "fraction_of_peak"}
    assert first_cells("metrics.jsonl") - rare - found == set()
    written = json.loads((run.model / "plume.json").read_text(encoding="utf-8"))
    assert written.keys() - first_cells("plume.json") == set()
    if recipe == "gpt2-laptop":
        assert first_cells("plume.json") == written.keys()


def test_of_prepared_data():
    assert first_cells("Prepared data") == names(Manifest)
    assert names(Shard) - words("Prepared data") == set()


def test_of_a_fine_tuning():
    seed = SeedResult(0, 1.0, {}, 1, 1, 1.0, False)
    judged = Assessment(baselines={}, verdict=None, test_verdict=None, findings=[], next_step="add rows")
    written = FinetuneResult(Path(), "classify", "accuracy", [seed], seed, assessment=judged).as_json()
    assert first_cells("results.json") == written.keys()
    assert names(SeedResult) - words("results.json") == written["summary"].keys() - words("results.json") == set()


def test_of_an_evaluation():
    assert first_cells("report.json") == names(TaskResult)
    assert EvaluationReport(tasks=[]).as_dict().keys() - words("report.json") == set()
