"""What each precision of the CPU engine keeps, against float64 and against weights read back by hand."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from plume.config import EngineConfig, UserError
from plume.hf import save_model
from plume.inference import engine_factory
from plume.inference.cpu import arithmetic
from plume.inference.cpu.cpu_engine import CpuEngine
from plume.inference.cpu.four_bits import iq4_blocks
from plume.inference.cpu.pack import aligned, pack
from plume.inference.cpu.panels import CLOSE, KINDS, LEVELS, float24_holds, float24_panels, float32_panels, panels
from plume.inference.engine import Feed
from plume.lm import LM

TOKENS = np.random.default_rng(0).integers(0, 266, 60).tolist()


def spread_rows(model):
    """The same function, with columns 10^-3 to 10^3 times as large behind norms whose gains are as much smaller."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.body.blocks:
            attention, mlp = block.attn.inner, block.mlp.inner
            for norm, products in (
                (block.attn.norm, (attention.q, attention.k, attention.v)),
                (block.mlp.norm, (mlp.up,)),
            ):
                factors = 10 ** (6 * torch.rand(norm.weight.shape, generator=draw) - 3)
                norm.weight.div_(factors)
                norm.bias.div_(factors)
                for product in products:
                    product.weight.mul_(factors)
    return model


def engine_logits(packed, tokens=TOKENS, **options):
    engine = CpuEngine(packed, threads=2, **options)
    rows = engine.step([Feed(0, tokens, len(tokens))]).astype(np.float64)
    engine.close()
    return rows


def torch_logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0].double().numpy()


@pytest.fixture(scope="module", params=["plain", "spread"])
def large(request, random_model):
    """A model, its float32 logits by torch, and the exact ones."""
    model = random_model(width=256, layers=4, heads=4, norm_eps=1e-5)
    model = spread_rows(model) if request.param == "spread" else model
    theirs, exact = torch_logits(model), torch_logits(model.double())
    return request.param, model.float(), theirs, exact


def test_float32_is_more_exact_than_torch(large):
    """Also where the weights of a row are spread over six orders of magnitude."""
    _, model, theirs, exact = large
    ours = engine_logits(pack(model, "float32"))
    assert np.abs(ours - exact).max() < np.abs(theirs - exact).max()
    assert np.square(ours - exact).mean() ** 0.5 < 0.9 * np.square(theirs - exact).mean() ** 0.5


def test_auto_takes_float24_only_where_it_is_as_exact(large):
    kind, model, theirs, exact = large
    packed = pack(model, "auto")
    assert packed.precision == {"plain": "float24", "spread": "float32"}[kind]
    limit = 2.5 * np.square(theirs - exact).mean() ** 0.5
    assert np.square(engine_logits(packed) - exact).mean() ** 0.5 < limit
    if kind == "spread":  # the bound is needed
        assert np.square(engine_logits(pack(model, "float24")) - exact).mean() ** 0.5 > 100 * limit


def test_float32_keeps_every_bit():
    weight = np.random.default_rng(0).normal(size=(70, 130)).astype(np.float32)
    weight[:, ::3] *= np.float32(1e-30)
    weight[5] = np.finfo(np.float32).max
    block = float32_panels(weight).view(np.float32).reshape(4, 131, 32)
    assert (block[:, 0] == 1).all()
    assert (block[:, 1:].swapaxes(1, 2).reshape(128, 130)[:70] == weight).all()


