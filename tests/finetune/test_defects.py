"""Rows, splits, validation, weights and losses that a review found wrong, each against an independent computation."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from test_losses import PAIRS, model_for, states, task, wrapped
from tiny import config_of, random_base, tokenizer_of, write_reviews

import plume
from plume.config import TaskConfig, UserError
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.tasks.embed import ContrastRows
from plume.tasks.schema import Example
from plume.tasks.task_data import load_task, split
from plume.tasks.task_kind import TaskOptions
from plume.tasks.token_rows import LabelledRows, Template, TokenRow, ValidationSample
from plume.train.finetune import TaskObjective


@pytest.mark.parametrize("head", ["pretraining", "bare"])
def test_the_pooler_is_kept_as_transformers_keeps_it(tmp_path, head):
    torch.manual_seed(1)
    base = Model(config_of("bert"), head)
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_model(base, tmp_path / "base", tokenizer=tokenizer_of("bert"))
    ours = load_model(tmp_path / "base", head="classify", labels=("no", "yes"))
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    pooler = theirs.bert.pooler.dense
    assert torch.equal(ours.head.summary.dense.weight, pooler.weight)
    assert torch.equal(ours.head.summary.dense.bias, pooler.bias)
    tokens = torch.tensor([[2, 30, 31, 3]])
    with torch.no_grad():
        ours.head.out.load_state_dict(theirs.classifier.state_dict())
        assert torch.allclose(ours(tokens), theirs.eval()(tokens).logits, atol=1e-5)


def test_validation_is_a_sample_of_all_lengths():
    rows = [[TokenRow(np.full(n, 7, np.int32), np.zeros(n, np.int32))] for n in range(1, 2001)]
    data = LabelledRows(rows, np.arange(2000))
    sample = ValidationSample(data, 512, group=32, seed=3)
    parts = [sample.part(0, first, 64) for first in range(0, 512, 64)]
    lengths = torch.cat([part.lengths for part in parts]).numpy()
    assert sample.rows(0) == 512 and len(set(lengths.tolist())) == 512
    assert abs(lengths.mean() - 1000.5) < 4 * 2000 / 12**0.5 / 512**0.5 and (np.diff(lengths) > 0).all()
    again = torch.cat([ValidationSample(data, 512, group=32, seed=3).part(0, 0, 512).lengths])
    assert torch.equal(torch.from_numpy(lengths), again)
    assert not torch.equal(again, ValidationSample(data, 512, group=32, seed=4).part(0, 0, 512).lengths)


def choices(tmp_path, *rows):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"context": "1 + 1", **row}) + "\n" for row in rows))
    return TaskConfig(kind="choose", train=str(path), validation=str(path))


def test_an_integer_answer_is_an_index(tmp_path):
    given = [2, 0, "5", "B", "7.5"]
    options = [["3", "2", "5", "7"], ["1", "0"], ["4", "5"], ["x", "y"], ["7.5", "8"]]
    rows = [{"choices": c, "label": a} for a, c in zip(given, options, strict=True)]
    assert [e.label for e in load_task(choices(tmp_path, *rows)).train] == [2, 0, 1, 1, 0]
    with pytest.raises(
        UserError, match="line 1: the label '2' is the text of choice 1 and the index of another; give the "
    ):
        load_task(choices(tmp_path, {"choices": ["3", "2", "5", "7"], "label": "2"}))


CONLLU = """# sent_id = 1
# text = Vámonos al mar
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
3-4\tal\t_\t_\t_\t_\t_\t_\t_\t_
3\ta\ta\tADP\t_\t_\t5\tcase\t_\t_
4\tel\tel\tDET\t_\t_\t5\tdet\t_\t_
5\tmar\tmar\tNOUN\t_\t_\t1\tobl\t_\t_
5.1\tvamos\tir\tVERB\t_\t_\t_\t_\t_\t_

