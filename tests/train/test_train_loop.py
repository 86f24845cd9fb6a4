"""What the loop promises: the same whatever the micro-batches, exact resume, a clean end when something goes wrong."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from toys import TINY, ToyRows, toy_trainer, weights_of

from plume.config import TrainConfig, UserError
from plume.model.heads import Model
from plume.model.loss import TensorBatch
from plume.train.distribute import Ranks
from plume.train.loop import NonFiniteError, Trainer
from plume.train.objectives import objective_called
from plume.train.optim import Muon
from plume.util.run_folder import read_metrics

CONFIG = TrainConfig(steps=8, batch=8, lr=1e-2, log_every=1, validate_every=4, warmup_steps=2, keep_best=False)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulation_changes_nothing(tmp_path: Path, micro: int) -> None:
    config = replace(CONFIG, steps=20)
    toy_trainer(tmp_path / "whole", replace(config, micro_batch=8)).run(resume=False)
    toy_trainer(tmp_path / "parts", replace(config, micro_batch=micro)).run(resume=False)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)


def test_the_loss_is_the_mean_over_all_targets_of_the_batch(tmp_path: Path) -> None:
    """Against plain logits and torch's own cross-entropy, before the first update."""
    trainer = toy_trainer(tmp_path, replace(CONFIG, steps=1, micro_batch=3))
    model, batch = trainer.task.model, trainer.task.train.part(0, 0, 8)
    with torch.no_grad():
        hidden = model.body(batch.tokens, segments=batch.segments, lengths=batch.lengths)
        logits = model.read(hidden).flatten(0, 1)[batch.positions]
        follows = model.head.follows(hidden)
    expected = F.cross_entropy(logits, batch.targets) + F.cross_entropy(follows, batch.next_sentence)
    trainer.run(resume=False)
    assert losses(tmp_path)[0] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_resumed_is_uninterrupted(tmp_path: Path, optimizer: Any, dropout: float) -> None:
    """Stopped twice, at steps that are no log or validation steps, and resumed each time by a new process' worth."""
    config = replace(
        CONFIG, steps=11, log_every=3, optimizer=optimizer, batch_start=2, batch_ramp_steps=6, checkpoint_every=1
    )
    model = replace(TINY, dropout=dropout)

    def trainer(folder: str, config: TrainConfig = config) -> Trainer:
        torch.manual_seed(5)
        return toy_trainer(tmp_path / folder, config, model=Model(model, "pretraining"), bytes_per_token=2.5)

    whole = trainer("whole")
    whole.run(resume=False)
    for until in (4, 7):
        cut = trainer("cut")
        cut.task = replace(
            cut.task, before_step=lambda step, cut=cut, until=until: setattr(cut, "stop_requested", step >= until)
        )
        assert not cut.run(resume=True).finished
    last = trainer("cut")
    outcome = last.run(resume=True)
    assert outcome.finished and outcome.tokens == whole.tokens
    assert_same_weights(whole, last)
    strip = ("seconds", "tokens_per_second", "fraction_of_peak")
    rows = [
        [{k: v for k, v in row.items() if k not in strip} for row in read_metrics(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    assert rows[0] == rows[1] and any("validation_bits_per_byte" in row for row in rows[0])


def test_muon_is_resumed_in_the_precision_that_the_run_began_in(tmp_path: Path) -> None:
    """Where the precision is measured, and measured anew it would be another."""
    config = replace(CONFIG, steps=2, optimizer="muon", checkpoint_every=1)

    def trainer(folder: str, name: Any) -> Trainer:
        made = toy_trainer(tmp_path / folder, config)
        task = replace(made.task, model=Model(TINY, "pretraining"))
        return Trainer(task, config, tmp_path / folder, Ranks(), replace(made.precision, name=name))

    torch.manual_seed(5)
    begun = trainer("run", "bfloat16")
    begun.task = replace(begun.task, before_step=lambda step: setattr(begun, "stop_requested", True))
    assert begun.run(resume=False).step == 1
    again = trainer("run", "float32")
    again.run(resume=True)
    dtypes = {part.dtype for part in again.optimizers.parts if isinstance(part, Muon)}
    assert again.precision.name == "bfloat16" and dtypes == {torch.bfloat16}


def test_a_finished_run_that_is_resumed_keeps_its_validation_loss(tmp_path: Path) -> None:
    """Also where the checkpoint of the best step is gone, as it may be where the best is not kept."""
    config = replace(CONFIG, steps=3, keep_last=1, validate_every=1)
    scores = iter((1.0, 2.0, 3.0))
    whole = toy_trainer(tmp_path, config, evaluate=lambda model: next(scores)).run(resume=False)
    again = toy_trainer(tmp_path, config).run(resume=True)
    assert whole.best_step == again.best_step == 1
    assert whole.validation == again.validation is not None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(next(folder.glob("*.safetensors"))),
        lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04."),
        lambda folder: flip(folder / "manifest.json"),
        lambda folder: os.truncate(next(folder.glob("*.safetensors")), 1000),
        lambda folder: os.truncate(folder / "manifest.json", 10),
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("[]"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = toy_trainer(tmp_path / "whole", CONFIG)
    whole.run(resume=False)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    damage(tmp_path / "cut" / "checkpoints" / "step-00000008")
    again = toy_trainer(tmp_path / "cut", CONFIG)
    again.run(resume=True)
    said = capsys.readouterr().err
    assert "skipping corrupt checkpoint step-00000008" in said and "resuming from step 4" in said
    assert_same_weights(whole, again)


def test_all_damaged_starts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = toy_trainer(tmp_path, CONFIG)
    whole.run(resume=False)
    for manifest in tmp_path.glob("checkpoints/*/manifest.json"):
        manifest.write_text("")
    again = toy_trainer(tmp_path, CONFIG)
    again.run(resume=True)
    assert "starting from scratch" in capsys.readouterr().err
    assert_same_weights(whole, again)


def test_damaged_leftovers_do_not_push_new_checkpoints_out(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_every=2, keep_last=1, validate_every=100)
    toy_trainer(tmp_path, config).run(resume=False)
    for manifest in tmp_path.glob("checkpoints/*/manifest.json"):
        manifest.write_text("")
    again = toy_trainer(tmp_path, config)
    again.restore()
    again.step = 2
    again.save()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_what_is_asked_for_when_a_run_goes_on_holds(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=4, micro_batch=4, precision="float32")
    toy_trainer(tmp_path, config).run(resume=False)
    smaller = toy_trainer(tmp_path, replace(config, steps=8, micro_batch=2))
    smaller.run(resume=True)
    assert smaller.microbatches.micro_batch == 2
    same = toy_trainer(tmp_path, replace(config, steps=10, micro_batch=2))
    same.microbatches.micro_batch = 7
    same.restore()
    assert same.microbatches.micro_batch == 2


def test_a_best_checkpoint_that_is_damaged_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(CONFIG, validate_every=2, checkpoint_every=2, keep_best=True)
    scores = iter([1.0, 2.0, 3.0, 4.0])
    trainer = toy_trainer(tmp_path, config, evaluate=lambda model: next(scores))
    choose = trainer.choose_weights

    def damaged() -> None:
        (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_text("")
        choose()

    trainer.choose_weights = damaged  # type: ignore[method-assign]
    outcome = trainer.run(resume=False)
    assert "is corrupt; keeping the last weights" in capsys.readouterr().err
    means = trainer.measure()
    assert outcome.best_step is None and list(outcome.parts.values()) == pytest.approx(means.tolist())
    assert outcome.validation == pytest.approx(float(means @ trainer.weights.double()))


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=12, validate_every=2, checkpoint_every=2, keep_last=2, keep_best=True)
    scores = iter([5.0, 1.0, 4.0, 3.0, 2.0, 6.0])
    trainer = toy_trainer(tmp_path, config, evaluate=lambda model: next(scores))
    outcome = trainer.run(resume=False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000010",
        "step-00000012",
    ]
    assert outcome.best_step == 4
    best = toy_trainer(tmp_path, config)
    best.checkpoints.load(4, best.tensors())
    assert_same_weights(best, trainer)  # the run ends with the best weights


@pytest.mark.parametrize(
    ("losses", "called"),
    [([5.0, 4.0, 4.0, 1.0], [2, 4]), ([5.0, 4.0, 3.0, 1.0], [2, 4, 6]), ([5.0, 4.0, math.nan, 1.0], [2, 4])],
)
def test_of_equal_scores_the_lower_loss_is_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: list[float], called: list[int]
) -> None:
    """An accuracy is often equal, and the F1 of tags is 0 for long; only what would be kept is called best."""
    scores = [2.0, 1.0, 1.0, 3.0]
    config = replace(CONFIG, validate_every=2, keep_best=True)
    trainer = toy_trainer(tmp_path, config, evaluate=lambda model: scores[trainer.step // 2 - 1])
    first = torch.eye(len(trainer.weights))[0]  # only the first part of the loss is not 0
    trainer.measure = lambda: losses[trainer.step // 2 - 1] * first  # type: ignore[method-assign]
    outcome = trainer.run(resume=False)
    lines = [line.split(":")[0] for line in capsys.readouterr().err.splitlines() if "(best)" in line]
    assert lines == [f"step {step}" for step in called] and outcome.best_step == called[-1]
    resumed = toy_trainer(tmp_path, config)
    resumed.restore()
    assert resumed.best == trainer.best


def test_patience(tmp_path: Path) -> None:
    scores = iter([3.0, 2.0, 2.5, 2.5, 2.5, 2.5])
    config = replace(CONFIG, steps=12, validate_every=2)
    trainer = toy_trainer(tmp_path, config, evaluate=lambda model: next(scores), patience=2)
    outcome = trainer.run(resume=False)
    assert outcome.finished and outcome.step == 8


@pytest.mark.parametrize(
    ("scores", "best", "last"),
    [([math.nan, 3.0, 2.0, math.nan], 6, 8), ([math.nan, math.nan, math.nan, 1.0], 6, 6)],
)
def test_a_score_that_is_no_number_is_not_the_best(tmp_path: Path, scores: list[float], best: int, last: int) -> None:
    """Such as the correlation of predictions that are all alike."""
    config = replace(CONFIG, validate_every=2, keep_best=True)
    trainer = toy_trainer(tmp_path, config, evaluate=lambda model: scores[trainer.step // 2 - 1], patience=3)
    outcome = trainer.run(resume=False)
    assert (outcome.best_step, outcome.step) == (best, last)


class Spoiled(ToyRows):
    """One batch whose loss is no number."""

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        batch = super().part(step, first, rows)
        if step == 5:
            object.__setattr__(batch, "spoil", True)
        return batch


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path: Path) -> None:
    objective = objective_called("masked-next-sentence")
    totals = objective.totals

    def spoiled(model: Any, batch: Any) -> torch.Tensor:
        value = totals(model, batch)
        return value * math.nan if hasattr(batch, "spoil") else value

    objective.totals = spoiled  # type: ignore[method-assign]
    trainer = toy_trainer(tmp_path, CONFIG, objective=objective, train=Spoiled(CONFIG))
    before: dict[str, torch.Tensor] = {}
    trainer.task = replace(trainer.task, before_step=lambda step: before.update(weights_of(trainer)))
    with pytest.raises(NonFiniteError, match=r"loss is not finite at step 5 \(batch 5, 8 sequences"):
        trainer.run(resume=False)
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_micro_batch(
    tmp_path: Path, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = objective_called("masked-next-sentence")
    totals = objective.totals
    sizes = []

    def starved(model: Any, batch: Any) -> torch.Tensor:
        if len(batch.tokens) > 2:
            raise error
        sizes.append(len(batch.tokens))
        return totals(model, batch)

    objective.totals = starved  # type: ignore[method-assign]
    toy_trainer(tmp_path / "whole", replace(CONFIG, micro_batch=2)).run(resume=False)
    trainer = toy_trainer(tmp_path / "starved", replace(CONFIG, micro_batch=8), objective=objective)
    trainer.run(resume=False)
    assert "out of memory at step 0: micro_batch reduced to 2" in capsys.readouterr().err
    assert losses(tmp_path / "starved") == losses(tmp_path / "whole") and set(sizes[:4]) == {2}


def test_out_of_memory_with_one_sequence_says_what_to_do(tmp_path: Path) -> None:
    objective = objective_called("masked-next-sentence")

    def starved(model: Any, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    objective.totals = starved  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"one sequence at a time.*activation_checkpointing=true"):
        toy_trainer(tmp_path, CONFIG, objective=objective).run(resume=False)


@pytest.mark.parametrize(
    ("micro", "replicas", "told"),
    [
        (8, 1, "with micro_batch=8 (CUDA out of memory.); resume with micro_batch=4, which is --train.micro-batch"),
        (8, 2, "with micro_batch=4 (CUDA out of memory.); resume with micro_batch=2,"),  # a rank has four rows
        (3, 2, "with micro_batch=3 (CUDA out of memory.); resume with micro_batch=1,"),
        (1, 2, "with one sequence at a time (CUDA out of memory.); train.activation_checkpointing=true needs less"),
    ],
)
def test_out_of_memory_among_many_ranks_names_the_rank_and_the_value_to_resume_with(
    tmp_path: Path, micro: int, replicas: int, told: str
) -> None:
    """The others are in the middle of the step, so it is not repeated; with one sequence no value would help."""
    objective = objective_called("masked-next-sentence")
    tries = []

    def starved(model: Any, batch: Any) -> torch.Tensor:
        tries.append(len(batch.tokens))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    objective.totals = starved  # type: ignore[method-assign]
    trainer = toy_trainer(tmp_path, replace(CONFIG, micro_batch=micro), objective=objective)
    trainer.microbatches.ranks = Ranks(rank=3, size=4)
    trainer.microbatches.distributed = replace(trainer.distributed, replicas=replicas)
    before = weights_of(trainer)
    with pytest.raises(UserError, match=re.escape(f"rank 3 ran out of memory at step 0 {told}")):
        trainer.run(resume=False)
    assert len(tries) == 1 and trainer.microbatches.micro_batch == micro
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(trainer).items())


def test_other_errors_are_not_taken_for_memory(tmp_path: Path) -> None:
    objective = objective_called("masked-next-sentence")

    def broken(model: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    objective.totals = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes do not match"):
        toy_trainer(tmp_path, CONFIG, objective=objective).run(resume=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_ends(tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(step: int) -> None:
        if step == 2:
            for _ in range(2 if number == signal.SIGHUP else 1):  # the system's and the shell's
                os.kill(os.getpid(), number)

    monkeypatch.setattr("plume.train.loop.leave_terminal", lambda: None)  # it is that of the tests
    before = signal.getsignal(number)
    trainer = toy_trainer(tmp_path, CONFIG, before_step=send)
    outcome = trainer.run(resume=False)
    assert not outcome.finished and outcome.step == 3
    assert trainer.checkpoints.latest() == 3
    assert signal.getsignal(number) == before


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = toy_trainer(tmp_path, CONFIG, before_step=lambda step: os.kill(os.getpid(), signal.SIGHUP))
        assert trainer.run(resume=False).finished
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_printed_to_a_closed_terminal_is_dropped() -> None:
    terminal, side = os.openpty()
    code = "import sys; from plume.util.console import leave_terminal; sys.stdin.readline(); leave_terminal(); "
    command = [sys.executable, "-c", code + "print('lost', flush=True); print('kept', file=sys.stderr)"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=side, stderr=pipe, text=True) as process:
        os.close(side)
        os.close(terminal)
        assert process.communicate("closed\n")[1] == "kept\n"
    assert process.returncode == 0


def test_validation_is_the_same_each_time_and_leaves_no_trace(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path / "a", CONFIG)
    assert torch.equal(trainer.measure(), trainer.measure())
    often = toy_trainer(tmp_path / "b", replace(CONFIG, validate_every=1))
    trainer.run(resume=False)
    often.run(resume=False)
    assert_same_weights(trainer, often)


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = toy_trainer(tmp_path, CONFIG)
    monkeypatch.setattr("plume.train.checkpoint.write_rank_file", full)
    with pytest.raises(UserError, match=r"step 4 could not be written.*No space left.*MB are free there.*--resume"):
        trainer.run(resume=False)
    assert not any((tmp_path / "checkpoints").iterdir())


def test_a_file_that_cannot_grow_is_told_by_its_cause(tmp_path: Path) -> None:
    """torch wraps what the system said; here files may not grow, as on a disk that is full."""
    resource = pytest.importorskip("resource", reason="only Unix has limits of this kind")
    trainer = toy_trainer(tmp_path, CONFIG)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=r"could not be written to .*File too large.*; earlier checkpoints"):
            trainer.run(resume=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any((tmp_path / "checkpoints").iterdir())


def test_sanity_gate_tells_when_nothing_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy_trainer(tmp_path / "bad", replace(CONFIG, lr=1e-9), unigram_loss=1.0).run(resume=False)
    assert "token frequencies alone give 1.000" in capsys.readouterr().err
    toy_trainer(tmp_path / "short", replace(CONFIG, steps=2, log_every=2), unigram_loss=1.0).run(resume=False)
    assert "token frequencies" not in capsys.readouterr().err  # one line shows no trend
    toy_trainer(tmp_path / "good", CONFIG, unigram_loss=100.0).run(resume=False)
    assert "token frequencies" not in capsys.readouterr().err


def test_files_of_a_run(tmp_path: Path) -> None:
    toy_trainer(tmp_path, CONFIG, sample=lambda model: "some words").run(resume=False)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert {"masked", "next_sentence", "next_sentence_accuracy", "lr", "gradient_norm", "tokens"} <= rows[0].keys()
    assert "some words" in (tmp_path / "samples.txt").read_text()


def test_samples_come_as_often_as_validation_unless_said(tmp_path: Path) -> None:
    for every, steps in ((None, ["4", "8"]), (2, ["2", "4", "6", "8"])):
        config, folder = replace(CONFIG, steps=8, validate_every=4, sample_every=every), tmp_path / str(every)
        toy_trainer(folder, config, sample=lambda model: "words").run(resume=False)
        assert [line[9:] for line in (folder / "samples.txt").read_text().splitlines() if line[0] == "-"] == steps


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    toy_trainer(tmp_path, replace(CONFIG, tensorboard=True)).run(resume=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [round(event.value, 4) for event in events.Scalars("loss")] == [round(x, 4) for x in losses(tmp_path)]


def test_wandb_gets_the_numbers_and_a_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []

    class Run:
        def log(self, row: dict[str, Any], step: int) -> None:
            logged.append((step, row))

        def finish(self) -> None:
            logged.append((-1, {}))

    monkeypatch.setattr("plume.train.training_log.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train.wandb=true needs the package wandb: pip install .plume-lm.track.."):
        toy_trainer(tmp_path / "a", replace(CONFIG, wandb=True))
    monkeypatch.setattr("plume.train.training_log.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **more: Run()))
    toy_trainer(tmp_path / "b", replace(CONFIG, wandb=True)).run(resume=False)
    assert [row["loss"] for _, row in logged if "loss" in row] == losses(tmp_path / "b") and logged[-1][0] == -1


def test_reading_ahead_changes_nothing(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    config = replace(CONFIG, micro_batch=3, batch_start=2, batch_ramp_steps=4)
    plain, ahead = toy_trainer(tmp_path / "a", config), toy_trainer(tmp_path / "b", config)
    with ThreadPoolExecutor(1) as ahead.microbatches.reader:
        ahead.run(resume=False)
    plain.run(resume=False)
    assert ahead.microbatches.ahead is not None and ahead.microbatches.ahead[0] == (7, ahead.microbatches.limit)
    assert_same_weights(plain, ahead)


def test_more_ranks_than_sequences_is_told(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, CONFIG)
    trainer.microbatches.distributed = replace(trainer.distributed, replicas=16)
    with pytest.raises(UserError, match=r"batch of 8 sequences cannot be shared by 16 ranks; batch=16 can"):
        trainer.microbatches.share(8, 8)


@pytest.mark.parametrize(("rows", "replicas", "micro"), [(8, 1, 3), (7, 2, 2), (5, 4, 1), (64, 4, 64), (9, 3, 1)])
def test_shares_make_the_whole_and_are_equally_many(tmp_path: Path, rows: int, replicas: int, micro: int) -> None:
    trainer = toy_trainer(tmp_path, replace(CONFIG, micro_batch=micro))
    shares = []
    for replica in range(replicas):
        trainer.microbatches.distributed = replace(trainer.distributed, replicas=replicas, replica=replica)
        shares.append(trainer.microbatches.share(rows, micro))
    assert len({len(share) for share in shares}) == 1
    covered = sorted(row for share in shares for first, count in share for row in range(first, first + count))
    assert covered == list(range(rows))


class Widths(ToyRows):
    """Rows of a source and a target, padded to the longest of their part; long ones from step 5 on."""

    def rows(self, step: int) -> int:
        return 64

    def part(self, step: int, first: int, rows: int) -> Any:
        lengths = [(8 if step < 5 else 32) - (first + i) % 4 for i in range(rows)]
        sources = [2 * length for length in lengths]
        return SimpleNamespace(
            tokens=torch.zeros(rows, max(lengths)),
            lengths=torch.tensor(lengths),
            source=torch.zeros(rows, max(sources)),
        )


def test_automatic_micro_batches_count_source_and_target_at_the_longest_row(tmp_path: Path) -> None:
    for replicas in (1, 2):
        micro = toy_trainer(tmp_path, CONFIG, train=Widths(CONFIG)).microbatches
        micro.tokens = 480
        for step, width in ((0, 24), (4, 24), (5, 96), (7, 96)):
            counts = []
            for replica in range(replicas):
                micro.distributed = replace(micro.distributed, replicas=replicas, replica=replica)
                parts = micro.load(step)
                counts.append(len(parts))
                assert all(part.tokens.numel() + part.source.numel() <= 480 for _, part in parts)
                assert max(len(part.tokens) for _, part in parts) > 480 // width // 2  # not smaller than it must be
            assert len(set(counts)) == 1  # ranks wait for each other in every micro-batch


def test_each_phase_has_its_own_automatic_micro_batch(tmp_path: Path) -> None:
    class Phases(ToyRows):
        def part(self, step: int, first: int, rows: int) -> Any:
            return SimpleNamespace(tokens=torch.zeros(rows, 128 if step < 3 else 512))

    micro = toy_trainer(tmp_path, replace(CONFIG, batch=64), train=Phases(replace(CONFIG, batch=64))).microbatches
    micro.tokens = 2048
    assert [max(len(part.tokens) for _, part in micro.load(step)) for step in (0, 2, 3, 6)] == [16, 16, 4, 4]


def test_what_dropout_depends_on(tmp_path: Path) -> None:
    """As docs/train.md says: on seed, step and micro-batches; without dropout on none of the latter two."""

    def run(name: str, dropout: float, micro: int) -> list[float]:
        torch.manual_seed(0)
        model = Model(replace(TINY, dropout=dropout), "pretraining")
        toy_trainer(tmp_path / name, replace(CONFIG, micro_batch=micro), model=model).run(resume=False)
        return losses(tmp_path / name)

    assert run("a", 0.0, 8) == pytest.approx(run("b", 0.0, 2), abs=1e-5)
    assert run("c", 0.2, 4) == run("d", 0.2, 4)
    assert run("e", 0.2, 8) != pytest.approx(run("f", 0.2, 2), abs=1e-4)
