"""Whether a fine-tuned model is worth using: baselines on the same rows, a verdict, what went wrong, and what next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.tasks import metrics
from plume.tasks.baselines import Baseline, missing_package, without_spaces
from plume.tasks.data_checks import Finding
from plume.tasks.paired import Verdict, compare
from plume.tasks.schema import Example, Prediction
from plume.tasks.task_kind import evaluate
from plume.train.finetune_plan import PAPER_WIDTH, FinetunePlan

if TYPE_CHECKING:
    from plume.train.finetune import SeedResult

HARDLY_BELOW = 0.9  # of a constant model's loss: a training loss above this is underfitting
GAP = 0.15  # between training and validation metric, on a scale to 1, from which a model overfits
ENOUGH = 50  # validation rows without which no better result means nothing
UNRELATED = "labels unrelated to the texts"
UNDERFITTING, OVERFITTING = "underfitting", "overfitting"


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The trivial models' metrics, verdicts, findings, and the next step."""

    baselines: dict[str, dict[str, float]]
    verdict: Verdict | None  # None: this kind has no baseline
    test_verdict: Verdict | None
    findings: list[Finding]
    next_step: str

    def as_json(self) -> dict[str, Any]:
        return {
            "baselines": self.baselines,
            "verdict": None if self.verdict is None else self.verdict.as_json(),
            "test_verdict": None if self.test_verdict is None else self.test_verdict.as_json(),
            "findings": [asdict(finding) for finding in self.findings],
            "next_step": self.next_step,
        }

    def lines(self, shown: Sequence[Finding] = ()) -> list[str]:
        """For the console and the report; without findings that were shown before."""
        found = [f"verdict: {self.verdict}"] if self.verdict is not None else []
        if self.test_verdict is not None:
            found.append(f"verdict on the test rows: {self.test_verdict}")
        missing = missing_package()
        notes = [*([missing] if missing else []), *(f"warning: {f}" for f in self.findings if f not in shown)]
        return [*found, *notes, f"next step: {self.next_step}"]


def assess(
    plan: FinetunePlan, best: SeedResult, validation: Mapping[int, Prediction], test: Mapping[int, Prediction] | None
) -> Assessment:
    """Compare the kept seed's predictions with the trivial models'."""
    rows = plan.data.validation
    trivial = plan.kind.baselines(plan.data.train, rows)
    scores = {b.name: evaluate(plan.kind, rows, b.predictions).results() for b in trivial}
    verdict = strongest(plan, rows, validation, trivial)
    findings = [*plan.findings, *run_findings(plan, best, validation, trivial)]
    test_verdict = None
    if test is not None:
        on_test = plan.kind.baselines(plan.data.train, plan.data.test)
        test_verdict = strongest(plan, plan.data.test, test, on_test)
    return Assessment(
        baselines=scores,
        verdict=verdict,
        test_verdict=test_verdict,
        findings=findings,
        next_step=next_step(plan, verdict, {finding.name for finding in findings}),
    )


def strongest(
    plan: FinetunePlan, rows: Sequence[Example], ours: Mapping[int, Prediction], trivial: Sequence[Baseline]
) -> Verdict | None:
    """The verdict against the best of the trivial models."""
    if not trivial:
        return None

    def loss(baseline: Baseline) -> float:
        return metrics.as_loss(plan.metric, evaluate(plan.kind, rows, baseline.predictions).results()[plan.metric])

    best = min(trivial, key=loss)
    return compare(plan.kind, rows, ours, best.predictions, plan.metric, best.name)


# ---- what went wrong in the run ----------------------------------------------------------------------------------


def run_findings(
    plan: FinetunePlan, best: SeedResult, ours: Mapping[int, Prediction], trivial: Sequence[Baseline]
) -> list[Finding]:
    found = [*unrelated_labels(plan, ours, trivial), *underfitting(plan, best)]
    return [*found, *([] if found else overfitting(plan, best))]