"""


@pytest.mark.parametrize("name", ["es.conllu", "es-ud-train", "es.txt"])
def test_conllu_has_words_and_universal_tags(tmp_path, name):
    (tmp_path / name).write_text(CONLLU * 3)
    data = load_task(TaskConfig(train=str(tmp_path / name), validation=str(tmp_path / name)))
    assert data.kind == "tag" and len(data.train) == 3
    assert data.train[0].fields["words"] == ["Vamos", "nos", "a", "el", "mar"]
    assert data.train[0].label == ["VERB", "PRON", "ADP", "DET", "NOUN"]


def test_conll_is_recognised_by_its_content(tmp_path):
    text = "-DOCSTART- -X- O O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n\nPeter NNP B-NP B-PER\nsings VBZ B-VP O\n\n"
    (tmp_path / "eng.train").write_text(text * 3)
    data = load_task(TaskConfig(train=str(tmp_path / "eng.train"), validation=str(tmp_path / "eng.train")))
    assert data.kind == "tag" and data.train[0].fields["words"] == ["EU", "rejects"]
    (tmp_path / "prose.text").write_text("It was a dark night.\n\nAnd the rain fell in torrents.\n" * 9)
    with pytest.raises(UserError, match=r"not recognised; .*\.csv.*\.conll"):
        load_task(TaskConfig(train=str(tmp_path / "prose.text")))


def test_copies_with_other_ids_are_on_one_side():
    draw = np.random.default_rng(0)
    letters = [chr(97 + int(n)) for n in draw.integers(0, 26, 200)]
    examples = [Example({"text": c, "id": str(n)}, "yes" if c < "m" else "no", "") for n, c in enumerate(letters)]
    train, validation = split(examples, 0.3, seed=1)
    assert train and validation and not {e.fields["text"] for e in train} & {e.fields["text"] for e in validation}


@pytest.mark.parametrize(("count", "apart"), [(40, True), (2, False)])
def test_questions_about_one_context_are_on_one_side(count, apart):
    """Or else a model has read the contexts it is validated on, answers and all; a few contexts cannot be split."""
    rows = [{"context": f"Text {n} of a book.", "question": f"Which {m}?", "id": f"{n}-{m}"} for n in range(count)
            for m in range(5)]  # fmt: skip
    train, validation = split([Example(row, [(5, "1")], "") for row in rows], 0.1, seed=1)
    assert len(train) + len(validation) == 5 * count and len(validation) == count / 2
    known = {e.fields["context"] for e in train}
    assert all((e.fields["context"] in known) != apart for e in validation)


def test_unlabelled_rows_are_skipped_and_counted(tmp_path):
    labels = ["entailment", "neutral", "contradiction", "-", "neutral", ""] * 5
    rows = [f"{y}\tleft {n}\tright {n}" for n, y in enumerate(labels)]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(["gold_label\tsentence1\tsentence2", *rows]) + "\n")
    data = load_task(TaskConfig(train=str(tmp_path), name="snli"))
    assert len(data.train) == len(data.validation) == 20 and data.skipped.counts == {"no label": 20}
    assert data.skipped.first["no label"].endswith("train.tsv line 5")
    rows = [f"film {n},{'+-'[n % 2]}" for n in range(40)]  # where - is a label, it stays one
    (tmp_path / "signs.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    signs = load_task(TaskConfig(train=str(tmp_path / "signs.csv")))
    assert signs.labels == ("+", "-") and not signs.skipped.counts


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 2), (1, 5), (4, 2)], ids=str)
def test_the_contrastive_loss_is_that_of_the_whole_batch(sizes):
    """Loss and gradients of a batch in parts, as micro-batches and ranks have them, against all pairs written out."""
    model, tokenizer = model_for("bert", "bare")
    kind = task("embed", "bert", tokenizer, options=TaskOptions(temperature=0.1))
    pairs = [(a, b) for a, b, _ in PAIRS] + [(f"{b} so", f"{a} too") for a, b, _ in PAIRS]
    data = kind.encode([Example({"text": a, "pair": b}, None, "") for a, b in pairs])
    assert isinstance(data, ContrastRows)

    def vector(text):
        mean = states(model, *wrapped(tokenizer, text)).mean(dim=0)
        return mean / mean.norm()

    expected = 0.0
    for place, (first, _) in enumerate(pairs):
        scores = torch.stack([vector(first) @ vector(other) / 0.1 for _, other in pairs])
        expected = expected - scores.log_softmax(0)[place] / len(pairs)
    model.zero_grad()
    expected.backward()
    theirs = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    objective, numbers, found, first = TaskObjective(kind), np.arange(6), 0.0, 0
    for size in sizes:
        part = data.part(numbers, first, size)
        assert float(objective.counts(part)[0]) == size
        loss = objective.totals(model, part)[0] / 6
        loss.backward()
        found, first = found + float(loss.detach()), first + size
    assert found == pytest.approx(expected.item(), abs=1e-5)
    for name, gradient in theirs.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, atol=2e-5, rtol=2e-4)


def test_label_smoothing_is_torchs():
    """The help says that the probability is spread over all labels, the correct one included."""
    model, tokenizer = model_for("bert", "classify", ("a", "b", "c"))
    options = TaskOptions(label_smoothing=0.3)
    kind = task("classify", "bert", tokenizer, labels=("a", "b", "c"), options=options)
    batch = kind.encode([Example({"text": "a fine film"}, "b", "")]).batch(np.arange(1))
    logits = kind.logits(model, kind.hidden(model, batch), batch)
    target = torch.tensor([[0.1, 0.8, 0.1]])  # 0.3 / 3 everywhere, and the rest on b
    expected = -(target * logits.log_softmax(1)).sum()
    assert kind.losses(model, kind.hidden(model, batch), batch).item() == pytest.approx(expected.item(), abs=1e-5)


def test_one_seed_is_said_as_one(tmp_path):
    from plume.train.finetune import FinetuneResult, SeedResult
    from plume.train.finetune_report import describe_scores

    seeds = [SeedResult(n, 0.5 + n / 10, {"accuracy": 0.5}, 1, 1, 1.0, False) for n in range(3)]
    one = FinetuneResult(tmp_path, "classify", "accuracy", seeds[:1], seeds[0])
    three = FinetuneResult(tmp_path, "classify", "accuracy", seeds, seeds[2])
    assert describe_scores(one) == "validation accuracy: 0.5000 (1 seed)"
    assert "median 0.6000 over 3 seeds (0.5000 to 0.7000" in describe_scores(three)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_without_any_label_are_an_error(tmp_path):
    train = jsonl(tmp_path / "a.jsonl", [{"text": f"film {n}", "label": []} for n in range(40)])
    with pytest.raises(UserError, match="no training row has a label"):
        load_task(TaskConfig(train=train, kind="multilabel"))


def test_numbers_are_recognised_wherever_they_have_fractions(tmp_path):
    """A file that is sorted by score begins with equal whole numbers."""
    scores = ["5.0"] * 1000 + [f"{n / 4}" for n in range(20)] * 10
    rows = [{"text": f"a {n}", "pair": f"b {n}", "label": score} for n, score in enumerate(scores)]
    assert load_task(TaskConfig(train=jsonl(tmp_path / "a.jsonl", rows))).target == "number"


@pytest.mark.parametrize(
    ("kind", "template", "says"),
    [
        ("classify", ("Is it good?",), "has no field in braces"),
        ("generate", ("Q: A:",), "one line with {source} in it"),
        ("generate", ("{source} =", "{source} ->"), "one line with {source} in it"),
    ],
)
def test_a_template_that_ignores_the_row_is_refused(kind, template, says):
    with pytest.raises(UserError, match=says):
        task(kind, "gpt2", tokenizer_of("gpt2"), template=template)


ANSWERS = [{"text": ["Mary", "Paris"], "answer_start": [0]}, {"text": None, "answer_start": [0]}, {"text": "Mary"}]


@pytest.mark.parametrize("answers", ANSWERS)
def test_answers_whose_lists_do_not_fit_are_named(tmp_path, answers):
    row = {"context": "Mary lives in Paris", "question": "who?", "answers": answers}
    with pytest.raises(UserError, match=r"line 1: the answers .* need lists answer_start and text of equal length"):
        load_task(TaskConfig(train=jsonl(tmp_path / "a.jsonl", [row])))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"data": 5}, "^[^:]* is not a SQuAD file: its data is not a list$"),
        ({"data": [{"paragraphs": [{"context": "a", "qas": ["who?"]}]}]}, "is not a SQuAD file: TypeError"),
    ],
)
def test_a_file_that_is_no_squad_is_named_once(tmp_path, content, says):
    (tmp_path / "a.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        load_task(TaskConfig(train=str(tmp_path / "a.json")))


def test_a_question_of_no_tokens_is_refused():
    with pytest.raises(UserError, match="question_length=-5 must be at least 1"):
        TaskConfig(train="a.json", question_length=-5)


def test_chats_without_an_answer_are_counted(tmp_path):
    asked, answered = (
        [{"role": role, "content": "hi"} for role in roles] for roles in (["user"], ["user", "assistant"])
    )
    path = jsonl(tmp_path / "a.jsonl", [{"messages": m} for m in (asked, answered, asked, answered)])
    data = load_task(TaskConfig(train=path, validation=path))
    assert len(data.train) == 2 and data.skipped.counts["no message of the assistant"] == 4


def test_comments_of_conll_are_no_words(tmp_path):
    """As in WNUT and MultiCoNER; a word # keeps its place."""
    text = "# id 7 domain=en\nMary _ _ B-PER\nsings _ _ O\n\n# _ _ O\n1 _ _ O\n\n"
    (tmp_path / "a.conll").write_text(text * 5)
    data = load_task(TaskConfig(train=str(tmp_path / "a.conll"), validation=str(tmp_path / "a.conll")))
    assert data.labels == ("B-PER", "O")
    assert [e.fields["words"] for e in data.train[:2]] == [["Mary", "sings"], ["#", "1"]]


