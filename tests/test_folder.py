"""A folder that does not fit is refused with a message that names what and where; nothing half-written is left."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, TRANSFORMER, random_model
from safetensors.torch import load_file, save_file

from plume.config import UserError
from plume.data.sources import load_hub
from plume.hf import load_model, model_hash, read_embedding, resolve, save_model
from plume.util.files import aside


@pytest.fixture
def folder(tmp_path):
    return save_model(random_model(FAMILIES["gpt2"]), tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, *parts):
    with pytest.raises(UserError) as caught:
        load_model(folder)
    for part in (str(folder), *parts):
        assert part in str(caught.value)


def test_what_a_config_does_not_say_is_what_its_class_assumes(tmp_path):
    import transformers

    folder = save_model(random_model(FAMILIES["bert"], "masked-token"), tmp_path / "bert")
    path = folder / "config.json"
    said = json.loads(path.read_text())
    del said["layer_norm_eps"], said["type_vocab_size"]
    path.write_text(json.dumps(said))
    theirs = transformers.AutoConfig.from_pretrained(folder)
    ours = load_model(folder).config
    assert (ours.norm_eps, ours.segments) == (theirs.layer_norm_eps, theirs.type_vocab_size)


def test_a_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, "model.safetensors is corrupt or truncated")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named(folder, file):
    (folder / "model.safetensors").unlink()
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n")
    with pytest.raises(UserError, match="is a pointer of Git LFS; `git lfs pull` downloads the weights"):
        load_model(folder)


def test_a_config_that_windows_wrote(folder):
    before = load_model(folder).table
    for file in (folder / "config.json", folder / "plume.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert torch.equal(load_model(folder).table, before)


def test_a_file_that_is_something_else(folder):
    (folder / "model.safetensors").write_bytes(b"not tensors at all")
    refused(folder, "model.safetensors is corrupt or truncated")


def test_missing_and_foreign_tensors_are_named_together(folder):
    def change(tensors):
        tensors["transformer.h.9.extra"] = tensors.pop("transformer.h.1.ln_2.bias")

    edit_tensors(folder, change)
    refused(folder, "it lacks: transformer.h.1.ln_2.bias", "it also has: transformer.h.9.extra")


def test_a_wrong_vocabulary_size(folder):
    edit_config(folder, vocab_size=100)
    refused(folder, "embed.tokens.weight is (61, 16) in the file, (100, 16) by config.json")


def test_a_deeper_config_than_file(folder):
    edit_config(folder, n_layer=4)
    refused(folder, "not a 4-layer gpt2 checkpoint", "transformer.h.3.ln_1.weight")


def test_a_foreign_family(folder):
    edit_config(folder, model_type="llama")
    with pytest.raises(UserError, match=r"model_type 'llama' is not one of .*gpt2"):
        load_model(folder)


def test_behaviour_we_cannot_run_is_refused(folder):
    edit_config(folder, scale_attn_by_inverse_layer_idx=True, activation_function="swish")
    refused(folder, "scale_attn_by_inverse_layer_idx=True is not supported", "activation_function='swish'")


def test_tied_tables_stored_twice_open(folder):
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    load_model(folder)


def test_a_damaged_config(folder):
    (folder / "config.json").write_text('{"model_type": "gpt2"')
    refused(folder, "config.json is corrupt")
    (folder / "config.json").write_text('{"a": ' * 100_000)
    refused(folder, "config.json is corrupt")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused(folder, "not a 12-layer gpt2 checkpoint")


def test_a_missing_shard(tmp_path):
    folder = save_model(random_model(FAMILIES["gpt2"]), tmp_path / "model", max_shard_bytes=20_000)
    sorted(folder.glob("model-00002*"))[0].unlink()
    refused(folder, "model-00002-of-", "is not there")


def test_no_such_folder(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        resolve(tmp_path / "none at all")
    with pytest.raises(UserError, match=r"has no config\.json"):
        resolve(tmp_path)


def test_a_hub_name_without_a_network(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="there is no folder nobody/nothing, and it cannot be downloaded from the hub"):
        resolve("nobody/nothing")


def test_a_hub_that_does_not_answer_is_told_at_once(monkeypatch, tmp_path):
    """The hub's own libraries pause and try again for half a minute, and say it in their words."""
    import time

    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    pauses = list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(UserError, match="downloaded from the hub: it is unreachable or HF_HUB_OFFLINE is set, and its"):
        resolve("nobody/nothing")
    assert huggingface_hub.constants.HF_HUB_OFFLINE  # so nothing else waits either
    with pytest.raises(UserError, match=r"hub:no/such \(offline\)"):
        load_hub("hub:no/such")
    assert pauses == []


def test_a_hub_name_in_the_cache_opens_offline(tmp_path, monkeypatch):
    """The layout huggingface_hub keeps: refs/main names a snapshot."""
    import huggingface_hub.constants

    repo = tmp_path / "hub" / "models--somebody--small"
    save_model(random_model(FAMILIES["bert"], "masked-token"), repo / "snapshots" / "abc")
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_model("somebody/small").kind == "masked-token"


@pytest.mark.parametrize("safetensors", [True, False])
def test_of_the_hub_comes_what_a_model_needs(safetensors, tmp_path, monkeypatch):
    """Weights came in both formats, twice the bytes, and a chat template in a file of its own did not come."""
    import huggingface_hub.constants
    from huggingface_hub.utils import filter_repo_objects

    weights = ["pytorch_model.bin", *(["model.safetensors"] if safetensors else [])]
    files = ["README.md", "config.json", "vocab.txt", "chat_template.jinja", "tf_model.h5", *weights]

    def snapshot_download(name, *, allow_patterns):
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / file).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("somebody/small") == tmp_path
    needed = {"config.json", "vocab.txt", "chat_template.jinja", weights[-1]}
    assert {path.name for path in tmp_path.iterdir()} == needed


