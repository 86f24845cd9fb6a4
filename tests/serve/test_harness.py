"""lm-evaluation-harness against the server equals the harness in the same process on the same folder."""

import json
from dataclasses import replace

import pytest
from running import serving

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
SENTENCES = [
    "The robot must obey the orders given it by human beings",
    "A robot may not injure a human being or allow a human being to come to harm",
    "Once upon a time there was a little girl named Lily",
    "She lived in a small house near the wood 你好",
]


def task(file, name, **more):
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return {"task": name, **files, **more}


def tasks(file) -> list[dict]:
    mean = {"aggregation": "mean", "higher_is_better": True}
    return [
        task(
            file, "last_word", output_type="loglikelihood",
            doc_to_text="{{text.split(' ')[:-1]|join(' ')}}", doc_to_target="{{' '+text.split(' ')[-1]}}",
            metric_list=[{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                         {"metric": "acc", **mean}],
        ),
        task(
            file, "choices", output_type="multiple_choice", doc_to_text="{{text}}", doc_to_target=0,
            doc_to_choice=["obey", "a small house", "girl named Lily."],
            metric_list=[{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
        ),
        task(
            file, "rolling", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
            metric_list=[{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        ),
        task(
            file, "generation", output_type="generate_until", doc_to_text="{{text}}", doc_to_target="x",
            generation_kwargs={"until": ["."], "max_gen_toks": 8, "do_sample": False},
            metric_list=[{"metric": "exact_match", **mean}],
        ),
    ]  # fmt: skip


def results(model, made: dict):
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate

    ready = ConfigurableTask(config=made | {"num_fewshot": 0})
    ready.set_fewshot_seed(1234)
    name = made["task"]
    found = evaluate(lm=model, task_dict={name: ready}, bootstrap_iters=0, log_samples=True)
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    numbers = {key: value for key, value in found["results"][name].items() if isinstance(value, float)}
    return numbers, [sample["filtered_resps"] for sample in samples]


@pytest.mark.parametrize("number", range(4), ids=["last word", "choices", "rolling", "generation"])
def test_local_completions_equal_the_harness_in_process(models, serve_config, tmp_path, number):
    for package in ("lm_eval", "tenacity"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    made, folder = tasks(file)[number], models["gpt"]
    here = HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32", max_length=63)
    expected, their_rows = results(here, made)
    with serving(replace(serve_config, models=(str(folder),), runs=None)) as (site, _):
        remote = LocalCompletionsAPI(
            model="gpt", base_url=f"{site.url}/v1/completions", tokenizer=str(folder), tokenizer_backend="huggingface",
            max_length=64, num_concurrent=1, batch_size=2, max_retries=1,
        )  # fmt: skip
        found, rows = results(remote, made)
    assert found.keys() == expected.keys() and found == pytest.approx(expected, rel=1e-3)
    for mine, theirs in zip(rows, their_rows, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if isinstance(one, str):
                assert one == other
            else:
                likelihoods = [value[0] if isinstance(value, tuple | list) else value for value in (one, other)]
                assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-3)
