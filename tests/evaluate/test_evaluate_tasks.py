"""Tasks as data: built-in ones, the user's own, few-shot, what is refused and where."""

import gzip
import json
import re

import pytest
from stories import story, write_rows

from plume.config import EvaluateConfig, UserError
from plume.evaluate import eval_tasks, evaluate
from plume.evaluate.eval_tasks import TASKS, book_file, find_rows, find_task
from plume.evaluate.items import PROTOCOLS, TaskRow
from plume.inference.scoring import pair
from plume.text import load_tokenizer

GOOD = {"context": "The cat went to the house and it ate", "choices": ["milk", "hay", "bones"], "answer": 0}


def run(folder, *tasks, **more):
    return evaluate(EvaluateConfig(model=str(folder), tasks=tasks, **more))


def test_choices_of_the_users_own(trained_folder, tmp_path):
    rows = [GOOD, GOOD | {"answer": "milk"}, GOOD | {"answer": "A"}, GOOD | {"answer": 1}]
    file = write_rows(tmp_path / "mine.jsonl", rows)
    result = run(trained_folder, str(file))["mine"].first
    assert result.items == 4 and result.metrics["acc"].value in (0.75, 0.25, 0.0)
    renamed = [{"q": r["context"], "opts": r["choices"], "key": r["answer"]} for r in rows]
    other = write_rows(tmp_path / "other.jsonl", renamed)
    again = run(trained_folder, str(other), context_field="q", choices_field="opts", answer_field="key")["other"].first
    assert again.metrics["acc"] == result.metrics["acc"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"context": "x", "choices": ["a", "b"]},
            r"line 2: the field 'answer' is missing; there are 'context', 'choices'",
        ),
        (GOOD | {"answer": 3}, r"line 2: answer=3 is out of range; the 3 candidates have the numbers 0 to 2"),
        (GOOD | {"answer": "Z"}, r"line 2: the field 'answer' should be a whole number, not 'Z'"),
        (GOOD | {"answer": 1.5}, r"line 2: the field 'answer' should be a whole number, not 1.5"),
        (GOOD | {"answer": float("inf")}, r"line 2: the field 'answer' should be a whole number, not inf"),
        (GOOD | {"answer": "H"}, r"line 2: answer=7 is out of range"),
        (GOOD | {"choices": "milk"}, r"line 2: the field 'choices' should be a list of texts"),
        (GOOD | {"choices": ["milk"]}, r"line 2: the field 'choices' has 1 entries; at least 2"),
        (GOOD | {"choices": ["milk", "", "hay"]}, r"line 2: candidate 1 is empty"),
        (GOOD | {"context": 5}, r"line 2: the field 'context' should be a text, not 5"),
    ],
)
def test_a_bad_row_is_named_with_its_line(trained_folder, tmp_path, row, says):
    file = write_rows(tmp_path / "mine.jsonl", [GOOD, row])
    with pytest.raises(UserError, match=says):
        run(trained_folder, str(file))


def test_a_line_that_is_not_json_is_named(trained_folder, tmp_path):
    file = write_rows(tmp_path / "mine.jsonl", [GOOD])
    file.write_text(file.read_text() + "{oops\n")
    with pytest.raises(UserError, match=r"mine.jsonl line 2: not JSON"):
        run(trained_folder, str(file))


def test_items_beyond_the_context(trained_folder, tmp_path):
    long = GOOD | {"context": story(1, 9)}
    file = write_rows(tmp_path / "mine.jsonl", [GOOD, long])
    cut = run(trained_folder, str(file))["mine"].first
    assert (cut.items, cut.cut, cut.skipped) == (2, 1, 0)
    skipped = run(trained_folder, str(file), too_long="skip")["mine"].first
    assert (skipped.items, skipped.cut, skipped.skipped) == (1, 0, 1)
    with pytest.raises(UserError, match=r"mine.jsonl line 2: \d+ tokens do not fit into the 65"):
        run(trained_folder, str(file), too_long="refuse")
    endless = GOOD | {"choices": ["milk", story(1, 9), "hay"]}
    file = write_rows(tmp_path / "endless.jsonl", [GOOD, endless])
    assert run(trained_folder, str(file))["endless"].first.skipped == 1


def test_texts_with_nothing_to_score(trained_folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="none of the 1 items of empty has a token that could be scored"):
        run(trained_folder, str(tmp_path / "empty.txt"))


def test_an_answer_that_is_none_of_the_options(trained_folder, tmp_path):
    row = {"article": "A text.", "question": "Why?", "options": ["so", "or"], "answer": "C"}
    file = write_rows(tmp_path / "race.jsonl", [row])
    with pytest.raises(UserError, match=r"line 1: answer='C' is not one of 'A', 'B'"):
        run(trained_folder, f"race={file}")


