"""A new kind of task is one module and one registry line: it fine-tunes, predicts, is served and is evaluated."""

import json
import sys
from pathlib import Path

import httpx
import pytest
from tiny import random_base

import plume
from plume import tasks
from plume.config import EngineConfig, FinetuneConfig, ServeConfig, TaskConfig, UserError
from plume.tasks.classify import ClassifyTask

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from running import serving


class TitledTask(ClassifyTask):
    """A label for a text with a title: one row `title: text`."""

    name = "titled"
    call = "predict([{'title': '...', 'body': '...'}])"
    fields = ("title", "body")
    fields_by_content = ()
    passes = ("{title} : {body}",)

    @classmethod
    def matches(cls, table):
        return {"title", "body", "label"} <= set(table.rows[0])


def write(path, count):
    words = {"good": "a fine film", "bad": "a dull film"}
    labels = ["good", "bad"] * (count // 2)
    rows = [{"title": f"review {n}", "body": f"{words[y]} {n}", "label": y} for n, y in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_new_kind_is_one_class_and_one_line(tmp_path, monkeypatch):
    random_base("bert", tmp_path / "bert")
    train, test = write(tmp_path / "train.jsonl", 60), write(tmp_path / "test.jsonl", 20)
    config = FinetuneConfig(
        model=str(tmp_path / "bert"),
        task=TaskConfig(train=train, test=test),
        folder=tmp_path / "run",
        epochs=12.0,
        batch=8,
        lr=5e-3,
        seeds=1,
        device="cpu",
        precision="float32",
    )
    with pytest.raises(UserError, match=r"task.kind='titled' does not exist.*kinds are tag, span"):
        tasks.kind_named("titled")
    monkeypatch.setattr(tasks, "KINDS", [TitledTask, *tasks.KINDS])
    monkeypatch.setattr("plume.tasks.task_data.KINDS", tasks.KINDS)
    result = plume.finetune(config)
    assert result.kind == "titled" and result.best.score > 0.9
    lm = plume.load(result.folder)
    rows = [{"title": "review 1", "body": "a fine film"}, {"title": "review 2", "body": "a dull film"}]
    assert [p.value for p in lm.predict(rows)] == ["good", "bad"]
    assert lm.evaluate(test)["accuracy"] == pytest.approx(result.test["accuracy"])
    served = ServeConfig(models=(f"titled={result.folder}",), engine=EngineConfig(engine="torch"))
    with serving(served) as (_, client):
        answer: httpx.Response = client.post("/v1/predict", json={"model": "titled", "input": rows})
        assert answer.status_code == 200, answer.text
        found = answer.json()["data"]
        wrong = client.post("/v1/predict", json={"model": "titled", "input": [{"title": "x"}]})
    assert [row["value"] for row in found] == ["good", "bad"]
    assert found[0]["scores"]["good"] == pytest.approx(lm.predict(rows)[0].scores["good"], abs=1e-5)
    assert wrong.status_code == 400 and "has no 'body'" in wrong.text


def test_the_names_in_the_config_are_those_of_the_registry():
    from plume.config import describe

    (text,) = [help for name, _, _, help in describe(TaskConfig) if name == "kind"]
    assert set(text.split(";")[0].replace(",", "").split()) == {kind.name for kind in tasks.KINDS}


def test_a_row_crosses_at_most_five_modules_to_its_loss(tmp_path, monkeypatch):
    """The modules whose functions are on the stack when the loss of a batch is computed."""
    from plume.cli.main import main

    random_base("bert", tmp_path / "bert")
    stacks = []

    def losses(self, model, hidden, batch, plain=ClassifyTask.losses):
        frame, found = sys._getframe(), []
        while frame is not None:
            found.append(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        stacks.append({name for name in found if name.split(".")[0] == "plume"} | {"plume.tasks.classify"})
        return plain(self, model, hidden, batch)

    monkeypatch.setattr(ClassifyTask, "losses", losses)
    rows = "".join(f"{'fine' if n % 2 else 'dull'} film {n},{n % 2}\n" for n in range(40))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    words = [
        "finetune",
        str(tmp_path / "bert"),
        "--task.train",
        str(tmp_path / "a.csv"),
        "--folder",
        str(tmp_path / "r"),
    ]
    assert main([*words, "--epochs", "1", "--seeds", "1", "--device", "cpu", "--precision", "float32"]) == 0
    path = {"plume.cli.main", "plume.config.recipes", "plume.train.finetune", "plume.train.loop"}
    assert stacks and all(stack <= path | {"plume.tasks.classify"} for stack in stacks), stacks[0]
