"""Losses against torch's own and transformers', values and gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import TRANSFORMER, random_model, random_pair
from torch import Tensor

from plume.config import PRESETS
from plume.data import IGNORE
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.model.loss import SampledSoftmax, TensorBatch, token_loss
from plume.train.objectives import objective_called


def plain_loss(features: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None, smoothing: float) -> Tensor:
    logits = F.linear(features, table, bias).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_numbers", [1, 50, 1 << 20])
def test_chunked_loss_is_the_plain_loss(smoothing: float, with_bias: bool, chunk_numbers: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)  # three rows are padding
    features = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 13, (3, 5))
    targets[0, 1] = targets[2] = IGNORE
    inputs = [t for t in (features, table, bias) if t is not None]
    theirs = plain_loss(features, table[:13], targets, bias, smoothing)
    expected = torch.autograd.grad(3 * theirs, inputs)
    ours = token_loss(
        features, table, targets, vocab_size=13, bias=bias, smoothing=smoothing, chunk_numbers=chunk_numbers
    )
    gradients = torch.autograd.grad(3 * ours, inputs)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    for mine, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_no_targets_give_zero_and_no_gradient() -> None:
    features = torch.randn(0, 8, requires_grad=True)
    table = torch.randn(5, 8, requires_grad=True)
    token_loss(features, table, torch.empty(0, dtype=torch.long), vocab_size=5).backward()
    assert table.grad is not None and not table.grad.any()


def test_logits_are_never_all_held(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    linear = F.linear

    def watched(*args: Tensor) -> Tensor:
        nonlocal largest
        out = linear(*args)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr("plume.train.objectives.F.linear", watched)
    features, table = torch.randn(64, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    token_loss(features, table, torch.randint(0, 100, (64,)), vocab_size=100, chunk_numbers=1000)
    assert 0 < largest <= 1000


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_softmax_of_which_all_is_drawn_is_the_whole_one(with_bias: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)  # three rows are padding
    features = torch.randn(15, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True) if with_bias else None
    targets = torch.randint(0, 13, (15,))
    targets[4] = IGNORE
    inputs = [t for t in (features, table, bias) if t is not None]
    theirs = plain_loss(features, table[:13], targets, bias, 0.0)
    ours = SampledSoftmax(torch.rand(13), 13).loss(features, table, targets, bias)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    expected, found = (torch.autograd.grad(loss, inputs) for loss in (theirs, ours))
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_candidates_stand_for_the_vocabulary() -> None:
    """The mean over many steps of what the candidates add up to is the sum over all tokens."""
    torch.manual_seed(0)
    shares = 1 / torch.arange(1.0, 201)
    shares, logits = shares / shares.sum(), torch.randn(200)
    sampled, sums, count = SampledSoftmax(shares, 10), list[float](), 0
    for _ in range(3000):
        targets = torch.multinomial(shares, 64, replacement=True)
        ids, raised, places = sampled.candidates(targets)
        assert torch.equal(ids[places], targets)
        sums.append(float((logits[ids] + raised).exp().sum()))
        count += len(ids)
    mean, error = torch.tensor(sums).mean(), torch.tensor(sums).std() / len(sums) ** 0.5
    assert abs(mean - logits.exp().sum()) < 4 * error and error < 0.01 * mean
    assert count / 3000 < 60  # of 200


def test_a_sampled_softmax_is_measured_by_the_whole_one(tmp_path: Path) -> None:
    model = random_model(PRESETS["gpt2-char"])
    vocab, tokens = model.config.vocab_size, torch.randint(0, 10, (2, 9))
    batch = TensorBatch(tokens=tokens[:, :-1], targets=tokens[:, 1:])
    plain = objective_called("language-model")
    sampled = objective_called("language-model", sampled=SampledSoftmax(torch.ones(vocab) / vocab, 1))
    assert torch.equal(sampled.totals(model.eval(), batch), plain.totals(model, batch))
    assert not torch.equal(sampled.totals(model.train(), batch), plain.totals(model, batch))


def test_language_model_loss_is_that_of_transformers(tmp_path: Path) -> None:
    theirs, ours = random_pair("gpt2", "next-token", tmp_path)
    text = torch.randint(0, 61, (3, 13))
    batch = TensorBatch(tokens=text[:, :-1], targets=text[:, 1:])
    objective = objective_called("language-model")
    mean = objective.totals(ours, batch) / objective.counts(batch)
    torch.testing.assert_close(mean[0], theirs(text, labels=text).loss, rtol=1e-5, atol=1e-5)


def masked_batch() -> tuple[TensorBatch, torch.Tensor]:
    """Rows of uneven length with uneven masks, as positions and as transformers' labels."""
    torch.manual_seed(1)
    tokens, lengths = torch.randint(0, 61, (3, 10)), torch.tensor([10, 7, 4])
    places = torch.tensor([0, 3, 9, 12, 21])  # three in the first row, one in each of the others
    labels = torch.full((30,), IGNORE)
    labels[places] = torch.randint(0, 61, (5,))
    batch = TensorBatch(
        tokens=tokens,
        targets=labels[places],
        positions=places,
        lengths=lengths,
        segments=torch.randint(0, 2, (3, 10)),
        next_sentence=torch.tensor([0, 1, 1]),
    )
    return batch, labels.view(3, 10)


