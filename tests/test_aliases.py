"""Names from other tools are answered with Plume's, and nothing unrelated is suggested."""

import pytest

import plume
from plume.cli.main import main
from plume.config import (
    DataConfig,
    DistillConfig,
    EvaluateConfig,
    FinetuneConfig,
    GenerateConfig,
    PlanConfig,
    PretrainConfig,
    ServeConfig,
    UserError,
    advice,
    build,
)
from plume.config.aliases import ALIASES
from plume.config.recipes import names_of

FOREIGN = {
    PretrainConfig: """
        learning_rate train.lr; max_steps train.steps; max_iters train.steps; batch_size train.batch
        text data.paths; model_name_or_path init_from
        per_device_train_batch_size train.micro_batch; gradient_accumulation_steps train.batch
        num_train_epochs train.steps; block_size model.context; n_layer model.layers; n_head model.heads
        n_embd model.width; hidden_size model.width; d_model model.width; num_hidden_layers model.layers
        num_attention_heads model.heads; intermediate_size model.mlp_width; n_inner model.mlp_width
        max_position_embeddings model.context; hidden_dropout_prob model.dropout; adam_beta1 train.beta1
        adam_beta2 train.beta2; adam_epsilon train.eps; max_grad_norm train.grad_clip; warmup_iters train.warmup_steps
        warmup_ratio train.warmup_steps; lr_decay_iters train.decay_steps; min_lr train.final_lr_ratio
        lr_scheduler_type train.schedule; eval_interval train.validate_every; eval_steps train.validate_every
        save_steps train.checkpoint_every; logging_steps train.log_every; log_interval train.log_every
        save_total_limit train.keep_last; gradient_checkpointing train.activation_checkpointing
        output_dir folder; out_dir folder; resume_from_checkpoint resume; overwrite_output_dir overwrite
        mlm_probability objective.masking.mask_prob; bf16 train.precision; fp16 train.precision
        label_smoothing_factor train.label_smoothing; tensor_parallel_size train.tensor_parallel
        dataset data.paths; num_workers data.workers; seq_length objective.length; optim train.optimizer
        """,
    FinetuneConfig: """
        learning_rate lr; batch_size batch; per_device_train_batch_size micro_batch; num_train_epochs epochs
        max_seq_length task.length; train_file task.train; validation_file task.validation; output_dir folder
        lora_r adapt.lora_rank; target_modules adapt.lora_modules; warmup_steps warmup_ratio; num_beams beams
        early_stopping_patience patience; metric_for_best_model metric; model_name_or_path model
        eval_steps validate_every
        """,
    DistillConfig: "learning_rate train.lr; max_steps train.steps; teacher_model teacher; n_layer layers",
    DataConfig: "num_proc workers; text_column text_field; output_dir folder; dataset_name paths; out_dir folder",
    GenerateConfig: """
        max_length sampling.max_new_tokens; n_predict sampling.max_new_tokens; max_tokens sampling.max_new_tokens
        temp sampling.temperature; do_sample sampling.temperature; num_beams sampling.beams
        num_return_sequences sampling.n; repeat_penalty sampling.repetition_penalty
        no_repeat_ngram_size sampling.no_repeat_ngram
        stop_token_ids sampling.stop_tokens; topk sampling.top_k; n_threads engine.threads; model_draft engine.draft
        load_in_8bit engine.precision; torch_dtype engine.precision
        """,
    EvaluateConfig: "num_fewshot shots; model_args model; output_path out; pretrained model; dtype precision",
    ServeConfig: "max_num_seqs engine.slots; gpu_memory_utilization batch; n_parallel engine.slots; api_key keys",
    PlanConfig: "gradient_accumulation_steps accumulation_steps; n_layer model.layers; tp_size tensor_parallel",
}
CASES = [
    (kind, *pair.split())
    for kind, rows in FOREIGN.items()
    for pair in rows.replace("\n", ";").split(";")
    if pair.strip()
]
NOTHING_LIKE_IT = [
    "foo",
    "sharding",
    "wubble",
    "chat_template",
    "x",
    "rope_theta",
    "num_experts",
    "speed",
    "zzz_every",
    "size",
]


