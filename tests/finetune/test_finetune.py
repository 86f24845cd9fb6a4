"""From a labelled file to a folder that transformers opens and that gives the same answers."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from cluster import as_ray_would
from families import FAMILIES
from matplotlib.font_manager import get_font_names
from tiny import BAD, GOOD, config_of, random_base, tokenizer_of, write_reviews

import plume
from plume.config import PRESETS, AdaptConfig, FinetuneConfig, TaskConfig, TokenizerConfig, UserError
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.model.ragged import length_groups
from plume.tasks import Predictor
from plume.tasks.schema import TaskSettings
from plume.tasks.tag import WordRows
from plume.tasks.token_rows import Grouped, LabelledRows
from plume.text import load_tokenizer, train_tokenizer
from plume.train.finetune import finetune, seeds_of
from plume.train.finetune_plan import learning_rate, make_plan
from plume.train.finetune_report import plot_confusion
from plume.train.loop import Trainer
from plume.util import files

QUICK = {
    "epochs": 2.0,
    "batch": 16,
    "lr": 3e-3,
    "seeds": 1,
    "device": "cpu",
    "precision": "float32",
    "validate_every": 5,
}
FEATURES = AdaptConfig(mode="features")
WRITTEN = {"kind": "generate", "columns": {"source": "review", "target": "sentiment"}}
COMPARED = {"kind": "embed", "columns": {"text": "review", "pair": "sentiment"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    for family in ("gpt2", "openai-gpt", "bert", "roberta", "marian"):
        random_base(family, folder / family)
    write_reviews(folder / "reviews.csv")
    return folder


def config_for(place, family, run, task, **more):
    return FinetuneConfig(**{**QUICK, **more}, model=str(place / family), task=TaskConfig(**task), folder=place / run)


def reviews(place):
    return {"train": str(place / "reviews.csv")}


@pytest.mark.parametrize("family", ["gpt2", "openai-gpt", "bert", "roberta"])
def test_transformers_gives_the_same_labels(place, family):
    result = finetune(config_for(place, family, f"run-{family}", reviews(place)))
    said = [json.loads(line) for line in (result.folder / "predictions.jsonl").read_text().splitlines()]
    pipeline = transformers.pipeline("text-classification", str(result.model), device="cpu")
    texts = [*GOOD[:3], *BAD[:3]]
    theirs = pipeline(texts, batch_size=3)  # the tokenizer wraps the texts, and padding is found, over there too
    ours = plume.load(result.folder).classify(texts)
    for a, b in zip(ours, theirs, strict=True):
        assert a.label == b["label"] and a.probability == pytest.approx(b["score"], abs=1e-5)
    assert said and all(row["prediction"] in ("neg", "pos") for row in said)
    hits = sum(row["prediction"] == row["label"] for row in said) / len(said)
    assert hits == pytest.approx(result.best.metrics["accuracy"])
    for name in ("report.md", "results.json", "curve.png", "confusion.png"):
        assert (result.folder / name).stat().st_size > 0
    assert not (result.folder / "seed-0" / "checkpoints").exists()


def test_a_set_that_can_be_learned_is_learned(place):
    run = config_for(place, "bert", "learned", reviews(place), epochs=8.0, lr=5e-3, seeds=2)
    result = finetune(run)
    assert result.summary["median"] >= 0.9 and result.baseline == pytest.approx(0.5)
    assert not any(seed.failed for seed in result.seeds) and len(result.seeds) == 2
    report = (result.folder / "report.md").read_text()
    assert "median" in report and "text = 'review' (guessed)" in report and "neg 50.0%" in report


@pytest.mark.parametrize(
    ("preset", "rate"),
    [("openai-gpt", 6.25e-5), ("bert-base-cased", 2e-5), ("bert-large-cased", 1.5e-5), ("gpt-laptop", 3.75e-4)],
)
def test_the_papers_rates_follow_the_width(preset, rate):
    """Width 768 is the papers' own; 1024 and 128 are their rates times 768 / width."""
    config = FinetuneConfig(model="any", task=TaskConfig(train="any.csv"), folder="any")
    paper = {"spread": 0.04, "steps": 234}  # of weights; of GPT-1 on RTE
    assert learning_rate(config, PRESETS[preset], **paper)[0] == pytest.approx(rate)
    assert learning_rate(config, PRESETS[preset], spread=0.04, steps=6000)[0] == pytest.approx(rate)
    assert learning_rate(replace(config, lr=0.5), PRESETS[preset], **paper) == (0.5, "set by --lr")
    features = replace(config, adapt=FEATURES)
    assert learning_rate(features, PRESETS[preset], **paper)[0] == 1e-3
    narrow = replace(PRESETS[preset], width=4, heads=1)
    assert learning_rate(config, narrow, spread=0.02, steps=1)[0] == 1e-3  # the most for weights of that size


