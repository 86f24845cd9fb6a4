"""Names that people bring from nanoGPT, transformers, lm-eval, vLLM and llama.cpp, with Plume's name for each."""

from __future__ import annotations

from typing import NamedTuple


class Alias(NamedTuple):
    """Plume's fields for a foreign name, of which a command has the first it knows; and what differs."""

    fields: tuple[str, ...]
    hint: str


# their names = Plume's fields (what differs)
TABLE = """
learning_rate peak_lr = lr
max_steps max_iters num_steps train_steps total_steps num_train_steps = steps
n_layer n_layers num_layers num_hidden_layers num_blocks encoder_layers = layers
num_decoder_layers = decoder_layers
n_head n_heads num_heads num_attention_heads = heads
n_embd d_model hidden_size hidden_dim embed_dim dim n_embed model_dim = width
n_inner intermediate_size ffn_dim d_ff ffn_hidden_size feed_forward = mlp_width
resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob dropout_prob = dropout
layer_norm_eps layer_norm_epsilon = norm_eps
type_vocab_size = segments
hidden_act activation_function = activation
sliding_window window_size = band
adam_beta1 = beta1
adam_beta2 = beta2
adam_epsilon adam_eps epsilon = eps
max_grad_norm clip_grad gradient_clipping grad_norm_clip gradient_clip_val clip = grad_clip
wd = weight_decay
optim = optimizer
lr_scheduler_type lr_scheduler scheduler lr_schedule = schedule
num_warmup_steps warmup_iters = warmup_steps
lr_decay_iters lr_decay_steps = decay_steps
label_smoothing_factor = label_smoothing
eval_interval eval_steps eval_every evaluation_steps val_every = validate_every
save_steps save_interval save_every checkpoint_interval ckpt_every = checkpoint_every
logging_steps log_interval log_steps = log_every
save_total_limit = keep_last
load_best_model_at_end = keep_best
gradient_checkpointing = activation_checkpointing
torch_compile = compile
early_stopping_patience = patience
metric_for_best_model = metric
num_epochs n_epochs = epochs
mlm_probability masked_lm_prob mlm_prob = mask_prob
max_predictions_per_seq = max_predictions
whole_word_mask = whole_words
dupe_factor = static_copies
train_file train_data_file dataset_path = train paths
validation_file eval_file = validation
test_file = test
dataset dataset_name data_dir input_file text_files text = paths train
text_column text_column_name text_key = text_field
preprocessing_num_workers num_workers num_proc dataset_num_proc = workers
validation_split_percentage val_fraction validation_split = validation_fraction
output_dir out_dir run_dir save_dir output_path output_folder outdir = folder out
resume_from_checkpoint = resume
overwrite_output_dir = overwrite
model_name_or_path model_name pretrained pretrained_model_name_or_path = init_from
model_name_or_path model_name pretrained pretrained_model_name_or_path = model models
lora_r = lora_rank
lora_target_modules target_modules = lora_modules
num_beams beam_size beam_width = beams
no_repeat_ngram_size = no_repeat_ngram
num_return_sequences num_samples = n
temp = temperature
topk = top_k
topp = top_p
n_predict max_tokens num_predict = max_new_tokens
min_tokens min_length = min_new_tokens
repeat_penalty = repetition_penalty
stop_token_ids eos_token_id = stop_tokens
stop_strings stop_sequences = stop
n_threads num_threads = threads
model_draft draft_model speculative_model = draft
num_speculative_tokens draft_max = speculate_tokens
kv_cache_dtype cache_type_k cache_type_v = cache_precision
max_num_seqs parallel n_parallel = slots batch
num_fewshot n_shot fewshot = shots
batch_size_tokens max_batch_tokens = batch_tokens
api_key api_keys = keys
teacher_model = teacher
n_positions max_position_embeddings n_ctx block_size ctx_size max_model_len context_length = context length
seq_len sequence_length max_seq_len max_seq_length seq_length max_length max_len = length context
num_train_epochs max_epochs = epochs
gradient_accumulation_steps grad_accum_steps accumulate_grad_batches = accumulation_steps
warmup_fraction warmup_proportion = warmup_ratio

batch_size train_batch_size global_batch_size = batch (the global batch over all ranks)
per_device_train_batch_size per_gpu_train_batch_size device_batch_size = micro_batch (batch is the global one)
gradient_accumulation_steps grad_accum_steps accumulate_grad_batches = batch (the global one; micro_batch is one pass)
num_train_epochs max_epochs num_epochs n_epochs epochs = steps (counted in optimizer steps)
warmup_ratio warmup_fraction warmup_proportion = warmup_steps (counted in steps)
warmup_steps num_warmup_steps warmup_iters = warmup_ratio (a fraction of the steps)
min_lr min_learning_rate lr_min = final_lr_ratio (a fraction of the peak learning rate)
max_length max_len = max_new_tokens (counts new tokens only, without the prompt)
do_sample greedy = temperature (0 is greedy, above 0 samples)
bf16 fp16 dtype torch_dtype mixed_precision amp = precision (for example bfloat16)
load_in_8bit load_in_4bit quantization quantize = precision (int8 or int4 on the CPU engine)
no_cuda use_cpu accelerator = device (for example cpu)
report_to = tensorboard (or wandb)
tensor_parallel_size tp_size = tensor_parallel
tensor_parallel_size tp_size = (serving runs on one device)
fsdp ddp deepspeed zero_stage = strategy (auto, ddp or fsdp, under torchrun)
model_args = model (device and precision are options of their own)
max_gen_toks = (each task has its own maximum)
include_path = tasks (as harness:FILE.yaml)
apply_chat_template = (plume evaluate uses no chat template)
log_samples write_out = out (the report folder holds every item)
typical = typical_p
repeat_last_n = repetition_penalty (it covers the whole text)
ctx_size max_model_len n_ctx context_length = (the context length is the model's own)
gpu_memory_utilization n_gpu_layers = batch slots (memory grows with the number of sequences)
bias = attention_bias (of attention; other biases are always there)
model_type architecture arch = preset (for example gpt2-laptop)
"""


def _read(table: str) -> dict[str, list[Alias]]:
    found: dict[str, list[Alias]] = {}
    for row in filter(None, table.splitlines()):
        theirs, _, rest = row.partition(" = ")
        ours, _, hint = rest.partition("(")
        for name in theirs.split():
            found.setdefault(name, []).append(Alias(tuple(ours.split()), hint.rstrip(")")))
    return found


ALIASES = _read(TABLE)
