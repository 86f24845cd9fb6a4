"""Checkpoint files and run folders: no pickle is read, every byte verified, one process at a time, RUN@STEP."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_pretrain import small
from toys import toy_trainer, weights_of

import plume
from plume.cli.main import main
from plume.config import TrainConfig, UserError
from plume.hf import load_model, resolve
from plume.train.checkpoint import Checkpoints
from plume.train.distribute import Ranks
from plume.train.pretrain import open_run, pretrain
from plume.util.checkpoint_files import (
    CheckpointManifest,
    CorruptCheckpointError,
    StoredPiece,
    StoredTensor,
    TensorReader,
    read_manifest,
    table_hash,
    write_manifest,
    write_rank_file,
)
from plume.util.run_folder import remove_run, run_lock, split_reference

CONFIG = TrainConfig(steps=8, batch=8, lr=1e-2, log_every=4, validate_every=4, validation_rows=6)


class Hostile:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.target}",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with checkpoints of steps 2 and 4, whose best step is not looked for."""
    place = tmp_path_factory.mktemp("run")
    settings = {
        "train.steps": "4",
        "train.checkpoint_every": "2",
        "train.validate_every": "9",
        "train.keep_best": "false",
    }
    return pretrain(small("gpt2-char", place, **settings)).folder


# ---- files -------------------------------------------------------------------------------------------------------


def test_pieces_of_any_number_of_ranks_make_the_whole(tmp_path: Path) -> None:
    """Six ranks wrote blocks of a matrix; every block of it, cut anywhere, is read back."""
    whole = torch.arange(77.0).view(7, 11)
    files, pieces = {}, []
    for number, (rows, columns) in enumerate((r, c) for r in ((0, 3), (3, 7)) for c in ((0, 4), (4, 5), (5, 11))):
        name = f"rank-{number:05d}.safetensors"
        block = whole[slice(*rows), slice(*columns)]
        files[name] = write_rank_file(tmp_path / name, {"w": block})
        pieces.append(StoredPiece(name, (rows[0], columns[0]), tuple(block.shape)))
    write_manifest(
        tmp_path, CheckpointManifest({"step": 1}, files, {"w": StoredTensor((7, 11), "float32", tuple(pieces))})
    )
    reader = TensorReader(tmp_path, read_manifest(tmp_path))
    for top in range(7):
        for left in range(11):
            out = torch.empty(7 - top, 11 - left)
            reader.fill("w", out, (top, left), (7, 11))
            assert torch.equal(out, whole[top:, left:])
    with pytest.raises(UserError, match=r"w is \(7, 11\) in the checkpoint and \(7, 12\) in this model"):
        reader.fill("w", torch.empty(7, 12), (0, 0), (7, 12))
    cut = StoredTensor((7, 11), "float32", tuple(pieces[:-1]))
    missing = CheckpointManifest({}, files, {"w": cut})
    with pytest.raises(UserError, match="has 53 of 77 values of w"):
        TensorReader(tmp_path, missing).fill("w", torch.empty(7, 11), (0, 0), (7, 11))


