"""How rows are read and asked, against the harness's own task files and the prompts that the papers print."""

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import matthews_corrcoef
from stories import harness_task, story, write_rows

from plume.config import EvaluateConfig, UserError
from plume.evaluate import evaluate
from plume.evaluate.eval_tasks import TASKS, find_rows
from plume.evaluate.formats import clean_penn
from plume.evaluate.items import PROTOCOLS, TaskRow
from plume.evaluate.requests import generated_record, protocol_for, with_examples
from plume.text import load_tokenizer


def built(name: str, row: dict, protocol: str):
    return list(TASKS[name].build(TaskRow(row, "row 1"), PROTOCOLS[protocol]))


# ---- long texts --------------------------------------------------------------------------------------------------

PENN = " no it was n't black monday \n <unk> rose N points to $ N million at N 's # N \n"


@pytest.mark.parametrize(
    ("task", "file", "text", "headline"),
    [
        ("ptb", "ptb.test.txt", PENN * 3, "word_perplexity"),
        ("enwik8", "enwik8", "a b " * 1_249_998 + "<page>Zürich</page>", "bits_per_byte"),
        ("text8", "text8", "x" * 200 + " the cat went to the garden", "bits_per_character"),
        ("1bw", "news.en.heldout-00000-of-00050", "The cat ate milk .\n\nThe dog went home .\n", "word_perplexity"),
    ],
)
def test_long_texts_are_read_and_divided(trained_folder, tmp_path, task, file, text, headline):
    """Every token's likelihood by a written-out loop; the denominators counted in the file itself."""
    (tmp_path / task).mkdir()
    (tmp_path / task / file).write_text(text, encoding="utf-8")
    if task in ("enwik8", "text8"):  # the last five million bytes are the test set
        (row,) = find_rows(TASKS[task], "test", tmp_path).rows()
        assert row["text"].encode() == text.encode()[-5_000_000:]
        (tmp_path / task / file).write_text(text[-300:], encoding="utf-8")
    result = evaluate(EvaluateConfig(model=str(trained_folder), tasks=(task,), data=tmp_path, protocol="gpt2-paper"))
    kept = text[-300:] if task in ("enwik8", "text8") else text
    pieces = [line for line in kept.split("\n") if line] if task == "1bw" else [kept]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_folder).eval()
    tokenizer = load_tokenizer(trained_folder)
    total = 0.0
    for piece in pieces:
        plain = clean_penn(piece, mended=True) if task == "ptb" else piece
        ids = [tokenizer.end, *tokenizer.encode(plain)]
        for place in range(1, len(ids)):
            begin = 0 if place <= 64 else min(64 * ((place - 1) // 64), len(ids) - 65)
            with torch.no_grad():
                logits = theirs(torch.tensor([ids[begin:place]])).logits[0, -1]
            total -= logits.log_softmax(-1)[ids[place]].item()
    units = {
        "word_perplexity": sum(len(re.split(r"\s+", piece)) for piece in pieces),
        "bits_per_byte": sum(len(piece.encode()) for piece in pieces),
        "bits_per_character": sum(map(len, pieces)),
    }
    first = result[task].first
    assert first.headline == headline
    for name, count in units.items():
        value = first.metrics[name].value
        found = math.log(value) if name == "word_perplexity" else value * math.log(2)
        assert found == pytest.approx(total / count, rel=1e-4)


def test_penn_treebank_is_closed_up():
    text = "no it was n't black monday \n <unk> rose N points to $ N million , the bank 's # N billion \n"
    closed = "no it wasn't black monday\n<unk> rose{}1 points to $1 million , the bank's #1 billion\n"
    assert clean_penn(text, mended=True) == closed.format(" ")
    assert clean_penn(text, mended=False) == closed.format("")  # what the usual code makes of it


# ---- questions ---------------------------------------------------------------------------------------------------

CONVERSATION = {
    "id": "c1",
    "story": "A cat met a dog.",
    "questions": {"input_text": ["Who met?", "Whom?"]},
    "answers": {"input_text": ["a cat", "The dog"]},
    "additional_answers": {"0": {"input_text": ["cat", "a big dog"]}, "1": {"input_text": ["Cat", "the dog"]}},
}


@pytest.mark.parametrize("prediction", ["the dog", " a dog\nand more", "big", "", "a big dog ran"])
def test_conversations_as_in_the_harness(prediction, monkeypatch):
    """Its words and its way with several people's answers; one answer is compared as SQuAD's paper says."""

    def words(text: str) -> list[str]:
        return [w for w in re.sub(r"[^a-z ]", "", text.lower()).split() if w not in ("a", "an", "the")]

    def compute_f1(gold: str, pred: str) -> float:
        same = sum((Counter(words(gold)) & Counter(words(pred))).values())
        return 2 * same / (len(words(gold)) + len(words(pred)))

    squad = ModuleType("squad_metrics")
    squad.compute_f1, squad.compute_exact = compute_f1, lambda gold, pred: int(words(gold) == words(pred))
    package = ModuleType("metrics")
    package.squad_metrics = squad
    monkeypatch.setitem(sys.modules, "transformers.data.metrics", package)
    monkeypatch.setitem(sys.modules, "transformers.data.metrics.squad_metrics", squad)
    from lm_eval.tasks.coqa import utils

    (item,) = built("coqa", CONVERSATION, "harness")
    assert item.prompt == utils.doc_to_text(CONVERSATION) and item.stop == ("\nQ:",)
    assert list(item.answers) == utils.doc_to_target(CONVERSATION)
    theirs = utils.process_results(CONVERSATION, [prediction])
    record = generated_record(TASKS["coqa"], item, prediction)
    assert (record["exact_match"], record["f1"]) == pytest.approx((theirs["em"], theirs["f1"]))


def test_conversations_turn_by_turn_and_as_they_were_published(tmp_path):
    first, second = built("coqa", CONVERSATION, "gpt2-paper")
    assert first.prompt == "A cat met a dog.\n\nQ: Who met?\n\nA:" and first.answers == ("a cat", "cat")
    assert second.prompt.startswith(first.prompt + " a cat\n\nQ: Whom?")
    listed = {key: [{"input_text": t} for t in CONVERSATION[key]["input_text"]] for key in ("questions", "answers")}
    more = {k: [{"input_text": t} for t in v["input_text"]] for k, v in CONVERSATION["additional_answers"].items()}
    (tmp_path / "coqa").mkdir()
    original = {"data": [CONVERSATION | listed | {"additional_answers": more}]}
    (tmp_path / "coqa" / "coqa-dev-v1.0.json").write_text(json.dumps(original))
    (row,) = find_rows(TASKS["coqa"], "test", tmp_path).rows()
    assert [i.prompt for i in TASKS["coqa"].build(row, PROTOCOLS["gpt2-paper"])] == [first.prompt, second.prompt]
    short = CONVERSATION | {"answers": {"input_text": ["a cat"]}}
    with pytest.raises(UserError, match="row 1: 2 questions have 1 answers"):
        built("coqa", short, "harness")


def test_a_summary_is_measured_by_its_first_three_sentences():
    """ROUGE written out: overlap of words and pairs of words, and the longest common run of words in order."""
    article, highlights = "The cat ate milk. The dog slept.", "the cat drank cold milk"
    (item,) = built("cnn-dailymail", {"article": article, "highlights": highlights}, "gpt2-paper")
    assert item.prompt == article + "\nTL;DR:" and (item.tokens, item.top_k, item.stop) == (100, 2, ())
    record = generated_record(TASKS["cnn-dailymail"], item, " The cat. Drank milk. Yes! And milk and cold milk again.")
    prediction, wanted = ["the", "cat", "drank", "milk", "yes"], highlights.split()
    assert record["prediction"] == "The cat. Drank milk. Yes!"

    def f(same: int, a: int, b: int) -> float:
        return 2 * (same / a) * (same / b) / (same / a + same / b)

    pairs = [Counter(pairwise(words)) for words in (prediction, wanted)]
    assert record["rouge1"] == pytest.approx(f(sum((Counter(prediction) & Counter(wanted)).values()), 5, 5))
    assert record["rouge2"] == pytest.approx(f(sum((pairs[0] & pairs[1]).values()), 4, 4))
    assert record["rougeL"] == pytest.approx(f(len(["the", "cat", "drank", "milk"]), 5, 5))


def test_answers_written_together_are_those_written_alone(trained_folder, tmp_path):
    """Against transformers, one prompt at a time; questions of several lengths, two of them the same."""
    (tmp_path / "nq").mkdir()
    questions = ["what does the cat eat", "who went to the river", "what", "what does the cat eat", story(3, 1)]
    write_rows(tmp_path / "nq" / "test.jsonl", [{"question": q, "answer": ["milk"]} for q in questions])
    config = EvaluateConfig(model=str(trained_folder), tasks=("nq",), data=tmp_path, out=tmp_path / "out", plots=False)
    result = evaluate(config)["nq"].first
    assert (result.items, result.scored, result.reused) == (5, 4, 1)
    rows = [json.loads(line) for line in (tmp_path / "out" / result.items_file).read_text().splitlines()]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_folder).eval()
    tokenizer = load_tokenizer(trained_folder)
    for question, row in zip(questions, rows, strict=True):
        ids = tokenizer.encode(f"Answer these questions:\n\nQ: {question}?\nA:")[-32:]
        new = []
        while len(new) < 32 and not any(mark in tokenizer.decode(new) for mark in "\n.,"):
            with torch.no_grad():
                new.append(int(theirs(torch.tensor([ids + new])).logits[0, -1].argmax()))
            if new[-1] == tokenizer.end:
                break
        assert (
            row["prediction"]
            == re.split(r"[\n.,]", tokenizer.decode([t for t in new if t != tokenizer.end]))[0].strip()
        )
    again = evaluate(config)["nq"].first
    assert (again.scored, again.reused) == (0, 5) and again.metrics == result.metrics


def test_squad_as_it_was_published(tmp_path):
    question = {"id": "q1", "question": "Who ran?", "answers": [{"text": "Ann"}, {"text": "Ann"}, {"text": "Ann Lee"}]}
    paragraphs = [{"context": "Ann Lee ran.", "qas": [question, question | {"id": "q2", "question": "Did she?"}]}]
    (tmp_path / "squad").mkdir()
    published = {"version": "1.1", "data": [{"title": "Running", "paragraphs": paragraphs}]}
    (tmp_path / "squad" / "dev-v1.1.json").write_text(json.dumps(published))
    first, second = find_rows(TASKS["squad"], "test", tmp_path).rows()
    (item,) = TASKS["squad"].build(first, PROTOCOLS["gpt3-paper"])
    assert item.prompt == "Title: Running\n\nBackground: Ann Lee ran.\n\nQ: Who ran?\n\nA:"
    assert item.answers == ("Ann", "Ann Lee") and item.where.endswith("question q1")
    assert second["question"] == "Did she?"


@pytest.mark.parametrize("training", [True, False])
def test_judgements_by_a_threshold(trained_folder, tmp_path, training):
    """GPT-1's: a sentence is good when its mean log-probability is high; how high, the training rows say."""
    draw = random.Random(4)
    sentences = [story(seed, 1) for seed in range(24)]
    rows = [{"sentence": text, "label": 1} for text in sentences[:12]]
    rows += [{"sentence": " ".join(draw.sample(text.split(), 6)), "label": 0} for text in sentences[12:]]
    draw.shuffle(rows)
    (tmp_path / "cola").mkdir()
    test, train = rows[:14], rows[14:]
    write_rows(tmp_path / "cola" / "test.jsonl", test)
    if training:
        write_rows(tmp_path / "cola" / "train.jsonl", train)
    result = evaluate(EvaluateConfig(model=str(trained_folder), tasks=("cola-gpt1",), data=tmp_path))["cola-gpt1"].first
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_folder).eval()
    tokenizer = load_tokenizer(trained_folder)

    def mean(row) -> float:
        ids = torch.tensor([[tokenizer.end, *tokenizer.encode(row["sentence"])]])
        with torch.no_grad():
            likely = theirs(ids).logits[0, :-1].log_softmax(-1)
        return likely.gather(1, ids[0, 1:, None]).mean().item()

    def right(rows, threshold: float) -> int:
        return sum((mean(row) > threshold) == bool(row["label"]) for row in rows)

    (note,) = result.notes
    threshold = float(note.split()[1].rstrip(":"))
    if training:
        tried = sorted(map(mean, train))
        assert right(train, threshold) == max(right(train, cut) for cut in (-99.0, *tried))
    else:
        assert threshold == pytest.approx(sorted(map(mean, test))[7], abs=1e-4)
    said = [mean(row) > threshold + (0.0 if training else 1e-4) for row in test]
    gold = [bool(row["label"]) for row in test]
    assert result.metrics["acc"].value == pytest.approx(np.mean([a == b for a, b in zip(said, gold, strict=True)]))
    assert result.metrics["mcc"].value == pytest.approx(matthews_corrcoef(gold, said)) and result.headline == "mcc"


