"""The experiments, one declaration each."""

from __future__ import annotations

from typing import Any

from plume.lab.experiment import (
    BATCH,
    CONTEXT,
    NONE,
    SCORES,
    SHORT_CONTEXT,
    STEPS,
    VOCAB_SIZE,
    Changes,
    Claim,
    Experiment,
    Lab,
    LabJob,
    Measures,
)

SIZES = {"1x32": (1, 32), "2x48": (2, 48), "3x64": (3, 64), "4x96": (4, 96)}
MORE_SIZES = {"1x16": (1, 16), **SIZES}
QUARTERS = ("25 %", "50 %", "75 %", "100 %")
SHOTS = (0, 1, 4)
PATTERNS = ("copy", "reverse", "capitals", "successor", "sum", "difference")
ADAMW_RATES = (0.0015, 0.003, 0.006, 0.012)
MUON_STEP = 1.15  # seconds of a step with Muon, in seconds of one with AdamW
GPT_TASKS = ("word-order", "next-passage", "missing-word")  # one text, a pair, choices
DATA_PARTS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "2": 2.0}
BITS = ("bits per byte",)
MASK_PROB = 0.15
MASKED_BATCH = BATCH * CONTEXT // SHORT_CONTEXT
SHORT = 400  # characters of a document, so that a row often holds two
PAIRS, FEW_PAIRS = 20_000, 200  # of a translation: more than are read, or so few that each is read many times
FEW_UNITS = 88  # an LSTM with 0.4 of the weights of the Transformer's blocks, as in the paper