def test_questions_beyond_the_context(trained_folder, tmp_path):
    """The same rule where the model writes, also for answers that an earlier run has kept."""
    rows = [{"question": "who is it", "answer": ["Ann"]}, {"question": story(1, 9), "answer": ["Bob"]}]
    name = f"nq={write_rows(tmp_path / 'nq.jsonl', rows)}"
    base = {"out": tmp_path / "out", "plots": False}
    cut = run(trained_folder, name, **base)["nq"].first
    assert (cut.items, cut.cut, cut.skipped) == (2, 1, 0)
    skipped = run(trained_folder, name, too_long="skip", **base)["nq"].first
    assert (skipped.items, skipped.cut, skipped.skipped) == (1, 0, 1)
    with pytest.raises(UserError, match=r"nq.jsonl line 2: this does not fit the context; too_long=truncate or skip"):
        run(trained_folder, name, too_long="refuse", **base)


def test_a_masked_model_is_refused_where_text_is_written(masked_folder, trained_folder, shared, made):
    with pytest.raises(UserError, match=r"squad generates text, and .* is a masked model"):
        run(masked_folder, "squad", data=shared / "data")
    with pytest.raises(UserError, match=r"lambada-fill needs a masked model, and .* is none"):
        run(trained_folder, "lambada-fill", data=made)


def test_a_name_before_rows_of_ones_own_is_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match=f"'mine' is no task here, .* rows of your own: {re.escape(str(rows))}"):
        find_task(f"mine={rows}")


def test_unknown_tasks_are_named_together(trained_folder):
    with pytest.raises(
        UserError, match=r"(?s)no file 'lamda'; did you mean 'lambada'.*no file 'wikitxt-2'; did you mean"
    ):
        run(trained_folder, "lamda", "wikitxt-2")


def test_two_tasks_of_one_name_are_refused(trained_folder, tmp_path):
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(write_rows(tmp_path / name / "test.jsonl", [{"text": "a story"}]))
    with pytest.raises(UserError, match="two tasks would be called 'test'"):
        evaluate(EvaluateConfig(model=str(trained_folder), tasks=tuple(map(str, files))))


def test_labels_are_looked_for_where_they_are(tmp_path):
    """GLUE's and SuperGLUE's test rows have none, so the validation rows are scored, and a label of -1 is refused."""
    (tmp_path / "boolq").mkdir()
    for name in ("test", "validation"):
        write_rows(tmp_path / "boolq" / f"{name}.jsonl", [{"passage": "So.", "question": "is it", "label": -1}])
    source = find_rows(TASKS["boolq"], "test", tmp_path)
    assert source.name.endswith("validation.jsonl")
    with pytest.raises(UserError, match=r"line 1: label is -1, which is neither yes nor no"):
        list(TASKS["boolq"].build(next(iter(source.rows())), PROTOCOLS["harness"]))


def test_rows_of_another_make_are_named(trained_folder, tmp_path):
    rows = write_rows(tmp_path / "race.jsonl", [{"article": "A.", "problems": "[not python"}])
    with pytest.raises(UserError, match=r"race.jsonl line 1: row does not match the format of task race \(SyntaxError"):
        evaluate(EvaluateConfig(model=str(trained_folder), tasks=(f"race={rows}",)))
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.txt.*UnicodeDecodeError"):
        evaluate(EvaluateConfig(model=str(trained_folder), tasks=(str(tmp_path / "latin.txt"),)))


def test_missing_data_says_what_to_do(trained_folder, tmp_path):
    with pytest.raises(
        UserError, match=r"has no piqa/test.jsonl; name it with --data FOLDER or --tasks piqa=FILE; baber/piqa cannot"
    ):
        run(trained_folder, "piqa", data=tmp_path)


@pytest.mark.parametrize("options", [{"data": "nowhere"}, {"training_data": ("nowhere.txt",)}])
def test_folders_and_texts_that_are_not_there_are_named_first(trained_folder, made, options, tmp_path, monkeypatch):
    """Not after hours of scoring; and rows of a folder are not taken from the hub instead."""
    monkeypatch.setattr("plume.evaluate.evaluation.task_reports", lambda *_: pytest.fail("nothing should be computed"))
    given = {"data": made} | {name: tmp_path / v if name == "data" else v for name, v in options.items()}
    with pytest.raises(UserError, match=r"there is no .*nowhere"):
        run(trained_folder, "lambada", **given)


def test_a_built_in_task_with_its_rows_elsewhere(trained_folder, made, tmp_path):
    moved = tmp_path / "rows.jsonl"
    moved.write_bytes((made / "lambada" / "lambada_test.jsonl").read_bytes())
    here = run(trained_folder, "lambada", data=made)["lambada"].first
    there = run(trained_folder, f"lambada={moved}")["lambada"].first
    assert here.metrics == there.metrics and here.data_hash == there.data_hash


