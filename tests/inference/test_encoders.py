"""Encoders on the CPU engine: hidden states and every head's answer against torch and transformers, without padding."""

from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from families import open_in_transformers

from plume.config import PRESETS, EngineConfig, ModelConfig, TokenizerConfig
from plume.hf import save_model
from plume.inference import engine_factory
from plume.inference.cpu.cpu_engine import CpuEngine
from plume.inference.cpu.pack import entry_sizes, layout, pack
from plume.inference.engine_stack import EngineStack, with_engine
from plume.inference.outputs import row_states
from plume.lm import LM, load
from plume.model.heads import Model
from plume.tasks import Predictor
from plume.tasks.schema import Example
from plume.tasks.task_kind import hidden_states
from plume.text import Tokenizer, train_tokenizer

SHAPES = {
    "bert": {},
    "roberta": {"first_position": 2, "segments": 1, "norm_eps": 1e-5},
    "distilbert": {"segments": 0, "summary": "relu"},
    "pre-norm": {"norm": "pre", "embed_norm": False},
    "no embedding norm": {"embed_norm": False},
    "sinusoids": {"positions": "sinusoidal", "segments": 0},
    "odd sizes": {"width": 60, "heads": 3, "mlp_width": 100, "vocab_size": 131},
    "own output": {"tie_embeddings": False},
    "causal": {"causal": True, "summary": "last"},
}
TEXTS = ["the cat sat on a mat .", "a dog ran", "the dog and the cat ran on the mat and sat .", "cat"]


def small(**fields) -> ModelConfig:
    given = {"vocab_size": 140, "context": 48, "layers": 3, "heads": 4, "width": 128, "dropout": 0.0}
    return replace(PRESETS["bert-tiny"], **given | fields)


def random_encoder(head="masked-token", **fields) -> Model:
    """Weights as large as a trained model's, biases and norms not at zero and one."""
    torch.manual_seed(0)
    model = Model(small(**fields), head, ("red", "green", "blue") if head in ("classify", "tag") else ()).eval()
    for name, parameter in model.named_parameters():
        base = 1.0 if "norm.weight" in name else 0.0
        torch.nn.init.normal_(parameter, mean=base, std=0.1 if parameter.ndim == 1 else 0.08)
    return model


def some_rows(config, lengths):
    draw = np.random.default_rng(5)
    tokens = [draw.integers(0, config.vocab_size, n).tolist() for n in lengths]
    return tokens, [draw.integers(0, max(1, config.segments), n).tolist() for n in lengths]


def reference(model, tokens, segments):
    """Each sequence alone through the torch model."""
    with torch.inference_mode():
        return [
            model.body(torch.tensor([t]), segments=torch.tensor([s]) if model.config.segments > 1 else None)[0].numpy()
            for t, s in zip(tokens, segments, strict=True)
        ]


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_are_those_of_torch(shape):
    model = random_encoder("bare" if shape == "causal" else "masked-token", **SHAPES[shape])
    tokens, segments = some_rows(model.config, (7, 48, 1, 2, 19, 33))
    expected = reference(model, tokens, segments)
    for precision in ("float32", "int8"):
        engine = CpuEngine(pack(model, precision), threads=2)
        found = engine.encode(tokens, segments)
        engine.close()
        for ours, theirs in zip(found, expected, strict=True):
            if precision == "float32":
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
            else:
                assert cosine(ours, theirs) >= 0.999