def test_masked_and_next_sentence_loss_is_that_of_transformers(tmp_path: Path) -> None:
    theirs, ours = random_pair("bert", "pretraining", tmp_path)
    batch, labels = masked_batch()
    objective = objective_called("masked-next-sentence")
    means = objective.totals(ours, batch) / objective.counts(batch)
    loss = sum(mean * weight for mean, weight in zip(means, objective.parts.values(), strict=True))
    assert batch.lengths is not None
    out = theirs(
        batch.tokens,
        attention_mask=(torch.arange(10) < batch.lengths[:, None]).long(),
        token_type_ids=batch.segments,
        labels=labels,
        next_sentence_label=batch.next_sentence,
    )
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=1e-5)
    right = (out.seq_relationship_logits.argmax(dim=1) == batch.next_sentence).float().mean()
    torch.testing.assert_close(means[2], right)


def test_masked_loss_is_that_of_transformers(tmp_path: Path) -> None:
    theirs, ours = random_pair("bert", "masked-token", tmp_path)
    batch, labels = masked_batch()
    objective = objective_called("masked")
    mean = objective.totals(ours, batch) / objective.counts(batch)
    assert batch.lengths is not None
    mask = (torch.arange(10) < batch.lengths[:, None]).long()
    out = theirs(batch.tokens, attention_mask=mask, token_type_ids=batch.segments, labels=labels)
    torch.testing.assert_close(mean[0], out.loss, rtol=1e-5, atol=1e-5)


def test_translation_loss_is_torchs_with_label_smoothing() -> None:
    model = random_model(TRANSFORMER)
    torch.manual_seed(2)
    source, tokens, targets = (torch.randint(0, 61, (2, n)) for n in (7, 5, 5))
    source_lengths, lengths = torch.tensor([7, 3]), torch.tensor([5, 2])
    targets[1, 2:] = IGNORE
    batch = TensorBatch(tokens=tokens, targets=targets, lengths=lengths, source=source, source_lengths=source_lengths)
    logits = model(source, tokens, lengths=source_lengths, target_lengths=lengths)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, label_smoothing=0.1)
    objective = objective_called("sequence-to-sequence", smoothing=0.1)
    mean = objective.totals(model.train(), batch) / objective.counts(batch)
    torch.testing.assert_close(mean[0], expected, rtol=1e-5, atol=1e-5)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    mean = objective.totals(model.eval(), batch) / objective.counts(batch)
    torch.testing.assert_close(mean[0], plain, rtol=1e-5, atol=1e-5)  # measuring never smooths


