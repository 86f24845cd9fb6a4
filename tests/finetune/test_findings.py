"""What is wrong with a set or a run is named, on the console and in the report, with the option that changes it."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support
from tiny import BAD, GOOD, random_base, tokenizer_of, write_reviews

from plume.cli.main import main
from plume.config import AdaptConfig, FinetuneConfig, TaskConfig, UserError
from plume.tasks import kind_named
from plume.tasks.data_checks import check_data
from plume.tasks.error_analysis import calibration, calibration_error, label_scores, worst_mistakes
from plume.tasks.generate import with_end_token
from plume.tasks.metrics import ClassificationMetric
from plume.tasks.paired import Verdict
from plume.tasks.schema import Example, Prediction, TaskSettings
from plume.tasks.task_data import load_task
from plume.train.assessment import UNRELATED, hub_model, next_step, overfitting
from plume.train.finetune import finetune, train_config
from plume.train.finetune_plan import make_plan
from plume.train.finetune_report import describe_data
from plume.util.console import plural


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("findings")
    random_base("bert", folder / "bert")
    write_reviews(folder / "reviews.csv", copies=30)
    return folder


def config_for(place, run, task, **more):
    given = {"epochs": 1.0, "batch": 16, "seeds": 1, "device": "cpu", "precision": "float32", "lr": 3e-3, **more}
    return FinetuneConfig(model=str(place / "bert"), task=TaskConfig(**task), folder=place / run, **given)


def write(path, rows, header="text,label"):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return str(path)


def names(task):
    data = load_task(TaskConfig(**task))
    kind = kind_named(data.kind)
    settings = TaskSettings(kind=data.kind, target=data.target, labels=data.labels, length=32)
    return {f.name: f.text for f in check_data(data, kind(settings, tokenizer_of("bert"), causal=False))}


def test_other_tools_words_for_no_label(tmp_path):
    rows = [f"good film {n},{('yes', 'no', 'NA', 'nan')[n % 4]}" for n in range(40)]
    found = names({"train": write(tmp_path / "a.csv", rows), "validation": write(tmp_path / "b.csv", rows[:8])})
    assert found["missing labels"].startswith("20 training rows with the label 'NA' or 'nan', which is learned")
    rows = [f"good film {n},{('yes', 'no', 'none')[n % 3]}" for n in range(40)]
    assert "missing labels" not in names({"train": write(tmp_path / "a.csv", rows)})


def test_texts_that_the_tokenizer_does_not_have(tmp_path):
    rows = [f"電影 {'很好' if n % 2 else '不好'} {n},{n % 2}" for n in range(40)]
    found = names({"train": write(tmp_path / "a.csv", rows)})
    assert "of the tokens of the training rows are unknown to the model's tokenizer" in found["unknown tokens"]
    assert "unknown tokens" not in names({"train": write(tmp_path / "b.csv", reviews(40))})


def reviews(count, seed=0, flip=False):
    draw = random.Random(seed)
    rows = [(f"{draw.choice(GOOD if n % 2 else BAD)} {draw.randrange(10**6)}", n % 2) for n in range(count)]
    labels = [y for _, y in rows]
    if flip:
        draw.shuffle(labels)
    return [f"{text},{'pos' if y else 'neg'}" for (text, _), y in zip(rows, labels, strict=True)]


def test_a_leaked_test_file_is_named_by_content(tmp_path):
    train = reviews(300)
    leaked = [f"{row.split(',')[0].upper()}  ,{row.split(',')[1]}" for row in train[:40]] + reviews(10, seed=5)
    test = write(tmp_path / "test.csv", leaked)
    valid = write(tmp_path / "valid.csv", reviews(120, seed=7))
    found = names({"train": write(tmp_path / "train.csv", train), "validation": valid, "test": test})
    assert found["overlap"].startswith("40 of 50 test rows (80.0%) are also training rows, so the")
    clean = names({"train": str(tmp_path / "train.csv"), "validation": valid})
    assert clean == {}


def test_duplicates_constants_imbalance_and_few_rows_are_named(tmp_path):
    rows = reviews(300)
    found = names({"train": write(tmp_path / "a.csv", rows + rows[:30])})
    assert found["duplicates"].startswith(("3", "2")) and "training rows" in found["duplicates"]
    both = [f"{row.split(',')[0]},same,{row.split(',')[1]}" for row in rows]
    constant = names({"train": write(tmp_path / "b.csv", both, "text,pair,label")})
    assert "column 'pair' (pair) holds 'same' in every" in constant["constant column"]
    rare = [f"film {n},{'yes' if n % 10 else 'no'}" for n in range(300)]
    assert "--class-weights balanced" in names({"train": write(tmp_path / "c.csv", rare)})["class imbalance"]
    few = names({"train": write(tmp_path / "d.csv", rows[:50])})
    assert few["few training rows"].startswith("4") and "--seeds 5" in few["few training rows"]
    wrong = [f"{row.split(',')[0]},{n}" for n, row in enumerate(rows)]
    with pytest.raises(UserError, match=r"'label' has 300 different labels in 300 training rows.*--task.columns.label"):
        load_task(TaskConfig(train=write(tmp_path / "e.csv", wrong)))
    long = [f"{'fine ' * 60}{n},{'yes' if n % 2 else 'no'}" for n in range(300)]
    data = load_task(TaskConfig(train=write(tmp_path / "f.csv", long)))
    settings = TaskSettings(kind="classify", labels=data.labels, length=32)
    kind = kind_named("classify")(settings, tokenizer_of("bert"), causal=False)
    kind.encode(data.train)
    assert "100.0% of the rows are longer than task.length=32" in check_data(data, kind)[-1].text


def test_few_numbers_are_uncertain_by_their_own_measure(tmp_path):
    rows = [f"film {n},{n / 7:.2f}" for n in range(300)]
    few = names({"train": write(tmp_path / "a.csv", rows), "target": "number"})["few validation rows"]
    assert few.startswith("30; a correlation near 0 is uncertain by up to 0.36 either way")


def test_rows_in_windows_are_not_called_truncated(tmp_path):
    row = {"question": "who?", "context": "Ann wrote it. " * 40, "answers": {"text": ["Ann"], "answer_start": [0]}}
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row | {"question": f"who {n}?"}) for n in range(300)))
    data = load_task(TaskConfig(train=str(tmp_path / "a.jsonl")))
    kind = kind_named("span")(TaskSettings(kind="span", length=32, stride=8), tokenizer_of("bert"), causal=False)
    kind.encode(data.train)
    assert kind.truncation.rows and "truncation" not in {finding.name for finding in check_data(data, kind)}


def test_shuffled_labels_are_named_on_the_console(place, capsys):
    train = write(place / "shuffled.csv", reviews(400, flip=True))
    valid = write(place / "shuffled-valid.csv", reviews(150, seed=3, flip=True))
    test = write(place / "leaked.csv", reviews(400, flip=True)[:20])
    task = {"train": train, "validation": valid, "test": test}
    result = finetune(config_for(place, "shuffled", task))
    said, report = capsys.readouterr().out, (result.folder / "report.md").read_text()
    for text in (said, report):
        assert "warning: labels unrelated to the texts: neither this model nor TF-IDF + logistic regression" in text
        assert "warning: overlap: 20 of 20 test rows (100.0%) are also training rows" in text
        assert "verdict: level with " in text or "verdict: worse than " in text
        assert "next step: check the labels" in text
    saved = json.loads((result.folder / "results.json").read_text())
    assert saved["verdict"]["outcome"] in ("level", "worse") and len(saved["verdict"]["text"]) > 50
    assert set(saved["baselines"]) == {"most frequent label", "TF-IDF + logistic regression"}


CONSOLE = {
    "clean": ("", {}),
    "leaked": ("warning: overlap: 40 of 120 validation rows (33.3%) are also training rows", {"leak": 40}),
    "shuffled": ("warning: labels unrelated to the texts: neither this model nor TF-IDF", {"flip": True}),
    "constant": (
        "warning: constant column: column 'pair' (pair) holds 'same' in every training row",
        {"constant": True},
    ),
    "duplicated": ("warning: duplicates: 40 of 440 training rows (9.1%) are copies of other rows", {"copies": 40}),
    "wrong column": ("warning: labels unrelated to the texts: neither this model nor TF-IDF", {"column": "origin"}),
}


@pytest.mark.parametrize("case", CONSOLE)
def test_what_is_wrong_is_named_on_the_console(place, tmp_path, capsys, case):
    """A leaked split, shuffled labels, a constant column, a tenth of the rows twice, a wrong label column."""
    says, change = CONSOLE[case]
    flip, draw = change.get("flip", False), random.Random(9)
    train, valid = reviews(400, flip=flip), reviews(120, seed=7, flip=flip)
    train += train[: change.get("copies", 0)]
    leak = change.get("leak", 0)
    valid[:leak] = train[:leak]
    if change.get("constant"):
        header, files = "text,pair,label", [[row.replace(",", ",same,") for row in part] for part in (train, valid)]
    else:
        header, files = (
            "text,origin,label",
            [[row.replace(",", f",{draw.choice('ab')},") for row in part] for part in (train, valid)],
        )
    words = ["finetune", str(place / "bert"), "--task.train", write(tmp_path / "train.csv", files[0], header)]
    words += ["--task.validation", write(tmp_path / "valid.csv", files[1], header), "--folder", str(tmp_path / "run")]
    words += ["--task.columns.label", change.get("column", "label"), "--seeds", "1", "--epochs", "1", "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert says in said and says in (tmp_path / "run" / "report.md").read_text()
    others = {text.split(":")[1] for text, _ in CONSOLE.values() if text and text != says}
    assert not [name for name in others - {says.partition(":")[2].split(":")[0]} if f"warning:{name}:" in said]


def test_a_column_of_ids_or_of_one_label_is_refused_at_the_command_line(place, tmp_path, capsys):
    rows = [f"{row.split(',')[0]},{n},{row.split(',')[1]},one" for n, row in enumerate(reviews(100))]
    file = write(tmp_path / "rows.csv", rows, "text,number,label,same")
    for column, says in (("number", "different labels in"), ("same", "every training row has the label 'one'")):
        words = ["finetune", str(place / "bert"), "--task.train", file, "--folder", str(tmp_path / column)]
        assert main([*words, "--task.columns.label", column]) == 2
        assert says in capsys.readouterr().err


def test_an_underfitted_run_names_the_search(place, capsys):
    result = finetune(config_for(place, "stuck", {"train": str(place / "reviews.csv")}, lr=1e-9))
    said = capsys.readouterr().out
    assert "worse than TF-IDF + logistic regression: accuracy 0." in said
    assert "warning: underfitting: the training loss is" in said and "--search 8" in said
    assert result.assessment.verdict.baseline > 0.95 and result.assessment.verdict.high < 0


def plan_of(kind="classify", texts=("a fine film",), label="pos", causal=False, width=128, **config):
    rows = [Example({"source" if kind == "generate" else "text": text}, label, "") for text in texts]
    given = {"model": "runs/small/model", "task": TaskConfig(train="x.csv"), "folder": Path("run"), **config}
    tokenizer = with_end_token(tokenizer_of("gpt2" if causal else "bert"))
    settings = TaskSettings(kind=kind, labels=("pos", "neg"), length=32)
    made = kind_named(kind)(settings, tokenizer, causal=causal)
    return SimpleNamespace(
        kind=made,
        data=SimpleNamespace(train=rows, test=[]),
        width=width,
        metric="accuracy",
        config=FinetuneConfig(**given),
    )


def test_the_next_step_names_a_model_that_does_the_task():
    chinese = ("房间很干净服务也很好下次还会再来",)
    assert hub_model(plan_of()) == "google-bert/bert-base-uncased"
    assert hub_model(plan_of(causal=True)) == "openai-community/gpt2"
    assert hub_model(plan_of(texts=chinese)) == "google-bert/bert-base-chinese"
    for causal in (False, True):  # a BERT writes nothing; the hub's Marian models have another activation and tokenizer
        assert hub_model(plan_of("generate", causal=causal)) == "openai-community/gpt2"
        assert "gpt2" in hub_model(plan_of("generate", chinese, chinese[0], causal=causal))


def test_the_next_step_is_none_that_was_taken():
    level = Verdict(metric="accuracy", against="a", score=0.5, baseline=0.5, low=-0.1, high=0.1, rows=9)
    assert "plume finetune google-bert/bert-base-uncased" in next_step(plan_of(), level, set())
    for more in ({"width": 1024}, {"model": "bert-base-uncased"}, {"model": "google-bert/bert-base-uncased"}):
        assert next_step(plan_of(**more), level, set()) == "add training rows (now 1), or try --search 8"
    assert next_step(plan_of(width=768, search=8), level, set()) == "add training rows (now 1)"
    right = Verdict(metric="accuracy", against="a", score=1.0, baseline=1.0, low=0.0, high=0.0, rows=8)
    assert next_step(plan_of(), right, set()).startswith("no row is wrong: measure on more rows")
    hard = {UNRELATED}  # or more than a small model can learn
    assert "; if they are right, begin with a model" in next_step(plan_of(), level, hard)
    assert next_step(plan_of(width=768), level, hard).endswith("if they are right, add training rows (now 1)")


def test_overfitting_names_no_option_that_is_set():
    best = SimpleNamespace(score=0.6, training={"accuracy": 0.9})
    (found,) = overfitting(plan_of(epochs=4.0), best)
    assert found.text.endswith("add rows, or try --epochs 2 or --dropout 0.2 or --adapt.mode lora")
    lora = plan_of(epochs=1.0, dropout=0.3, adapt=AdaptConfig(mode="lora"))
    assert overfitting(lora, best)[0].text.endswith("on validation rows; add rows")


def test_rows_without_labels_are_not_called_labels(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"source": f"a {n}", "target": f"b {n}"}) for n in range(40))
    )
    random_base("gpt2", tmp_path / "gpt2")
    task = TaskConfig(train=str(tmp_path / "a.jsonl"))
    plan = make_plan(FinetuneConfig(model=str(tmp_path / "gpt2"), task=task, folder=tmp_path / "run"))
    assert describe_data(plan).startswith("- task: generate; columns: source")


def test_a_report_holds_texts_labels_and_calibration(place):
    result = finetune(config_for(place, "fine", {"train": str(place / "reviews.csv")}, epochs=4.0))
    rows = [json.loads(line) for line in (result.folder / "predictions.jsonl").read_text().splitlines()]
    assert all(isinstance(row["text"], str) and row["text"] for row in rows)
    report = (result.folder / "report.md").read_text()
    assert "| label | precision | recall | F1 | rows |" in report and "Expected calibration error" in report
    assert f"{len(rows):,} validation" in report and f"on {len(rows):,} rows" in report
    assert result.assessment.verdict.rows == len(rows)


def test_rows_of_the_report_are_those_before_training(place, capsys):
    """The report repeats what was printed; validation rows that are encoded again are not counted again."""
    path = write(place / "long.csv", [f"{'fine ' * (n % 2 * 60)}{n},{'yes' if n % 2 else 'no'}" for n in range(60)])
    result = finetune(config_for(place, "long", {"train": path}))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("- longer than")]
    assert ": 30 rows (up to" in line and line in (result.folder / "report.md").read_text()


def test_few_rows_are_not_validated_at_every_step(place):
    path = write(place / "small.csv", reviews(300))
    adapt = AdaptConfig(mode="lora")
    plan = make_plan(config_for(place, "lora", {"train": path}, batch=32, epochs=3.0, adapt=adapt))
    settings = train_config(plan, 9, 0, causal=False)
    assert settings.steps == 27 and settings.validate_every == 5


def test_scores_of_labels_and_calibration_equal_independent_ones():
    draw = np.random.default_rng(0)
    labels = ("a", "b", "c")
    gold, chance = draw.integers(0, 3, 200), draw.dirichlet([1, 1, 1], 200)
    predicted = chance.argmax(axis=1)
    metric = ClassificationMetric(labels)
    for a, b in zip(gold, predicted, strict=True):
        metric.add(int(a), int(b))
    theirs = np.array(precision_recall_fscore_support(gold, predicted)).T
    assert np.allclose([[s.precision, s.recall, s.f1, s.rows] for s in label_scores(metric)], theirs)
    examples = [Example({"text": str(n)}, labels[y], "") for n, y in enumerate(gold)]
    rows = zip(chance.tolist(), predicted, strict=True)
    given = {n: Prediction(labels[y], dict(zip(labels, p, strict=True))) for n, (p, y) in enumerate(rows)}
    error = 0.0
    for low in np.arange(10) / 10:
        inside = [n for n in range(200) if low <= chance[n].max() < low + 0.1]
        if inside:
            right = np.mean([gold[n] == predicted[n] for n in inside])
            error += len(inside) / 200 * abs(np.mean([chance[n].max() for n in inside]) - right)
    assert calibration_error(calibration(examples, given)) == pytest.approx(error)
    settings = TaskSettings(kind="classify", labels=labels, length=32)
    kind = kind_named("classify")(settings, tokenizer_of("bert"), causal=False)
    worst = worst_mistakes(kind, examples, given, 20)
    wrong = sorted((n for n in range(200) if gold[n] != predicted[n]), key=lambda n: -chance[n].max())
    assert worst == wrong[:20]


def test_one_is_not_a_plural(place, capsys):
    assert [plural(n, "row") for n in (0, 1, 2, 1200, 0.5)] == ["0 rows", "1 row", "2 rows", "1,200 rows", "0.5 rows"]
    path = write(place / "one.csv", [*reviews(60), "no label,"])
    finetune(config_for(place, "one", {"train": path}, batch=64, lr=None))
    shown = capsys.readouterr()
    assert "1 step), 1 epoch" in shown.out and "skipped: 1 row, no label" in shown.out
    assert "are trained, 1 step\n" in shown.err and " 1 steps" not in shown.out + shown.err