def cosine(a, b):
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize(("threads", "rows"), [(3, 100), (2, 400)])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_company_changes_no_bit(precision, threads, rows):
    """A sequence alone on one thread, or among 64 others on some, which share few rows by panels and many by rows:
    the same bits."""
    model = random_encoder()
    lengths = [1 + (11 * i) % 48 for i in range(64)]
    tokens, segments = some_rows(model.config, lengths)
    alone = CpuEngine(pack(model, precision), threads=1)
    expected = [alone.encode([t], [s])[0] for t, s in zip(tokens, segments, strict=True)]
    alone.close()
    parts = []
    engine = CpuEngine(pack(model, precision), threads=threads, rows=rows)
    together = engine.encode(tokens, segments, between=lambda: parts.append(1))
    engine.close()
    assert len(parts) >= sum(lengths) // rows
    assert all((a == b).all() for a, b in zip(together, expected, strict=True))


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False}, {"norm": "pre", "embed_norm": False}])
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_sizes_of_packed_encoders_follow_from_the_config(fields, precision):
    packed = pack(random_encoder(**fields), precision)
    offsets, size = layout(entry_sizes(packed.config, precision, logits=False))
    assert not packed.generates and (offsets == packed.offsets).all() and size == packed.size


# ---- every head, through LM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=90), TEXTS * 20)


def folder_for(head, words, folder, **fields):
    model = random_encoder(head, vocab_size=words.vocab_size, **fields)
    return save_model(model, folder, tokenizer=words)