def test_a_run_that_has_not_ended_has_no_model_yet(tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(UserError, match="is an unfinished run without a model folder; --resume continues it"):
        resolve(tmp_path)


def test_a_run_folder_stands_for_the_model_inside(tmp_path):
    save_model(random_model(FAMILIES["gpt2"]), tmp_path / "run" / "model")
    assert resolve(tmp_path / "run") == tmp_path / "run" / "model"


def test_saving_leaves_foreign_folders_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "keep.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and not a model folder"):
        save_model(random_model(FAMILIES["gpt2"]), tmp_path / "notes")
    assert (tmp_path / "notes" / "keep.txt").read_text() == "mine"


def test_a_failed_save_keeps_the_old_folder(folder, monkeypatch):
    before = model_hash(folder)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plume.hf.model_folder.write_tensors", full_disk)
    with pytest.raises(UserError, match=r"the disk is full: model could not be written.*, with --resume"):
        save_model(random_model(FAMILIES["gpt2"], seed=1), folder)
    assert model_hash(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_numpy_on_a_full_disk_is_one_message(tmp_path):
    """Its own errors have no number."""
    for message in ("2097152 requested and 453920 written", "Not enough free space to write 8 bytes after offset 128"):
        with pytest.raises(UserError, match="the disk is full: rows could not"), aside(tmp_path / "rows"):
            raise OSError(message)
    with pytest.raises(OSError, match="something else"), aside(tmp_path / "rows"):
        raise OSError("something else")


def test_saving_again_replaces_the_model_and_nothing_else(folder):
    old = ["model-00001-of-00002.safetensors", "pytorch_model.bin", "generation_config.json", "model-int8.gguf"]
    kept = ["notes.txt", ".gitattributes", "chat_template.jinja", "checkpoint-500/trainer_state.json"]
    (folder / "checkpoint-500").mkdir()
    for name in (*old, *kept):
        (folder / name).write_text(name)
    save_model(random_model(FAMILIES["gpt2"], seed=1), folder)
    assert not any((folder / name).exists() for name in old)
    assert [(folder / name).read_text() for name in kept] == kept
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_link_to_a_model_folder_stays_a_link(folder):
    link = folder.with_name("link")
    link.symlink_to(folder)
    (folder / "notes.txt").write_text("mine")
    new = random_model(FAMILIES["gpt2"], seed=1)
    assert save_model(new, link) == link and link.is_symlink()
    assert torch.equal(load_model(folder).table, new.table) and (folder / "notes.txt").read_text() == "mine"


def test_a_config_json_alone_makes_no_model_folder(tmp_path):
    (tmp_path / "project" / "src").mkdir(parents=True)
    (tmp_path / "project" / "config.json").write_text('{"port": 80}')
    (tmp_path / "file").write_text("mine")
    for name in ("project", "file"):
        with pytest.raises(UserError, match=f"{name} is not empty and not a model folder"):
            save_model(random_model(FAMILIES["gpt2"]), tmp_path / name)
    assert (tmp_path / "project" / "src").is_dir() and (tmp_path / "file").read_text() == "mine"


def test_threads_that_save_to_one_folder(folder):
    models = [random_model(FAMILIES["gpt2"], seed=seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda model: save_model(model, folder), models)) == {folder}
    saved = load_model(folder).table
    assert any(torch.equal(saved, model.table) for model in models)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_broken_file_of_weights_without_a_head_named(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "architectures"}))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")  # no pickle
    refused(folder, "pytorch_model.bin")


def test_relative_positions_are_refused(tmp_path):
    folder = save_model(random_model(FAMILIES["bert"], "masked-token"), tmp_path / "bert")
    edit_config(folder, position_embedding_type="relative_key")
    refused(folder, "position_embedding_type='relative_key' is not supported")


def test_modules_json_of_another_folder_is_not_read(folder):
    (folder.parent / "modules.json").write_text("{}")  # of anything
    assert read_embedding(folder) is None


def test_a_translation_config_without_sizes(folder):
    (folder / "config.json").write_text('{"model_type": "marian"}')
    refused(folder, "'width'")


def test_the_hash_tells_models_apart(tmp_path):
    a = save_model(random_model(FAMILIES["gpt2"]), tmp_path / "a")
    b = save_model(random_model(FAMILIES["gpt2"]), tmp_path / "b")
    c = save_model(random_model(FAMILIES["gpt2"], seed=1), tmp_path / "c")
    assert model_hash(a) == model_hash(b) != model_hash(c)


def test_half_precision_files_open_in_full_precision(folder):
    right = load_model(folder)
    edit_tensors(folder, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    again = load_model(folder)
    assert again.table.dtype == torch.float32
    torch.testing.assert_close(again.table, right.table, atol=1e-3, rtol=1e-3)


def test_a_model_that_no_family_can_hold(tmp_path):
    strange = random_model(replace(FAMILIES["gpt2"], embed_norm=True))
    with pytest.raises(UserError, match="matches no supported Hugging Face architecture"):
        save_model(strange, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_and_a_decoder_that_differ_are_refused(tmp_path):
    folder = save_model(random_model(TRANSFORMER), tmp_path / "marian")
    load_model(folder)
    edit_config(folder, decoder_attention_heads=1)
    refused(folder, "decoder_attention_heads=1 is not supported beside encoder_attention_heads=")
