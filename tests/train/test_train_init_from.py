"""Pretraining that continues from a model folder: its weights, sizes and tokenizer, and what does not fit it."""

import json
from pathlib import Path

import pytest
import torch
from test_train_pretrain import small
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from plume.config import UserError
from plume.hf import load_model
from plume.text import load_tokenizer
from plume.train.first_weights import continued
from plume.train.pretrain import pretrain, validation_batches
from plume.util.run_folder import read_metrics


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A GPT-2 that transformers made: half precision, more rows in its table than tokens."""
    small("gpt2-laptop", tmp_path)  # writes the text
    trained = ByteLevelBPETokenizer()
    trained.train([str(tmp_path / "plain.txt")], vocab_size=290, special_tokens=["<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    folder = tmp_path / "theirs"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer) + 6, n_positions=24, n_embd=32, n_layer=3, n_head=2, initializer_range=0.2
    )
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


STILL = {"train.lr": "1e-12", "train.muon_lr": "1e-12", "train.weight_decay": "0", "train.steps": "2"}


def test_the_model_begins_with_the_weights_of_the_folder(tmp_path: Path, theirs: Path) -> None:
    """At a rate of nothing it ends with them too, and the loss is what transformers finds on the same rows."""
    config = small("gpt2-laptop", tmp_path, init_from=str(theirs), **STILL, **{"train.validate_every": "1"})
    result = pretrain(config)
    before = GPT2LMHeadModel.from_pretrained(theirs, dtype=torch.float32).state_dict()
    after = GPT2LMHeadModel.from_pretrained(result.model).state_dict()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0)
    assert load_tokenizer(result.model).encode("red green") == load_tokenizer(theirs).encode("red green")
    read = json.loads((result.model / "config.json").read_text())
    assert (read["n_layer"], read["n_embd"], read["n_positions"]) == (3, 32, 24)

    config, _ = continued(config, str(theirs))
    rows = validation_batches(config, load_tokenizer(theirs), next(tmp_path.glob("data*/tokenizer")).parent)
    batch = rows.part(0, 0, rows.count)
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(theirs, dtype=torch.float32).eval()(batch.tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
    found = [row["validation_loss"] for row in read_metrics(result.folder) if "validation_loss" in row]
    assert found[0] == pytest.approx(float(expected), abs=1e-4)


def test_it_learns_and_resumes(tmp_path: Path, theirs: Path) -> None:
    """Half of a run and its resumption are the run."""
    settings = {"init_from": str(theirs), "train.checkpoint_every": "5", "train.log_every": "1"}
    whole = pretrain(small("gpt2-laptop", tmp_path, **settings, **{"train.steps": "30"}))
    rows = [row["loss"] for row in read_metrics(whole.folder) if "loss" in row]
    assert rows[-1] < rows[0] - 1
    for folder in (whole.folder / "checkpoints").iterdir():
        if folder.name.endswith("30"):
            for file in sorted(folder.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            folder.rmdir()
    theirs.rename(tmp_path / "elsewhere")  # all that is needed is in the run by now
    again = pretrain(small("gpt2-laptop", tmp_path, **settings, **{"train.steps": "30", "resume": "true"}))
    assert again.outcome.loss == whole.outcome.loss


def test_a_body_without_a_token_head_gets_one(tmp_path: Path) -> None:
    """As masked-token training of a plain BertModel."""
    from transformers import BertConfig, BertModel

    before = pretrain(small("bert-laptop", tmp_path, **{"train.steps": "2"}))
    tokens = load_tokenizer(before.model).vocab_size
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=tokens, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    body = BertModel(config, add_pooling_layer=False)
    body.save_pretrained(tmp_path / "body")
    for file in before.model.glob("*token*"):
        (tmp_path / "body" / file.name).write_bytes(file.read_bytes())
    more = {"init_from": str(tmp_path / "body"), "folder": str(tmp_path / "more"), **STILL}
    after = pretrain(small("bert-laptop", tmp_path, **more))
    found = BertModel.from_pretrained(after.model, add_pooling_layer=False).state_dict()
    for name, tensor in body.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kinds", [("masked", "masked-next-sentence"), ("masked-next-sentence", "masked")])
def test_the_head_of_masked_tokens_is_kept_by_the_other_objective(tmp_path: Path, kinds: tuple[str, str]) -> None:
    first = pretrain(small("bert-laptop", tmp_path, **{"train.steps": "20", "objective.kind": kinds[0]}))
    more = {"init_from": str(first.folder), "folder": str(tmp_path / "more"), "objective.kind": kinds[1], **STILL}
    later = pretrain(small("bert-laptop", tmp_path, **more))
    ids = torch.randint(4, 20, (2, 9))
    with torch.no_grad():
        before, after = (load_model(result.model)(ids) for result in (first, later))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


def test_two_tokenizers_on_one_recipe_have_data_of_their_own(tmp_path: Path, theirs: Path) -> None:
    """The recipe's own tokenizer is the default one, which a given tokenizer must not be taken for."""
    default = {"data.tokenizer.vocab_size": "32768", "train.steps": "2"}
    plain = pretrain(small("gpt2-laptop", tmp_path, **default))
    more = {"init_from": str(theirs), "folder": str(tmp_path / "more"), **STILL}
    other = pretrain(small("gpt2-laptop", tmp_path, **(default | more)))
    assert load_tokenizer(other.model).hash == load_tokenizer(theirs).hash != load_tokenizer(plain.model).hash


def test_a_run_is_not_replaced_by_what_continues_from_it(tmp_path: Path) -> None:
    run = pretrain(small("gpt2-laptop", tmp_path, **{"train.steps": "2"}))
    with pytest.raises(UserError, match="is the run's own folder"):
        pretrain(small("gpt2-laptop", tmp_path, init_from=str(run.folder), overwrite="true", **STILL))
    assert load_model(run.model)


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("bert-laptop", {}, "kind='masked.* does not fit this model"),
        ("gpt2-laptop", {"objective.length": "32"}, "objective.length=32 is longer than model.context=24"),
        ("gpt2-laptop", {"minutes": "1"}, "minutes chooses the sizes of a fresh model"),
        ("gpt2-laptop", {"init_from": "no/such/folder"}, "there is no folder"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_written(
    tmp_path: Path, theirs: Path, recipe: str, more: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pretrain(small(recipe, tmp_path, **{"init_from": str(theirs), **more}))
    assert not (tmp_path / "run").exists()


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, theirs: Path) -> None:
    config = small("gpt2-laptop", tmp_path, **{"train.steps": "2"})
    pretrain(config)
    prepared = next(tmp_path.glob("data*/tokenizer")).parent
    more = {"init_from": str(theirs), "prepared": str(prepared), "folder": str(tmp_path / "more")}
    with pytest.raises(UserError, match="was not prepared with the tokenizer of"):
        pretrain(small("gpt2-laptop", tmp_path, **more))