def test_large_weights_and_few_steps_get_larger_rates():
    """Weights made by Muon are several times as large, and a step of Adam at the papers' rate hardly turns them."""
    config = FinetuneConfig(model="any", task=TaskConfig(train="any.csv"), folder="any")
    usual = learning_rate(config, PRESETS["openai-gpt"], spread=0.04, steps=200)[0]
    assert learning_rate(config, PRESETS["openai-gpt"], spread=0.06, steps=200)[0] == pytest.approx(1.5 * usual)
    assert learning_rate(config, PRESETS["openai-gpt"], spread=0.12, steps=200)[0] == pytest.approx(2 * usual)
    assert learning_rate(config, PRESETS["openai-gpt"], spread=0.04, steps=50)[0] == pytest.approx(2 * usual)


def test_the_rate_follows_the_weights_that_training_begins_with(place):
    """Twice the weights, twice the rate; reinitialised ones get that of first weights."""
    table, twice = reviews(place), place / "twice"
    model = load_model(place / "gpt2")
    with torch.no_grad():
        for p in model.body.blocks.parameters():
            p *= 2
    save_model(model, twice, tokenizer=load_tokenizer(place / "gpt2"))
    config = config_for(place, "gpt2", "any", table, lr=None)
    once = make_plan(config).lr
    assert make_plan(replace(config, model=str(twice))).lr == pytest.approx(2 * once)
    fresh = AdaptConfig(transfer_layers=-1)
    assert len({make_plan(replace(config, model=str(m), adapt=fresh)).lr for m in (place / "gpt2", twice)}) == 1


def test_the_rate_is_said_before_training(place, capsys):
    config = config_for(place, "bert", "told", reviews(place), lr=None, epochs=0.2)
    finetune(config)
    said = capsys.readouterr().out
    assert f"learning rate {make_plan(config).lr:.3g} (" in said
    assert f"BERT's 2e-05, for width {FAMILIES['bert'].width}, weights of 0." in said


def test_what_picks_the_best_checkpoint_is_shown(place, capsys):
    """Best is by the task's metric, not by the loss that stands beside it."""
    result = finetune(config_for(place, "bert", "shown", reviews(place), epochs=1.0))
    lines = [line for line in capsys.readouterr().err.splitlines() if "validation loss" in line]
    best = [line for line in lines if line.endswith(" (best)")][-1]
    assert all(", accuracy " in line for line in lines)
    assert best.startswith(f"step {result.best.best_step}: ") and f", accuracy {result.best.score:.4f} (best)" in best


def test_labels_in_chinese_are_drawn_without_a_warning(tmp_path, monkeypatch):
    """Warnings are errors here; and without any font that has the letters there are boxes, but no warning."""
    for name, fonts in (("usual.png", files.WIDE_FONTS), ("boxes.png", ())):
        monkeypatch.setattr(files, "WIDE_FONTS", fonts)
        plot_confusion(np.array([[3, 1], [0, 4]]), ["好评", "差评 ★"], tmp_path / name)
    usual, boxes = ((tmp_path / name).read_bytes() for name in ("usual.png", "boxes.png"))
    installed = set(get_font_names()) & {"Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei"}
    assert usual[:4] == b"\x89PNG" and (usual != boxes if installed else True)