def both(folder):
    """The folder on the CPU engine, and on torch alone."""
    ours, theirs = load(folder, engine="cpu", threads=2), load(folder, engine="torch")
    assert isinstance(ours.inference_model.body, EngineStack) and theirs.inference_model is theirs.model
    return ours, theirs


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("head", ["bare", "masked-token", "classify", "tag", "span", "choose"])
def test_heads_read_the_engines_states_like_transformers(family, head, tmp_path):
    if (family, head) not in families.PAIRS:
        pytest.skip("transformers has no such class")
    theirs, ours = families.random_pair(family, head, tmp_path)
    engine = CpuEngine(pack(ours, "float32"), threads=2)
    tokens = torch.randint(2, ours.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = with_engine(ours, engine.encode).read(row_states(with_engine(ours, engine.encode), tokens))
        given = tokens[None] if head == "choose" else tokens
        output = theirs(given)
        engine.close()
        if head == "span":
            expected = torch.stack([output.start_logits, output.end_logits], dim=2)
        else:
            expected = output.last_hidden_state if head == "bare" else output.logits
    torch.testing.assert_close(found.flatten(), expected.flatten(), atol=1e-4, rtol=1e-4)


def test_vectors_are_those_of_torch_and_of_no_other_text(words, tmp_path):
    folder = folder_for("bare", words, tmp_path / "model")
    ours, theirs = both(folder)
    texts = TEXTS * 16
    for pool in ("mean", "cls", "max", "summary"):
        expected, found = theirs.embed(texts, pool=pool), ours.embed(texts, pool=pool)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert all((ours.embed(text, pool=pool) == row).all() for text, row in zip(texts[:5], found, strict=False))
    np.testing.assert_allclose(ours.similarity(*TEXTS[:2]), theirs.similarity(*TEXTS[:2]), atol=1e-5)
    small = load(folder, precision="int8", threads=2)
    assert min(cosine(a, b) for a, b in zip(small.embed(TEXTS), theirs.embed(TEXTS), strict=True)) >= 0.999
    for lm in (ours, theirs, small):
        lm.close()


def test_labels_are_those_of_torch(words, tmp_path):
    ours, theirs = both(folder_for("classify", words, tmp_path / "model"))
    for pairs in (None, TEXTS[::-1]):
        for a, b in zip(ours.classify(TEXTS, pairs), theirs.classify(TEXTS, pairs), strict=True):
            assert a.probabilities == pytest.approx(b.probabilities, abs=1e-4)


def test_tags_and_spans_are_those_of_torch(words, tmp_path):
    ours, theirs = both(folder_for("tag", words, tmp_path / "tag"))
    assert ours.tag(TEXTS) == theirs.tag(TEXTS)
    ours, theirs = both(folder_for("span", words, tmp_path / "span"))
    for context in TEXTS[:3]:
        a, b = (lm.answer(question="the cat", context=context) for lm in (ours, theirs))
        assert (a.text, a.start) == (b.text, b.start) and a.score == pytest.approx(b.score, abs=1e-4)


@pytest.mark.parametrize("head", ["masked-token", "pretraining"])
def test_masks_and_scores_are_those_of_torch(head, words, tmp_path):
    ours, theirs = both(folder_for(head, words, tmp_path / head))
    mask = words.token(words.mask)
    text = f"the {mask} sat on {mask} mat"
    for a, b in zip(ours.fill_mask(text, k=15), theirs.fill_mask(text, k=15), strict=True):
        assert [c.id for c in a] == [c.id for c in b]
        assert [c.probability for c in a] == pytest.approx([c.probability for c in b], abs=1e-4)
    for one in TEXTS:
        a, b = ours.score(one), theirs.score(one)
        assert [t.logprob for t in a.tokens] == pytest.approx([t.logprob for t in b.tokens], abs=1e-4)


def test_the_engine_follows_trained_weights(words, tmp_path):
    """Weights that changed in place are packed anew, for what was opened before as well."""
    folder = folder_for("classify", words, tmp_path / "model")
    lm = load(folder, engine="cpu", threads=2)
    vector, labels = lm.embed(TEXTS[0]), lm.classify(TEXTS[0])
    with torch.no_grad():
        lm.model.body.blocks[1].mlp.inner.up.weight.mul_(1.5)
    fresh = LM(None, words, EngineConfig(engine="torch"), lm.model)
    np.testing.assert_allclose(lm.embed(TEXTS[0]), fresh.embed(TEXTS[0]), atol=1e-4)
    assert np.abs(lm.embed(TEXTS[0]) - vector).max() > 1e-3
    changed = lm.classify(TEXTS[0]).probabilities
    assert changed == pytest.approx(fresh.classify(TEXTS[0]).probabilities, abs=1e-4)
    assert changed != pytest.approx(labels.probabilities, abs=1e-6)
    lm.close()


def test_packed_encoders_are_used_again(words, tmp_path, monkeypatch):
    folder = folder_for("masked-token", words, tmp_path / "model", tie_embeddings=False)
    first = engine_factory.packed_weights(folder, "int8")
    monkeypatch.setattr(engine_factory, "load_model", lambda _: pytest.fail("packed weights should have been used"))
    second = engine_factory.packed_weights(folder, "int8")
    assert not second.generates
    assert (first.block == second.block).all() and (first.offsets == second.offsets).all()


def test_training_goes_through_torch(words, tmp_path):
    """A gradient is wanted: the engine has none, so the stack itself computes."""
    lm = load(folder_for("classify", words, tmp_path / "model"), engine="cpu", threads=2)
    predictor = Predictor(lm.inference_model, words, None)
    kind = predictor.kind()
    batch = next(kind.encode([Example({"text": text}, None, "") for text in TEXTS]).sweep(4))
    with torch.no_grad():
        fast = hidden_states(predictor.model, batch)
    slow = hidden_states(predictor.model, batch)
    assert slow.requires_grad and not fast.requires_grad
    for a, b, n in zip(fast, slow, batch.lengths.tolist(), strict=True):
        torch.testing.assert_close(a[:n], b[:n].detach(), atol=1e-4, rtol=1e-4)


def test_many_masked_rows_share_steps(words, tmp_path, monkeypatch):
    """Pseudo-likelihood sends its masked rows to the engine together, and the answers are transformers' own."""
    folder = folder_for("masked-token", words, tmp_path / "model")
    lm, theirs = load(folder, engine="cpu", threads=2), open_in_transformers(folder)
    calls = []
    encode = lm._handle.encode
    monkeypatch.setattr(
        lm._handle, "encode", lambda rows, segments: (calls.append(len(rows)), encode(rows, segments))[1]
    )
    scored = lm.score(TEXTS[0]).tokens
    assert calls == [len(scored)]
    ids = words.add_special_tokens(words.encode(TEXTS[0]))[0]
    for place, token in enumerate(scored, 1):
        masked = torch.tensor([[words.mask if i == place else t for i, t in enumerate(ids)]])
        with torch.inference_mode():
            expected = theirs(masked).logits[0, place].log_softmax(0)[token.id]
        assert token.logprob == pytest.approx(float(expected), abs=1e-4)