def test_a_missing_file_of_targets_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.txt"):
        load_task(TaskConfig(train=str(tmp_path / "a.txt"), targets=str(tmp_path / "nowhere.txt")))


QUICK = {"epochs": 1, "seeds": 1, "batch": 16, "device": "cpu", "precision": "float32"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defects")
    random_base("bert", folder / "bert")
    write_reviews(folder / "reviews.csv")
    return folder


def test_a_file_is_evaluated_as_the_training_rows_were_read(place):
    """Columns that the user named, a header that the file lacks and its encoding belong to the model's task."""
    _, *lines = (place / "reviews.csv").read_text().splitlines()
    named, bare = place / "named.csv", place / "bare.csv"
    named.write_text("text,headline,label\n" + "".join(f"filler {n},{line}\n" for n, line in enumerate(lines)))
    bare.write_bytes("".join(f"{line}\n" for line in lines).replace("lovely", "café").encode("latin-1"))
    given = [
        (named, {"columns": {"text": "headline"}}),
        (bare, {"header": ["headline", "label"], "encoding": "latin-1"}),
    ]
    for path, how in given:
        options = {**QUICK, "epochs": 12, "lr": 5e-3, **how}
        found = plume.finetune(model=place / "bert", train=path, validation=path, folder=place / path.stem, **options)
        lm = plume.load(found.folder)
        assert found.best.score > 0.8 and lm.evaluate(path)["accuracy"] == pytest.approx(found.best.score)
    assert lm.predictor.settings.columns == {"text": "headline", "label": "label"}
    other = place / "other.csv"  # with other names: they are guessed
    other.write_text("x,review,sentiment\n" + "".join(f"1,{line}\n" for line in lines))
    assert plume.load(place / "named").evaluate(other)["accuracy"] > 0.8


def test_fields_that_a_task_does_not_have_are_ignored(place):
    folder = plume.finetune(model=place / "bert", train=place / "reviews.csv", folder=place / "run", **QUICK).folder
    lm = plume.load(folder)
    rows = [{"text": "a fine film", "label": 0, "id": 0, "note": None}, {"text": 5}]
    found = lm.predict(rows)
    assert [p.value for p in found] == [p.value for p in lm.predict([{"text": "a fine film"}, {"text": "5"}])]
    for wrong, says in (
        ({"text": " "}, "text 0 is empty"),
        ({"text": None}, "must be a text"),
        ({"text": ["a"]}, "must"),
    ):
        with pytest.raises(UserError, match=says):
            lm.predict([wrong])


def test_words_that_are_no_list_of_texts_are_named(place):
    from plume.tasks import Predictor

    predictor = Predictor(load_model(place / "bert", head="tag", labels=("A", "B")), tokenizer_of("bert"), None)
    for wrong in (5, "a b", [], [None], [["a"]]):
        with pytest.raises(UserError, match="words 0 is"):
            predictor.predict([{"words": wrong}])


def test_test_rows_are_measured_where_they_can_be(place):
    lines = (place / "reviews.csv").read_text().splitlines()
    (place / "some.csv").write_text("\n".join([*lines[:11], "one without a label,"]) + "\n")
    (place / "labelled.csv").write_text("\n".join(lines[:11]) + "\n")
    runs = [
        plume.finetune(
            model=place / "bert", train=place / "reviews.csv", test=place / f"{name}.csv", folder=place / name, **QUICK
        )
        for name in ("some", "labelled")
    ]
    assert runs[0].test is not None and runs[0].test == runs[1].test
    rows = [{"text": f"a film {n}", "pair": f"film {n} so"} for n in range(60)]
    train, test = jsonl(place / "train.jsonl", rows[:40]), jsonl(place / "test.jsonl", rows[40:])
    found = plume.finetune(model=place / "bert", train=train, test=test, folder=place / "embed", **QUICK)
    assert found.kind == "embed" and 0 <= found.test["accuracy"] <= 1


def test_a_glue_task_of_another_kind_has_a_metric_of_that_kind(place):
    (place / "stsb").mkdir()
    rows = "".join(f"a film {n}\tfilm {n}\t{n % 3}\n" for n in range(60))
    for name in ("train", "dev"):
        (place / "stsb" / f"{name}.tsv").write_text(f"sentence1\tsentence2\tscore\n{rows}")
    found = plume.finetune(
        model=place / "bert", train=place / "stsb", name="stsb", target="label", folder=place / "run-stsb", **QUICK
    )
    assert found.metric == "accuracy"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"validation": "b.csv", "validation_fraction": 0.3}, "validation_fraction=0.3 has no effect with validation"),
        ({"test_targets": "b.txt"}, "test_targets needs test, the file that it is aligned with"),
    ],
)
def test_files_that_would_be_ignored_are_refused(fields, says):
    with pytest.raises(UserError, match=says):
        TaskConfig(train="a.csv", **fields)


