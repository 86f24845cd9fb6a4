"""Both engines against the plain model, and the CPU engine's promises: exact, independent of company, packed once."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import types
from waiting import wait_until

from plume.config import EngineConfig, ModelConfig, UserError
from plume.hf import read_tensors, save_model
from plume.inference import engine_factory
from plume.inference.cpu import cpu_engine, forward
from plume.inference.cpu.cpu_engine import CpuEngine
from plume.inference.cpu.lanes import compiled, entry
from plume.inference.cpu.pack import (
    cache_paths,
    entry_sizes,
    layout,
    pack,
    read,
    source_hash,
    user_key,
    write,
)
from plume.inference.cpu.panels import int8_panels
from plume.inference.engine import Feed
from plume.inference.torch_engine import TorchEngine
from plume.lm import LM
from plume.model.heads import Model
from plume.util.devices import cores, default_threads

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "gpt2": {},
    "gpt1": {"norm": "post"},
    "gpt3": {"band": 7},
    "odd sizes": {"width": 60, "heads": 3, "mlp_width": 100, "vocab_size": 131},
    "exact gelu": {"activation": "gelu"},
    "sinusoids": {"norm": "post", "positions": "sinusoidal", "embed_scale": True, "activation": "relu"},
    "no attention bias": {"attention_bias": False},
    "wide heads": {"width": 96, "heads": 1},
    "embedding norm": {"norm": "post", "embed_norm": True, "segments": 1},
    "padded table": {"vocab_size": 250, "vocab_multiple": 64},
}


def reference(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0].numpy()


def some_tokens(model, count, seed=0):
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, count).tolist()


@pytest.fixture(params=["cpu", "torch"])
def open_engine(request):
    """Makes an engine of either kind."""
    opened = []

    def make(model, **fields):
        kind = CpuEngine(pack(model, "float32"), threads=2, **fields) if request.param == "cpu" else None
        opened.append(TorchEngine(model, **fields) if kind is None else kind)
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_engine_gives_the_models_logits(open_engine, random_model, shape):
    model = random_model(**SHAPES[shape])
    tokens = some_tokens(model, 50)
    expected = reference(model, tokens)
    engine = open_engine(model, slots=2)
    whole = engine.step([Feed(0, tokens, len(tokens))]).copy()
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    singles = [engine.step([Feed(1, [token])])[0].copy() for token in tokens]
    np.testing.assert_allclose(singles, expected, atol=1e-4)


@pytest.mark.parametrize("shape", ["gpt2", "gpt1", "gpt3"])
def test_cpu_engine_equals_torch_over_200_steps(random_model, shape):
    model = random_model(**SHAPES[shape], context=256)
    tokens = some_tokens(model, 232)
    ours, theirs = CpuEngine(pack(model, "float32")), TorchEngine(model)
    for engine in (ours, theirs):
        engine.step([Feed(0, tokens[:32])])
    worst = 0.0
    for token in tokens[32:]:
        difference = ours.step([Feed(0, [token])]) - theirs.step([Feed(0, [token])])
        worst = max(worst, float(np.abs(difference).max()))
    ours.close()
    assert worst < 1e-4


@pytest.mark.parametrize("precision", ["float32", "float24", "int8", "int4"])
def test_company_and_chunks_change_no_bit(random_model, precision):
    """Alone or in a batch, whole or token by token, on one thread or three: the same bits."""
    model = random_model(band=9)
    texts = [some_tokens(model, n, seed=n) for n in (40, 3, 17, 28, 33)]
    alone = CpuEngine(pack(model, precision), slots=1, threads=1)
    expected = []
    for text in texts:
        expected.append(alone.step([Feed(0, text, len(text))]).copy())
        alone.rewind(0, 0)
    alone.close()
    engine = CpuEngine(pack(model, precision), slots=5, threads=3, rows=24)  # prompts are cut into parts of 24 rows
    together = engine.step([Feed(slot, text, len(text)) for slot, text in enumerate(texts)])
    assert (together == np.concatenate(expected)).all()
    at_once = CpuEngine(pack(model, precision), slots=5, threads=1)  # so many rows that they are read some at a time
    together = at_once.step([Feed(slot, text, len(text)) for slot, text in enumerate(texts)])
    assert (together == np.concatenate(expected)).all()
    at_once.close()
    for slot in range(5):
        engine.rewind(slot, 0)
    for i in range(40):
        feeds = [Feed(slot, text[i : i + 1]) for slot, text in enumerate(texts) if i < len(text)]
        rows = engine.step(feeds)
        for feed, row in zip(feeds, rows, strict=True):
            assert (row == expected[feed.slot][i]).all()
    engine.close()


def test_a_band_far_from_the_start_changes_no_bit(random_model):
    """Sums over keys begin at the same key for a row alone and among its neighbours, some of which see earlier keys."""
    model = random_model(band=70, context=160)
    text = some_tokens(model, 150)
    engine = CpuEngine(pack(model, "float32"), slots=2, threads=1)
    whole = engine.step([Feed(0, text, len(text))]).copy()
    assert all((engine.step([Feed(1, [token])])[0] == row).all() for token, row in zip(text, whole, strict=True))
    engine.close()


def test_a_batch_on_torch_is_its_members(random_model):
    model = random_model()
    texts = [some_tokens(model, n, seed=n) for n in (40, 3, 17)]
    engine = TorchEngine(model, slots=3)
    engine.step([Feed(slot, text[:-2]) for slot, text in enumerate(texts)])
    for back in (-2, -1):
        rows = engine.step([Feed(slot, [text[back]]) for slot, text in enumerate(texts)])
        for text, row in zip(texts, rows, strict=True):
            np.testing.assert_allclose(row, reference(model, text)[back], atol=1e-4)


def test_slots_can_be_copied_and_rewound(open_engine, random_model):
    model = random_model()
    engine = open_engine(model, slots=3)
    tokens = some_tokens(model, 40)
    engine.step([Feed(0, tokens)])
    engine.copy(0, 2, 23)
    engine.rewind(0, 11)
    rows = engine.step([Feed(2, tokens[23:]), Feed(0, tokens[11:20])])
    expected = reference(model, tokens)
    np.testing.assert_allclose(rows, expected[[39, 19]], atol=1e-4)
    assert [engine.length(slot) for slot in range(3)] == [20, 0, 40]


def test_int8_and_int4_hardly_change_perplexity(trained, tokenizer, training_text):
    """The bars of half a percent and of two, and how often the greedy token stays the same."""
    tokens = tokenizer.encode(training_text)[: 64 * 40]
    windows = [tokens[i : i + 64] for i in range(0, len(tokens), 64)]
    losses, choices = {}, {}
    for precision in ("float32", "int8", "int4"):
        engine = CpuEngine(pack(trained, precision), threads=2)
        total, best = 0.0, []
        for window in windows:
            logits = torch.from_numpy(engine.step([Feed(0, window[:-1], len(window) - 1)]).copy())
            total += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:])).item()
            best.append(logits.argmax(-1))
            engine.rewind(0, 0)
        losses[precision], choices[precision] = total / len(windows), torch.cat(best)
        engine.close()
    assert abs(np.exp(losses["int8"] - losses["float32"]) - 1) < 0.005
    assert np.exp(losses["int4"] - losses["float32"]) - 1 < 0.02
    assert (choices["int8"] == choices["float32"]).float().mean() > 0.97


def test_int8_error_is_that_of_its_codes(random_model):
    """Weights read back from the packed form are within half a step of their group's scale."""
    weight = np.random.default_rng(0).normal(size=(70, 130)).astype(np.float32)
    block = int8_panels(weight).reshape(4, 3, 2 * 32 + 64 * 32)
    for row, column in [(0, 0), (69, 129), (33, 64), (5, 127)]:
        part = block[row // 32, column // 64]
        bits = part[: 2 * 32].view(np.uint16)[row % 32].astype(np.uint32) << 16
        scale = bits.view(np.float32) if bits.shape else np.array([bits], np.uint32).view(np.float32)[0]
        code = part[2 * 32 :].reshape(16, 32, 4)[column % 64 // 4, row % 32, column % 4]
        assert abs((int(code) - 128) * float(scale) - weight[row, column]) <= float(scale) * 0.501


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A user's cache, and the key in it, of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plume"


def test_packed_weights_are_written_once_and_read_again(trained_folder, own_cache, monkeypatch):
    first = engine_factory.packed_weights(trained_folder, "int8")
    path = cache_paths(trained_folder, "int8", source_hash(trained_folder))[0]
    assert path.is_file()
    monkeypatch.setattr(engine_factory, "load_model", lambda _: pytest.fail("packed weights should have been used"))
    second = engine_factory.packed_weights(trained_folder, "int8")
    assert not isinstance(second.block, np.memmap), "a copy, which nobody can change behind the check"
    assert (first.block == second.block).all() and (first.offsets == second.offsets).all()


@pytest.mark.parametrize(
    "fields", [{}, {"norm": "post"}, {"norm": "post", "embed_norm": True}, {"width": 40}, {"tie_embeddings": False}]
)
@pytest.mark.parametrize("precision", ["float32", "float24", "int8", "int4"])
def test_sizes_follow_from_the_config(random_model, fields, precision):
    packed = pack(random_model(**fields), precision)
    offsets, size = layout(entry_sizes(packed.config, precision))
    assert (offsets == packed.offsets).all() and size == packed.size


def damaged(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One random change of a file: bits, ranges, lengths, header fields, parts of another valid file."""
    at, until = sorted(draw.randrange(len(data)) for _ in range(2))
    match draw.randrange(8):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + draw.randbytes(until - at) + data[until:]
        case 2:
            return data[:at]
        case 3:
            return data + draw.randbytes(draw.randint(1, 5000))
        case 4:
            return data[:at] + other[at:until] + data[until:]
        case 5:
            return other[:4096] + data[4096:]
        case 6:  # two parts change places
            half = (until - at) // 2
            return data[:at] + data[at + half : at + 2 * half] + data[at : at + half] + data[at + 2 * half :]
        case _:
            head = json.loads(data[:4096])
            head[draw.choice(sorted(head))] = draw.choice([0, -1, None, "", 10**30, [], "a" * 64])
            return json.dumps(head).encode().ljust(4096) + data[4096:]


def check_damaged_caches(random_model, tokenizer, folder, count):
    """Whatever happens to a cache, the weights that come out are those of the folder."""
    model, changed = (random_model(layers=1, width=32, heads=2, context=16) for _ in range(2))
    with torch.no_grad():
        changed.table.mul_(1.25)
    folder = save_model(model, folder, tokenizer=tokenizer)
    expected, key, source = engine_factory.packed_weights(folder, "int8"), user_key(), source_hash(folder)
    path = cache_paths(folder, "int8", source)[0]
    data = path.read_bytes()
    write(pack(changed, "int8"), path, "f" * 64, key)  # sealed with the right key, made from other weights
    other = path.read_bytes()
    draw, refused = random.Random(count), 0
    for _ in range(count):
        bad = damaged(data, other, draw)
        path.write_bytes(bad)
        found = read(path, model.config, "int8", source, key)
        refused += found is None
        assert found is None or (found.block == expected.block).all()
        assert found is not None or bad != data
    assert refused > 0.9 * count
    for bad in (damaged(data, other, draw), other, b"", b"\0" * len(data)):
        path.write_bytes(bad)
        assert (engine_factory.packed_weights(folder, "int8").block == expected.block).all()
        assert path.read_bytes() == data, "packed anew"


def test_a_damaged_cache_never_changes_the_weights(random_model, tokenizer, tmp_path, own_cache):
    check_damaged_caches(random_model, tokenizer, tmp_path / "model", 1_000)


@pytest.mark.slow
def test_ten_thousand_damaged_caches_never_change_the_weights(random_model, tokenizer, tmp_path, own_cache):
    check_damaged_caches(random_model, tokenizer, tmp_path / "model", 10_000)


def test_a_cache_that_came_with_a_folder_is_not_trusted(random_model, tokenizer, tmp_path, own_cache, monkeypatch):
    """Well made, of the right source, but sealed with another user's key."""
    folder = save_model(random_model(), tmp_path / "model", tokenizer=tokenizer)
    expected = engine_factory.packed_weights(folder, "int8").block
    source = source_hash(folder)
    forged = pack(random_model(layers=1), "int8")
    path = cache_paths(folder, "int8", source)[0]
    with torch.no_grad():
        other = random_model()
        other.table.mul_(-1)
    forged = pack(other, "int8")
    assert forged.size == expected.nbytes
    write(forged, path, source, b"k" * 32)
    assert (engine_factory.packed_weights(folder, "int8").block == expected).all()
    (own_cache / "key").chmod(0o666)  # a key that others may write is nobody's
    assert user_key() is None
    assert (engine_factory.packed_weights(folder, "int8").block == expected).all()


def test_weights_of_the_same_size_and_time_are_noticed(random_model, tokenizer, tmp_path, own_cache):
    folder = save_model(random_model(), tmp_path / "model", tokenizer=tokenizer)
    weights = folder / "model.safetensors"
    before, first = weights.stat(), engine_factory.packed_weights(folder, "float32").block.copy()
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (engine_factory.packed_weights(folder, "float32").block != first).any()
    assert len(list((folder / ".plume").iterdir())) == 1, "the older file is removed"


@pytest.mark.parametrize("wanted", [{"engine": "cpu"}, {"engine": "torch"}, {"precision": "int8"}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_refused_when_they_are_opened(random_model, tokenizer, tmp_path, own_cache, wanted, value):
    model = random_model()
    with torch.no_grad():
        model.body.blocks[1].mlp.inner.up.weight[3, 4] = value
    folder = save_model(model, tmp_path / "model", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"h.1.mlp.c_fc.weight holds NaN or infinity"):
        LM(folder, tokenizer, EngineConfig(**wanted)).generate("a")
    with pytest.raises(UserError, match=r"NaN or infinity \(body.blocks.1.mlp.inner.up.weight\)"):
        LM(None, tokenizer, EngineConfig(**wanted), model).generate("a")


def test_second_start_needs_no_torch(trained_folder):
    engine_factory.packed_weights(trained_folder, "int8")
    code = (
        "import sys; from plume.lm import load;"
        f"lm = load({str(trained_folder)!r}, precision='int8', threads=2);"
        "print(lm.generate('def ', max_new_tokens=3, seed=1).text, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False")


@pytest.mark.parametrize(
    ("fields", "wanted", "words"),
    [
        ({"norm": "pre", "embed_norm": True}, {"engine": "cpu"}, "embeddings"),
        ({"causal": False, "decoder_layers": 1}, {"precision": "int8"}, "encoder-decoder"),
    ],
)
def test_cpu_engine_says_what_it_cannot_do(random_model, tokenizer, fields, wanted, words):
    with pytest.raises(UserError, match=words):
        LM(None, tokenizer, EngineConfig(**wanted), random_model(**fields)).engine  # noqa: B018


def test_wrong_engine_options_are_named():
    for fields in ({"threads": 0}, {"slots": 0}, {"engine": "torch", "precision": "int8"}):
        with pytest.raises(UserError, match=next(iter(fields))):
            EngineConfig(**fields)
    for fields in ({"compile": True, "engine": "cpu"}, {"device": "cuda", "precision": "int8"}):
        with pytest.raises(UserError, match=f"{next(iter(fields))}=.* is for torch; engine=torch precision=float32"):
            EngineConfig(**fields)
    model = Model(ModelConfig(vocab_size=8, context=4, layers=1, heads=1, width=8))
    assert not engine_factory.wants_cpu(model.config, EngineConfig(compile=True))
    with pytest.raises(UserError, match="device='nonsense'"):
        engine_factory.torch_engine(model, EngineConfig(device="nonsense"))


def test_ctrl_c_during_a_step_leaves_the_threads_together(random_model, monkeypatch):
    """The interrupt comes when the compiled step has ended and before Python has taken what it returned."""
    model = random_model()
    engine, tokens = CpuEngine(pack(model, "float32"), threads=2), some_tokens(model, 30)
    work_on = forward.work_on

    def pressed(*given):
        found = work_on(*given)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return found

    for _ in range(3):
        monkeypatch.setattr(forward, "work_on", pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.step([Feed(0, tokens[:20])])
        monkeypatch.setattr(forward, "work_on", work_on)
        engine.rewind(0, 0)
        for n in range(1, 30, 3):
            row = engine.step([Feed(0, tokens[engine.length(0) : n])])[0]
            np.testing.assert_allclose(row, reference(model, tokens[:n])[-1], atol=1e-4)
        engine.rewind(0, 0)
    engine.close()


def test_threads_follow_the_environment(random_model, monkeypatch):
    packed = pack(random_model(), "int8")
    for given, expected in (("1", 1), ("3,2", 3), ("some", cores()), ("0", cores())):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert default_threads() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for threads, expected in ((None, 1), (2, 2)):
        engine = CpuEngine(packed, threads=threads)
        assert engine.threads == expected
        assert f", {expected} thread{'s' if expected > 1 else ''}, " in engine.name
        engine.close()


def test_engines_take_turns(random_model, monkeypatch):
    """Two models in two threads: each computes what it computes alone, and one that waits keeps no core awake."""
    monkeypatch.setattr(cpu_engine, "PATIENCE", 1 << 60)  # a helper that is not sent to sleep never does
    models = [random_model(), random_model(layers=1, activation="relu")]
    tokens = list(range(5, 45))
    engines = [CpuEngine(pack(model, "float32"), threads=2) for model in models]

    def run(engine):
        rows = []
        for n in range(1, 40, 3):
            engine.rewind(0, 0)
            rows.append(engine.step([Feed(0, tokens[:n])])[0].copy())
        return rows

    alone = [run(engine) for engine in engines]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, engines))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    run(engines[0])
    run(engines[1])
    wait_until(lambda: engines[0]._sleeping == 1)
    for engine in engines:
        engine.close()


class Sleeper:
    """Stands for an engine whose steps take two milliseconds."""

    def __init__(self):
        self.rests = 0

    def rest(self):
        self.rests += 1


def test_an_engine_keeps_its_turn_for_some_steps():
    """To wake another one's threads at every step cost a quarter of the rate of two models; none starves."""
    turns, steps, computing = cpu_engine.Turns(), list[Sleeper](), list[Sleeper]()
    engines = Sleeper(), Sleeper()

    def work(engine):
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            with turns.of(engine):
                computing.append(engine)
                assert len(computing) == 1
                time.sleep(0.002)
                steps.append(computing.pop())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, engines))
    switches = sum(one is not other for one, other in itertools.pairwise(steps))
    assert 2 < switches < len(steps) / 3 and abs(engines[0].rests + engines[1].rests - switches) <= 1
    assert all(steps.count(engine) > len(steps) / 4 for engine in engines)
    began = time.monotonic()
    with turns.of(engines[0] if steps[-1] is engines[1] else engines[1]):
        assert time.monotonic() - began < 0.5  # the other one does not come back, and is not waited for


def test_packed_weights_follow_the_files_they_come_from(random_model, tokenizer, tmp_path):
    folder = save_model(random_model(), tmp_path / "model", tokenizer=tokenizer)
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    before = source_hash(folder)
    torch.save({n: 2 * t for n, t in torch.load(folder / "pytorch_model.bin").items()}, folder / "pytorch_model.bin")
    assert source_hash(folder) != before


@compiled
def _sum(x: int, n: int) -> int:
    return x + n


@entry
def _sums(x: int) -> int:
    i = 0
    while i < 3:
        x = _sum(x, i)
        i += 1
    return _sum(x, 5)


def test_a_function_is_compiled_once_for_constants_and_variables():
    """numba would compile it for 0, for 5 and for any number; the code on disk is made anew with its sources."""
    assert _sums(1) == 9
    assert _sum.signatures in ([], [(types.int64, types.int64)])  # none where the outer one was loaded


@pytest.mark.slow
def test_machine_code_on_disk_is_made_anew_when_anything_it_calls_has_changed(tmp_path):
    """numba by itself looks at the file of the outermost function only; both files keep their times here."""
    package = tmp_path / "plume"
    shutil.copytree(ROOT / "plume", package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    code = """
import numpy as np
from plume.inference.cpu import arithmetic
x = np.array([-1.0, 2.0], np.float32)
arithmetic.activate(x, 2)
print(arithmetic.__file__, x.tolist(), sum(arithmetic.activate.stats.cache_hits.values()))
"""

    def run():
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        file, rest = done.stdout.strip().split(" ", 1)
        assert Path(file).is_relative_to(tmp_path)
        return rest

    assert run() == "[0.0, 2.0] 0"
    assert run() == "[0.0, 2.0] 1"
    lanes = package / "inference" / "cpu" / "lanes.py"
    before = lanes.stat()
    lanes.write_text(lanes.read_text(encoding="utf-8") + "# another day\n", encoding="utf-8")
    os.utime(lanes, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run() == "[0.0, 2.0] 0"


@pytest.mark.slow
@pytest.mark.parametrize("features", ["-avx512vnni,-avx512f,-avx512bw,-avx512vl", "-avx2,-avx512f,-avx512vnni"])
def test_kernels_for_older_machines_give_the_same(features, tmp_path):
    """The code paths for other instruction sets, compiled with these features switched off."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("needs an x86-64 machine with AVX2 to switch it off")
    code = f"""
import json, llvmlite.binding as llvm
known = llvm.get_host_cpu_features()
off = {[name[1:] for name in features.split(",")]!r}
llvm.get_host_cpu_features = lambda: type(known)({{k: v and k not in off for k, v in known.items()}})
import numpy as np, torch
from plume.config import ModelConfig
from plume.model.heads import Model
from plume.inference.cpu.cpu_engine import CpuEngine
from plume.inference.engine import Feed
from plume.inference.cpu.pack import pack
torch.manual_seed(0)
model = Model(ModelConfig(vocab_size=50, context=16, layers=1, heads=2, width=64)).eval()
tokens = list(range(12))
with torch.inference_mode():
    expected = model(torch.tensor([tokens]))[0].numpy()
found = {{}}
for precision in ("float32", "float24", "int8", "int4"):
    engine = CpuEngine(pack(model, precision), threads=2)
    found[precision] = float(np.abs(engine.step([Feed(0, tokens, 12)]) - expected).max() / expected.std())
print(json.dumps(found))
"""
    machine = "x86-64-v2" if "-avx2" in features else "x86-64-v3"
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": machine, "NUMBA_CPU_FEATURES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    found = json.loads(result.stdout)
    assert max(found["float32"], found["float24"]) < 1e-4
    assert found["int8"] < 0.1
    assert found["int4"] < 0.6


def test_an_engine_opens_while_another_process_compiles(monkeypatch, tmp_path):
    """What this process has compiled before needs no lock: a server opens checkpoints beside one that starts."""
    from filelock import FileLock, Timeout

    from plume.inference.cpu import lanes

    monkeypatch.setattr(lanes, "READY", set())
    monkeypatch.setattr(lanes, "compile_lock", lambda: FileLock(tmp_path / "lock", timeout=0))
    monkeypatch.setattr(lanes, "suppress", lambda *kinds: nullcontext())  # which would compile without the lock
    with lanes.announced_compilation("a test"), pytest.raises(Timeout):
        FileLock(tmp_path / "lock", timeout=0).acquire()  # held while it compiles
    with FileLock(tmp_path / "lock"):  # as another process holds it
        with lanes.announced_compilation("a test"):
            pass
        with pytest.raises(Timeout), lanes.announced_compilation("another test"):
            pass