def test_a_run_that_learns_nothing_is_flagged(place):
    result = finetune(config_for(place, "bert", "stuck", reviews(place), lr=1e-9, epochs=0.5))
    assert result.seeds[0].failed and "FAILED" in (result.folder / "report.md").read_text()


def test_resuming_keeps_finished_seeds_and_gives_the_same(place):
    config = config_for(place, "gpt2", "resumed", reviews(place), epochs=1.0, seeds=2)
    whole = finetune(config)
    import shutil

    shutil.rmtree(config.folder / "seed-1")
    again = finetune(replace(config, resume=True))
    assert [s.score for s in again.seeds] == [s.score for s in whole.seeds]
    with pytest.raises(UserError, match="already contains a run"):
        finetune(config)


def test_the_history_of_a_seed_that_was_interrupted_is_whole(place, monkeypatch):
    config = config_for(place, "gpt2", "at-once", reviews(place), epochs=2.0, seeds=1, validate_every=2)
    whole = finetune(config).seeds[0].history
    halves, validate = replace(config, folder=place / "halves"), Trainer.validate

    def stops(trainer):
        trainer.stop = True
        return validate(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "validate", stops)
        with pytest.raises(KeyboardInterrupt):
            finetune(halves)
    again = finetune(replace(halves, resume=True))
    found = [(point["step"], point[again.metric]) for point in again.seeds[0].history]
    assert len(found) > 2 and found == [(point["step"], point[again.metric]) for point in whole]


def test_seeds_on_a_cluster_are_those_trained_here(place, monkeypatch):
    """Each from the config alone, which is all that a Ray worker has."""
    here = finetune(config_for(place, "gpt2", "here", reviews(place), epochs=1.0, seeds=2))
    monkeypatch.setattr("plume.train.finetune.run_on_ray", as_ray_would)
    there = finetune(config_for(place, "gpt2", "there", reviews(place), epochs=1.0, seeds=2, backend="ray"))
    assert [s.metrics for s in there.seeds] == [s.metrics for s in here.seeds]
    files = [
        [(r.folder / f"seed-{s}" / "model" / "model.safetensors").read_bytes() for s in (0, 1)] for r in (here, there)
    ]
    assert files[0] == files[1] and files[0][0] != files[0][1]


def test_small_sets_are_run_with_several_seeds(place):
    config = config_for(place, "gpt2", "seeds", reviews(place), seeds=None, seed=7)
    assert list(seeds_of(config, 4999)) == [7, 8, 9] and list(seeds_of(config, 5000)) == [7]


def test_a_regression_in_both_orders(place):
    rows = [f"{a},{b},{1.5 if a == b else 0.25}" for a in GOOD for b in GOOD]
    path = place / "sims.csv"
    path.write_text("sentence1,sentence2,score\n" + "\n".join(rows) + "\n")
    result = finetune(config_for(place, "gpt2", "sims", {"train": str(path), "kind": "similarity"}))
    assert result.metric == "pearson"
    lm = plume.load(result.folder)
    both = lm.similarity(["a fine film", "what a joy"], ["what a joy", "a fine film"])
    assert both[0] == pytest.approx(both[1], abs=1e-5)  # the order cannot matter
    model = transformers.AutoModelForSequenceClassification.from_pretrained(result.model)
    assert model.config.num_labels == 1