def test_a_hostile_pickle_is_refused_and_never_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with a manifest, in one as torch.distributed.checkpoint writes it, and when the run is resumed."""
    touched = tmp_path / "touched"
    payload = pickle.dumps(Hostile(touched))
    folder = run / "checkpoints" / "step-00000004"
    (folder / ".metadata").write_bytes(payload)
    try:
        with pytest.raises(UserError, match=r"run@4 is corrupt: .metadata does not belong.*pickles.*are never read"):
            resolve(f"{run}@4")
        checkpoints = Checkpoints(run / "checkpoints", Ranks(), keep_last=2, print=print)
        assert checkpoints.latest() == 2
        assert "skipping corrupt checkpoint step-00000004" in capsys.readouterr().out
    finally:
        (folder / ".metadata").unlink(missing_ok=True)
    old = tmp_path / "checkpoints" / "step-00000001"
    old.mkdir(parents=True)
    (old / ".metadata").write_bytes(payload)
    (old / "__0_0.distcp").write_bytes(payload)
    with pytest.raises(CorruptCheckpointError, match="is a pickle, which is never read"):
        read_manifest(old)
    (old / "manifest.json").write_bytes(payload)
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json cannot be read"):
        read_manifest(old)
    assert not touched.exists()


@pytest.mark.parametrize("name", [".DS_Store", "._rank-00000.safetensors", ".nfs00012", "Thumbs.db", "desktop.ini"])
def test_files_of_the_system_do_not_make_a_checkpoint_corrupt(tmp_path: Path, name: str) -> None:
    written = write_rank_file(tmp_path / "rank-00000.safetensors", {"w": torch.ones(2)})
    write_manifest(tmp_path, CheckpointManifest({"step": 1}, {"rank-00000.safetensors": written}))
    (tmp_path / name).write_bytes(b"x")
    assert read_manifest(tmp_path).state == {"step": 1}
    (tmp_path / "weights.pt").write_bytes(b"x")
    with pytest.raises(CorruptCheckpointError, match=r"weights\.pt does not belong"):
        read_manifest(tmp_path)


def test_checkpoints_behind_a_link_are_not_those_of_the_next_run(tmp_path: Path) -> None:
    place, run = tmp_path / "scratch", tmp_path / "run"
    (place / "step-00000004").mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(place)
    remove_run(run)
    assert not (run / "checkpoints").exists() and (place / "step-00000004").is_dir()


def test_a_run_that_is_interrupted_before_it_starts_leaves_no_folder(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path)

    def start(error: type[BaseException]) -> None:
        with open_run(config, "cpu") as opened, opened.starting():
            assert (config.folder / "recipe.toml").is_file()
            raise error

    for error in (KeyboardInterrupt, RuntimeError, UserError):
        with pytest.raises(error):
            start(error)
        assert not config.folder.exists()


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "rank-00000.pt", "model.bin"])
def test_a_manifest_names_no_other_files(tmp_path: Path, name: str) -> None:
    table = CheckpointManifest({"step": 1}, {name: {"bytes": 1, "sha256": ""}}).plain()
    (tmp_path / "manifest.json").write_text(json.dumps({**table, "sha256": table_hash(table)}))
    with pytest.raises(CorruptCheckpointError, match="is no file of a checkpoint"):
        read_manifest(tmp_path)


def test_checkpoints_in_the_background_are_the_same(tmp_path: Path) -> None:
    for name, background in (("now", False), ("later", True)):
        toy_trainer(tmp_path / name, replace(CONFIG, async_checkpoints=background, checkpoint_every=1)).run(
            resume=False
        )
    for step in (7, 8):
        first, second = (
            load_file(tmp_path / name / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")
            for name in ("now", "later")
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_loop_does_not_wait_until_an_old_checkpoint_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, deleting = shutil.rmtree, list[str]()

    def delete(path: Path, **more: bool) -> None:
        if path.name.endswith(".old"):
            deleting.append(threading.current_thread().name)
        plain(path, **more)

    monkeypatch.setattr(shutil, "rmtree", delete)
    checkpoints = Checkpoints(tmp_path, Ranks(), keep_last=1, print=print, background=True)
    for step in (1, 2, 3):
        checkpoints.save(step, {"model/w": torch.zeros(4)}, {}, best=None)
    checkpoints.finish()
    assert deleting == ["checkpoint_0"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_checkpoint_in_the_background_keeps_the_step_it_was_taken_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is slow: training goes on meanwhile, and what is written is the step of the call."""
    plain, disk = write_rank_file, threading.Event()

    def slow(*given: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            disk.wait()
        return plain(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("plume.train.checkpoint.write_rank_file", slow)
    trainer = toy_trainer(tmp_path, replace(CONFIG, async_checkpoints=True))
    for _ in range(4):
        trainer.update()
    kept = weights_of(trainer)
    trainer.save()
    assert trainer.checkpoints.steps() == []
    trainer.update()
    disk.set()
    trainer.checkpoints.commit()
    stored = load_file(tmp_path / "checkpoints" / "step-00000004" / "rank-00000.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in kept.items())
    assert not torch.equal(
        kept["model/body.embed.tokens.weight"], weights_of(trainer)["model/body.embed.tokens.weight"]
    )


def test_a_full_disk_in_the_background_ends_the_run_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plume.train.checkpoint.write_rank_file", full)
    with pytest.raises(UserError, match=r"step 4 could not be written.*No space left.*--resume"):
        toy_trainer(tmp_path, replace(CONFIG, async_checkpoints=True)).run(resume=False)
    assert not any((tmp_path / "checkpoints").iterdir())


# ---- RUN@STEP ----------------------------------------------------------------------------------------------------


def test_every_step_of_a_run_opens_as_a_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        stored = load_file(run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors")
        weights = dict(plume.load(f"{run}@{step}").model.named_parameters())
        assert weights and all(torch.equal(weight, stored[f"model/{name}"]) for name, weight in weights.items())
    last = dict(load_model(run).named_parameters())
    assert all(torch.equal(weight, last[name]) for name, weight in load_model(f"{run}@4").named_parameters())
    written = []
    for step in (2, 4):
        assert main(["generate", f"{run}@{step}", "red", "--max-new-tokens", "8", "--temperature", "0"]) == 0
        written.append(capsys.readouterr().out)
    assert (
        written[1]
        == (
            main(["generate", str(run), "red", "--max-new-tokens", "8", "--temperature", "0"]),
            capsys.readouterr().out,
        )[1]
    )
    with pytest.raises(UserError, match=r"has no checkpoint of step 3 to open; checkpoints: 2, 4"):
        plume.load(f"{run}@3")
    assert split_reference("org/model@main") == (Path("org/model@main"), None)


def test_a_run_that_has_not_ended_opens_at_its_checkpoints(run: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(run, tmp_path / "half", ignore=shutil.ignore_patterns("model"))
    shutil.copytree(run / "checkpoints" / "model", tmp_path / "half" / "checkpoints" / "model")
    with pytest.raises(UserError, match=r"half is an unfinished run without a model folder; .*half@4 opens its last"):
        plume.load(tmp_path / "half")
    assert plume.load(f"{tmp_path / 'half'}@4").generate("red", max_new_tokens=3, seed=1).text


def test_a_damaged_checkpoint_is_not_opened(run: Path) -> None:
    """Neither a flipped bit in its own file, nor one in the model folder that was made of it."""
    made = resolve(f"{run}@2")
    good = load_file(made / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in good.items()}, made / "model.safetensors", {"format": "pt"})
    again = load_file(resolve(f"{run}@2") / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in good.items())  # made anew
    file = run / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    kept = file.read_bytes()
    made = resolve(f"{run}@4")
    (made / "checkpoint.json").unlink()
    try:
        file.write_bytes(kept[:-5] + bytes([kept[-5] ^ 1]) + kept[-4:])
        with pytest.raises(UserError, match=r"run@4 is corrupt: rank-00000.safetensors does not match its hash"):
            plume.load(f"{run}@4")
    finally:
        file.write_bytes(kept)


# ---- one process at a time ---------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from plume.util.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # until it is killed
"""


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_run_in_use_is_neither_resumed_nor_replaced(tmp_path: Path, how: str) -> None:
    config = small("gpt2-char", tmp_path, **{"train.steps": "2"})
    pretrain(config)
    before = (config.folder / "metrics.jsonl").read_bytes()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(config.folder)], **pipes, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "held\n"
            with pytest.raises(UserError, match=rf"run is in use by process {child.pid} on .*wait until it ends"):
                pretrain(replace(config, **{how: True}))
            assert (config.folder / "metrics.jsonl").read_bytes() == before
        finally:
            child.send_signal(signal.SIGKILL)
    assert pretrain(replace(config, **{how: True})).outcome.finished  # the lock dies with its process


def test_a_lock_names_this_process_too_and_leaves_nothing(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] in ([".lock"], [])
