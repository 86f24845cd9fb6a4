"""The facade: lists, threads, trained weights, saving, one perplexity, and nothing but helpful errors."""

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas
import pytest
import torch

import plume
from plume.cli.generate_command import run_batch
from plume.config import EngineConfig, SamplingConfig, UserError
from plume.hf import EmbeddingConfig, read_embedding, save_model
from plume.hf.config_json import write_embedding
from plume.inference import engine_factory
from plume.inference.scoring import score_text, scorer_for
from plume.lm import LM, load
from plume.text import load_tokenizer

PROMPTS = ["the robot", "a house in the hills", "hello hello", "then the inner", "in", "all"]


def torch_greedy(model, tokens, count):
    """The definition: the whole text read again for every token."""
    tokens, model = list(tokens), model.eval()
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tuple(tokens[-count:])


@pytest.mark.slow
def test_many_threads_get_what_one_gets(open_lm):
    """4 threads, 50 calls each, of several kinds: the same results as one after another."""
    lm = open_lm(EngineConfig(threads=2, slots=3))

    def call(number: int):
        prompt = PROMPTS[number % len(PROMPTS)] * (1 + number % 3)
        match number % 5:
            case 3:
                return lm.score(prompt)
            case 4:
                return lm.generate(prompt, beams=2, max_new_tokens=3).tokens
            case _:
                options = {"top_p": 0.9} if number % 2 else {"top_k": 20}
                return lm.generate(prompt, seed=number, max_new_tokens=8, **options).tokens

    alone = [call(number) for number in range(200)]
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(call, range(200))) == alone


def test_streams_in_threads_do_not_mix(open_lm):
    lm = open_lm(EngineConfig(threads=1, slots=2))
    options = {"temperature": 0, "max_new_tokens": 12}
    alone = [lm.generate(prompt, **options).text for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: "".join(lm.stream(prompt, **options)), PROMPTS)) == alone


def test_one_text_or_a_list(lm):
    some = PROMPTS[:3]
    assert lm.generate(some, seed=2, max_new_tokens=5) == [lm.generate(p, seed=2, max_new_tokens=5) for p in some]
    greedy = {"temperature": 0, "max_new_tokens": 3, "seed": 0}
    assert lm.generate_batch(some, **greedy) == lm.generate(some, **greedy)
    assert lm.generate([lm.encode(p) for p in some], seed=1, max_new_tokens=4) == lm.generate(
        tuple(some), seed=1, max_new_tokens=4
    )
    assert lm.score(some) == [lm.score(p) for p in some]
    assert lm.next_tokens(some, k=3) == [lm.next_tokens(p, k=3) for p in some]
    assert lm.suggest(some) == [lm.suggest(p) for p in some]
    ids, short = np.array(lm.encode(some[0])), {"seed": 1, "max_new_tokens": 3}
    assert lm.generate(ids, **short) == lm.generate(torch.tensor(ids), **short) == lm.generate(some[0], **short)
    assert lm.generate([]) == lm.score([]) == lm.next_tokens(()) == [] and lm.embed(()).shape == (0, lm.config.width)
    column = np.array(some)  # as a column of a table
    assert lm.score(column) == lm.score(some) and lm.score(pandas.Series(some, index=[7, 8, 9])) == lm.score(some)
    assert lm.generate(np.stack([ids, ids]), **short) == [lm.generate(some[0], **short)] * 2
    np.testing.assert_array_equal(lm.embed(column), lm.embed(some))
    assert lm.generate(some[0], stop=None, stop_tokens=None, **short) == lm.generate(some[0], **short)
    assert lm.embed([]).shape == (0, lm.config.width) and lm.embed([], layers=[0, 1]).shape == (0, 2 * lm.config.width)
    explained = lm.explain(some)
    assert [e.tokens for e in explained] == [lm.explain(p).tokens for p in some]
    together = lm.embed(some)
    assert together.shape == (3, lm.config.width)
    np.testing.assert_allclose(lm.embed(some[0]), together[0], atol=1e-5)
    assert isinstance(lm.similarity("a", "b"), float)


def test_an_engine_that_does_not_exist(trained_folder):
    for wrong, message in (({"engine": "gpu"}, "engine='gpu' is none of"), ({"precision": "fp16"}, "precision='fp16'")):
        with pytest.raises(UserError, match=message):
            plume.load(trained_folder, **wrong)


def test_older_packed_weights_that_another_process_has_open(tmp_path, monkeypatch):
    """As on Windows: they stay, and the new ones are used."""
    path = tmp_path / ".plume" / "cpu-int8-new.bin"
    path.parent.mkdir()
    (path.parent / "cpu-int8-old.bin").touch()

    def refused(self, missing_ok=False):
        raise PermissionError

    monkeypatch.setattr(type(path), "unlink", refused)
    engine_factory._forget_older(path, "int8")
    assert [p.name for p in path.parent.iterdir()] == ["cpu-int8-old.bin"]