def test_choosing(place):
    items = [{"context": good, "choices": [bad, good], "label": 1} for good, bad in zip(GOOD, BAD, strict=True)] * 6
    path = place / "choices.jsonl"
    path.write_text("\n".join(json.dumps({**item, "question": f"q{i}"}) for i, item in enumerate(items)))
    result = finetune(config_for(place, "bert", "choices", {"train": str(path)}))
    choice = plume.load(result.folder).choose("a fine film", ["a dull film", "a fine film"], question="q1")
    assert choice.text == ["a dull film", "a fine film"][choice.index]
    model = transformers.AutoModelForMultipleChoice.from_pretrained(result.model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    given = tokenizer(["a fine film q1"] * 2, ["a dull film", "a fine film"], return_tensors="pt", padding=True)
    with torch.no_grad():
        theirs = model(**{name: value[None] for name, value in given.items()}).logits[0].softmax(0)
    assert list(choice.probabilities) == pytest.approx(theirs.tolist(), abs=1e-5)


def conll(place):
    path = place / "names.conll"
    sentences = [["Mary", "lives", "in", "Paris"], ["Smith", "sings"], ["the", "river", "near", "Paris"]] * 8
    tags = {"Mary": "B-PER", "Smith": "B-PER", "Paris": "B-LOC"}
    lines = ["\n".join(f"{w} x {tags.get(w, 'O')}" for w in s) + "\n" for s in sentences]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_tagging(place, family):
    path = conll(place)
    result = finetune(config_for(place, family, f"tags-{family}", {"train": path, "validation": path}, epochs=15.0))
    assert result.metric == "f1" and result.best.score > 0.5
    (sentence,) = plume.load(result.folder).tag(["Mary lives in Paris"])
    assert [word.word for word in sentence] == ["Mary", "lives", "in", "Paris"]
    model = transformers.AutoModelForTokenClassification.from_pretrained(result.model).eval()
    tokenizer = tokenizer_of(family) if family == "bert" else plume.load(result.folder).tokenizer
    pieces = [tokenizer.encode(w if i == 0 else f" {w}") for i, w in enumerate(["Mary", "lives", "in", "Paris"])]
    ids, _ = tokenizer.add_special_tokens([p for piece in pieces for p in piece])
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0].argmax(dim=1)
    places = np.cumsum([1, *[len(piece) for piece in pieces[:-1]]])
    assert [model.config.id2label[int(best[p])] for p in places] == [word.tag for word in sentence]


def test_tagged_words_are_tokens_of_the_running_text():
    """Chinese was tagged with spaces between its characters, which no GPT has read."""
    text = "我爱北京，Paris is nice 吗？"
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=400), [text])
    words = [*"我爱北京，", "Paris", "is", "nice", *"吗？"]
    ((row,),) = WordRows(tokenizer, length=100).rows([words])
    assert tokenizer.decode(row.row.tokens) == text.replace("nice 吗", "nice吗")
    starts = [tokenizer.decode(row.row.tokens[at:])[:1].strip() for at in row.places]
    assert [word.startswith(start) for word, start in zip(words, starts, strict=True)] == [True] * len(words)


def test_long_sentences_lose_no_word(place):
    path = conll(place)
    result = finetune(config_for(place, "bert", "long-tags", {"train": path, "validation": path}, epochs=1.0))
    words = ["Mary"] * 100
    (sentence,) = plume.load(result.folder).tag([words])
    assert [word.word for word in sentence] == words


def squad(place, impossible):
    people = ["Mary", "Smith", "John"]
    qas = [
        {"context": f"{who} lives in the old house on the hill. {'yes no ' * 8}", "who": who, "id": f"{who}{n}"}
        for n in range(6)
        for who in people
    ]
    paragraphs = []
    for q in qas:
        questions = [{"id": q["id"], "question": "who lives?", "answers": [{"answer_start": 0, "text": q["who"]}]}]
        if impossible:
            questions.append({"id": q["id"] + "x", "question": "near the river?", "answers": [], "is_impossible": True})
        paragraphs.append({"context": q["context"], "qas": questions})
    path = place / f"squad{int(impossible)}.json"
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return str(path)