def sized(lab: Lab, name: str, seed: int, *, data: LabJob | None = None, steps: float = STEPS) -> LabJob:
    layers, width = MORE_SIZES[name]
    model = {"layers": layers, "width": width, "heads": width // 16}
    return lab.pretrained("gpt2", seed, model=model, data=data, steps=steps)


def parameters(name: str) -> float:
    layers, width = MORE_SIZES[name]
    return 12.0 * layers * width**2 + (VOCAB_SIZE + CONTEXT) * width


def bert(
    lab: Lab, seed: int, *, nsp: bool = True, masking: Changes = NONE, data: LabJob | None = None, halves: int = 1,
    steps: float = 1.5 * STEPS,
) -> LabJob:  # fmt: skip
    """Trained for equally many tokens, in batches that are whole or cut into so many."""
    kind, rows = "masked-next-sentence" if nsp else "masked", MASKED_BATCH // halves
    objective, train = {"kind": kind, "masking": dict(masking)}, {"batch": rows, "micro_batch": rows}
    return lab.pretrained("bert", seed, objective=objective, data=data, steps=halves * steps, train=train)


def masks(mask: float, random: float, prob: float = MASK_PROB) -> Changes:
    return {"mask_token_prob": mask, "random_token_prob": random, "mask_prob": prob}


def tokens(part: float) -> float:
    return part * STEPS * BATCH * CONTEXT


SCALED = {
    **{name: (name, 1.0) for name in MORE_SIZES},
    **{f"3x64, {t} of the tokens": ("3x64", part) for t, part in DATA_PARTS.items()},
}


def masked_by(*masking: float) -> Any:
    return lambda lab, seed: lab.finetuned(bert(lab, seed, masking=masks(*masking), nsp=False), seed, ("word-order",))


def features_of(layer: int) -> Any:
    return lambda lab, seed: lab.features(
        bert(lab, seed, masking=masks(0.8, 0.1), nsp=False), seed, layer, ("word-order",)
    )


def input_format(objective: Changes, batch: int = MASKED_BATCH) -> Any:
    """Rows that are shorter come in larger batches, so that all formats read about as many tokens."""

    def measured(lab: Lab, seed: int) -> Measures:
        data = lab.prepared("bert", lab.corpus(changes={"document": SHORT}))
        train = {"batch": batch, "micro_batch": batch}
        return lab.finetuned(lab.pretrained("bert", seed, data=data, objective=objective, train=train), seed)

    return measured


def few_texts(lab: Lab, seed: int, masking: Changes = NONE, halves: int = 1) -> Measures:
    """The loss after training on a text small enough to be read several times."""
    data = lab.prepared("bert", lab.corpus(120_000))
    return lab.loss(bert(lab, seed, nsp=False, masking=masking, data=data, halves=halves, steps=0.75 * STEPS), "loss")


def pairs(lab: Lab, rows: int) -> LabJob:
    settings = {"paths": list(lab.config.data), "targets": list(lab.config.targets), "rows": rows}
    return LabJob("pairs", {**settings, "digest": lab.digest}, (lab.corpus(),) if not lab.config.targets else ())


def translator(
    lab: Lab, seed: int, kind: str = "transformer", *, bleu: bool = True, model: Changes = NONE, rows: int = PAIRS
) -> Measures:
    source = pairs(lab, rows)
    held_out = {} if rows == PAIRS else {"validation_fraction": 0.2}
    data = lab.prepared(kind, source, "pairs.jsonl", {"target_field": "target", **held_out})
    job = lab.pretrained(kind, seed, data=data, model=model, steps=0.75 * STEPS)
    found = {"loss of target tokens": (job, "loss")}
    if not bleu:
        return found
    return {**found, "BLEU": (LabJob("translate", {"rows": lab.scaled(40, 5)}, (job, source)), "bleu")}


def shots(lab: Lab, size: str, count: int, seed: int) -> Measures:
    source = LabJob("patterns", {"documents": 4000, "items": lab.scaled(100, 12), "seed": 0})
    data = lab.prepared("gpt2", source, data={"tokenizer": {"kind": "bytes"}})
    model = sized(lab, size, seed, data=data, steps=3 * STEPS)
    return lab.evaluated(model, PATTERNS, source, {"shots": count, "limit": lab.scaled(60, 12)})


def overlap(lab: Lab, seed: int, file: str) -> Measures:
    source = LabJob("leak", {}, (lab.corpus(200_000),))
    data = LabJob("prepare", lab.prepared("gpt2", source, file).settings, (source, lab.prepared("gpt2")))
    model = lab.pretrained("gpt2", seed, data=data)
    found = lab.evaluated(model, ("leaked", "clean"), source, {"limit": 40})
    return {f"bits per byte of {name} texts": measure for name, measure in found.items()}


def student(lab: Lab, seed: int, changes: Changes = NONE) -> Measures:
    data = lab.prepared("gpt2")
    teacher = lab.pretrained("gpt2", seed, model={"layers": 4}, steps=1.5 * STEPS)
    recipe = {"train": lab.trained(lab.scaled(STEPS), seed), "layers": 2, **changes}
    return loss_and_size(lab, LabJob("distill", recipe, (teacher, data), teacher.flops / 2, lab.scaled(STEPS)))


def loss_and_size(lab: Lab, model: LabJob) -> Measures:
    speed = LabJob("speed", {"rounds": 30}, (model,))
    return {**lab.loss(model), "parameters": (model, "parameters"), "speed, tokens/s": (speed, "tokens_per_second")}


def zero_shot(kind: str, quarter: int) -> Any:
    return lambda lab, seed: lab.evaluated(lab.pretrained(kind, seed), recipe={"quarter": quarter})


def at_size(name: str, part: float = 1.0) -> Any:
    """Trained on all tokens of the design, or a part of them."""

    def measured(lab: Lab, seed: int) -> Measures:
        model = sized(lab, name, seed, steps=part * STEPS)
        return {**lab.loss(model), **lab.evaluated(model)}

    return measured


EXPERIMENTS: dict[str, Experiment] = {e.name: e for e in (
    Experiment(
        name="gpt1-ablations",
        paper="GPT-1 (2018), table 5",
        question="What do pretraining, the auxiliary loss and the Transformer each contribute?",
        variants={
            "full": lambda lab, seed: lab.finetuned(lab.pretrained("gpt", seed), seed, GPT_TASKS),
            "no auxiliary loss": lambda lab, seed: lab.finetuned(
                lab.pretrained("gpt", seed), seed, GPT_TASKS, {"auxiliary_weight": 0.0}),
            "no pretraining": lambda lab, seed: lab.finetuned(
                lab.pretrained("gpt", seed), seed, GPT_TASKS, {"adapt": {"transfer_layers": -1}}),
            "LSTM": lambda lab, seed: lab.finetuned(lab.pretrained("lstm", seed), seed, GPT_TASKS),
            "LSTM, fewer units": lambda lab, seed: lab.finetuned(
                lab.pretrained("lstm", seed, model={"width": FEW_UNITS * lab.wide}), seed, GPT_TASKS),
        },
        claims=(
            Claim("pretraining helps", "full", "no pretraining"),
            Claim("the Transformer is better than the LSTM", "full", "LSTM"),
            Claim("the Transformer is better than an LSTM of the paper's share of weights", "full",
                  "LSTM, fewer units"),
            Claim("the auxiliary loss does not help on average", "no auxiliary loss", "full"),
        ),
        published={"full": "74.7", "no auxiliary loss": "75.0", "no pretraining": "59.9", "LSTM": "69.1"},
        published_as="mean of 8 tasks",
        note="The LSTM has as many units beside the Transformer as in the paper, and with 3 layers instead of 12 "
        f"then 1.5 times its weights; with {FEW_UNITS} units it has 0.4 of them, as in the paper.",
    ),
    Experiment(
        name="gpt1-layers",
        paper="GPT-1 (2018), figure 2",
        question="Does every transferred layer add to the accuracy?",
        variants={
            f"{count} layers": lambda lab, seed, count=count: lab.finetuned(  # type: ignore[misc]
                lab.pretrained("gpt", seed), seed, ("word-order",), {"adapt": {"transfer_layers": count}})
            for count in (0, 1, 2, 3)
        },
        claims=(
            Claim("all layers are better than the embeddings alone", "3 layers", "0 layers"),
            Claim("all layers are better than the first", "3 layers", "1 layers"),
        ),
        published={"0 layers": "about 9 points below all layers (MNLI)"},
        published_as="figure 2",
        curves={"": {f"{count} layers": count for count in (0, 1, 2, 3)}},
        x_label="transferred layers",
    ),
    Experiment(
        name="gpt1-zero-shot",
        paper="GPT-1 (2018), figure 2",
        question="Do zero-shot heuristics improve while a model is pretrained, and more for the Transformer?",
        variants={
            f"{label} {part}": zero_shot(kind, quarter)
            for label, kind in (("Transformer", "gpt"), ("LSTM", "lstm")) for quarter, part in enumerate(QUARTERS)
        },
        claims=(
            Claim("pretraining improves the Transformer's zero-shot score", "Transformer 100 %", "Transformer 25 %"),
            Claim("the Transformer ends above the LSTM", "Transformer 100 %", "LSTM 100 %"),
        ),
        published_as="no figures, only curves",
        note="By likelihood: which of four words ends the sentence, which end has its words in order, which of two "
        "words of the sentence before is named again.",
        curves={
            label: {f"{label} {part}": 25.0 * (i + 1) for i, part in enumerate(QUARTERS)}
            for label in ("Transformer", "LSTM")
        },
        x_label="% of pretraining",
    ),
    Experiment(
        name="gpt2-sizes",
        paper="GPT-2 (2019), table 3",
        question="Do larger models have lower perplexity and better zero-shot scores?",
        variants={name: at_size(name) for name in SIZES},
        claims=(
            Claim("the largest model has fewer bits per byte than the smallest", "4x96", "1x32", BITS),
            Claim("the largest model has fewer bits per byte than the second", "4x96", "2x48", BITS),
            Claim("the largest model has better zero-shot scores", "4x96", "1x32", (SCORES,)),
        ),
        published={"1x32": "1.16, 45.99 (117M)", "2x48": "1.01, 55.48 (345M)", "3x64": "0.97, 60.12 (762M)",
                   "4x96": "0.93, 63.24 (1542M)"},
        published_as="enwik8 bits per byte, LAMBADA accuracy",
        note="All sizes are trained for equally many tokens. Tasks made from the text stand beside given ones.",
        curves={"": {name: parameters(name) for name in SIZES}},
        x_label="parameters",
    ),
    Experiment(
        name="gpt2-overlap",
        paper="GPT-2 (2019), section 4",
        question="How much better are test texts predicted that were also in the training text?",
        variants={
            "half of the test texts in training": lambda lab, seed: overlap(lab, seed, "with-leak.jsonl"),
            "no test text in training": lambda lab, seed: overlap(lab, seed, "without.jsonl"),
        },
        claims=(
            Claim("leaked texts are predicted better", "half of the test texts in training", "no test text in training",
                  ("bits per byte of leaked texts",)),
            Claim("other texts are predicted better, too", "half of the test texts in training",
                  "no test text in training", ("bits per byte of clean texts",)),
        ),
        published={"half of the test texts in training": "overlap of 3.6 % of 8-grams on average, a small benefit"},
        published_as="in words",
        note="Overlap is planted here; `plume evaluate --training-data` measures the natural one.",
    ),
    Experiment(
        name="gpt3-shots",
        paper="GPT-3 (2020), figures 1.2 and 3.10",
        question="Do examples in the prompt help, and more in larger models?",
        variants={
            f"{size}, {count} examples": lambda lab, seed, size=size, count=count: shots(lab, size, count, seed)  # type: ignore[misc]
            for size in ("1x32", "3x64") for count in SHOTS
        },
        claims=(
            Claim("examples help the larger model", "3x64, 4 examples", "3x64, 0 examples"),
            Claim("one example helps the larger model", "3x64, 1 examples", "3x64, 0 examples"),
            Claim("with examples, the larger model is better", "3x64, 4 examples", "1x32, 4 examples"),
        ),
        published={"3x64, 0 examples": "76.2", "3x64, 1 examples": "72.5", "3x64, 4 examples": "86.4 (few)"},
        published_as="LAMBADA accuracy of 175B",
        note="The text consists of patterns (of letters: copy, reverse, capitals, successor; of two digits: sum, "
        "difference, larger, smaller), since a model of this size learns nothing in context from prose. Chance: 0.25.",
        curves={size: {f"{size}, {count} examples": count for count in SHOTS} for size in ("1x32", "3x64")},
        x_label="examples in the prompt",
    ),
    Experiment(
        name="bert-tasks",
        paper="BERT (2018), table 5",
        question="What do next-sentence prediction and context from both sides contribute?",
        variants={
            "masked + next sentence": lambda lab, seed: lab.finetuned(bert(lab, seed), seed),
            "no next sentence": lambda lab, seed: lab.finetuned(bert(lab, seed, nsp=False), seed),
            "no next sentence, as many predictions": lambda lab, seed: lab.finetuned(
                bert(lab, seed, nsp=False, steps=1.5 * STEPS / MASK_PROB), seed),
            "left to right": lambda lab, seed: lab.finetuned(
                lab.pretrained("gpt", seed, model={"context": SHORT_CONTEXT}, steps=1.5 * STEPS), seed,
                recipe={"auxiliary_weight": 0.0}),
        },
        claims=(
            Claim("next-sentence prediction helps on pairs", "masked + next sentence", "no next sentence",
                  ("next-passage",)),
            Claim("masked is better than left to right", "no next sentence", "left to right"),
            Claim("masked is better after as many predictions", "no next sentence, as many predictions",
                  "left to right"),
        ),
        published={
            "masked + next sentence": "84.4, 88.4", "no next sentence": "83.9, 84.9", "left to right": "82.1, 84.3"},
        published_as="MNLI, QNLI",
        note="Masked models predict 15 % of the tokens they read: for as many predictions they are trained longer.",
    ),
    Experiment(
        name="bert-masking",
        paper="BERT (2018), table 8; Wettig et al. (2023); BERT table 7",
        question="Which masks are best, and is fine-tuning better than fixed features?",
        variants={
            "80/10/10": masked_by(0.8, 0.1),
            "100/0/0": masked_by(1.0, 0.0),
            "0/0/100": masked_by(0.0, 1.0),
            "80/10/10 of 40 %": masked_by(0.8, 0.1, 0.4),
            **{f"80/10/10, features of layer {layer}": features_of(layer) for layer in (1, 2, 3)},
        },
        claims=(
            Claim("80/10/10 is better than random tokens alone", "80/10/10", "0/0/100"),
            Claim("80/10/10 is better than mask tokens alone", "80/10/10", "100/0/0"),
            Claim("masking 40 % is better than 15 %", "80/10/10 of 40 %", "80/10/10"),
            Claim("fine-tuning is better than features of the last layer", "80/10/10", "80/10/10, features of layer 3"),
            Claim("features of the layer before the last are better than of the last",
                  "80/10/10, features of layer 2", "80/10/10, features of layer 3"),
        ),
        published={"80/10/10": "84.2", "100/0/0": "84.3", "0/0/100": "83.6",
                   "80/10/10, features of layer 2": "95.6 (NER; 96.4 fine-tuned)",
                   "80/10/10, features of layer 3": "94.9 (NER)"},
        published_as="MNLI; mask/same/random",
        note="Features: a head on frozen hidden states.",
    ),
    Experiment(
        name="roberta-recipe",
        paper="RoBERTa (2019), tables 1 to 3",
        question="Dynamic masks, full sentences, larger batches: what helps?",
        variants={
            "dynamic masks": few_texts,
            "static masks": lambda lab, seed: few_texts(lab, seed, masking={"static_copies": 1}),
            "batch / 2": lambda lab, seed: few_texts(lab, seed, halves=2),
            "segment pairs, next sentence": input_format({"kind": "masked-next-sentence"}),
            "sentence pairs, next sentence": input_format(
                {"kind": "masked-next-sentence", "single_sentences": True}, 3 * MASKED_BATCH // 2),
            "full sentences": input_format({"kind": "masked"}),
            "doc sentences": input_format({"kind": "masked", "document_mask": True}),
        },
        claims=(
            Claim("dynamic masks are better than static ones", "dynamic masks", "static masks"),
            Claim("the larger batch is better at equal tokens", "dynamic masks", "batch / 2"),
            Claim("segment pairs are better than sentence pairs", "segment pairs, next sentence",
                  "sentence pairs, next sentence"),
            Claim("full sentences are better than segment pairs", "full sentences", "segment pairs, next sentence"),
            Claim("doc sentences are better than full sentences", "doc sentences", "full sentences"),
        ),
        published={"dynamic masks": "78.7, 84.0", "static masks": "78.3, 84.3",
                   "batch / 2": "perplexity 3.99 (256) against 3.68 (2k)",
                   "segment pairs, next sentence": "90.4 / 78.7, 84.0",
                   "sentence pairs, next sentence": "88.7 / 76.2, 82.9",
                   "full sentences": "90.4 / 79.1, 84.7", "doc sentences": "90.6 / 79.7, 84.7"},
        published_as="SQuAD 1.1 / 2.0, MNLI",
        note="Masks and batches are compared by loss on a text of 120,000 characters, read several times; input "
        f"formats by tasks, after training on documents of {SHORT} characters.",
    ),
    Experiment(
        name="transformer-parts",
        paper="Attention is all you need (2017), table 3",
        question="What do heads, size, dropout and positions matter in translation?",
        variants={
            "base": lambda lab, seed: translator(lab, seed),
            "1 head": lambda lab, seed: translator(lab, seed, model={"heads": 1}),
            "keys of 4": lambda lab, seed: translator(lab, seed, model={"heads": 16}),
            "1 layer": lambda lab, seed: translator(lab, seed, model={"layers": 1, "decoder_layers": 1}),
            "half as wide": lambda lab, seed: translator(lab, seed, model={"width": 32 * lab.wide}),
            "no dropout": lambda lab, seed: translator(lab, seed, model={"dropout": 0.0}),
            "few pairs": lambda lab, seed: translator(lab, seed, bleu=False, rows=FEW_PAIRS),
            "few pairs, no dropout": lambda lab, seed: translator(
                lab, seed, bleu=False, rows=FEW_PAIRS, model={"dropout": 0.0}),
            "decoder, sinusoids": lambda lab, seed: translator(
                lab, seed, "gpt", bleu=False,
                model={"positions": "sinusoidal", "embed_scale": True, "context": 2 * CONTEXT}),
            "decoder, learned positions": lambda lab, seed: translator(
                lab, seed, "gpt", bleu=False, model={"context": 2 * CONTEXT}),
        },
        claims=(
            Claim("one head is worse", "base", "1 head", ("loss of target tokens",)),
            Claim("smaller keys are worse", "base", "keys of 4", ("loss of target tokens",)),
            Claim("fewer layers are worse", "base", "1 layer", ("loss of target tokens",)),
            Claim("half as wide is worse", "base", "half as wide", ("loss of target tokens",)),
            Claim("dropout helps", "base", "no dropout", ("loss of target tokens",)),
            Claim("dropout helps where pairs are read many times", "few pairs", "few pairs, no dropout"),
            Claim("sinusoids are better than learned positions", "decoder, sinusoids", "decoder, learned positions"),
        ),
        published={"base": "1.59 (25.8)", "1 head": "1.67 (24.9)", "keys of 4": "1.64 (25.1, keys of 16)",
                   "1 layer": "1.81 (23.7, 2 layers)", "half as wide": "1.75 (24.5, 256)", "no dropout": "1.75 (24.6)",
                   "decoder, sinusoids": "1.59 (25.8)", "decoder, learned positions": "1.59 (25.7)"},
        published_as="log perplexity (BLEU)",
        note="Positions are compared in a decoder alone; the paper found nearly no difference. Most variants read a "
        f"pair once, those with few pairs read {FEW_PAIRS:,} of them many times, as the paper's do.",
    ),
    Experiment(
        name="decoder-joined",
        paper="Generating Wikipedia (2018), table 4",
        question="Is a decoder alone on source and target in one sequence as good as an encoder-decoder?",
        variants={
            "decoder alone": lambda lab, seed: translator(
                lab, seed, "gpt", bleu=False, model={"layers": 7, "context": 2 * CONTEXT}),
            "encoder-decoder": lambda lab, seed: translator(
                lab, seed, bleu=False, model={"layers": 3, "decoder_layers": 3, "dropout": 0.0}),
        },
        claims=(Claim("the decoder alone is better", "decoder alone", "encoder-decoder"),),
        published={"decoder alone": "0.80 (sequences of 4000)", "encoder-decoder": "0.90 (sequences of 500)"},
        published_as="log perplexity",
        note="Both have 84 d^2 parameters in their blocks.",
    ),
    Experiment(
        name="distil",
        paper="DistilBERT (2019), table 4",
        question="What does the teacher give to a student of half its layers?",
        variants={
            "distilled": lambda lab, seed: student(lab, seed),
            "no soft targets": lambda lab, seed: student(lab, seed, {"soft_weight": 0.0}),
            "no hidden states": lambda lab, seed: student(lab, seed, {"hidden_weight": 0.0}),
            "no training loss": lambda lab, seed: student(lab, seed, {"hard_weight": 0.0}),
            "random first weights": lambda lab, seed: student(lab, seed, {"init": "random"}),
            "no teacher": lambda lab, seed: loss_and_size(lab, lab.pretrained("gpt2", seed, model={"layers": 2})),
            "teacher": lambda lab, seed: loss_and_size(
                lab, lab.pretrained("gpt2", seed, model={"layers": 4}, steps=1.5 * STEPS)),
        },
        claims=(
            Claim("the distilled student is better than one without a teacher", "distilled", "no teacher", BITS),
            Claim("the teacher's weights are a better start than random ones", "distilled",
                  "random first weights", BITS),
            Claim("soft targets help", "distilled", "no soft targets", BITS),
            Claim("hidden states help", "distilled", "no hidden states", BITS),
            Claim("the training loss helps", "distilled", "no training loss", BITS),
        ),
        published={"no soft targets": "-2.96", "no hidden states": "-1.46", "no training loss": "-0.31",
                   "random first weights": "-3.69", "distilled": "77.0", "teacher": "79.5"},
        published_as="GLUE score or difference",
        note="The student has 2 of the teacher's 4 layers and half the operations in its blocks.",
    ),
    Experiment(
        name="scaling",
        paper="Kaplan et al. (2020); GPT-3 (2020), figure 3.1",
        question="Does the loss fall as a power of parameters, data and compute, and do scores rise with it?",
        variants={name: at_size(size, part) for name, (size, part) in SCALED.items()},
        claims=(
            Claim("4x96 has a lower loss than 1x16", "4x96", "1x16", BITS),
            Claim("4x96 has a lower loss than 3x64", "4x96", "3x64", BITS),
            Claim("all tokens give a lower loss than an eighth", "3x64", "3x64, 1/8 of the tokens", BITS),
            Claim("twice the tokens give a lower loss", "3x64, 2 of the tokens", "3x64", BITS),
            Claim("with the loss, scores improve", "3x64, 2 of the tokens", "3x64, 1/8 of the tokens", (SCORES,)),
        ),
        published={"1x16": "powers of the loss: 0.076 of parameters, 0.095 of data, 0.050 of compute"},
        published_as="laws",
        note="Sizes see equally many tokens, far fewer than convergence needs; tokens are new, and counted at scale 1; "
        "compute is that of all these models, not of the best for each.",
        curves={
            "parameters": {name: parameters(name) for name in MORE_SIZES},
            "tokens": {name: tokens(part) for name, (size, part) in SCALED.items() if size == "3x64"},
            "FLOP": {name: 6 * parameters(size) * tokens(part) for name, (size, part) in SCALED.items()},
        },
        x_label="parameters, tokens or FLOP",
        fits="bits per byte",
    ),
    Experiment(
        name="optimisers",
        paper="Jordan et al. (2024)",
        question="Is Muon better than AdamW in equal time?",
        variants={
            "Muon": lambda lab, seed: lab.loss(lab.pretrained("gpt2", seed, steps=STEPS / MUON_STEP)),
            **{
                f"AdamW at {rate}": lambda lab, seed, rate=rate: lab.loss(  # type: ignore[misc]
                    lab.pretrained("gpt2", seed, train={"optimizer": "adamw", "lr": rate}))
                for rate in ADAMW_RATES
            },
            "Muon, constant rate, then decay": lambda lab, seed: lab.loss(lab.pretrained(
                "gpt2", seed, steps=STEPS / MUON_STEP, train={"schedule": "constant-then-decay"})),
        },
        claims=(
            *(Claim(f"Muon is better than AdamW at {rate}", "Muon", f"AdamW at {rate}")
              for rate in ADAMW_RATES),
            Claim("a constant rate with a decay at the end is better than a linear decay",
                  "Muon, constant rate, then decay", "Muon"),
        ),
        published={"Muon": "1.35 times fewer tokens to the same loss"},
        published_as="in words",
        note=f"A step with Muon is counted as {MUON_STEP} steps.",
    ),
)}  # fmt: skip