def test_float24_keeps_24_bits_of_its_rows_largest():
    """Read back by hand from the packed form; a row of bfloat16 numbers and a row of zeros are exact."""
    weight = np.random.default_rng(0).normal(size=(70, 130)).astype(np.float32)
    weight[3] = torch.from_numpy(weight[3]).bfloat16().float().numpy()
    weight[4] = 0
    weight[5, :] = np.finfo(np.float32).max
    block = float24_panels(weight).reshape(4, 128 + 130 * 96)
    for row in range(70):
        panel = block[row // 32]
        scale = panel[:128].view(np.float32)[row % 32].astype(np.float64)
        columns = panel[128:].reshape(130, 96)
        high = np.ascontiguousarray(columns[:, :64]).view(np.int16)[:, row % 32].astype(np.int64)
        found = (high * 256 + columns[:, 64 + row % 32]) * scale
        bound = np.abs(weight[row]).max().astype(np.float64) * 2.0**-23
        assert np.abs(found - weight[row]).max() <= (0 if row in (3, 4) else bound)


def test_float24_holds_up_to_its_bound():
    weight = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    assert float24_holds(weight)
    weight[3] = 0
    assert float24_holds(weight)
    weight[5, 7] = np.median(np.abs(weight[5])) * 2.0**24 * CLOSE * 4
    assert not float24_holds(weight)


@pytest.fixture(scope="module")
def low_weight():
    """A matrix, and what GGUF's own package reads out of its blocks of 32."""
    gguf = pytest.importorskip("gguf", reason="the gguf package reads IQ4_NL")
    weight = np.random.default_rng(0).normal(size=(192, 320)).astype(np.float32) * np.float32(0.02)
    weight[7] = 0
    weight[8, 100:] *= 50
    return weight, gguf.quants.dequantize(iq4_blocks(weight), gguf.GGMLQuantizationType.IQ4_NL)


def in_memory(data):
    block = aligned(data.nbytes)
    block[:] = data.reshape(-1).view(np.uint8)
    return block


def test_int4_is_the_nearest_of_its_levels(low_weight):
    """As read by another's code; less is lost than by GGUF's plain four bits, Q4_0."""
    import gguf

    weight, expected = low_weight
    block, row, found = in_memory(panels(weight, "int4")), aligned(320, np.float32), []
    for i in range(192):
        arithmetic.gather(KINDS["int4"], block.ctypes.data, 320, i, row.ctypes.data)
        found.append(row.copy())
    assert (np.stack(found) == expected).all()
    kind = gguf.GGMLQuantizationType.Q4_0
    plain = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    assert np.square(expected - weight).sum() < 0.8 * np.square(plain - weight).sum()


def test_scales_of_int4_have_about_the_smallest_squared_error(low_weight):
    """Of each group, beside 200 scales around the one at which its largest weight is the outermost level."""
    weight, found = low_weight
    groups, levels = weight.reshape(-1, 32), LEVELS.astype(np.float32)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    best = np.full(len(groups), np.inf)
    for outermost in np.concatenate([np.linspace(-140, -80, 100), np.linspace(80, 140, 100)]):
        near = groups * (outermost / np.where(largest == 0, 1, largest))
        rounded = levels[np.abs(near[..., None] - levels).argmin(axis=-1)] * largest / outermost
        best = np.minimum(best, np.square(rounded - groups).sum(axis=1))
    assert np.square(found - weight).sum() < 1.01 * best.sum()


def products(precision, weight, values, bias):
    """Of a packed matrix (N, K) with rows of floats (M, K), as the engine computes them; and the rows as it rounds
    them."""
    (n, k), rows, depth = weight.shape, len(values), -(-weight.shape[1] // 64) * 64
    block, source, start = in_memory(panels(weight, precision)), in_memory(values), in_memory(bias)
    stride = depth * 5 // 4 + 64
    codes, out, memory = aligned(rows * stride), aligned(rows * n, np.float32), aligned(128 + depth * 128)
    for m in range(rows):
        at = codes.ctypes.data + m * stride
        arithmetic.quantise(source.ctypes.data + m * k * 4, k, at, depth, 0, depth // 64)
    whole = codes.reshape(rows, stride)[:, :depth].astype(np.int8).reshape(rows, depth // 64, 64)
    scales = np.ascontiguousarray(codes.reshape(rows, stride)[:, depth : depth + depth // 16]).view(np.float32)
    rounded = (whole * scales[:, :, None].astype(np.float64)).reshape(rows, depth)[:, :k]
    arithmetic.multiply(
        KINDS[precision], block.ctypes.data, depth, 0, n // 32, codes.ctypes.data, stride, rows, start.ctypes.data,
        out.ctypes.data, n * 4, memory.ctypes.data,
    )  # fmt: skip
    return out.reshape(rows, n), rounded


@pytest.mark.parametrize("rows", [1, 12, 29])
@pytest.mark.parametrize("columns", [3, 64, 130, 257])
def test_float32_products_of_any_number_of_columns(rows, columns):
    """Sums are made in blocks of columns, and some columns at a time: whatever is left over counts too."""
    draw = np.random.default_rng(columns)
    weight, values = draw.normal(size=(64, columns)), draw.normal(size=(rows, columns))
    weight, values, bias = (x.astype(np.float32) for x in (weight, values, draw.normal(size=64)))
    block, source, start = in_memory(panels(weight, "float32")), in_memory(values), in_memory(bias)
    out, memory = aligned(rows * 64, np.float32), aligned(128 + columns * 128)
    arithmetic.multiply(
        KINDS["float32"], block.ctypes.data, columns, 0, 2, source.ctypes.data, columns * 4, rows, start.ctypes.data,
        out.ctypes.data, 64 * 4, memory.ctypes.data,
    )  # fmt: skip
    expected = values.astype(np.float64) @ weight.T.astype(np.float64) + bias
    np.testing.assert_allclose(out.reshape(rows, 64), expected, atol=5e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
def test_int4_products_are_those_of_its_levels(low_weight, rows):
    """Against a product in float64 of weights and activations as they were rounded; few rows and many, unpacked."""
    _, weight = low_weight
    draw = np.random.default_rng(rows)
    values, bias = draw.normal(size=(rows, 320)).astype(np.float32), draw.normal(size=192).astype(np.float32)
    out, rounded = products("int4", low_weight[0], values, bias)
    assert np.abs(rounded - values).max() <= np.abs(values).max() / 127 * 1.001
    np.testing.assert_allclose(out, rounded @ weight.T.astype(np.float64) + bias, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 6, 13])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_sums_of_bytes_never_overflow(precision, rows):
    """The largest weights that the form has, times the largest activations, of one sign and of both: where products
    are summed in 16 bits, such pairs would pass their range."""
    k, draw = 130, np.random.default_rng(0)
    weight = np.where(draw.random((64, k)) < 0.5, -1, 1).astype(np.float32)
    weight[:8], weight[8:16] = 1, -1
    values = draw.normal(size=(rows, k)).astype(np.float32)
    values[0] = 3
    values[-1, ::2] *= -1
    values[rows // 2] = np.where(np.arange(k) % 64 < 2, 100, 1)
    out, rounded = products(precision, weight, values, np.zeros(64, np.float32))
    block, row, kept = in_memory(panels(weight, precision)), aligned(k, np.float32), []
    for i in range(64):
        arithmetic.gather(KINDS[precision], block.ctypes.data, k, i, row.ctypes.data)
        kept.append(row.copy())
    np.testing.assert_allclose(out, rounded @ np.stack(kept).T.astype(np.float64), rtol=1e-5, atol=1e-4)


def test_rounding_to_bytes_loses_little():
    """Normal numbers in groups of 64: less than 0.8 % of their size is lost, where seven bits would lose 1.2 %."""
    values = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    _, rounded = products("int8", np.zeros((64, 512), np.float32), values, np.zeros(64, np.float32))
    assert np.sqrt(np.square(rounded - values).mean() / np.square(values).mean()) < 0.008


def test_int4_engine_gives_the_logits_of_its_levels(random_model):
    """Every matrix replaced by what GGUF's package reads of it; activations are rounded to bytes, so not exactly."""
    gguf = pytest.importorskip("gguf", reason="the gguf package reads IQ4_NL")
    model = random_model()
    ours = engine_logits(pack(model, "int4"))
    whole = torch_logits(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "positions" not in name:
                blocks = iq4_blocks(weight.numpy())
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.IQ4_NL)))
    expected = torch_logits(model)
    near = np.square(ours - expected).mean() ** 0.5
    assert near < 0.02 * expected.std()
    assert near < 0.3 * np.square(ours - whole).mean() ** 0.5, "the weights' rounding is what shows"


@pytest.mark.parametrize("kept", ["body.embed.tokens.weight", "head.output.weight"])
def test_int4_keeps_eight_bits_of_output_weights_of_their_own_and_of_the_token_table_then(random_model, kept):
    """They are rounded to bytes at most, the rest as GGUF's package reads it."""
    gguf = pytest.importorskip("gguf", reason="the gguf package reads IQ4_NL")
    model = random_model(tie_embeddings=False)
    table, tables = model.get_parameter(kept), (model.body.embed.tokens.weight, model.head.output.weight)
    with torch.no_grad():
        tables[0].mul_(50)  # so that it is what hidden states are made of
    ours = engine_logits(pack(model, "int4"))

    def levels(weight):
        return torch.from_numpy(gguf.quants.dequantize(iq4_blocks(weight.numpy()), gguf.GGMLQuantizationType.IQ4_NL))

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "positions" not in name and all(weight is not each for each in tables):
                weight.copy_(levels(weight))
        whole_rows = torch_logits(model)
        table.copy_(levels(table))
    four_bit_rows = torch_logits(model)
    near, far = (np.square(ours - other).mean() ** 0.5 for other in (whole_rows, four_bit_rows))
    assert near < 0.02 * whole_rows.std() and near < 0.3 * far


def taken(array):
    """Bytes of memory behind an array, by the kernel's own account."""
    first, total, inside = array.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(part, 16) for part in found.groups())
            inside = low < first + array.nbytes and high > first
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what memory is taken")
def test_slots_take_the_memory_that_they_use(random_model):
    """64 slots of 1,024 tokens: next to nothing when they are opened, and with 32 tokens in each a small part."""
    engine = CpuEngine(pack(random_model(context=1024, width=256), "int8"), slots=64, threads=1)
    held = [engine._memory["keys"], engine._memory["values"]]
    whole = sum(array.nbytes for array in held)
    assert whole == 64 * engine.slot_bytes == 64 * 1024 * 2 * 2 * 256 * 4
    assert max(taken(array) for array in held) < 0.02 * whole  # the two may be one mapping
    for slot in range(64):
        engine.step([Feed(slot, TOKENS[:32])])
    assert max(taken(array) for array in held) < 0.1 * whole
    engine.close()


def test_what_auto_chose_is_packed_once(random_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for model, chosen in ((random_model(), "float24"), (spread_rows(random_model()), "float32")):
        folder = save_model(model, tmp_path / chosen, tokenizer=tokenizer)
        first = engine_factory.packed_weights(folder, "auto")
        assert first.precision == chosen
        with monkeypatch.context() as patched:
            patched.setattr(engine_factory, "load_model", lambda _: pytest.fail("packed weights should have been used"))
            again = engine_factory.packed_weights(folder, "auto")
        assert again.precision == chosen and (again.block == first.block).all()
        other = engine_factory.packed_weights(folder, "float24")  # by hand, beside what auto chose
        assert other.precision == "float24"
        assert len(list((folder / ".plume").iterdir())) == 2


def test_precisions_have_an_engine(random_model, tokenizer):
    lm = LM(None, tokenizer, EngineConfig(engine="cpu", precision="auto", threads=2), random_model())
    assert "float24 weights" in lm.engine.name
    lm.close()
    lm = LM(None, tokenizer, EngineConfig(engine="torch", precision="auto"), random_model())
    assert lm.generate("a", max_new_tokens=2, seed=1).text is not None
    for precision in ("float24", "int8", "int4"):
        with pytest.raises(UserError, match=f"precision={precision} needs engine=cpu"):
            EngineConfig(engine="torch", precision=precision)


# ---- keys and values


@njit
def half_bits(number):
    return arithmetic.bits_of_half(np.float32(number))


def rounded_cache(kind, x):
    """Keys or values (..., positions, head width) as the cache keeps them: halves, or bytes with a scale each."""
    if kind == "float16":
        return x.half().float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.floor(x / scale + 0.5) * scale


@pytest.mark.parametrize("kind", ["float16", "int8"])
@pytest.mark.parametrize("fields", [{"width": 64, "heads": 4}, {"width": 60, "heads": 3, "band": 8, "layers": 3}])
def test_a_low_cache_precision_rounds_keys_and_values_alone(random_model, monkeypatch, kind, fields):
    """The engine's logits are torch's with rounded keys and values; what differs is small beside that rounding."""
    model = random_model(context=80, **fields)
    exact, plain = torch_logits(model), torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, **options):
        return plain(q, rounded_cache(kind, k), rounded_cache(kind, v), **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    expected = torch_logits(model)
    found = engine_logits(pack(model, "float32"), cache=kind)
    effect = np.square(expected - exact).mean() ** 0.5
    assert effect > 1e-6
    assert np.square(found - expected).mean() ** 0.5 < 0.2 * effect
    bound = {"float16": 2e-3, "int8": 5e-2}[kind]
    assert np.abs(found - exact).max() < bound * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_low_cache_precision_keeps_slots_apart(random_model, kind):
    """Alone or in a batch, at once or in pieces, and in a copied slot: the same logits to the last bit."""
    packed = pack(random_model(context=80), "int8")
    engine = CpuEngine(packed, slots=3, threads=2, cache=kind)
    expected = engine.step([Feed(0, TOKENS, 40)]).copy()
    engine.rewind(0, 0)
    together = engine.step([Feed(1, TOKENS[::-1], 1), Feed(0, TOKENS, 40), Feed(2, TOKENS[5:], 1)])[1:41]
    assert (together == expected).all()
    engine.rewind(1, 0)
    engine.copy(0, 1, 37)
    for start, end in ((37, 44), (44, 60)):
        assert (engine.step([Feed(1, TOKENS[start:end], end - start)]) == expected[start - 20 : end - 20]).all()
    engine.close()


def test_numbers_that_half_precision_cannot_hold(random_model):
    """Keys and values beyond its range become its largest number, small ones its denormals."""
    numbers = np.array([0, 1, -2.5, 65504, 1e6, -1e30, 6e-8, -3e-6, 1e-9, 1 / 3, 2049, 1e-4], np.float32)
    bits = np.array([half_bits(number) for number in numbers], np.uint16)
    assert (bits.view(np.float16) == np.clip(numbers, -65504, 65504).astype(np.float16)).all()


def test_what_a_slot_costs_is_shown(random_model, tokenizer):
    sizes = {}
    for kind in ("float32", "float16", "int8"):
        config = EngineConfig(engine="cpu", threads=1, slots=2, cache_precision=kind)
        lm = LM(None, tokenizer, config, random_model(context=1024, width=256, heads=4))
        sizes[kind] = lm.engine.slot_bytes
        assert f"{kind} cache of {sizes[kind] / 1e6:.1f} MB per slot" in lm.engine.name
        lm.close()
    assert sizes["float16"] == sizes["float32"] / 2 and sizes["int8"] == sizes["float32"] / 4 * (68 / 64)
    for wrong in ({"engine": "torch"}, {"precision": "bfloat16"}):
        with pytest.raises(UserError, match="cache_precision=int8 needs engine=cpu"):
            EngineConfig(cache_precision="int8", **wrong)