@pytest.mark.parametrize("impossible", [False, True])
def test_answers_with_windows_and_none(place, impossible):
    path = squad(place, impossible)
    task = {"train": path, "validation": path, "stride": 8, "question_length": 8}
    result = finetune(config_for(place, "bert", f"squad{int(impossible)}", task, epochs=12.0, lr=5e-3))
    assert result.metric == "f1" and result.best.score > (0.5 if not impossible else 0.3)
    lm = plume.load(result.folder)
    context = "Mary lives in the old house on the hill. " + "yes no " * 8
    answer = lm.answer(question="who lives?", context=context)
    assert answer.text == context[answer.start : answer.end].strip()
    settings = json.loads((result.model / "plume.json").read_text())["task"]
    assert (settings["null_threshold"] is not None) == impossible
    assert transformers.AutoModelForQuestionAnswering.from_pretrained(result.model)


def test_translation_is_measured_by_beam_search(place):
    (place / "a.en").write_text("\n".join([*GOOD, *BAD] * 4) + "\n")
    (place / "a.de").write_text(
        "\n".join(["yes"] * 5 + ["no"] * 5) + "\n" + "\n".join((["yes"] * 5 + ["no"] * 5) * 3) + "\n"
    )
    task = {
        "train": str(place / "a.en"),
        "targets": str(place / "a.de"),
        "validation": str(place / "a.en"),
        "validation_targets": str(place / "a.de"),
    }
    result = finetune(config_for(place, "marian", "translated", task, epochs=2.0, beams=2))
    assert {"bleu", "chrf", "rougeL"} <= result.best.metrics.keys()
    said = [json.loads(line)["prediction"] for line in (result.folder / "predictions.jsonl").read_text().splitlines()]
    assert said[0] == plume.load(result.folder).translate(GOOD[0], beams=2, length_penalty=0.6, max_new_tokens=50).text
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(result.model)


def test_embeddings(place):
    rows = [f"{a},{a} so" for a in (*GOOD, *BAD)] * 2
    path = place / "pairs.csv"
    path.write_text("anchor,positive\n" + "\n".join(f"{r}{i}" for i, r in enumerate(rows)) + "\n")
    result = finetune(config_for(place, "bert", "embedded", {"train": str(path)}, epochs=4.0))
    lm = plume.load(result.folder)
    vectors = lm.embed(["a fine film", "a fine film"])
    assert np.allclose(vectors[0], vectors[1])
    assert lm.similarity(["a fine film"], ["a fine film"])[0] == pytest.approx(1.0, abs=1e-5)


def test_embeddings_of_pairs_with_numbers(place):
    """Numbers from 0 to 5 are cosines from 0 to 1 everywhere, and a test file may come without them."""
    rows = [f"{a} {n},{a} so,{n % 6}" for n, a in enumerate((*GOOD, *BAD) * 2)]
    train, test = place / "scored.csv", place / "unscored.csv"
    train.write_text("\n".join(["text,pair,score", *rows]) + "\n")
    test.write_text("text,pair\na fine film,a dull film\n")
    task = {"train": str(train), "test": str(test), "kind": "embed", "columns": {"label": "score"}}
    result = finetune(config_for(place, "bert", "scored", task, epochs=1.0))
    assert (result.folder / "test_predictions.jsonl").read_text().count("\n") == 1
    assert result.test is None and result.best.metrics["mse"] < 4  # 25 when raw numbers meet cosines


def test_a_context_of_nothing_has_no_answer():
    from plume.tasks.span import Window, best_span
    from plume.tasks.token_rows import IMPOSSIBLE, TokenRow

    none = np.zeros(0, np.int64)
    window = Window(TokenRow(none, none), 3, none, none, np.zeros(0, bool))
    found = best_span(np.zeros((4, 2), np.float32), window, "\u200b", 30)
    assert (found.text, found.score) == ("", IMPOSSIBLE)