@pytest.mark.parametrize("fields", [{"labels": ["pos", "neg"]}, {"target": "number"}])
def test_labels_that_a_kind_does_not_have_are_refused(place, fields):
    rows = [{"context": f"a {n}", "choices": ["b", "c"], "label": n % 2} for n in range(40)]
    with pytest.raises(UserError, match="has no effect on this choose task"):
        plume.finetune(
            model=place / "bert", train=jsonl(place / "c.jsonl", rows), folder=place / "no", **fields, **QUICK
        )


def test_a_template_of_a_question_that_a_row_lacks():
    template = Template(tokenizer_of("bert"), ("{question} | {choice}",), length=32)
    fields = {"context": "a fine film", "choices": ["yes", "no"]}
    asked, other = (
        [len(r.tokens) for r in template.rows([Example(f, 0, "")])[0]] for f in (fields | {"question": "who"}, fields)
    )
    assert len(other) == 2 and all(a > b for a, b in zip(asked, other, strict=True))


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_a_seed_without_a_score_is_never_the_best(metric, tmp_path):
    from plume.train.finetune import FinetuneResult, SeedResult, best_seed
    from plume.train.finetune_report import describe_scores

    scores = {"accuracy": [math.nan, 0.7, 0.9], "mse": [math.nan, 3.0, 2.0]}[metric]
    seeds = [SeedResult(n, s, {metric: s}, 1, 1, 1.0, math.isnan(s)) for n, s in enumerate(scores)]
    assert best_seed(seeds, metric).seed == 2 == best_seed(seeds[::-1], metric).seed
    assert best_seed(seeds[:1], metric).seed == 0
    result = FinetuneResult(tmp_path, "classify", metric, seeds, seeds[2])
    assert "nan" not in describe_scores(result) and describe_scores(result).endswith("; 1 seed failed")