def test_translations_of_a_list(open_lm):
    lm = open_lm(EngineConfig(slots=4), decoder_layers=1, causal=False, norm="post")
    some = ["the inner", "a robot"]
    assert lm.translate(some, max_new_tokens=4) == [lm.translate(s, max_new_tokens=4) for s in some]


def test_results_are_readable(lm):
    written = lm.generate("the robot", seed=1, max_new_tokens=40)
    assert str(written) == written.text and len(repr(written)) < 160 and "finish_reason='" in repr(written)
    score = lm.score("the robot")
    assert repr(score).startswith("TextScore(perplexity=") and len(repr(score)) < 80
    assert len(str(score).splitlines()) == len(score.tokens) + 1
    likely = lm.next_tokens("the robot", k=3)
    assert all("%" in repr(token) for token in likely) and len(str(likely).splitlines()) == 3


# -- training lm.model


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_trained_weights_are_used_and_saved(trained_folder, tmp_path, engine):
    lm = LM(trained_folder, load_tokenizer(trained_folder), EngineConfig(engine=engine, threads=1, slots=2))
    before = lm.generate("def ", temperature=0, max_new_tokens=12).tokens
    tokens = torch.tensor([lm.encode("the the the the the the")])
    lm.model.train()
    optimizer = torch.optim.SGD(lm.model.parameters(), lr=0.5)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(lm.model(tokens[:, :-1])[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after = lm.generate("def ", temperature=0, max_new_tokens=12).tokens
        assert lm.model.training, "generating leaves a model in training"
    assert after != before
    assert after == torch_greedy(lm.model, lm.encode("def "), 12)
    again = load(lm.save(tmp_path / "trained"), engine=engine, threads=1)
    assert again.generate("def ", temperature=0, max_new_tokens=12).tokens == after
    again.close()
    lm.close()


def test_the_engine_is_kept_while_weights_stay(open_lm):
    lm = open_lm()
    engine = lm.engine
    lm.model(torch.tensor([[1, 2, 3]]))
    lm.generate("a", max_new_tokens=2)
    assert lm.engine is engine
    with torch.no_grad():
        lm.model.table.mul_(1.5)
    assert lm.engine is not engine


# -- likelihoods


def test_a_score_after_given_text(lm):
    whole = lm.encode("the robot in the house")
    given = lm.encode("the robot")
    with torch.inference_mode():
        logprobs = torch.log_softmax(lm.model(torch.tensor([[lm.tokenizer.start, *whole]]))[0], -1)
    expected = sum(float(logprobs[i, t]) for i, t in enumerate(whole) if i >= len(given))
    found = lm.score(" in the house", given="the robot")
    assert [t.id for t in found.tokens] == whole[len(given) :]
    assert found.logprob == pytest.approx(expected, abs=1e-3)
    assert lm.score(whole[len(given) :], given=given) == found
    assert lm.score("in the house", given="the robot ") == found  # the space belongs to a token of the text
    assert [t.text for t in lm.score("llo", given="he").tokens] == ["ll", "o"]  # one token together, none is left over


@pytest.mark.parametrize("longer", [0, 30])
def test_every_scorer_gives_one_perplexity(open_lm, tokenizer, longer):
    """LM, the batched scorer of evaluation, explanation, and a loop written out; also past the context, and where the
    model's table is longer than its tokenizer: all rows are in the sum, as in transformers."""
    lm = open_lm(vocab_size=tokenizer.vocab_size + longer)
    text = "the quick brown fox jumps over the lazy dog"
    tokens = [lm.tokenizer.start, *lm.encode(text)]
    with torch.inference_mode():
        logprobs = torch.log_softmax(lm.model(torch.tensor([tokens]))[0], -1)
    expected = math.exp(-np.mean([float(logprobs[i, t]) for i, t in enumerate(tokens[1:])]))
    batched = scorer_for(lm.model, lm.tokenizer, details=True)
    assert lm.score(text).perplexity == pytest.approx(expected, rel=1e-4)
    assert lm.explain(text).surprise().perplexity == pytest.approx(expected, rel=1e-4)
    assert score_text(batched, tokens[1:]).perplexity == pytest.approx(expected, rel=1e-4)
    for mine, theirs in zip(lm.score(text).tokens, score_text(batched, tokens[1:]).tokens, strict=True):
        assert mine.rank == theirs.rank and mine.entropy == pytest.approx(theirs.entropy, abs=1e-3)
    long = text * 8
    other = score_text(batched, lm.encode(long), stride=32)
    assert lm.score(long, stride=32).perplexity == pytest.approx(other.perplexity, rel=1e-4)


# -- what used to reach users as an assertion


def test_one_slot_serves_a_stream_and_questions(open_lm):
    lm = open_lm(EngineConfig(threads=1, slots=1))
    options = {"temperature": 0, "max_new_tokens": 10}
    expected, likely = lm.generate("the robot", **options).text, lm.next_tokens("a house")
    stream = lm.stream("the robot", **options)
    pieces = [next(stream), next(stream)]
    assert lm.next_tokens("a house") == likely
    assert lm.generate("hello", temperature=0, max_new_tokens=3)
    assert "".join([*pieces, *stream]) == expected


def test_beams_during_a_stream(open_lm):
    lm = open_lm(EngineConfig(threads=1, slots=3))
    options = {"temperature": 0, "max_new_tokens": 10}
    expected, best = lm.generate("the robot", **options).text, lm.generate("a house", beams=3, max_new_tokens=5)
    stream = lm.stream("the robot", **options)
    pieces = list(itertools.islice(stream, 3))
    assert lm.generate("a house", beams=3, max_new_tokens=5) == best
    assert "".join([*pieces, *stream]) == expected


def test_healing_keeps_bias_and_penalties(lm):
    """Token healing limits the first token to those that begin with the prompt's last bytes; the rest still counts."""
    tokenizer = lm.tokenizer
    plain = lm.start("say hel", SamplingConfig(token_healing=True, seed=1))[0]
    assert plain.owed
    allowed = [i for i, p in enumerate(tokenizer.piece_table) if p and (p + b"\0").startswith(plain.owed)]
    options = {"token_healing": True, "temperature": 0, "max_new_tokens": 1}
    for token in allowed:
        assert lm.generate("say hel", logit_bias={token: 100.0}, **options).tokens == (token,)
    first = lm.generate("say hel", **options).tokens[0]
    other = lm.generate("say hel", logit_bias={first: -100.0}, **options).tokens[0]
    assert other != first


# -- prompts of a file


def test_every_prompt_of_a_file_has_its_own_seed(trained_folder, tmp_path, capsys):
    from plume.cli.main import main

    path = tmp_path / "prompts.txt"
    path.write_text("def \n\ndef \nclass \n", encoding="utf-8")
    assert main(["generate", str(trained_folder), "--prompts", str(path), "--seed", "5", "--max-new-tokens", "6"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["def ", "", "def ", "class "]
    assert [row["seed"] for row in rows] == [5, 6, 7, 8]
    lm = load(trained_folder, threads=1)
    for number, row in enumerate(rows):
        alone = lm.generate(row["prompt"] or None, seed=5 + number, max_new_tokens=6)
        assert row["text"] == alone.text
    assert len(run_batch(lm, ["a", None], SamplingConfig(max_new_tokens=2))) == 2
    lm.close()


def test_ids_of_rows_that_only_pad_the_table(open_lm):
    lm = open_lm(vocab_size=272)  # the tokenizer has 266
    with pytest.raises(UserError, match="token id 270 is outside the vocabulary"):
        lm.score([5, 270])


def test_a_context_of_one_token(open_lm):
    lm = open_lm(context=1)
    written = lm.generate("hello there", max_new_tokens=4, overflow="slide", temperature=0)
    assert len(written.tokens) == 4
    assert [t.id for t in lm.score("hello there").tokens] == lm.encode("hello there")


def test_a_saved_folder_of_sentence_transformers_gives_the_same_vectors(tokenizer, random_model, tmp_path):
    settings = EmbeddingConfig("max", True, 5)
    folder = save_model(random_model(), tmp_path / "a", tokenizer=tokenizer)
    write_embedding(settings, folder, random_model().config.width)
    lm = load(folder)
    again = load(lm.save(tmp_path / "b"))
    np.testing.assert_array_equal(again.embed(PROMPTS), lm.embed(PROMPTS))
    assert read_embedding(again.folder) == settings


def test_what_the_engine_does_not_compute_is_on_its_device(trained_folder, monkeypatch):
    with pytest.raises(UserError, match="device='cuda:77'"):
        load(trained_folder, device="cuda:77").embed("a")  # it was ignored
    asked = list[str]()

    def pick(wanted):
        asked.append(wanted)
        return torch.device("meta")

    monkeypatch.setattr("plume.util.devices.pick_device", pick)
    assert load(trained_folder, device="cuda").model.table.device.type == "meta" and asked == ["cuda"]
    assert load(trained_folder, precision="int8").model.table.device.type == "cpu"


def test_a_model_in_memory_keeps_its_precision(open_lm):
    lm = open_lm(EngineConfig(engine="torch", precision="bfloat16", device="cpu"))
    assert lm.generate("hello", max_new_tokens=2, seed=1).tokens
    assert lm.model.table.dtype == torch.float32 and lm.engine.model.table.dtype == torch.bfloat16
