"""Both engines against the plain model, and the CPU engine's promises: exact, independent of company, packed once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from plume.config import EngineConfig, ModelConfig, UserError
from plume.generate import opening
from plume.generate.cpu import forward
from plume.generate.cpu.engine import CpuEngine
from plume.generate.cpu.pack import float_panels, int8_panels, pack, place_for, read, write
from plume.generate.engine import Feed
from plume.generate.lm import LM
from plume.generate.torch_engine import TorchEngine
from plume.heads import Model
from plume.weights import read_tensors, save_model

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "gpt2": {},
    "gpt1": {"norm": "post"},
    "gpt3": {"band": 7},
    "odd sizes": {"width": 60, "heads": 3, "hidden": 100, "vocab_size": 131},
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


@pytest.mark.parametrize("precision", ["float32", "int8"])
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
    for slot in range(5):
        engine.rewind(slot, 0)
    for i in range(40):
        feeds = [Feed(slot, text[i : i + 1]) for slot, text in enumerate(texts) if i < len(text)]
        rows = engine.step(feeds)
        for feed, row in zip(feeds, rows, strict=True):
            assert (row == expected[feed.slot][i]).all()
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


def test_int8_hardly_changes_perplexity(trained, tokenizer, training_text):
    """The bar of half a percent, and how often the greedy token stays the same."""
    tokens = tokenizer.encode(training_text)[: 64 * 40]
    windows = [tokens[i : i + 64] for i in range(0, len(tokens), 64)]
    losses, choices = {}, {}
    for precision in ("float32", "int8"):
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
    assert (choices["int8"] == choices["float32"]).float().mean() > 0.97


def test_three_bytes_are_as_good_as_float32(random_model):
    """What the packed weights lose is lost in the sums: hardly further from the exact logits than torch in float32."""
    model = random_model(width=256, layers=4, heads=4).eval()
    tokens = some_tokens(model, 60)
    engine = CpuEngine(pack(model, "float32"), threads=2)
    ours = engine.step([Feed(0, tokens, len(tokens))]).astype(np.float64)
    engine.close()
    theirs = reference(model, tokens).astype(np.float64)
    exact = reference(model.double(), tokens)
    assert exact.dtype == np.float64
    assert np.square(ours - exact).mean() ** 0.5 < 2.5 * np.square(theirs - exact).mean() ** 0.5


def test_float_weights_keep_24_bits_of_their_rows_largest():
    """Read back by hand from the packed form; a row of bfloat16 numbers and a row of zeros are exact."""
    weight = np.random.default_rng(0).normal(size=(70, 130)).astype(np.float32)
    weight[3] = torch.from_numpy(weight[3]).bfloat16().float().numpy()
    weight[4] = 0
    weight[5, :] = np.finfo(np.float32).max
    block = float_panels(weight).reshape(4, 128 + 130 * 96)
    for row in range(70):
        panel = block[row // 32]
        scale = panel[:128].view(np.float32)[row % 32].astype(np.float64)
        columns = panel[128:].reshape(130, 96)
        high = np.ascontiguousarray(columns[:, :64]).view(np.int16)[:, row % 32].astype(np.int64)
        found = (high * 256 + columns[:, 64 + row % 32]) * scale
        bound = np.abs(weight[row]).max().astype(np.float64) * 2.0**-23
        assert np.abs(found - weight[row]).max() <= (0 if row in (3, 4) else bound)


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


def test_packed_weights_are_written_once_and_mapped(trained_folder, tmp_path, monkeypatch):
    first = opening.packed_weights(trained_folder, "int8")
    path = place_for(trained_folder, "int8")[0]
    assert path.is_file()
    monkeypatch.setattr(opening, "load_model", lambda _: pytest.fail("packed weights should have been used"))
    second = opening.packed_weights(trained_folder, "int8")
    assert isinstance(second.block, np.memmap)
    assert (first.block == second.block).all() and (first.offsets == second.offsets).all()


def test_damaged_packed_weights_are_not_used(trained, tmp_path):
    packed = pack(trained, "float32")
    path = tmp_path / "packed.bin"
    write(packed, path)
    assert read(path) is not None
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-100])
    assert read(path) is None
    path.write_bytes(b"something else")
    assert read(path) is None


def test_changed_weights_are_packed_anew(trained_folder):
    before = place_for(trained_folder, "int8")
    os.utime(trained_folder / "model.safetensors")
    assert place_for(trained_folder, "int8") != before


def test_second_start_needs_no_torch(trained_folder):
    opening.packed_weights(trained_folder, "int8")
    code = (
        "import sys; from plume.generate.lm import load;"
        f"lm = load({str(trained_folder)!r}, precision='int8', threads=2);"
        "print(lm.generate('def ', max_new_tokens=3, seed=1).text, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("False")


@pytest.mark.parametrize(
    ("fields", "wanted", "words"),
    [
        ({"norm": "pre", "embed_norm": True}, {"engine": "cpu"}, "embeddings"),
        ({"causal": False}, {"precision": "int8"}, "next token"),
    ],
)
def test_cpu_engine_says_what_it_cannot_do(random_model, tokenizer, fields, wanted, words):
    with pytest.raises(UserError, match=words):
        LM(None, tokenizer, EngineConfig(**wanted), random_model(**fields)).engine  # noqa: B018


def test_wrong_engine_options_are_named():
    for fields in ({"threads": 0}, {"slots": 0}, {"engine": "torch", "precision": "int8"}):
        with pytest.raises(UserError, match=next(iter(fields))):
            EngineConfig(**fields)
    model = Model(ModelConfig(vocab_size=8, context=4, layers=1, heads=1, width=8))
    with pytest.raises(UserError, match="device='nonsense'"):
        opening.torch_engine(model, EngineConfig(device="nonsense"))


def test_ctrl_c_during_a_step_leaves_the_threads_together(random_model, monkeypatch):
    """The interrupt comes when the compiled step has ended and before Python has taken what it returned."""
    model = random_model()
    engine, tokens = CpuEngine(pack(model, "float32"), threads=2), some_tokens(model, 30)
    lead = forward.lead

    def pressed(*given):
        lead(*given)
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(forward, "lead", pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.step([Feed(0, tokens[:20])])
        monkeypatch.setattr(forward, "lead", lead)
        engine.rewind(0, 0)
        for n in range(1, 30, 3):
            row = engine.step([Feed(0, tokens[engine.length(0) : n])])[0]
            np.testing.assert_allclose(row, reference(model, tokens[:n])[-1], atol=1e-4)
        engine.rewind(0, 0)
    engine.close()


def test_packed_weights_follow_the_files_they_come_from(random_model, tokenizer, tmp_path):
    folder = save_model(random_model(), tmp_path / "model", tokenizer=tokenizer)
    torch.save(read_tensors(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    before = place_for(folder, "int8")
    torch.save({n: 2 * t for n, t in torch.load(folder / "pytorch_model.bin").items()}, folder / "pytorch_model.bin")
    assert not set(place_for(folder, "int8")) & set(before)


@pytest.mark.slow
def test_machine_code_on_disk_is_made_anew_when_anything_it_calls_has_changed(tmp_path):
    """numba by itself looks at the file of the outermost function only; both files keep their times here."""
    package = tmp_path / "plume"
    shutil.copytree(ROOT / "plume", package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    code = """
import numpy as np
from plume.generate.cpu import arithmetic
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
    lanes = package / "generate" / "cpu" / "lanes.py"
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
from plume.heads import Model
from plume.generate.cpu.engine import CpuEngine
from plume.generate.engine import Feed
from plume.generate.cpu.pack import pack
torch.manual_seed(0)
model = Model(ModelConfig(vocab_size=50, context=16, layers=1, heads=2, width=64)).eval()
tokens = list(range(12))
with torch.inference_mode():
    expected = model(torch.tensor([tokens]))[0].numpy()
found = {{}}
for precision in ("float32", "int8"):
    engine = CpuEngine(pack(model, precision), threads=2)
    found[precision] = float(np.abs(engine.step([Feed(0, tokens, 12)]) - expected).max() / expected.std())
print(json.dumps(found))
"""
    machine = "x86-64-v2" if "-avx2" in features else "x86-64-v3"
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": machine, "NUMBA_CPU_FEATURES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    found = json.loads(result.stdout)
    assert found["float32"] < 1e-4
    assert found["int8"] < 0.1
