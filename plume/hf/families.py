"""One table per family: Plume's names and fields, and those of Hugging Face's folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plume.config import ModelConfig, UserError


@dataclass(frozen=True)
class Rule:
    """One tensor of theirs and what it is here; `q|k|v` is cut from one of theirs along the outputs."""

    ours: str
    theirs: str
    transposed: bool = False  # Conv1D stores (in, out), nn.Linear (out, in)

    def parts(self) -> list[str]:
        choice = re.search(r"\w+(\|\w+)+", self.ours)
        return [self.ours.replace(choice[0], part) for part in choice[0].split("|")] if choice else [self.ours]


def layer(ours: str, theirs: str, *, transposed: bool = False) -> list[Rule]:
    return [Rule(f"{ours}.weight", f"{theirs}.weight", transposed), Rule(f"{ours}.bias", f"{theirs}.bias")]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that one `model_type` of config.json means."""

    model_type: str
    prefix: str  # before the stack's names, except in a folder without a head
    body: list[Rule]
    heads: Mapping[str, tuple[str, list[Rule]]]  # our head: their class, its rules
    keys: Mapping[str, str]  # our field: their key
    activations: Mapping[str, str]  # ours: theirs
    dropouts: Sequence[str]  # their keys that all hold our one rate
    behaves: Mapping[str, Any]  # what a ModelConfig must say to belong here
    constants: Mapping[str, Any] = field(default_factory=dict)  # their keys with the one value that we can run
    output: str = "lm_head.weight"  # their table of output weights, which may be tied to the token table
    ties: Mapping[str, str] = field(default_factory=dict)  # second names of one tensor: the first
    buffers: str = r"$^"  # tensors of old files that carry nothing
    sinusoids: str | None = None  # their table of sinusoids, where they keep one
    zero_biases: Sequence[str] = ()  # their rows of one number per token, which are zeros here
    assumes: Mapping[str, Any] = field(default_factory=dict)  # our fields where its config.json is silent
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of their keys that their class takes
    second_keys: Mapping[str, str] = field(default_factory=dict)  # their key: our field, repeated
    written: Mapping[str, Any] = field(default_factory=dict)  # their keys that are written and never read
    end_token: int | None = None  # what its class assumes as eos_token_id
    head_activations: Mapping[str, str] = field(default_factory=dict)  # of heads that have one whatever the config says
    positions_after_pad: bool = False  # first_position is the padding token's id plus one, and the context counts both
    needs_ids: bool = False  # its class takes no None for a special token's id; 0 is what it assumes itself