def test_the_border_is_cut_as_the_protocol_says(trained_folder):
    tokenizer = load_tokenizer(trained_folder)
    context, continuation = "The cat went", "ing home"
    before, after = pair(context, continuation, tokenizer, "separate")
    assert before == tokenizer.encode(context) and after == tokenizer.encode(continuation)
    before, after = pair(context + " ", "home", tokenizer, "joint")
    assert before + after == tokenizer.encode("The cat went home") and before == tokenizer.encode("The cat went")


# ---- last words --------------------------------------------------------------------------------------------------


def test_last_word_last_token_and_filter(trained_folder, made):
    word = run(trained_folder, "lambada", data=made)["lambada"].first
    token = run(trained_folder, "lambada-token", data=made)["lambada-token"].first
    assert token.tokens == token.items <= word.tokens
    assert token.metrics["acc"].value >= word.metrics["acc"].value
    filtered = run(trained_folder, "lambada", data=made, protocol="gpt2-paper")["lambada"].first
    assert filtered.protocol["stop_word_filter"] and filtered.metrics["acc"].value >= word.metrics["acc"].value
    plain = run(trained_folder, "lambada", data=made, protocol="gpt2-paper", stop_word_filter=False)["lambada"].first
    assert not plain.protocol["stop_word_filter"]


def test_a_masked_model_fills_the_last_word(masked_folder, made):
    result = run(masked_folder, "lambada-fill", data=made, limit=5)["lambada-fill"].first
    assert result.items == 5 and 0 <= result.score.value <= 1


# ---- few-shot ----------------------------------------------------------------------------------------------------


def test_examples_are_whole_and_fit(trained_folder, made, monkeypatch):
    """The papers' protocols leave examples out from the front until the rest fits; the harness cuts tokens."""
    from plume.evaluate import requests

    asked = []
    ask = requests.RequestBuilder.ask
    monkeypatch.setattr(requests.RequestBuilder, "ask", lambda self, item: asked.append(item) or ask(self, item))
    report = run(trained_folder, "hellaswag", data=made, protocol="gpt3-paper", shots=8, limit=4)
    assert report["hellaswag"].first.cut == 0
    starts = {item.contexts[0].split(":")[0] for item in asked}
    assert starts == {"Eating"}


def test_seeds_give_a_spread(trained_folder, made):
    task = run(trained_folder, "hellaswag", data=made, shots=2, seed=1, seeds=3)["hellaswag"]
    values = [r.metrics["acc"].value for r in task.results]
    assert [r.seed for r in task.results] == [1, 2, 3]
    assert task.score("acc").value == pytest.approx(sum(values) / 3)
    same = run(trained_folder, "hellaswag", data=made, shots=2, seed=2)["hellaswag"]
    assert same.first.metrics["acc"].value == values[1]


def test_an_item_is_never_its_own_example(trained_folder, made, monkeypatch):
    from plume.evaluate import task_run as running

    seen = []
    fitted = running.TaskRun.fitted
    monkeypatch.setattr(running.TaskRun, "fitted", lambda self, i, e: seen.append((i.solved, e)) or fitted(self, i, e))
    result = run(trained_folder, "lambada", data=made, shots=5)["lambada"].first
    assert "no training split" in result.notes[0]
    assert len(seen) == 41 and all(solved not in examples and len(examples) == 5 for solved, examples in seen)


def test_normalisation_by_unconditional_probability(trained_folder, tmp_path):
    (tmp_path / "arc-easy").mkdir()
    row = {
        "question": "What does a cat eat?",
        "choices": {"text": ["milk", "hay"], "label": ["A", "B"]},
        "answerKey": "A",
    }
    write_rows(tmp_path / "arc-easy" / "test.jsonl", [row] * 3)
    result = run(trained_folder, "arc-easy", data=tmp_path, protocol="gpt3-paper")["arc-easy"].first
    assert (
        result.headline == "acc_unconditional" and result.scored == 4
    )  # two candidates, with and without the question


# ---- made and collected rows -------------------------------------------------------------------------------------


def test_arithmetic_is_right():
    for name in ("2d-plus", "5d-minus", "2d-times", "1d-composite"):
        rows = list(eval_tasks.sums(name))
        assert len(rows) == 2000 and rows == list(eval_tasks.sums(name))
        for row in rows[:50]:
            sum_ = row["question"].replace("plus", "+").replace("minus", "-").replace("times", "*")
            assert eval(sum_) == int(row["answer"])