@pytest.mark.parametrize(
    "adapt",
    [
        AdaptConfig(mode="lora", lora_rank=2),
        FEATURES,
        AdaptConfig(freeze_layers=1, layer_decay=0.8),
        AdaptConfig(unfreeze_every=2),
        AdaptConfig(transfer_layers=1),
    ],
    ids=["lora", "features", "freeze", "unfreeze", "transfer"],
)
def test_every_way_to_adapt_runs(place, adapt, request):
    name = f"adapted-{request.node.callspec.id}"
    result = finetune(config_for(place, "gpt2", name, reviews(place), adapt=adapt, epochs=1.0, tune_threshold=True))
    base, tuned = (plume.load(folder).model.state_dict() for folder in (place / "gpt2", result.folder))
    same = {n for n in base if n in tuned and base[n].shape == tuned[n].shape and torch.equal(base[n], tuned[n])}
    first, last = "body.blocks.0.mlp.inner.up.weight", "body.blocks.1.mlp.inner.up.weight"
    assert (first in same) == (adapt.mode != "full" or adapt.freeze_layers == 1)
    assert (last in same) == (adapt.mode != "full")
    assert (result.folder / "seed-0" / "adapter").exists() == (adapt.mode == "lora")
    assert json.loads((result.model / "plume.json").read_text())["task"]["threshold"] is not None
    assert plume.load(result.folder).classify(["a fine film"])


@pytest.mark.parametrize(
    ("family", "task", "more", "message"),
    [
        ("marian", {}, {}, "a classify task needs a GPT or a BERT"),
        (
            "bert",
            WRITTEN,
            {},
            "an encoder-decoder or a GPT",
        ),
        ("bert", {}, {"auxiliary_weight": 0.5}, "auxiliary_weight=0.5.*auxiliary_weight=0 works"),
        ("gpt2", {"length": 9999}, {}, "task.length=9999 is longer than the model's context of 32"),
        ("gpt2", {}, {"metric": "f7"}, "metric='f7' is not one of this task's: accuracy"),
        ("gpt2", {}, {"adapt": AdaptConfig(freeze_layers=7)}, "freeze_layers=7 is more than"),
        ("gpt2", WRITTEN, {"adapt": FEATURES}, "generate tasks lack; use lora"),
        ("bert", COMPARED, {"adapt": FEATURES}, "embed tasks lack; use lora"),
        ("bert", {}, {"temperature": 0.1}, "temperature=0.1 has no effect on this classify task"),
        ("bert", {}, {"answer_length": 5}, "answer_length=5 has no effect"),
        ("bert", {"stride": 5}, {}, "stride=5 has no effect"),
        ("bert", {"kind": "multilabel"}, {"class_weights": "balanced"}, "class_weights=balanced has no effect"),
        ("gpt2", WRITTEN, {"tune_threshold": True}, "tune_threshold=True has no effect"),
        ("nowhere/at/all", {}, {}, "there is no folder"),
    ],
)
def test_mistakes_leave_nothing_behind(place, family, task, more, message):
    config = config_for(place, family, "broken", {**reviews(place), **task}, **more)
    with pytest.raises(UserError, match=message):
        finetune(config)
    assert not (place / "broken" / "model").exists()


def test_predictions_of_the_wrong_head_or_of_nothing(place):
    lm = plume.load(place / "bert")
    with pytest.raises(UserError, match="masked-token head, not classify"):
        lm.classify(["x"])
    with pytest.raises(UserError, match="masked-token head, not tag"):
        lm.tag(["x"])
    with pytest.raises(UserError, match="masked-token head, not classify"):
        lm.predict([{"text": "x"}])
    with pytest.raises(UserError, match="masked-token head, not classify"):
        lm.evaluate(place / "reviews.csv")