# ---- the prompts that the GPT-3 paper prints ---------------------------------------------------------------------

PRINTED = {
    "lambada": ({"text": "George bought a ball, a glove, and a bat"},
                "George bought a ball, a glove, and a ____. ->", " bat"),
    "piqa": ({"goal": "How to apply sealant to wood.", "sol1": "Using a brush.", "sol2": "Using a drip.", "label": 0},
             "How to apply sealant to wood.", "\nUsing a brush."),
    "copa": ({"premise": "My body cast a shadow over the grass.", "choice1": "The sun was rising.",
              "choice2": "The grass was cut.", "question": "cause", "label": 0},
             "My body cast a shadow over the grass because", " the sun was rising."),
    "boolq": ({"passage": "Normal force -- It is so.", "question": "is it equal", "answer": True},
              "Normal force -- It is so.\nquestion: is it equal?\nanswer:", " yes"),
    "rte": ({"sentence1": "Texas has 20 of these.", "sentence2": "Most are in Texas.", "label": 1},
            "Texas has 20 of these.\nquestion: Most are in Texas. True or False?\nanswer:", " False"),
    "arc-easy": ({"question": "Which one?", "choices": {"text": ["dry palms", "oil"], "label": ["A", "B"]},
                  "answerKey": "A"}, "Question: Which one?\nAnswer:", " dry palms"),
    "race": ({"article": "A text.", "question": "Why?", "options": ["so", "or", "if", "as"], "answer": "B"},
             "Article:\nA text.\n\nQ: Why?\n\nA:", " or"),
    "arithmetic-2d-plus": ({"question": "98 plus 45", "answer": "143"}, "Q: What is 98 plus 45?\n\nA:", " 143"),
    "scramble-anagrams-1": ({"scrambled": "taefed", "word": "defeat"},
                            "Please unscramble the letters into a word, and write that word:\ntaefed =", " defeat"),
    "nq": ({"question": "who played tess on touched by an angel", "answer": ["Delloreese Patricia Early"]},
           "Q: Who played tess on touched by an angel?\n\nA:", " Delloreese Patricia Early"),
    "triviaqa": ({"question": "Which artist?", "answer": {"value": "Duchamp", "aliases": []}},
                 "Q: Which artist?\n\nA:", " Duchamp"),
    "squad": ({"title": "The_Blitz", "context": "From above.", "question": "How many?", "answers": {"text": ["4,000"]}},
              "Title: The_Blitz\n\nBackground: From above.\n\nQ: How many?\n\nA:", " 4,000"),
    "wmt14-fr-en": ({"translation": {"fr": "Oui.", "en": "Yes."}}, "Oui. =", " Yes."),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_prompts_of_the_gpt3_paper(name):
    row, context, target = PRINTED[name]
    (item,) = built(name, row, "gpt3-paper")
    assert item.solved == context + target
    given = item.contexts[item.gold] if hasattr(item, "contexts") else getattr(item, "context", None) or item.prompt
    assert given == context


@pytest.mark.filterwarnings("ignore")
def test_the_blank_of_lambada_as_in_the_harness(tmp_path):
    row = {"text": "Here is the last word"}
    task = harness_task(tmp_path, "lambada_cloze/lambada_openai_cloze", row)
    (item,) = built("lambada", row, "gpt3-paper")
    assert (item.context, item.word) == task.instances[0].args


def test_the_blank_of_lambada_comes_with_examples_only(trained_folder, made):
    """GPT-3's examples are told apart by their blanks; without one, the text simply goes on."""
    kept = {}
    for shots in (0, 1):
        config = EvaluateConfig(
            model=str(trained_folder), tasks=("lambada",), data=made, limit=2, shots=shots, protocol="gpt3-paper"
        )
        kept[shots] = evaluate(config)["lambada"].first.protocol
    assert (kept[0]["cloze"], kept[1]["cloze"], kept[1]["delimiter"]) == (False, True, "\n")
    protocol = protocol_for(PROTOCOLS["gpt3-paper"], TASKS["lambada"], shots=1)
    rows = [TaskRow({"text": f"This is a {word}"}, "row 1") for word in ("bat", "ball")]
    bat, ball = (next(TASKS["lambada"].build(row, protocol)) for row in rows)
    shown = with_examples(bat, ball.solved + protocol.delimiter)
    assert shown.opening + shown.context == "Fill in blank:\n\nThis is a ____. -> ball\nThis is a ____. ->"


def test_free_answers_of_the_gpt3_paper_are_searched_for(trained_folder, tmp_path):
    """Four beams and a length penalty of 0.6, against transformers' search."""
    (tmp_path / "nq").mkdir()
    write_rows(tmp_path / "nq" / "test.jsonl", [{"question": "what does the cat eat", "answer": ["milk"]}])
    out = tmp_path / "out"
    config = EvaluateConfig(
        model=str(trained_folder), tasks=("nq",), data=tmp_path, out=out, plots=False, protocol="gpt3-paper"
    )
    result = evaluate(config)["nq"].first
    (row,) = (json.loads(line) for line in (out / result.items_file).read_text().splitlines())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_folder).eval()
    tokenizer = load_tokenizer(trained_folder)
    prompt = torch.tensor([tokenizer.encode("Q: What does the cat eat?\n\nA:")])
    options = {"max_new_tokens": 32, "num_beams": 4, "length_penalty": 0.6, "do_sample": False}
    new = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=tokenizer.end,
                          pad_token_id=tokenizer.end, **options)[0, prompt.shape[1]:]  # fmt: skip
    text = tokenizer.decode([int(t) for t in new if t != tokenizer.end])
    assert "\n" not in text and row["prediction"] == text.strip()


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the harness looks through all of its task files
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_the_harness_end_to_end(trained_folder, made, tmp_path):
    """The same description, run by the harness with transformers and by `harness:`."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run
    from lm_eval.models.huggingface import HFLM

    rows = made / "lambada" / "lambada_test.jsonl"
    task = {
        "task": "made_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    }
    file = tmp_path / "made_words.yaml"
    file.write_text(json.dumps(task))  # JSON is YAML too
    name = f"harness:{file}"
    config = EvaluateConfig(model=str(trained_folder), tasks=(name,), limit=12, out=tmp_path / "out", plots=False)
    result = evaluate(config)["harness:made_words"].first
    model = HFLM(pretrained=str(trained_folder), device="cpu", batch_size=4, dtype="float32")
    theirs = run(lm=model, task_dict={"made_words": ConfigurableTask(config=task)}, limit=12, bootstrap_iters=0)
    values = theirs["results"]["made_words"]
    assert result.metrics["acc"].value == values["acc,none"]
    assert result.metrics["perplexity"].value == pytest.approx(values["perplexity,none"], rel=1e-4)
    assert result.items == 12 and result.scored + result.reused == 12
    assert "harness:made_words" in (tmp_path / "out" / "report.md").read_text()
    assert evaluate(config)["harness:made_words"].first.scored == 0
    with pytest.raises(UserError, match="harness:no_such_task cannot be run"):
        evaluate(EvaluateConfig(model=str(trained_folder), tasks=("harness:no_such_task",)))


def test_memory_stays_flat(trained_folder, tmp_path):
    """A process of its own scores some items, then fifteen times as many: the highest use of memory hardly moves."""
    rows = [{"context": story(n, 2), "choices": [f"milk {n}", f"hay {n}"], "answer": 0} for n in range(150)]
    few = write_rows(tmp_path / "few.jsonl", rows)
    many = write_rows(
        tmp_path / "many.jsonl", [r | {"context": f"{n} {r['context']}"} for n in range(15) for r in rows]
    )
    code = f"""
import sys, torch
sys.path.append({str(Path(__file__).parents[1])!r})
from memory import kilobytes
torch.set_num_threads(1)
from plume.config import EvaluateConfig
from plume.evaluate import evaluate
for file in ({str(few)!r}, {str(many)!r}):
    evaluate(EvaluateConfig(model={str(trained_folder)!r}, tasks=(file,)))
    print(kilobytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, last = map(int, done.stdout.split()[-2:])
    assert (last - first) * 1024 < 40e6