def test_scrambled_words_keep_their_letters():
    for kind in ("cycle", "anagrams-1", "anagrams-2", "reversed", "insertion"):
        for row in list(eval_tasks.scrambles(kind))[:50]:
            letters = re.sub("[^a-z]", "", row["scrambled"])
            assert sorted(letters) == sorted(row["word"])
            if kind == "anagrams-2":
                assert letters[:2] == row["word"][:2] and letters[-2:] == row["word"][-2:]


def test_made_tasks_run(trained_folder):
    result = run(trained_folder, "arithmetic-2d-plus", limit=5, protocol="gpt3-paper")["arithmetic-2d-plus"].first
    assert result.items == 5 and result.data == "synthetic"


def test_the_childrens_book_test(tmp_path):
    lines = [f"{n} Sentence {n} ." for n in range(1, 21)]
    question = "21 `` I saw the XXXXX , '' he prediction .\tdog\t\tcat|dog|cow"
    file = tmp_path / "cbtest_CN_test.txt"
    file.write_text("\n".join([*lines, question]) + "\n\n")
    (row,) = book_file(file)
    (item,) = TASKS["cbt-cn"].build(row, PROTOCOLS["gpt2-paper"])
    assert item.gold == 1 and item.contexts[0].endswith('Sentence 20. "I saw the')
    assert item.continuations[1] == ' dog," he prediction.'


def test_winograd_fully_and_partly():
    row = TaskRow({"text": "Ann paid Eve because she was rich.", "pronoun": "she", "pronoun_loc": 21,
               "options": ["Ann", "Eve"], "label": 0}, "row 1")  # fmt: skip
    (part,) = TASKS["winograd"].build(row, PROTOCOLS["gpt2-paper"])
    (full,) = TASKS["winograd-full"].build(row, PROTOCOLS["gpt2-paper"])
    assert part.contexts[0] == "Ann paid Eve because Ann" and part.continuations[0] == " was rich."
    assert full.contexts == ("", "") and full.continuations[1] == "Ann paid Eve because Eve was rich."


@pytest.mark.parametrize("task", ["cola-gpt1", "rte-gpt1", "sst2-gpt1", "cola", "rte"])
def test_glue_without_training(trained_folder, shared, task):
    result = run(trained_folder, task, data=shared / "data", limit=12)[task].first
    assert result.items == 12
    if task in ("cola-gpt1", "rte-gpt1"):
        assert "training items" in result.notes[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["squad", "multi30k-en-de"])
def test_written_answers(trained_folder, shared, task):
    result = run(trained_folder, task, data=shared / "data", limit=2)[task].first
    assert result.items == 2 and result.tokens > 0


def test_every_task_says_what_it_needs():
    for name, task in TASKS.items():
        assert find_task(name) is task
        assert task.make is not None or task.hub is not None or task.files, name


def test_own_blanks_and_targets(masked_folder, trained_folder, tmp_path):
    blanks = write_rows(tmp_path / "blank.jsonl", [{"text": "The cat ate [MASK].", "answer": "milk"}])
    assert run(masked_folder, str(blanks))["blank"].first.headline == "exact_match"
    ends = write_rows(tmp_path / "ends.jsonl", [{"context": "The cat ate", "target": "milk."}])
    assert run(trained_folder, str(ends))["ends"].first.metrics["acc"].value in (0.0, 1.0)
    nothing = write_rows(tmp_path / "nothing.jsonl", [{"context": "The cat ate", "target": " "}])
    with pytest.raises(UserError, match="line 1: the field 'target' is empty"):
        run(trained_folder, str(nothing))
    odd = write_rows(tmp_path / "odd.jsonl", [{"a": 1}])
    with pytest.raises(UserError, match="line 1: a row should have context, choices and answer"):
        run(trained_folder, str(odd))
    assert json.loads(ends.read_text())["target"] == "milk."


def test_packed_texts_and_byte_order_marks(trained_folder, tmp_path):
    """A text is the same text whether it is packed or begins with a byte order mark."""
    text = story(3, 12)
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "marked.txt").write_text(text, encoding="utf-8-sig")
    report = run(trained_folder, *(str(tmp_path / name) for name in ("plain.txt", "packed.txt.gz", "marked.txt")))
    first, *others = (task.first.metrics for task in report.tasks)
    assert all(other == first for other in others)


def test_a_named_field_is_taken_where_another_has_our_name(tmp_path):
    rows = [{"story": "It ate", "choices": ["milk", "hay"], "answer": 0, "context": "of no use"}]
    task = find_task(str(write_rows(tmp_path / "mine.jsonl", rows)), {"context": "story"})
    (row,) = task.read(task.path)
    assert row == {"context": "It ate", "story": "It ate", "choices": ["milk", "hay"], "answer": 0}