def test_what_is_no_text_is_not_read_as_its_python_form(place):
    settings = TaskSettings(kind="pair", labels=("no", "yes"), length=32)
    model = Model(config_of("bert"), "classify", ("no", "yes"))
    predictor = Predictor(model, tokenizer_of("bert"), None)
    predictor.settings, predictor.known = settings, True
    with pytest.raises(UserError, match=r"text 0 is \['a film', 'a bore'\]; it must be a text"):
        predictor.classify([["a film", "a bore"]], ["x"])
    with pytest.raises(UserError, match=r"pair 0 is \['a bore'\]; it must be a text"):
        predictor.classify(["a film"], [["a bore"]])
    assert predictor.classify(["a film"], ["a bore"])[0].label in ("no", "yes")


def test_test_rows_without_labels_are_predicted(place):
    (place / "new.csv").write_text("review\na fine film\nwhat a bore\n")
    task = {**reviews(place), "test": str(place / "new.csv")}
    result = finetune(config_for(place, "bert", "tested", task, epochs=1.0))
    rows = [json.loads(line) for line in (result.folder / "test_predictions.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == [None, None] and all(row["prediction"] in ("neg", "pos") for row in rows)


# ---- batches -----------------------------------------------------------------------------------------------------


def many_rows(count):
    from plume.tasks.token_rows import TokenRow

    draw = np.random.default_rng(0)
    rows = [np.full(int(n), i) for i, n in enumerate(draw.integers(3, 40, count))]
    return LabelledRows([[TokenRow(r, np.zeros_like(r))] for r in rows], np.arange(count))


def test_an_epoch_visits_every_item_once_and_batches_are_a_function_of_the_step():
    data = many_rows(1003)
    first, second = Grouped(data, 16, seed=3), Grouped(data, 16, seed=3)
    seen = np.concatenate([first.numbers(step) for step in range(first.steps)])
    assert sorted(seen) == list(range(1003))
    step = first.steps + 7
    assert np.array_equal(second.numbers(step), first.numbers(step))  # asked for alone, without the steps before
    assert not np.array_equal(first.numbers(0), Grouped(data, 16, seed=4).numbers(0))
    assert torch.equal(first.part(5, 4, 3).tokens[:, :3], first.part(5, 0, first.rows(5)).tokens[4:7, :3])


def test_no_batch_is_much_smaller_than_the_others():
    """So that many ranks can share every one of them, and no row has nothing to be told apart from."""
    for count, size in ((65, 32), (33, 32), (1003, 16), (7, 16)):
        batches = Grouped(many_rows(count), size, seed=0)
        sizes = [batches.rows(step) for step in range(batches.steps)]
        assert sum(sizes) == count and min(sizes) >= min(count, size) // 2 and max(sizes) <= size


def padding(data, groups):
    return 1 - data.real_tokens / sum(int(data.lengths[g].max()) * len(g) for g in groups)


def test_batches_of_labelled_rows_hold_every_length_and_little_padding_is_computed():
    """Batches of one length hold one label where the length tells the label: each is then a biased sample."""
    data = many_rows(4000)
    for count in (96, 4000):
        few = many_rows(count)
        batches = Grouped(few, 32, seed=0)
        means = [few.lengths[batches.numbers(step)].mean() for step in range(batches.steps)]
        assert np.std(means) < 3 * few.lengths.std() / np.sqrt(32)  # as of batches that are drawn at random
    plan = [batches.numbers(step) for step in range(batches.steps)]
    cut = [numbers[g] for numbers in plan for g in length_groups(data.lengths[numbers], 16)]
    assert padding(data, plan) > 0.4 and padding(data, cut) < 0.1
    assert sorted(np.concatenate(cut)) == list(range(4000))
    data.mixed = False  # texts without labels
    batches = Grouped(data, 32, seed=0)
    assert padding(data, [batches.numbers(step) for step in range(batches.steps)]) < 0.15
