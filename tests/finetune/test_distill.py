"""A student's losses equal a written-out computation, its first weights are its teacher's, and its folder opens."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import TEXTS, config_of, random_base, tokenizer_of

from plume.config import DataConfig, DistillConfig, ObjectiveConfig, TrainConfig, UserError
from plume.data.batches import IGNORE
from plume.model.heads import Model
from plume.model.loss import TensorBatch
from plume.train.distill import (
    DistillObjective,
    StudentWithProjection,
    copy_layers,
    distill,
    matched_layers,
    student_config,
)

TRAIN = TrainConfig(steps=3, batch=2, lr=1e-3, device="cpu", precision="float32", validation_rows=4)


def pair_of(family, **more):
    """A random teacher, and a random student of half its layers."""
    torch.manual_seed(0)
    head = "masked-token" if family == "bert" else "next-token"
    config = DistillConfig(teacher="t", folder="f", **({"train": TRAIN, "init": "random"} | more))
    teacher = Model(config_of(family), head)
    student = Model(student_config(config, teacher.config), head)
    for model in (teacher, student):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return teacher, student, config


def batch_of(model, lengths=(9, 5)):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, model.config.vocab_size, (2, 9), generator=generator)
    targets = torch.randint(5, model.config.vocab_size, (2, 9), generator=generator)
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORE
    if not model.config.causal:
        targets[:, ::2] = IGNORE
    return TensorBatch(tokens=tokens, targets=targets, lengths=torch.tensor(lengths))


def layers_and_scores(model, tokens):
    """States after every block and raw attention scores of one unpadded row, block by block."""
    x = model.body.embed(tokens[None], torch.arange(len(tokens)), None)
    states, scores = [], []
    for block in model.body.blocks:
        inner = block.attn.inner
        source = block.attn.norm(x) if block.attn.pre else x
        q, k = inner.q(source)[0], inner.k(source)[0]
        width = model.config.head_width
        heads = [
            q[:, h * width : (h + 1) * width] @ k[:, h * width : (h + 1) * width].T / width**0.5
            for h in range(model.config.heads)
        ]
        scores.append(torch.stack(heads))  # (H, T, T)
        x = block(x)
        states.append(x[0])
    final = x if model.body.norm is None else model.body.norm(x)
    return states, scores, final[0]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_losses_are_what_they_say(family):
    teacher, student, config = pair_of(family, temperature=3.0, attention_weight=0.7)
    lesson, batch = StudentWithProjection(student, teacher), batch_of(teacher)
    objective = DistillObjective(teacher, config, student.config.layers)
    assert objective.parts == {"soft": 5.0, "hard": 2.0, "hidden": 1.0, "attention": 0.7}
    found = (objective.totals(lesson, batch) / objective.counts(batch)).tolist()
    soft, hard, hidden, attention, count, tokens = 0.0, 0.0, 0.0, 0.0, 0, 0
    for row, length in enumerate((9, 5)):
        ids = batch.tokens[row, :length]
        theirs, their_scores, their_final = layers_and_scores(teacher, ids)
        ours, our_scores, our_final = layers_and_scores(student, ids)
        for place in range(length):
            tokens += 1
            hidden += 1 - F.cosine_similarity(ours[0][place], theirs[1][place], dim=0)  # layer 0 stands for the last
            seen = range(place + 1) if teacher.config.causal else range(length)
            squares = [
                (our_scores[0][h, place, other] - their_scores[1][h, place, other]) ** 2
                for h in range(2)
                for other in seen
            ]
            attention += torch.stack(squares).mean()
            if batch.targets[row, place] == IGNORE:
                continue
            count += 1
            mine, right = student.read(our_final[place]), teacher.read(their_final[place])
            p = (right / 3.0).softmax(0)
            soft += 9.0 * (p * (p.log() - (mine / 3.0).log_softmax(0))).sum()
            hard += -mine.log_softmax(0)[batch.targets[row, place]]
    expected = [soft / count, hard / count, hidden / tokens, attention / tokens]
    assert found == pytest.approx([float(e.detach()) for e in expected], rel=2e-4)


def test_labels_are_smoothed_in_training_alone():
    teacher, student, config = pair_of("gpt2", train=TrainConfig(steps=1, label_smoothing=0.1))
    lesson, batch = StudentWithProjection(student, teacher), batch_of(teacher)
    objective = DistillObjective(teacher, config, student.config.layers)
    logits, targets = student(batch.tokens).flatten(0, 1), batch.targets.flatten()
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        lesson.train(training)
        hard = objective.totals(lesson, batch)[list(objective.parts).index("hard")]
        expected = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(hard, expected, rtol=1e-4, atol=0)


def test_a_sampled_softmax_is_refused():
    with pytest.raises(UserError, match=r"objective\.sampled_softmax: a teacher has probabilities for all tokens"):
        pair_of("gpt2", objective=ObjectiveConfig(sampled_softmax=8))


def test_a_narrower_student_is_widened_for_the_comparison():
    teacher, student, config = pair_of("gpt2", width=8)
    lesson, batch = StudentWithProjection(student, teacher), batch_of(teacher)
    assert lesson.project is not None and lesson.project.weight.shape == (16, 8)
    objective = DistillObjective(teacher, config, student.config.layers)
    objective.totals(lesson, batch).sum().backward()
    assert lesson.project.weight.grad is not None and all(p.grad is None for p in teacher.parameters())


def test_layers_are_evenly_spaced():
    assert matched_layers(6, 12) == [1, 3, 5, 7, 9, 11]
    assert matched_layers(3, 3) == [0, 1, 2]
    assert matched_layers(1, 2) == [1]


def test_a_student_of_all_layers_is_its_teacher_and_distilbert_folds_the_segment():
    torch.manual_seed(0)
    teacher = Model(config_of("bert"), "masked-token").eval()
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = DistillConfig(teacher="t", folder="f", train=TRAIN, layers=2, drop_segments=True)
    student = Model(student_config(config, teacher.config), "masked-token").eval()
    copy_layers(student, teacher)
    tokens = torch.randint(5, 60, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(student(tokens), teacher(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_from_texts_to_a_folder(family, tmp_path):
    base = random_base(family, tmp_path / "teacher", std=0.05)
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 60))
    result = distill(
        DistillConfig(
            teacher=str(base),
            folder=tmp_path / "run",
            train=TRAIN,
            drop_segments=family == "bert",
            data=DataConfig(
                paths=(str(tmp_path / "text.txt"),),
                folder=tmp_path / "data",
                documents="paragraph",
                validation_fraction=0.2,
                workers=1,
            ),
        )
    )
    assert result.student_weights < result.teacher_weights
    model = transformers.AutoModel.from_pretrained(tmp_path / "run" / "model")
    assert model.config.model_type == ("distilbert" if family == "bert" else "gpt2")
    assert model.config.num_hidden_layers == 1
    assert tokenizer_of(family).vocab_size == model.config.vocab_size
    assert result.student_loss is not None and result.outcome.finished
    assert f"loss {result.student_loss:.4f}" in result.summary()


def test_a_resumed_distillation_reads_what_was_prepared(tmp_path):
    """As a pretraining does: its texts may have changed, or be gone."""
    base, text = random_base("gpt2", tmp_path / "teacher", std=0.05), tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS * 20))
    data = DataConfig(paths=(str(text),), folder=tmp_path / "data", validation_fraction=0.2, workers=1)
    config = DistillConfig(teacher=str(base), folder=tmp_path / "run", train=TRAIN, data=data)
    distill(config)
    text.unlink()
    again = distill(replace(config, resume=True, train=replace(TRAIN, steps=4)))
    assert again.outcome.step == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layers": 5}, "layers=5 is more than the teacher's 2"),
        ({"width": 8}, "init=random draws new ones"),
        ({"heads": 4, "attention_weight": 1.0}, "heads=2"),
        ({"drop_segments": True}, "must be a BERT"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"soft_weight": 0.0, "hard_weight": 0.0, "hidden_weight": 0.0}, "none may be negative, not all 0"),
    ],
)
def test_mistakes(more, message):
    with pytest.raises(UserError, match=message):
        student_config(DistillConfig(teacher="t", folder="f", train=TRAIN, **more), config_of("gpt2"))


def test_a_classifier_is_no_teacher(tmp_path):
    from plume.hf import save_model

    save_model(Model(config_of("bert"), "classify", ("a", "b")), tmp_path / "t", tokenizer=tokenizer_of("bert"))
    with pytest.raises(UserError, match="a teacher predicts tokens"):
        distill(DistillConfig(teacher=str(tmp_path / "t"), folder=tmp_path / "run", train=TRAIN))
    assert not (tmp_path / "run").exists()