GPT2_BODY = [
    Rule("embed.tokens.weight", "wte.weight"),
    Rule("embed.positions.weight", "wpe.weight"),
    *layer("blocks.{}.attn.norm", "h.{}.ln_1"),
    *layer("blocks.{}.attn.inner.q|k|v", "h.{}.attn.c_attn", transposed=True),
    *layer("blocks.{}.attn.inner.out", "h.{}.attn.c_proj", transposed=True),
    *layer("blocks.{}.mlp.norm", "h.{}.ln_2"),
    *layer("blocks.{}.mlp.inner.up", "h.{}.mlp.c_fc", transposed=True),
    *layer("blocks.{}.mlp.inner.down", "h.{}.mlp.c_proj", transposed=True),
    *layer("norm", "ln_f"),
]
GPT_ALIASES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
TIED = {"tie_embeddings": "tie_word_embeddings"}
GPT2_SCORE = [Rule("out.weight", "score.weight")]
GPT2 = Family(
    model_type="gpt2",
    prefix="transformer.",
    body=GPT2_BODY,
    heads={
        "next-token": ("GPT2LMHeadModel", []),
        "bare": ("GPT2Model", []),
        "classify": ("GPT2ForSequenceClassification", GPT2_SCORE),
        "similarity": ("GPT2ForSequenceClassification", GPT2_SCORE),
        "choose": ("GPT2DoubleHeadsModel", layer("out", "multiple_choice_head.summary")),
        "tag": ("GPT2ForTokenClassification", layer("out", "classifier")),
        "span": ("GPT2ForQuestionAnswering", layer("out", "qa_outputs")),
    },
    keys={
        "vocab_size": "vocab_size",
        "context": "n_positions",
        "layers": "n_layer",
        "heads": "n_head",
        "width": "n_embd",
        "mlp_width": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
        **TIED,
    },
    activations={"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"},
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    behaves={
        "decoder_layers": 0,
        "norm": "pre",
        "causal": True,
        "band": 0,
        "positions": "learned",
        "first_position": 0,
        "segments": 0,
        "embed_norm": False,
        "embed_scale": False,
        "attention_bias": True,
        "summary": "last",
    },
    constants={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    assumes={"vocab_size": 50_257, "context": 1024, "layers": 12, "heads": 12, "width": 768},
    aliases=GPT_ALIASES,
    end_token=50_256,
    ties={"lm_head.weight": "wte.weight"},
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)$",
)
# transformers has no class with GPT-3's banded layers: a type of its own makes it refuse instead of computing
# something else
BANDED = replace(
    GPT2,
    model_type="plume-banded",
    heads={head: (f"Banded{name}", rules) for head, (name, rules) in GPT2.heads.items()},
    keys={**GPT2.keys, "band": "band"},
    behaves={name: value for name, value in GPT2.behaves.items() if name != "band"},
)
GPT1 = Family(
    model_type="openai-gpt",
    prefix="transformer.",
    body=[
        Rule("embed.tokens.weight", "tokens_embed.weight"),
        Rule("embed.positions.weight", "positions_embed.weight"),
        *[rule for rule in GPT2_BODY if rule.ours.startswith("blocks")],
    ],
    heads={
        "next-token": ("OpenAIGPTLMHeadModel", []),
        "bare": ("OpenAIGPTModel", []),
        "classify": ("OpenAIGPTForSequenceClassification", GPT2_SCORE),
        "similarity": ("OpenAIGPTForSequenceClassification", GPT2_SCORE),
        "choose": ("OpenAIGPTDoubleHeadsModel", layer("out", "multiple_choice_head.summary")),
        "tag": ("OpenAIGPTForTokenClassification", layer("out", "classifier")),  # not a class of transformers
        "span": ("OpenAIGPTForQuestionAnswering", layer("out", "qa_outputs")),  # nor this one
    },
    keys={
        "vocab_size": "vocab_size",
        "context": "n_positions",
        "layers": "n_layer",
        "heads": "n_head",
        "width": "n_embd",
        "norm_eps": "layer_norm_epsilon",
        "activation": "afn",
        "positions": "positions",  # not a key of transformers, which reads the sinusoids from the file like any table
        **TIED,
    },
    activations={"gelu_tanh": "gelu", "relu": "relu"},  # "gelu" means the tanh form there
    dropouts=GPT2.dropouts,
    behaves={
        **{name: value for name, value in GPT2.behaves.items() if name != "positions"},
        "norm": "post",
        "mlp_width": None,
    },
    assumes={"vocab_size": 40_478, "context": 512, "layers": 12, "heads": 12, "width": 768},
    aliases=GPT_ALIASES,
    ties={"lm_head.weight": "tokens_embed.weight"},
    buffers=r"(h\.\d+\.attn\.bias|position_ids)$",
    sinusoids="positions_embed.weight",
)
# nor one that multiplies tied embeddings: the Transformer-Decoder has a type of its own too
SCALED = replace(
    GPT1,
    model_type="plume-scaled",
    heads={head: (f"Scaled{name}", rules) for head, (name, rules) in GPT1.heads.items()},
    keys={**GPT1.keys, "embed_scale": "embed_scale"},
    behaves={name: value for name, value in GPT1.behaves.items() if name != "embed_scale"},
)

