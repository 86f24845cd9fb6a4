"""Batches: pure functions of (seed, number), the same on any number of ranks; windows, mixtures, isolated documents."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plume.config import DataConfig, ModelConfig, ObjectiveConfig, TokenizerConfig, UserError
from plume.data import IGNORE, Batch, JoinedPairs, PackedWindows, Phases, SequencePairs, open_shards, prepare
from plume.data.batches import Dataset, Order, Permutation, generator
from plume.model.transformer import Transformer
from plume.text import load_tokenizer
from plume.train.pretrain import dataset


def make(tmp_path: Path, *texts: list[str], name: str = "out", **options) -> Path:
    """Shards of byte tokens, one source for each list of documents."""
    paths = []
    for n, documents in enumerate(texts):
        path = tmp_path / f"{name}{n}.jsonl"
        path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        paths.append(str(path))
    given = {"validation_fraction": 0.0, "tokenizer": TokenizerConfig(kind="bytes")} | options
    prepare(DataConfig(paths=tuple(paths), folder=tmp_path / name, **given))
    return tmp_path / name


def numbered(count: int, tag: str = "d") -> list[str]:
    return [f"{tag}{n:04}" + "x" * (n % 13) for n in range(count)]


@given(st.integers(1, 5000), st.integers(0, 2**63))
def test_a_permutation_visits_everything_once(size, seed):
    assert sorted(Permutation(size, seed, "test")(np.arange(size)).tolist()) == list(range(size))


def test_permutations_are_random_and_seek_freely():
    size = 100_000
    order = Permutation(size, 1, "test")(np.arange(size))
    assert not np.array_equal(order, Permutation(size, 2, "test")(np.arange(size)))
    assert np.corrcoef(order, np.arange(size))[0, 1] == pytest.approx(0, abs=0.02)
    assert np.corrcoef(order[1:], order[:-1])[0, 1] == pytest.approx(0, abs=0.02)
    assert Permutation(size, 1, "test")(np.array([77_777]))[0] == order[77_777]
    assert Permutation(10**15, 1, "test")(np.array([10**14]))[0] < 10**15  # no table of that size


def test_draws_depend_on_seed_purpose_and_numbers():
    keys = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", 1, 1), (-1, "a", 1)]
    draws = [generator(*key).random() for key in keys]
    assert len(set(draws)) == len(draws)
    assert draws == [generator(*key).random() for key in keys]


def test_a_window_is_the_text_and_its_target_the_next_token(tmp_path):
    folder = make(tmp_path, numbered(50))
    stream = np.fromfile(folder / "train-00000.tokens", np.uint16).astype(np.int64)
    windows = PackedWindows(open_shards(folder), 16, shuffle=False)
    assert len(windows) == (len(stream) - 1) // 16
    batch = windows.batch(1, 3)
    np.testing.assert_array_equal(batch.tokens, stream[48:96].reshape(3, 16))
    np.testing.assert_array_equal(batch.targets, stream[49:97].reshape(3, 16))


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_pass_visits_every_window_once_in_its_own_order(tmp_path, shuffle):
    rng = np.random.default_rng(0)
    folder = make(tmp_path, ["".join(map(chr, rng.integers(33, 127, 12))) for _ in range(100)])  # no window twice
    windows = PackedWindows(open_shards(folder), 8, seed=3, shuffle=shuffle)
    passes = [windows.take(p * len(windows), len(windows)).tokens for p in range(3)]
    if shuffle:
        assert len({tuple(p[0]) for p in passes}) == 3
    for rows in passes:
        text = rows[np.argsort([find(open_shards(folder), row) for row in rows])].reshape(-1)
        start = find(open_shards(folder), text)
        assert 0 <= start < 8  # all windows together are one run of the text


def find(shards, row) -> int:
    text = shards.streams[0].read(0, shards.tokens).astype(np.uint16).tobytes()
    place = text.find(row.astype(np.uint16).tobytes())
    assert place % 2 == 0
    return place // 2


def equal(a: Batch, b: Batch) -> None:
    for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)


def test_a_batch_depends_on_seed_and_step_alone(tmp_path):
    folder = make(tmp_path, numbered(300))
    first, again = (PackedWindows(open_shards(folder), 8, seed=5) for _ in range(2))
    for step in range(40):
        first.batch(step, 4)
    equal(first.batch(20, 4), again.batch(20, 4))  # nothing is remembered
    other = PackedWindows(open_shards(folder), 8, seed=6).batch(20, 4)
    assert not np.array_equal(other.tokens, again.batch(20, 4).tokens)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_share_the_same_global_batch(tmp_path, world):
    windows = PackedWindows(open_shards(make(tmp_path, numbered(300))), 8, seed=5, document_mask=True)
    whole = windows.batch(7, 10)
    parts = [windows.batch(7, 10, rank=rank, world=world) for rank in range(world)]
    for name in ("tokens", "targets", "documents"):
        np.testing.assert_array_equal(np.concatenate([getattr(p, name) for p in parts]), getattr(whole, name))
    equal(whole.rows(2, 5), windows.take(72, 3))


def test_a_sweep_visits_everything_once_over_all_ranks(tmp_path):
    windows = PackedWindows(open_shards(make(tmp_path, numbered(100))), 8, shuffle=False)
    whole = np.concatenate([b.tokens for b in windows.sweep(7)])
    assert len(whole) == len(windows)
    ranks = [row for rank in range(3) for b in windows.sweep(7, rank=rank, world=3) for row in b.tokens.tolist()]
    assert sorted(ranks) == sorted(whole.tolist())


def test_isolated_documents_predict_nothing_over_their_border(tmp_path):
    windows = PackedWindows(open_shards(make(tmp_path, numbered(60))), 32, document_mask=True, shuffle=False)
    separator = windows.shards.manifest.separator
    for batch in windows.sweep(4):
        for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.documents, strict=True):
            number = 0
            for t in range(32):  # written out: a document ends with its separator
                assert documents[t] == number
                if tokens[t] == separator:
                    number += 1
                    assert targets[t] == IGNORE
                elif t < 31:
                    assert targets[t] == tokens[t + 1]


def test_isolated_documents_do_not_leak(tmp_path):
    """A window of several documents gives each the hidden states that it has alone."""
    batch = PackedWindows(open_shards(make(tmp_path, numbered(60))), 48, document_mask=True, seed=2).batch(0, 3)
    torch.manual_seed(0)
    for causal in (True, False):
        config = ModelConfig(vocab_size=300, context=48, layers=2, heads=2, width=16, causal=causal, dropout=0.0)
        model = Transformer(config).eval()
        with torch.no_grad():
            packed = model(torch.from_numpy(batch.tokens), documents=torch.from_numpy(batch.documents))
            for row in range(3):
                assert len(set(batch.documents[row])) > 2
                for number in set(batch.documents[row].tolist()):
                    places = batch.documents[row] == number
                    alone = model(torch.from_numpy(batch.tokens[row, places])[None])
                    torch.testing.assert_close(packed[row, places], alone[0], atol=1e-5, rtol=1e-5)
            mixed = model(torch.from_numpy(batch.tokens))
            assert (mixed - packed).abs().max() > 1e-3  # without the numbers they do see each other


def test_mixtures_keep_their_weights_and_repeat_nothing_within_a_pass(tmp_path):
    folder = make(tmp_path, numbered(50, "a"), numbered(300, "b"), numbered(80, "c"), weights=(0.6, 0.3, 0.1))
    windows = PackedWindows(open_shards(folder), 8, seed=1)
    source, passes, item = windows.order.locate(np.arange(20_000))
    shares = np.bincount(source) / len(source)
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.001)
    places = list(zip(source.tolist(), passes.tolist(), item.tolist(), strict=True))
    assert len(set(places)) == len(places)
    every_batch = [np.bincount(source[i : i + 20], minlength=3) for i in range(0, 20_000, 20)]
    assert np.ptp(every_batch, axis=0).max() <= 2  # also in each single batch
    epochs = windows.epochs(20_000)
    for n, name in enumerate(epochs):
        assert epochs[name] == pytest.approx((source == n).sum() / windows.sizes[n], rel=0.01)


def test_the_published_mixture_has_the_published_epochs():
    """GPT-3: 300 billion tokens over sources of these sizes, in billions."""
    sizes, weights, epochs = [410, 19, 12, 55, 3], [60, 22, 8, 8, 3], [0.44, 2.9, 1.9, 0.43, 3.4]
    order = Order([s * 1000 for s in sizes], weights, seed=0, shuffle=True)
    assert order.epochs(300_000) == pytest.approx(epochs, rel=0.2)  # the paper's own figures are rounded


def test_a_source_of_few_documents_has_its_own_held_out_text(tmp_path):
    """A hundred long documents beside many short ones: a split of all by hash would hold out none of them."""
    long = [letter * 5000 for letter in "abcd"]
    folder = make(tmp_path, long, numbered(2000), validation_fraction=0.01, weights=(0.5, 0.5))
    few, many = open_shards(folder, "validation").streams
    assert len(few) == pytest.approx(200, abs=5) and 10 <= many.documents <= 35


def test_a_weight_of_zero_leaves_a_source_out(tmp_path):
    folder = make(tmp_path, numbered(50, "a"), numbered(50, "b"), weights=(1.0, 0.0))
    assert b"b0001" not in (folder / "train-00000.tokens").read_bytes().replace(b"\0", b"")
    report = json.loads((folder / "report.json").read_text())
    assert [s["tokens"] > 0 for s in report["sources"]] == [True, False]
    for wrong, message in (((0.0, 0.0), "at least one weight"), ((1.0, -1.0), "negative"), ((1.0,), "for 2 paths")):
        with pytest.raises(UserError, match=message):
            make(tmp_path, ["a"], ["b"], name="wrong", weights=wrong)


def test_a_text_shorter_than_a_window_is_refused_with_the_numbers(tmp_path):
    folder = make(tmp_path, ["just a few words"])
    with pytest.raises(UserError, match=r"has 17 tokens, and one window needs 65; use a context below 17"):
        PackedWindows(open_shards(folder), 64)
    assert len(PackedWindows(open_shards(folder), 16)) == 1


def test_phases_follow_each_other(tmp_path):
    shards = open_shards(make(tmp_path, numbered(300)))
    short, long = PackedWindows(shards, 8), PackedWindows(shards, 32)
    phases = Phases([(40, short), (0, long)])
    assert [phases.batch(step, 4).tokens.shape[1] for step in (0, 9, 10, 500)] == [8, 8, 32, 32]
    equal(phases.batch(12, 4), long.batch(2, 4))
    assert (phases.over(39), phases.over(40)) == ([], [40])
    longer = Phases([(80, short), (0, long)])
    longer.keep(phases.over(48))
    equal(longer.batch(12, 4), long.batch(2, 4))


@pytest.fixture
def pairs(tmp_path) -> Dataset:
    (tmp_path / "en").write_text("".join(f"{n} " * (n % 9 + 1) + "\n" for n in range(200)))
    (tmp_path / "de").write_text("".join(f"Z{n} " * (n % 9 + 1) + "\n" for n in range(200)))
    config = DataConfig(
        paths=(str(tmp_path / "en"),),
        targets=(str(tmp_path / "de"),),
        folder=tmp_path / "out",
        tokenizer=TokenizerConfig(kind="bytes"),
        validation_fraction=0.1,
    )
    prepare(config)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    return SequencePairs(open_shards(tmp_path / "out"), tokenizer, 30, seed=1, group=4)


def test_pairs_stay_together_and_shift_by_one(pairs):
    tokenizer = load_tokenizer(pairs.shards.folder / "tokenizer")
    batch = pairs.batch(3, 8)
    for row in range(8):
        source = tokenizer.decode(batch.source[row, : batch.source_lengths[row]], skip_special=True).split()
        length = batch.lengths[row]
        target = tokenizer.decode(batch.targets[row, :length], skip_special=True).split()
        assert target[0] == f"Z{source[0]}"
        assert batch.tokens[row, 0] == pairs.start and batch.targets[row, length - 1] == tokenizer.end
        np.testing.assert_array_equal(batch.tokens[row, 1:length], batch.targets[row, : length - 1])
        assert (batch.targets[row, length:] == IGNORE).all()
    assert batch.source.shape[1] <= 30 and batch.tokens.shape[1] <= 30


def test_pairs_of_like_length_stand_together_and_none_is_lost(pairs):
    assert len(pairs) == pytest.approx(180, abs=5)  # a tenth of the tokens is held out
    seen = [tuple(row) for b in pairs.sweep(16) for row in b.source[:, :4].tolist()]
    assert len(seen) == len(pairs)
    alike = [np.ptp(pairs.batch(step, 4).source_lengths) for step in range(40)]
    random = SequencePairs(pairs.shards, load_tokenizer(pairs.shards.folder / "tokenizer"), 30, seed=1, group=1)
    apart = [np.ptp(random.batch(step, 4).source_lengths) for step in range(40)]
    assert np.mean(alike) < 0.5 * np.mean(apart)
    numbers = pairs.numbers(np.arange(4 * 64))
    assert sorted(numbers.tolist()) == list(range(4 * 64))


def test_shards_without_pairs_are_refused(tmp_path):
    folder = make(tmp_path, numbered(5))
    with pytest.raises(UserError, match="holds no pairs"):
        SequencePairs(open_shards(folder), load_tokenizer(folder / "tokenizer"), 30)


def test_pairs_for_a_decoder_are_one_sequence_with_the_loss_on_the_target(tmp_path):
    """Against a loop over the pairs; a source that does not fit loses its beginning."""
    pairs = [(f"source {n} " + "x" * n, f"target {n}") for n in range(40)]
    rows = "".join(json.dumps({"text": a, "target": b}) + "\n" for a, b in pairs)
    (tmp_path / "pairs.jsonl").write_text(rows)
    config = DataConfig(
        paths=(str(tmp_path / "pairs.jsonl"),),
        target_field="target",
        folder=tmp_path / "out",
        tokenizer=TokenizerConfig(kind="bytes"),
        validation_fraction=0.0,
    )
    prepare(config)
    tokenizer, length = load_tokenizer(tmp_path / "out" / "tokenizer"), 32
    joined = JoinedPairs(open_shards(tmp_path / "out"), tokenizer, length, shuffle=False)
    (batch,) = joined.sweep(40)
    for row, (source, target) in enumerate(pairs):
        answer = [*tokenizer.encode(target), tokenizer.end]
        prompt = [*tokenizer.encode(source), tokenizer.end][-(length + 1 - len(answer)) :]
        whole, count = prompt + answer, len(prompt) + len(answer) - 1
        assert batch.lengths[row] == count
        assert batch.tokens[row, :count].tolist() == whole[:-1]
        assert batch.targets[row, : len(prompt) - 1].tolist() == [IGNORE] * (len(prompt) - 1)
        assert batch.targets[row, len(prompt) - 1 : count].tolist() == answer
        assert (batch.targets[row, count:] == IGNORE).all()
    assert batch.documents is None  # the target attends to the source
    assert isinstance(dataset(ObjectiveConfig(), open_shards(tmp_path / "out"), tokenizer, 32, seed=0), JoinedPairs)
