"""What `plume plan` says is what a real model of that shape has and keeps."""

import json
from dataclasses import replace

import pytest
import torch

from plume.cli.main import main
from plume.config import PRESETS, PlanConfig, PretrainConfig, UserError, build, preset
from plume.model.heads import Model
from plume.plan import HARDWARE, activation_floats, human_bytes, human_time, plan, plan_fields, plan_ranks
from plume.util.run_folder import write_recipe


@pytest.mark.parametrize("base", ["gpt2", "bert-tiny", "openai-gpt", "lstm"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_memory_is_what_autograd_really_saves(base, dropout):
    shape = {"layers": 3, "width": 64, "heads": 1 if base == "lstm" else 4, "vocab_size": 100}
    config = replace(preset(base), dropout=dropout, context=64, **shape)
    body, saved, alive = Model(config, "bare").body.train(), {}, []
    own = {parameter.untyped_storage().data_ptr() for parameter in body.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body(torch.randint(0, 100, (4, 64)))
    assert 4 * activation_floats(config, 4, 64) == pytest.approx(sum(saved.values()), rel=0.03)


def test_forward_operations_are_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(preset("gpt2"), layers=2, width=64, heads=4, vocab_size=500, context=64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Model(config).eval()(torch.zeros(1, 64, dtype=torch.long))
    said = plan(PlanConfig(model=config, tokens=1)).flops_per_token_forward
    assert said * 64 == pytest.approx(counter.get_total_flops(), rel=0.1)  # torch counts both halves of the mask


def test_the_table_of_one_gpt2_block(capsys):
    assert main(["plan", "gpt2"]) == 0
    shown = capsys.readouterr().out
    for part in ("124,439,808", "7,087,872", "2,359,296", "this machine", "A100"):
        assert part in shown


def test_json_even_for_the_largest(capsys):
    assert main(["plan", "gpt3-175b", "--json", "--tokens", "300_000_000_000"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 174_604_259_328
    assert said["tokens"] == 300_000_000_000
    assert said["weight_bytes"] == 4 * 174_604_259_328


def test_bad_numbers_are_refused():
    with pytest.raises(UserError, match="length=2000 must lie between 1 and the context 1024"):
        plan(PlanConfig(model=PRESETS["gpt2"], length=2000))
    for name in ("tokens", "micro_batch", "ranks", "tensor_parallel", "accumulation_steps", "node_bandwidth_gb"):
        with pytest.raises(UserError, match=f"{name}=0 must be"):
            plan(PlanConfig(model=PRESETS["gpt2"], **{name: 0}))
    with pytest.raises(UserError, match="tflops=0 must be"):
        plan(PlanConfig(model=PRESETS["gpt2"], tflops=0, memory_gb=8))
    with pytest.raises(UserError, match="needs both --tflops and --memory-gb"):
        plan(PlanConfig(model=PRESETS["gpt2"], tflops=100))


@pytest.mark.parametrize(
    ("number", "text"), [(999_600, "1 MB"), (12_300, "12.3 kB"), (999, "999 B"), (12_345e12, "12,345 TB")]
)
def test_sizes_are_written_without_powers(number, text):
    assert human_bytes(number) == text


def test_times_are_written_without_powers():
    assert human_time(31_557_600 * 52_345.6) == "52,346 years" and human_time(90) == "1.5 min"


# ---- many ranks: what the papers of data, sharded and tensor parallelism say each rank holds and sends

SHAPE = {"layers": 2, "width": 64, "heads": 4, "vocab_size": 500, "context": 32}


def planned(**settings):
    config = PlanConfig(model=replace(preset("gpt2"), **SHAPE), micro_batch=3, tokens=10**9, **settings)
    sizes = {name: parameter.numel() for name, parameter in Model(config.model).named_parameters()}
    return plan_ranks(config, plan(config)), sizes, config


def test_copies_hold_everything_and_send_gradients_around_a_ring():
    found, sizes, _ = planned(ranks=8, strategy="ddp")
    parameters = sum(sizes.values())
    assert found.resident_bytes == 16 * parameters  # a weight, its gradient and Adam's two means, in float32
    assert found.gathered_bytes == 0 and found.replicas == 8 and found.tokens_per_step == 8 * 3 * 32
    assert found.sent_bytes == {"weights": 0, "gradients": int(2 * 7 / 8 * 4 * parameters), "activations": 0}


def test_shards_hold_their_part_and_send_weights_twice():
    found, sizes, _ = planned(ranks=8, strategy="fsdp", accumulation_steps=2)
    parameters = sum(sizes.values())
    assert found.resident_bytes == pytest.approx(16 * parameters / 8, abs=16)
    assert found.sent_bytes["weights"] == int(2 * 2 * 7 / 8 * 2 * parameters)  # both micro-batches, in 16 bits
    assert found.sent_bytes["gradients"] == int(7 / 8 * 4 * parameters)
    assert found.tokens_per_step == 8 * 3 * 32 * 2


def test_products_in_float32_take_twice_the_memory_and_traffic():
    half, whole = (planned(ranks=8, precision=precision)[0] for precision in ("auto", "float32"))
    assert whole.resident_bytes == half.resident_bytes
    assert whole.activation_bytes == 2 * half.activation_bytes
    assert whole.sent_bytes["weights"] == 2 * half.sent_bytes["weights"]
    blocks = sum(size for name, size in planned()[1].items() if "inner" in name and name.endswith("weight"))
    more = 2 * blocks  # bytes, for the weights of both blocks, and the same for their gradients
    assert whole.gathered_bytes - half.gathered_bytes == pytest.approx(2 * more, rel=0.05)


def test_tensor_parallelism_cuts_the_matrices_of_the_blocks():
    found, sizes, config = planned(ranks=4, strategy="ddp", tensor_parallel=4)
    cut = sum(
        size
        for name, size in sizes.items()
        if "embed.tokens" in name  # 500 rows, which four ranks share
        or ("inner" in name and not name.endswith(("out.bias", "down.bias")))  # the sums' biases are added once, whole
    )
    assert found.weight_bytes == 4 * (cut // 4 + sum(sizes.values()) - cut)
    sums = 2 * 2 * config.model.layers  # after attention and after the MLP, in the forward and in the backward
    sums += 2  # the embeddings in the forward, the gradient of the output's input in the backward
    assert found.sent_bytes["activations"] == int(sums * 2 * 3 / 4 * 2 * 3 * 32 * 64)
    with pytest.raises(UserError, match="tensor_parallel=3 must divide ranks=4 and heads=4"):
        planned(ranks=4, tensor_parallel=3)


def test_a_step_takes_as_long_as_the_slower_of_computing_and_sending():
    found, sizes, config = planned(ranks=16, strategy="ddp", ranks_per_node=8, network_bandwidth_gb=1.0)
    machine = next(hardware for hardware in HARDWARE if hardware.name == config.hardware)
    assert found.send_seconds == pytest.approx(2 * 15 / 16 * 4 * sum(sizes.values()) / 1e9)  # over the network
    operations = plan(config).flops_per_token_training * found.tokens_per_step
    assert found.compute_seconds == pytest.approx(operations / (16 * machine.teraflops * 1e12 * machine.reached))
    steps = 10**9 / found.tokens_per_step
    assert found.run_seconds == pytest.approx(steps * max(found.send_seconds, found.compute_seconds))
    assert found.run_dollars == pytest.approx(found.run_seconds / 3600 * machine.dollars_per_hour * 16)
    again, _, _ = planned(ranks=16, strategy="ddp", activation_checkpointing=True)
    assert again.compute_seconds == pytest.approx(4 / 3 * found.compute_seconds)  # one more forward
    assert again.activation_bytes < found.activation_bytes


def test_the_table_of_many_ranks(capsys):
    assert main(["plan", "gpt3-175b", "--ranks", "16", "--tensor-parallel", "8", "--tokens", "1000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("Each of 2 x 8 ranks (fsdp, A100 80GB)", "which does not fit", "sends activations", "tokens per step"):
        assert part in shown
    assert main(["plan", "gpt2", "--ranks", "2", "--hardware", "abacus"]) == 2
    assert "hardware='abacus' is not known as one device" in capsys.readouterr().err


def test_operations_of_an_encoder_decoder_are_what_torch_counts():
    """Its cross-attention too; torch counts the matrices, and attention on a CPU is counted by hand."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"layers": 2, "decoder_layers": 3, "width": 64, "heads": 4, "vocab_size": 500, "context": 64}
    config = replace(preset("transformer-base"), **shape)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Model(config).eval()(tokens, tokens)
    attention = 4 * 64 * 64 * 64 * (2 + 3 / 2 + 3)  # encoder; half of the target before a token; all of the source
    found = plan(PlanConfig(model=config, tokens=1)).flops_per_token_forward
    assert found * 64 == pytest.approx(counter.get_total_flops() + attention, rel=1e-6)


def test_several_presets_a_recipe_and_a_run_folder(capsys, tmp_path):
    write_recipe(
        tmp_path / "run", {"folder": "run", "model": {"preset": "gpt2-char"}, "train": {"steps": 50, "batch": 4}}
    )
    names = ["gpt2", "bert-base-uncased", "gpt2-laptop.toml", str(tmp_path / "run")]
    names[2] = "recipes/gpt2-laptop.toml"
    assert main(["plan", *names, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == names
    assert [each["parameters"] for each in found[:2]] == [124_439_808, 109_482_240]
    char = preset("gpt2-char")
    assert found[3]["tokens"] == 50 * 4 * char.context
    assert found[3]["parameters"] == sum(p.numel() for p in Model(char).parameters())
    assert main(["plan", "gpt2-mediun"]) == 2
    assert "did you mean 'gpt2-medium'?" in capsys.readouterr().err


def test_shapes_multiply_to_the_parameters_of_each_tensor():
    found = plan(PlanConfig(model=PRESETS["gpt2"]))
    assert found.shapes["body.embed.tokens.weight"] == (50257, 768)
    assert found.shapes["body.blocks.{}.mlp.inner.up.weight"] == (3072, 768)
    assert {name: torch.Size(shape).numel() for name, shape in found.shapes.items()} == found.by_tensor


def test_what_does_not_fit_is_marked_for_every_device(capsys):
    """16 bytes a parameter and the activations, against the memory of one device, or shards of it on eight."""
    found = plan(PlanConfig(model=PRESETS["gpt3-6.7b"], micro_batch=1, length=128))
    assert found.state_bytes == 16 * found.parameters > 80e9
    assert not found.fits["A100 80GB"] and found.fits["8 x A100 80GB"]
    assert not plan(PlanConfig(model=PRESETS["gpt3-175b"], micro_batch=1, length=128)).fits["8 x A100 80GB"]
    assert main(["plan", "gpt3-6.7b"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_hardware_without_a_price_has_no_cost(capsys):
    assert main(["plan", "gpt2", "--ranks", "2", "--hardware", "mine", "--tflops", "90", "--memory-gb", "24"]) == 0
    printed = capsys.readouterr().out
    assert "mine" in printed and "$0" not in printed


def test_hardware_of_ones_own():
    settings = {"hardware": "mine", "tflops": 100.0, "memory_gb": 10.0, "dollars_per_hour": 2.0}
    found, _, config = planned(ranks=2, strategy="ddp", **settings)
    whole = plan(config)
    per_second = 100e12 * 0.4
    assert whole.seconds["mine"] == pytest.approx(whole.flops_per_token_training * config.tokens / per_second)
    assert whole.dollars["mine"] == pytest.approx(whole.seconds["mine"] / 3600 * 2)
    assert found.fits and not plan_ranks(replace(config, memory_gb=1e-6), whole).fits
    unnamed = plan(replace(config, hardware=PlanConfig(model=config.model).hardware))
    assert unnamed.seconds["your device"] == pytest.approx(whole.seconds["mine"])
    assert unnamed.seconds["A100 80GB"] == pytest.approx(whole.seconds["A100 80GB"])
    with pytest.raises(UserError, match=r"'8 x A100 80GB' is not known as one device; .*--tflops and --memory-gb"):
        planned(ranks=8, hardware="8 x A100 80GB")


def test_options_may_stand_before_the_name(capsys):
    found = []
    for words in (["--tokens", "5000", "gpt2-laptop", "--json"], ["gpt2-laptop", "--tokens", "5000", "--json"]):
        assert main(["plan", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == 5000 and found[0]["parameters"] == found[1]["parameters"]


def test_tokens_of_a_recipe_are_those_its_batches_have():
    """BERT's short sequences and GPT-3's growing batches, counted step by step."""
    from plume.plan import tokens_of
    from plume.train.optim import batch_rows

    train = {"steps": 100, "batch": 24, "batch_start": 4, "batch_ramp_steps": 30}
    for objective, model in (({}, "gpt2"), ({"short_lengths": [16, 32], "short_fraction": 0.9}, "gpt2")):
        recipe = build(PretrainConfig, {"folder": "f", "model": model, "train": train, "objective": objective})
        lengths = [16] * 45 + [32] * 45 + [128] * 10 if objective else [128] * 100
        assert tokens_of(recipe, 128) == sum(batch_rows(n, recipe.train) * lengths[n] for n in range(100))


def test_a_run_that_is_no_pretraining_is_named(tmp_path):
    write_recipe(tmp_path / "tuned", {"model": "bert", "task": {"train": "a.csv"}, "folder": "tuned"})
    with pytest.raises(UserError, match="is the recipe of a fine-tuning; a plan is of a preset or of a pretraining"):
        plan_fields(str(tmp_path / "tuned"))