@pytest.mark.parametrize(
    ("preset_name", "positions"),
    [("gpt2", 0.01), ("openai-gpt", 0.02), ("bert-tiny", 0.02), ("roberta-base", 0.02)],  # as the released code draws
)
def test_first_weights_of_position_tables(preset_name: str, positions: float) -> None:
    config = replace(PRESETS[preset_name], layers=1, width=128, heads=2, vocab_size=500)
    torch.manual_seed(0)
    embed = Model(config, "bare").body.embed
    assert float(embed.positions.weight.detach().std()) == pytest.approx(positions, rel=0.05)
    assert float(embed.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_sinusoids_do_not_hide_the_tokens() -> None:
    """Token vectors and sinusoids of the Transformer-Decoder are of one size, as in the paper's code."""
    config = replace(PRESETS["transformer-decoder"], layers=1, vocab_size=500, context=64, dropout=0.0)
    torch.manual_seed(0)
    embed = Model(config).body.embed
    tokens = embed.tokens(torch.arange(64)) * embed.scale
    assert 0.7 < float(tokens.detach().std() / embed.waves.std()) < 2.0


def test_a_scaled_decoder_comes_back_from_its_folder(tmp_path) -> None:
    shape = {"layers": 2, "width": 32, "heads": 2, "vocab_size": 50, "context": 16, "dropout": 0.0}
    config = replace(PRESETS["transformer-decoder"], **shape)
    model = Model(config).eval()
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config == config
    tokens = torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), model(tokens))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "bias"), [(12, True), (16, False)])
def test_a_split_token_table_has_the_loss_and_gradients_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, rows: int, bias: bool
) -> None:
    """Two threads as two ranks, against torch's cross-entropy; of 16 rows the second rank's last five pad 11 tokens."""
    import threading

    from plume.train import split_vocabulary

    torch.manual_seed(0)
    features, table, shift = torch.randn(9, 6), torch.randn(rows, 6), torch.randn(11)
    targets = torch.randint(0, 11, (9,)).index_fill(0, torch.tensor([2]), -100)
    wanted = [tensor.clone().requires_grad_() for tensor in (features, table, shift)]
    logits = wanted[0] @ wanted[1][:11].T + (wanted[2] if bias else 0.0)
    expected = torch.nn.functional.cross_entropy(
        logits, targets, reduction="sum", label_smoothing=smoothing, ignore_index=-100
    )
    (3 * expected).backward()
    meet, slots, results = threading.Barrier(2), [torch.empty(0)] * 2, {}

    def all_reduce(tensor: torch.Tensor, op: object = None, *, group: int) -> None:
        slots[group] = tensor.clone()
        meet.wait()
        both = torch.stack(slots)
        meet.wait()
        tensor.copy_(both.amax(dim=0) if op is not None else both.sum(dim=0))

    def rank(number: int) -> None:
        half = rows // 2
        mine = [features.clone(), table[number * half :][:half].clone(), shift.clone()]
        x, part, b = (tensor.requires_grad_() for tensor in mine)
        loss = split_vocabulary.SplitLoss.apply(
            x, part, b if bias else None, targets, number * half, 11, smoothing, number
        )
        (3 * loss).backward()
        results[number] = loss.detach(), x.grad, part.grad, b.grad

    monkeypatch.setattr(split_vocabulary.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(split_vocabulary, "CHUNK_NUMBERS", 24)  # several chunks
    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        loss, x, _, b = results[number]
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x, wanted[0].grad, rtol=1e-5, atol=1e-5)
        if bias:
            torch.testing.assert_close(b, wanted[2].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([results[0][2], results[1][2]]), wanted[1].grad, rtol=1e-5, atol=1e-5)


def test_the_loss_is_summed_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    features, table = torch.randn(3000, 16, dtype=torch.bfloat16), torch.randn(50, 16)
    targets = torch.randint(50, (3000,))
    with torch.autocast("cpu", torch.bfloat16):
        found = token_loss(features, table, targets, vocab_size=50)
    logits = F.linear(features, table.bfloat16()).double()
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
