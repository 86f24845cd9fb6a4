"""Plume's numbers against lm-evaluation-harness driving the transformers copy of the same folder."""

import inspect
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from stories import harness_task

from plume.config import EvaluateConfig, UserError
from plume.evaluate import evaluate
from plume.evaluate.eval_tasks import TASKS
from plume.evaluate.formats import clean_wikitext, split_pages
from plume.evaluate.items import PROTOCOLS, LastWord, Question, TaskRow
from plume.evaluate.requests import generated_record, protocol_for, with_examples

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports


def harness(model, task: dict, shots: int = 0, limit=None):
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run  # what simple_evaluate calls, without reading all task files first

    made = ConfigurableTask(config=task | {"num_fewshot": shots})
    made.set_fewshot_seed(1234)
    found = run(lm=model, task_dict={task["task"]: made}, limit=limit, bootstrap_iters=0, log_samples=True)
    name = task["task"]
    samples = sorted(found["samples"][name], key=lambda s: s["doc_id"])
    return {key.split(",")[0]: v for key, v in found["results"][name].items() if "," in key}, samples


def hf(folder):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32")


def json_task(name: str, file: Path, **more) -> dict:
    """A task of the harness that reads a local file."""
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        **more,
    }


def lambada_task(file: Path) -> dict:
    return json_task(
        "made_lambada",
        file,
        output_type="loglikelihood",
        doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
        doc_to_target="{{' '+text.split(' ')[-1]}}",
        metric_list=[
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    )


def hellaswag_task(file: Path, train: Path | None = None) -> dict:
    from lm_eval.tasks.hellaswag.utils import process_docs

    files = {"test": str(file)} | ({} if train is None else {"train": str(train)})
    more = {} if train is None else {"training_split": "train", "fewshot_split": "train"}
    return json_task("made_hellaswag", file, **more) | {
        "dataset_kwargs": {"data_files": files},
        "output_type": "multiple_choice",
        "process_docs": process_docs,
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    }


def wikitext_task(file: Path) -> dict:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    return json_task(
        "made_wikitext",
        file,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target=wikitext_detokenizer,
        process_results=process_results,
        metric_list=[{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    )


def ours(folder, task: str, data: Path, out: Path, **more):
    config = EvaluateConfig(model=str(folder), tasks=(task,), data=data, out=out, plots=False, **more)
    report = evaluate(config)[task]
    rows = [json.loads(line) for line in (out / report.first.items_file).read_text().splitlines()]
    return report.first, rows


@pytest.fixture(params=["random_folder", "trained_folder"])
def folder(request) -> Path:
    return request.getfixturevalue(request.param)


def test_last_words_as_the_harness(folder, made, tmp_path):
    check_lambada(folder, made, tmp_path)


def check_lambada(folder, data, tmp_path, limit=None):
    theirs, samples = harness(hf(folder), lambada_task(data / "lambada" / "lambada_test.jsonl"), limit=limit)
    result, rows = ours(folder, "lambada", data, tmp_path / "out", limit=limit)
    for row, sample in zip(rows, samples, strict=True):
        likelihood, greedy = sample["filtered_resps"][0]
        assert row["loglikelihood"] == pytest.approx(likelihood, abs=1e-4)
        assert row["acc"] == greedy
    assert result.metrics["acc"].value == theirs["acc"]
    assert result.metrics["perplexity"].value == pytest.approx(theirs["perplexity"], rel=1e-4)
    return result


def test_long_items_are_cut_on_the_left_and_counted(random_folder, made, tmp_path):
    result = check_lambada(random_folder, made, tmp_path)
    assert result.cut == 1 and result.items == 41


@pytest.mark.parametrize("shots", [0, 3])
def test_choices_as_the_harness(folder, made, tmp_path, shots):
    task = hellaswag_task(made / "hellaswag" / "validation.jsonl", made / "hellaswag" / "train.jsonl")
    theirs, samples = harness(hf(folder), task, shots=shots)
    result, rows = ours(folder, "hellaswag", made, tmp_path / "out", shots=shots)
    for row, sample in zip(rows, samples, strict=True):
        likelihoods = [float(resp[0]) for resp in sample["filtered_resps"]]
        assert row["loglikelihood"] == pytest.approx(likelihoods[row["gold"]], abs=1e-4)
        assert row["prediction"] == max(range(4), key=likelihoods.__getitem__)
    for metric in ("acc", "acc_norm"):
        assert result.metrics[metric].value == theirs[metric]
    assert result.metrics["acc"].stderr == pytest.approx(theirs_stderr(rows, "acc"))
    assert result.cut == (30 if shots else 0)


def theirs_stderr(rows, name: str) -> float:
    from lm_eval.api.metrics import mean_stderr

    return mean_stderr([row[name] for row in rows])


def test_rolling_perplexity_as_the_harness(folder, made, tmp_path):
    check_wikitext(folder, made, tmp_path)


def check_wikitext(folder, data, tmp_path, pages=None):
    cut = split_pages((data / "wikitext-2" / "wiki.test.raw").read_text(encoding="utf-8"))[:pages]
    file = tmp_path / "pages.jsonl"
    file.write_text("".join(json.dumps({"page": page}) + "\n" for page in cut))
    theirs, samples = harness(hf(folder), wikitext_task(file))
    result, rows = ours(folder, "wikitext-2", data, tmp_path / "out", limit=pages)
    for row, sample in zip(rows, samples, strict=True):
        likelihood = float(sample["filtered_resps"][0])
        assert row["loglikelihood"] == pytest.approx(likelihood, abs=1e-4, rel=2e-6)
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert result.metrics[metric].value == pytest.approx(theirs[metric], rel=1e-5)


def test_real_lambada_as_the_harness(trained_folder, shared, tmp_path):
    check_lambada(trained_folder, shared / "data", tmp_path, limit=40)


def test_real_wikitext_as_the_harness(trained_folder, shared, tmp_path):
    check_wikitext(trained_folder, shared / "data", tmp_path, pages=2)


def test_real_sentiment_as_the_harness(trained_folder, shared, tmp_path):
    rows = [line.split("\t") for line in (shared / "data/sst2/dev.tsv").read_text().splitlines()[1:41]]
    file = tmp_path / "sst2.jsonl"
    file.write_text("".join(json.dumps({"sentence": s, "label": int(label)}) + "\n" for s, label in rows))
    task = json_task(
        "made_sst2",
        file,
        output_type="multiple_choice",
        doc_to_text="{{sentence}}\nQuestion: Is this sentence positive or negative?\nAnswer:",
        doc_to_target="label",
        doc_to_choice=["negative", "positive"],
        metric_list=[{"metric": "acc"}],
    )
    theirs, _ = harness(hf(trained_folder), task)
    result, _ = ours(trained_folder, "sst2", shared / "data", tmp_path / "out", limit=40)
    assert result.metrics["acc"].value == theirs["acc"]


# ---- the same texts, whatever the model --------------------------------------------------------------------------

ARC = {"question": "Why?", "choices": {"text": ["a", "b c", "d"], "label": ["A", "B", "C"]}, "answerKey": "B"}
PROBLEMS = [
    {"question": "He is  _  .", "options": ["a", "b", "c", "d"], "answer": "C"},
    {"question": "Who?", "options": ["e", "f", "g", "h"], "answer": "A"},
]
EXAMPLES = {  # the harness's file and a row
    "hellaswag": ("hellaswag/hellaswag", {"activity_label": "Run", "ctx_a": "A man [x] runs.", "ctx_b": "he",
                                          "endings": ["stops [title] now", "sits", "goes  on", "ends"], "label": "2"}),
    "piqa": ("piqa/piqa", {"goal": "Open it", "sol1": "Push.", "sol2": "Pull.", "label": 1}),
    "arc-easy": ("arc/arc_easy", ARC),
    "arc-challenge": ("arc/arc_challenge", ARC),
    "openbookqa": ("openbookqa/openbookqa", {"question_stem": "Why?", "choices": ARC["choices"], "answerKey": "C"}),
    "boolq": ("super_glue/boolq/default", {"passage": "It is so.", "question": "is it", "label": 1}),
    "copa": ("super_glue/copa/default", {"premise": "It rained.", "choice1": "I got wet.",
                                         "choice2": "The sun was out.", "question": "effect", "label": 0}),
    "winogrande": ("winogrande/default", {"sentence": "Ann told Eve that _ was late .", "option1": "Ann",
                                          "option2": "Eve", "answer": "2"}),
    "winograd": ("wsc273/default", {"text": "The men scared the boys because they were loud.", "pronoun": "they",
                                    "pronoun_loc": 31, "options": ["The men", "The boys"], "label": 0}),
    "race": ("race/race", {"article": "A text.", "problems": repr(PROBLEMS)}),
    "storycloze": ("storycloze/storycloze_2016", {f"input_sentence_{n}": f"Part {n}." for n in (1, 2, 3, 4)}
                   | {"sentence_quiz1": "Good.", "sentence_quiz2": "Bad.", "answer_right_ending": 2}),
    "sst2": ("glue/sst2/default", {"sentence": "fine .", "label": 1}),
    "rte": ("glue/rte/default", {"sentence1": "A is B.", "sentence2": "B is A.", "label": 1}),
    "cola": ("glue/cola/default", {"sentence": "They is.", "label": 0}),
    "lambada": ("lambada/lambada_openai", {"text": "Here is the last word"}),
    "arithmetic-2d-plus": ("arithmetic/arithmetic_2da", {
        "context": "Q: What is 98 plus 45?\n\nA:", "completion": " 143", "question": "98 plus 45", "answer": "143"}),
    "nq": ("nq_open/nq_open", {"question": "who wrote it", "answer": ["Ann", "The Ann Lee"]}),
    "triviaqa": ("triviaqa/default", {"question": "Who wrote", "answer": {"value": "Ann", "aliases": ["An A", "B"]}}),
    "wmt14-fr-en": ("translation/wmt14_fr-en", {"translation": {"fr": "Oui.", "en": "Yes."}}),
    "cnn-dailymail": ("cnn_dailymail/cnn_dailymail", {"article": "It rained. So.", "highlights": "Rain\nand sun."}),
}  # fmt: skip


def wanted(item) -> list:
    """What is asked of a model for an item, in the harness's form."""
    match item:
        case LastWord():
            return [(item.opening + item.context, item.word)]
        case Question():
            return [(item.opening + item.prompt, list(item.stop), item.tokens, item.top_k == 1 and item.beams == 1)]
    return list(zip(item.contexts, item.continuations, strict=True))


def theirs_wanted(instance) -> tuple:
    if instance.request_type != "generate_until":
        return instance.args
    prompt, options = instance.args
    return prompt, options["until"], options.get("max_gen_toks", 256), not options["do_sample"]


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_item_reads_as_in_the_harness(name, shots, tmp_path):
    """The harness's own task files ask for the same after the same, and put the same between examples."""
    file, row = EXAMPLES[name]
    task = harness_task(tmp_path, file, row, shots)
    protocol = protocol_for(PROTOCOLS["harness"], TASKS[name], shots=shots)
    (item,) = TASKS[name].build(TaskRow(row, "row 1"), protocol)
    shown = with_examples(item, item.solved + protocol.delimiter) if shots else item
    assert wanted(shown) == [theirs_wanted(instance) for instance in task.instances]


@pytest.mark.parametrize(
    "prediction", ["Ann", "the ANN lee", "ann.", "An A", "A", "b", "  ", "rain and the sun. More!"]
)
@pytest.mark.parametrize("name", ["nq", "triviaqa", "cnn-dailymail"])
def test_an_answer_counts_as_in_the_harness(name, prediction, tmp_path):
    file, row = EXAMPLES[name]
    task = harness_task(tmp_path, file, row)
    (item,) = TASKS[name].build(TaskRow(row, "row 1"), PROTOCOLS["harness"])
    theirs = task.process_results(task.instances[0].doc, [prediction.strip()])
    ours = generated_record(TASKS[name], item, prediction)
    shared = theirs.keys() & ours.keys()
    assert shared == ({"exact_match"} if name != "cnn-dailymail" else {"rouge1", "rouge2", "rougeL"})
    assert {metric: ours[metric] for metric in shared} == pytest.approx({metric: theirs[metric] for metric in shared})


def test_wikitext_is_detokenized_as_in_the_harness():
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    page = (
        ' = A = \n \n It was the students \' @-@ 3 @.@ 5 ( or so ) [ x ] " quoted " , 5 ° N and N 1 ; '
        "{ y } 'z ' . = = = B = = = \n x 's \n"
    )
    assert clean_wikitext(page, mended=False) == wikitext_detokenizer({"page": page})
    assert clean_wikitext("in ' 90", mended=True) == "in '90"


# ---- our models inside the harness -------------------------------------------------------------------------------


def test_our_model_in_the_harness(trained_folder, made, tmp_path):
    from plume.evaluate.harness import PlumeLM

    file = made / "lambada" / "lambada_test.jsonl"
    theirs, samples = harness(hf(trained_folder), lambada_task(file))
    mine, same = harness(PlumeLM(str(trained_folder)), lambada_task(file))
    assert mine["acc"] == theirs["acc"]
    for a, b in zip(samples, same, strict=True):
        assert a["filtered_resps"][0][0] == pytest.approx(b["filtered_resps"][0][0], abs=1e-4)
    pages = tmp_path / "pages.jsonl"
    pages.write_text(json.dumps({"page": (made / "wikitext-2" / "wiki.test.raw").read_text()}) + "\n")
    theirs, _ = harness(hf(trained_folder), wikitext_task(pages))
    mine, _ = harness(PlumeLM(str(trained_folder)), wikitext_task(pages))
    assert mine["word_perplexity"] == pytest.approx(theirs["word_perplexity"], rel=1e-5)


def generation_task(file: Path) -> dict:
    return json_task(
        "made_generation",
        file,
        output_type="generate_until",
        doc_to_text="{{text[:40]}}",
        doc_to_target="{{text}}",
        generation_kwargs={"until": ["."], "max_gen_toks": 12, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )


def test_our_model_writes_in_the_harness_what_transformers_writes(trained_folder, made):
    from plume.evaluate.harness import PlumeLM

    task = generation_task(made / "lambada" / "lambada_test.jsonl")
    _, theirs = harness(hf(trained_folder), task, limit=5)
    _, mine = harness(PlumeLM(str(trained_folder)), task, limit=5)
    assert [s["resps"] for s in mine] == [s["resps"] for s in theirs]


def test_a_masked_model_runs_in_the_harness_but_does_not_write(masked_folder, made):
    from plume.evaluate.harness import PlumeLM

    model = PlumeLM(str(masked_folder))
    found, _ = harness(model, hellaswag_task(made / "hellaswag" / "validation.jsonl"), limit=5)
    assert 0 <= found["acc"] <= 1 and math.isfinite(found["acc"])
    with pytest.raises(UserError, match="masked model"):
        harness(model, generation_task(made / "lambada" / "lambada_test.jsonl"), limit=2)


def test_a_task_of_the_harness_is_asked_for_and_told(trained_folder, monkeypatch, tmp_path):
    """What goes to the harness and what comes back; the harness itself at work is a slow test."""
    import lm_eval

    asked = []

    def answer(**options):
        asked.append(options)
        likely = options["model"].loglikelihood([SimpleNamespace(args=("The cat ate", " milk"))])
        values = {
            "alias": "made",
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "acc_norm,none": 0.25,
            "likely,none": likely[0][0],
        }
        return {"results": {"made": values}, "samples": {"made": [{"doc_hash": "a"}, {"doc_hash": "b"}]}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", answer)
    config = EvaluateConfig(
        model=str(trained_folder), tasks=("harness:made",), shots=2, limit=7, seed=5, out=tmp_path, plots=False
    )
    result = evaluate(config)["harness:made"].first
    (options,) = asked
    assert (options["tasks"], options["num_fewshot"], options["limit"]) == (["made"], 2, 7)
    assert options["fewshot_random_seed"] == 5
    assert (result.headline, result.score.value, result.score.stderr) == ("acc_norm", 0.25, None)
    assert result.metrics["acc"].stderr == 0.1 and "alias" not in result.metrics
    assert (result.items, result.scored, result.reused, result.shots) == (2, 1, 0, 2) and result.tokens > 0

    def fail(**options):
        raise KeyError("no such task\nand a long story")

    monkeypatch.setattr(lm_eval, "simple_evaluate", fail)
    with pytest.raises(UserError, match=r"harness:made cannot be run: 'no such task"):
        evaluate(config)


def test_the_call_of_the_page_works(trained_folder, monkeypatch):
    import lm_eval

    page = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    asked, known = [], inspect.signature(lm_eval.simple_evaluate).parameters
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **options: asked.append(options))  # it needs the hub
    exec(block.replace("runs/demo", str(trained_folder)), {})
    assert isinstance(asked[0]["model"], lm_eval.api.model.LM) and asked[0].keys() <= known.keys()


def test_figures_of_the_harness_keep_their_names():
    """A task's own number of examples, and each way of reading an answer by itself."""
    from types import SimpleNamespace

    from plume.evaluate.harness import as_result

    values = {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1, "exact_match,loose": 0.7, "acc,none": 1.0}
    subject = SimpleNamespace(name="m", hash="h", parameters=1)
    model = SimpleNamespace(subject=subject, tokens=3, store=SimpleNamespace(fresh=1, reused=2))
    config = EvaluateConfig(model="m", tasks=("harness:t",))
    result = as_result("t", values, {"n-shot": {"t": 5}, "samples": {}}, model, config, 0.1)
    assert {name: m.value for name, m in result.metrics.items()} == {
        "exact_match/strict": 0.5, "exact_match/loose": 0.7, "acc": 1.0
    }  # fmt: skip
    assert result.metrics["exact_match/strict"].stderr == 0.1 and result.shots == 5