def test_the_table_is_long_enough():
    assert len(CASES) > 90 and len({name for _, name, _ in CASES}) > 60


@pytest.mark.parametrize(("kind", "foreign", "ours"), CASES)
def test_a_foreign_name_is_answered_with_plumes(kind, foreign, ours):
    assert ours in names_of(kind)
    for spelled in (foreign, foreign.replace("_", "-")):
        told = advice(kind, spelled)
        assert told.split(" (")[0] in (f"; use {ours}", f"; did you mean {ours}?"), told


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", NOTHING_LIKE_IT)
def test_nothing_is_suggested_for_a_name_like_no_other(kind, name):
    assert advice(kind, name) == ""


@pytest.mark.parametrize("kind", FOREIGN)
def test_whatever_is_advised_exists(kind):
    """Also where a command lacks what the name stands for: then there is a hint or nothing, never a wrong field."""
    for name, aliases in ALIASES.items():
        told = advice(kind, name)
        if told.startswith("; use "):
            field = told.removeprefix("; use ").split(" (")[0]
            assert field in names_of(kind) and field.rpartition(".")[2] in {f for a in aliases for f in a.fields}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.warmup_step", "train.warmup_steps"),
        ("layrs", "model.layers"),
        ("trian.lr", "train"),
        ("warm_up_steps", "train.warmup_steps"),
        ("microbatch", "train.micro_batch"),
        ("data.clean.duplicate", "data.clean.duplicates"),
        ("optim.weight_decay", "train.weight_decay"),
    ],
)
def test_a_misspelt_or_misplaced_name(written, meant):
    *sections, name = written.split(".")
    table = {name: 1}
    for section in reversed(sections):
        table = {section: table}
    with pytest.raises(UserError) as caught:
        build(PretrainConfig, {"folder": "f", "model": "gpt2", "train": {"steps": 1}} | table)
    assert f"did you mean {meant}?" in str(caught.value)


PROBLEMS = ["there is no learning_rate; use ", "there is no foo", "seed"]


@pytest.mark.parametrize(
    "verb",
    [
        "pretrain gpt2-laptop --train.seed x",
        "finetune model --task.train rows.csv --folder f --seed x",
        "distill teacher --folder f --train.steps 3 --train.seed x",
        "sweep gpt2-laptop --folder f --train.seed x",
    ],
)
def test_all_problems_of_a_command_come_together(verb, capsys):
    assert main([*verb.split(), "--learning-rate", "1", "--foo", "2"]) == 2
    message = capsys.readouterr().err
    for problem in PROBLEMS:
        assert problem in message


def test_unknown_names_wrong_types_and_failed_checks_come_together():
    with pytest.raises(UserError) as caught:
        plume.pretrain(folder="f", model="gpt2", steps="many", lr=-1, batch_size=3, beta1=2)
    for part in (
        "there is no batch_size; use train.batch",
        "train.steps: input should be",
        "lr=-1.0 must be",
        "beta1=2.0",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "words", [["--seed", "3", "the prompt"], ["the prompt", "--seed", "3"], ["--seed=3", "the prompt"]]
)
def test_an_option_does_not_swallow_the_prompt(words, monkeypatch):
    asked = []
    monkeypatch.setattr("plume.cli.generate_command.generate", asked.append)
    assert main(["generate", "model", *words]) == 0
    assert (asked[0].model, asked[0].prompt, asked[0].sampling.seed) == ("model", "the prompt", 3)


def test_a_word_too_many_is_refused(capsys):
    assert main(["generate", "model", "two", "words"]) == 2
    assert "unexpected argument 'words'" in capsys.readouterr().err