# transformers has no recurrent language model either; torch.nn.LSTM has the same names without the prefix
LSTM = replace(
    GPT1,
    model_type="plume-lstm",
    prefix="model.",
    body=[
        Rule("embed.tokens.weight", "embeddings.weight"),
        *[
            Rule(f"blocks.{{}}.lstm.{name}_l0", f"lstm.{name}_l{{}}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ],
    ],
    heads={head: (name.replace("OpenAIGPT", "LSTM"), rules) for head, (name, rules) in GPT1.heads.items()},
    keys={**GPT1.keys, "recurrent": "recurrent"},
    behaves={**GPT1.behaves, "recurrent": True},
    ties={"lm_head.weight": "embeddings.weight"},
    buffers=r"$^",
    sinusoids=None,
)

BERT_MASKED = [
    *layer("dense", "cls.predictions.transform.dense"),
    *layer("norm", "cls.predictions.transform.LayerNorm"),
    Rule("bias", "cls.predictions.bias"),
]
BERT_SIZES = {"vocab_size": 30_522, "context": 512, "layers": 12, "heads": 12, "width": 768, "mlp_width": 3072}
BERT_POOLER = layer("summary.dense", "bert.pooler.dense")
BERT = Family(
    model_type="bert",
    prefix="bert.",
    body=[
        Rule("embed.tokens.weight", "embeddings.word_embeddings.weight"),
        Rule("embed.positions.weight", "embeddings.position_embeddings.weight"),
        Rule("embed.segments.weight", "embeddings.token_type_embeddings.weight"),
        *layer("embed.norm", "embeddings.LayerNorm"),
        *layer("blocks.{}.attn.inner.q", "encoder.layer.{}.attention.self.query"),
        *layer("blocks.{}.attn.inner.k", "encoder.layer.{}.attention.self.key"),
        *layer("blocks.{}.attn.inner.v", "encoder.layer.{}.attention.self.value"),
        *layer("blocks.{}.attn.inner.out", "encoder.layer.{}.attention.output.dense"),
        *layer("blocks.{}.attn.norm", "encoder.layer.{}.attention.output.LayerNorm"),
        *layer("blocks.{}.mlp.inner.up", "encoder.layer.{}.intermediate.dense"),
        *layer("blocks.{}.mlp.inner.down", "encoder.layer.{}.output.dense"),
        *layer("blocks.{}.mlp.norm", "encoder.layer.{}.output.LayerNorm"),
    ],
    heads={
        "masked-token": ("BertForMaskedLM", BERT_MASKED),
        "pretraining": (
            "BertForPreTraining",
            [
                *[replace(rule, ours=f"token.{rule.ours}") for rule in BERT_MASKED],
                *BERT_POOLER,
                *layer("next_sentence", "cls.seq_relationship"),
            ],
        ),
        "bare": ("BertModel", layer("summary.dense", "pooler.dense")),
        "classify": ("BertForSequenceClassification", [*BERT_POOLER, *layer("out", "classifier")]),
        "similarity": ("BertForSequenceClassification", [*BERT_POOLER, *layer("out", "classifier")]),
        "choose": ("BertForMultipleChoice", [*BERT_POOLER, *layer("out", "classifier")]),
        "tag": ("BertForTokenClassification", layer("out", "classifier")),
        "span": ("BertForQuestionAnswering", layer("out", "qa_outputs")),
    },
    keys={
        "vocab_size": "vocab_size",
        "context": "max_position_embeddings",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "width": "hidden_size",
        "mlp_width": "intermediate_size",
        "segments": "type_vocab_size",
        "norm_eps": "layer_norm_eps",
        "activation": "hidden_act",
        **TIED,
    },
    activations={"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"},
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    assumes={"norm_eps": 1e-12, "segments": 2, **BERT_SIZES},
    behaves={
        "decoder_layers": 0,
        "norm": "post",
        "causal": False,
        "band": 0,
        "positions": "learned",
        "first_position": 0,
        "embed_norm": True,
        "embed_scale": False,
        "attention_bias": True,
        "summary": "tanh",
    },
    constants={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    output="cls.predictions.decoder.weight",
    ties={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=r"embeddings\.position_ids$",
)
ROBERTA_POOLER = layer("summary.dense", "roberta.pooler.dense")
ROBERTA_CLASSIFY = [*layer("summary.dense", "classifier.dense"), *layer("out", "classifier.out_proj")]
ROBERTA = replace(
    BERT,
    model_type="roberta",
    prefix="roberta.",
    heads={
        "masked-token": (
            "RobertaForMaskedLM",
            [*layer("dense", "lm_head.dense"), *layer("norm", "lm_head.layer_norm"), Rule("bias", "lm_head.bias")],
        ),
        "bare": ("RobertaModel", layer("summary.dense", "pooler.dense")),
        "classify": ("RobertaForSequenceClassification", ROBERTA_CLASSIFY),
        "similarity": ("RobertaForSequenceClassification", ROBERTA_CLASSIFY),
        "choose": ("RobertaForMultipleChoice", [*ROBERTA_POOLER, *layer("out", "classifier")]),
        "tag": ("RobertaForTokenClassification", layer("out", "classifier")),
        "span": ("RobertaForQuestionAnswering", layer("out", "qa_outputs")),
    },
    behaves={name: value for name, value in BERT.behaves.items() if name != "first_position"},
    assumes={**BERT.assumes, "vocab_size": 50_265},
    end_token=2,
    head_activations={"masked-token": "gelu"},
    output="lm_head.decoder.weight",
    ties={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    positions_after_pad=True,
)
DISTIL_CLASSIFY = [*layer("summary.dense", "pre_classifier"), *layer("out", "classifier")]
DISTILBERT = replace(
    BERT,
    model_type="distilbert",
    prefix="distilbert.",
    body=[
        *[rule for rule in BERT.body if rule.ours.startswith("embed") and "segments" not in rule.ours],
        *layer("blocks.{}.attn.inner.q", "transformer.layer.{}.attention.q_lin"),
        *layer("blocks.{}.attn.inner.k", "transformer.layer.{}.attention.k_lin"),
        *layer("blocks.{}.attn.inner.v", "transformer.layer.{}.attention.v_lin"),
        *layer("blocks.{}.attn.inner.out", "transformer.layer.{}.attention.out_lin"),
        *layer("blocks.{}.attn.norm", "transformer.layer.{}.sa_layer_norm"),
        *layer("blocks.{}.mlp.inner.up", "transformer.layer.{}.ffn.lin1"),
        *layer("blocks.{}.mlp.inner.down", "transformer.layer.{}.ffn.lin2"),
        *layer("blocks.{}.mlp.norm", "transformer.layer.{}.output_layer_norm"),
    ],
    heads={
        "masked-token": (
            "DistilBertForMaskedLM",
            [
                *layer("dense", "vocab_transform"),
                *layer("norm", "vocab_layer_norm"),
                Rule("bias", "vocab_projector.bias"),
            ],
        ),
        "bare": ("DistilBertModel", []),
        "classify": ("DistilBertForSequenceClassification", DISTIL_CLASSIFY),
        "similarity": ("DistilBertForSequenceClassification", DISTIL_CLASSIFY),
        "choose": ("DistilBertForMultipleChoice", DISTIL_CLASSIFY),
        "tag": ("DistilBertForTokenClassification", layer("out", "classifier")),
        "span": ("DistilBertForQuestionAnswering", layer("out", "qa_outputs")),
    },
    keys={
        "vocab_size": "vocab_size",
        "context": "max_position_embeddings",
        "layers": "n_layers",
        "heads": "n_heads",
        "width": "dim",
        "mlp_width": "hidden_dim",
        "activation": "activation",
        **TIED,
    },
    dropouts=("dropout", "attention_dropout"),
    behaves={**BERT.behaves, "segments": 0, "summary": "relu", "norm_eps": 1e-12},
    constants={},  # sinusoidal_pos_embds only fills the table at the start
    assumes={**BERT_SIZES, "layers": 6},
    aliases={"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
    output="vocab_projector.weight",
    ties={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
)


def _marian_side(side: str) -> list[Rule]:
    return [
        *layer(f"{side}.blocks.{{}}.attn.inner.q", f"{side}.layers.{{}}.self_attn.q_proj"),
        *layer(f"{side}.blocks.{{}}.attn.inner.k", f"{side}.layers.{{}}.self_attn.k_proj"),
        *layer(f"{side}.blocks.{{}}.attn.inner.v", f"{side}.layers.{{}}.self_attn.v_proj"),
        *layer(f"{side}.blocks.{{}}.attn.inner.out", f"{side}.layers.{{}}.self_attn.out_proj"),
        *layer(f"{side}.blocks.{{}}.attn.norm", f"{side}.layers.{{}}.self_attn_layer_norm"),
        *layer(f"{side}.blocks.{{}}.mlp.inner.up", f"{side}.layers.{{}}.fc1"),
        *layer(f"{side}.blocks.{{}}.mlp.inner.down", f"{side}.layers.{{}}.fc2"),
        *layer(f"{side}.blocks.{{}}.mlp.norm", f"{side}.layers.{{}}.final_layer_norm"),
    ]


# Marian is the original Transformer: post-norm, sinusoids, one token table for all; only attention biases are added
MARIAN = Family(
    model_type="marian",
    prefix="model.",
    body=[
        Rule("encoder.embed.tokens.weight", "shared.weight"),
        *_marian_side("encoder"),
        *_marian_side("decoder"),
        *layer("decoder.blocks.{}.cross.inner.q", "decoder.layers.{}.encoder_attn.q_proj"),
        *layer("decoder.blocks.{}.cross.inner.k", "decoder.layers.{}.encoder_attn.k_proj"),
        *layer("decoder.blocks.{}.cross.inner.v", "decoder.layers.{}.encoder_attn.v_proj"),
        *layer("decoder.blocks.{}.cross.inner.out", "decoder.layers.{}.encoder_attn.out_proj"),
        *layer("decoder.blocks.{}.cross.norm", "decoder.layers.{}.encoder_attn_layer_norm"),
    ],
    heads={"next-token": ("MarianMTModel", [])},
    keys={
        "vocab_size": "vocab_size",
        "context": "max_position_embeddings",
        "layers": "encoder_layers",
        "decoder_layers": "decoder_layers",
        "heads": "encoder_attention_heads",
        "width": "d_model",
        "mlp_width": "encoder_ffn_dim",
        "activation": "activation_function",
        "embed_scale": "scale_embedding",
        "attention_bias": "attention_bias",  # not a key of transformers, where the biases are then zeros in the file
        **TIED,
    },
    activations={"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new"},
    dropouts=("dropout", "attention_dropout"),
    behaves={
        "norm": "post",
        "causal": False,
        "band": 0,
        "positions": "sinusoidal",
        "first_position": 0,
        "segments": 0,
        "embed_norm": False,
        "summary": "last",
        "norm_eps": 1e-5,
    },
    constants={
        "is_encoder_decoder": True,
        "share_encoder_decoder_embeddings": True,
        "activation_dropout": 0.0,
    },
    ties={
        "lm_head.weight": "shared.weight",
        "model.encoder.embed_tokens.weight": "shared.weight",
        "model.decoder.embed_tokens.weight": "shared.weight",
    },
    buffers=r"(en|de)coder\.embed_positions\.weight$",
    zero_biases=("final_logits_bias",),
    second_keys={
        "decoder_attention_heads": "heads",
        "decoder_ffn_dim": "mlp_width",
        "decoder_vocab_size": "vocab_size",
    },
    written={"forced_eos_token_id": None},
    needs_ids=True,
)
FAMILIES = [LSTM, GPT2, BANDED, GPT1, SCALED, DISTILBERT, BERT, ROBERTA, MARIAN]  # the first that fits is taken


def family_of(config: ModelConfig) -> Family:
    """The family whose folder can hold this model."""
    if config.mlp_width == 4 * config.width:
        config = replace(config, mlp_width=None)
    for family in FAMILIES:
        alike = all(getattr(config, name) == value for name, value in family.behaves.items())
        if alike and config.activation in family.activations:
            return family
    raise UserError(f"the config matches no supported Hugging Face architecture, so it cannot be saved: {config}")


def check_head(family: Family, config: ModelConfig, head: str) -> None:
    """Refuse a head that transformers would compute with another activation."""
    if (fixed := family.head_activations.get(head, config.activation)) != config.activation:
        raise UserError(f"activation={config.activation!r}: {family.heads[head][0]} has {fixed!r} in its head, use it")


def family_named(model_type: object) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise UserError(f"model_type {model_type!r} is not one of {', '.join(f.model_type for f in FAMILIES)}")


def family_with_class(name: object) -> Family | None:
    """The family of a class of transformers, such as GPT2LMHeadModel."""
    return next((family for family in FAMILIES if any(name == cls for cls, _ in family.heads.values())), None)


def family_with_tensors(names: Iterable[str]) -> Family | None:
    """The family whose tensors these are; None where none or more than one fits."""
    given = set(names)

    def fits(family: Family, prefix: str) -> bool:
        return all(prefix + rule.theirs.replace("{}", "0") in given for rule in family.body)

    def own_head(family: Family) -> bool:
        return family.output in given or any(
            rule.theirs in given for _, rules in family.heads.values() for rule in rules
        )

    theirs = [family for family in FAMILIES if not family.model_type.startswith("plume-")]  # ours name themselves
    for found in ([f for f in theirs if fits(f, f.prefix)], [f for f in theirs if fits(f, "")]):
        if len(found) > 1:  # BERT's and RoBERTa's stacks have the same names without their prefixes
            found = [family for family in found if own_head(family)]
        if len(found) == 1:
            return found[0]
    return None