def unrelated_labels(plan: FinetunePlan, ours: Mapping[int, Prediction], trivial: Sequence[Baseline]) -> list[Finding]:
    """Labels that neither the model nor TF-IDF predicts better than a constant does."""
    if len(trivial) < 2 or not plan.data.labels or len(plan.data.validation) < ENOUGH:
        return []
    constant, rows = trivial[0], plan.data.validation
    for predictions in (ours, *(b.predictions for b in trivial[1:])):
        against = compare(plan.kind, rows, predictions, constant.predictions, plan.metric, constant.name)
        if against.outcome == "better" or against.low == 0.0 < against.high:  # on few rows, as of a rare label
            return []
    column = plan.data.columns.get(plan.kind.label_field, plan.kind.label_field)
    text = (
        f"neither this model nor {trivial[-1].name} is better than the {constant.name}; column {column!r} may be "
        f"shuffled or not the label: --task.columns.{plan.kind.label_field} NAME"
    )
    return [Finding(UNRELATED, text)]


def underfitting(plan: FinetunePlan, best: SeedResult) -> list[Finding]:
    constant, loss = plan.kind.constant_loss(plan.data.train), best.training.get("loss")
    weighted = plan.kind.options.class_weights is not None
    if constant is None or loss is None or weighted or loss < HARDLY_BELOW * constant:
        return []
    search = "find a learning rate with --search 8, or " if plan.config.search is None else ""
    text = (
        f"the training loss is {loss:.3f}, that of constant predictions {constant:.3f}; "
        f"{search}train longer with --epochs {2 * plan.config.epochs:g}"
    )
    return [Finding(UNDERFITTING, text)]


def overfitting(plan: FinetunePlan, best: SeedResult) -> list[Finding]:
    train = best.training.get(plan.metric)
    if train is None or not metrics.higher_is_better(plan.metric) or train - best.score < GAP:
        return []
    config = plan.config
    options = [
        *([f"--epochs {max(1.0, config.epochs / 2):g}"] if config.epochs > 1 and config.contrastive is None else []),
        *(["--dropout 0.2"] if config.dropout is None or config.dropout < 0.2 else []),
        *(["--adapt.mode lora"] if config.adapt.mode == "full" else []),
    ]
    text = f"{plan.metric} is {train:.3f} on training rows and {best.score:.3f} on validation rows; add rows"
    return [Finding(OVERFITTING, f"{text}, or try {' or '.join(options)}" if options else text)]


# ---- what next ---------------------------------------------------------------------------------------------------


def hub_model(plan: FinetunePlan) -> str | None:
    """A pretrained model for the kind and the language of the rows; None: none that is larger than this one.

    An encoder-decoder is followed by a GPT, which learns the same pairs.
    """
    kind = plan.kind
    texts = [str(value) for e in plan.data.train[:100] for value in e.fields.values()]
    if plan.width >= PAPER_WIDTH:
        return None
    if without_spaces(texts):
        name = "uer/gpt2-chinese-cluecorpussmall" if kind.decoder_only else "google-bert/bert-base-chinese"
    else:
        name = "openai-community/gpt2" if kind.causal or kind.decoder_only else "google-bert/bert-base-uncased"
    return None if Path(plan.config.model).name == name.split("/")[-1] else name


def next_step(plan: FinetunePlan, verdict: Verdict | None, problems: set[str]) -> str:
    """The one change that is most likely to help."""
    name, searched = hub_model(plan), plan.config.search is not None
    rows = f"training rows (now {len(plan.data.train):,})"
    pretrained = f"begin with a model pretrained on more text: plume finetune {name} with the same options"
    if UNRELATED in problems:
        column = f"--task.columns.{plan.kind.label_field} NAME"
        right = pretrained if name is not None else f"add {rows}"
        return f"check the labels: print some rows, or name the column with {column}; if they are right, {right}"
    if "overlap" in problems:
        return "remove the rows that two splits share and train again: until then the scores say little"
    if UNDERFITTING in problems and searched:
        return f"train longer: --epochs {2 * plan.config.epochs:g}"
    if UNDERFITTING in problems:
        return "repeat with --search 8, which tries 8 learning rates and trains with the best"
    if verdict is not None and verdict.outcome != "better":
        if verdict.score == 1.0 and verdict.metric not in ("mse", "bleu", "chrf"):
            return "no row is wrong: measure on more rows, --task.validation FILE or --task.validation_fraction 0.3"
        if name is None:
            return f"add {rows}" + ("" if searched else ", or try --search 8")
        return f"{pretrained}; or add rows"
    if OVERFITTING in problems:
        return f"add {rows}"
    if not plan.data.test:
        return "measure on rows that chose nothing: --task.test FILE (the best step and seed were chosen on validation)"
    return f"none needed; more training rows than {len(plan.data.train):,} usually help most"
