"""The thresholds that give an image another status than `ok`; each is declared once, as a field of `Decision`.

Commands, `Model`, `serve`, Triton, run.json and the page in the browser take a decision as it is, so that a threshold
has one name everywhere: `--min-margin`, `min_margin=`, `"min_margin"`. Light to import: numpy comes with a rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from opal_deploy.artifact.files import is_finite_number, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import UsageError
from opal_deploy.logs import Log, log_line
from opal_deploy.options import Option, Options, flag_of, parse_number, parse_rate

if TYPE_CHECKING:
    from opal_deploy.artifact.baseline import Baseline
    from opal_deploy.records.record import AnswerStatus, Slot

_PANEL = "Thresholds"
# the rate of examples
_USUAL_RATE = 0.05


class Chosen(NamedTuple):
    """A limit that was chosen by a rate, and a sentence on its effect on the validation images."""

    limit: float
    effect: str


@dataclass(frozen=True)
class Threshold:
    """The rule of one threshold.

    Attributes:
        quantity: the field of a record that is compared with the limit.
        above: the status is given above the limit; False: below it.
        status: the record's status.
        number: a limit in words, for messages.
        check: raises UsageError if the model lacks the quantity; gets the option, the model's file and metadata.
        choose: finds the limit for a rate; raises UsageError where the validation images do not allow it. Gets what
            `check` gets, and the rate.
        explain: why an image has the status, in words, from its quantity, the limit, its class, its slots and the
            metadata; None: the status says enough.
    """

    quantity: str
    above: bool
    status: AnswerStatus
    number: str
    check: Callable[[str, Path, Metadata], None]
    choose: Callable[[str, Path, Metadata, float], Chosen]
    explain: Callable[[float, float, int, Sequence[Slot], Metadata], str] | None = None


def _check_margin(flag: str, path: Path, metadata: Metadata) -> None:
    if metadata.evidence == "none":
        raise UsageError(f"{path}: it has no cosines, so no margin; leave out {flag}")
    if metadata.is_multi_label:
        raise UsageError(f"{path}: gives several labels per image, so no margin; leave out {flag}")


def _choose_margin(flag: str, path: Path, metadata: Metadata, rate: float) -> Chosen:
    """Return the margin that keeps an error rate on the validation images (`statistics.choose_threshold`)."""
    from opal_deploy.statistics import CONFIDENCE, choose_threshold, supported_rates

    option = f"{flag} {100 * rate:g}%"
    risk = metadata.risk
    if not risk:
        raise UsageError(
            f"{option}: {path} has no validation images to choose a margin by; give a margin, or store them with "
            f"`opal-deploy evaluate DATA --model {path} --split val --record`"
        )
    supported = supported_rates(risk)
    point = choose_threshold(risk, rate) if rate in supported else None
    if point is None:
        rates = ", ".join(f"{100 * other:g}%" for other in supported) or "no rate"
        raise UsageError(
            f"{option}: {risk['images']} validation images support {rates}; give one of these, or a margin"
        )
    return Chosen(
        point.min_margin,
        f"Abstaining below margin {point.min_margin:.4g}: on {risk['images']} validation images it answers "
        f"{point.answered / risk['images']:.1%}, {point.wrong} of {point.answered} wrong; error rate at most "
        f"{point.bound:.2%} with {CONFIDENCE:.0%} confidence",
    )


def _check_ood_score(flag: str, path: Path, metadata: Metadata) -> None:
    if metadata.has_output("ood_score"):
        return
    if metadata.evidence != "exact" or not metadata.is_opal:
        head = f"head {metadata.head_kind}, evidence {metadata.evidence}"
        raise UsageError(f"{path}: computes no OOD score ({head}); leave {flag} out")
    is_checkpoint = model_kind(path) == "checkpoint"
    model, after = (path, "") if is_checkpoint else (metadata.checkpoint_name, ", then export it again")
    raise UsageError(
        f"{path}: computes no OOD score for {flag}: it has no features of training images; add them with `opal-deploy "
        f"evaluate DATA --model {model} --split val --record`{after}"
    )


def _choose_ood_score(flag: str, path: Path, metadata: Metadata, rate: float) -> Chosen:
    """Return the OOD score that an image like the validation images exceeds with at most this probability."""
    option, baseline = f"{flag} {100 * rate:g}%", metadata.known_baseline
    if baseline is None or not baseline.ood_score:
        raise UsageError(
            f"{option}: {path} has no baseline of validation images; measure one with `opal-deploy evaluate "
            f"DATA --model {path} --split val --record`, or give an OOD score such as 0.7"
        )
    limit = baseline.choose_threshold(rate)
    if limit is None:
        raise UsageError(
            f"{option}: {baseline.images} validation images are too few for that rate; give "
            f"{100 * baseline.smallest_rate:g}% or more, or an OOD score"
        )
    return Chosen(
        limit,
        f"Unknown above OOD score {limit}: an image like the {baseline.images:,} {baseline.split} images exceeds it "
        f"with a probability of at most {100 * rate:g}%",
    )


def describe_supported_rates(risk: Mapping[str, Any], baseline: Baseline | None) -> Iterator[str]:
    """Yield a line on the rates that each threshold takes with a model's validation images.

    Args:
        risk: `Metadata.risk`, or an empty document.
        baseline: of the answers; None without one.
    """
    from opal_deploy.statistics import supported_rates

    if risk:
        rates = ", ".join(f"{100 * rate:g}%" for rate in supported_rates(risk))
        wrong = f"{round(risk['images'] * risk['error'])} of {risk['images']:,} validation images are wrong"
        yield f"--min-margin takes {rates or 'no error rate'}: {wrong}, and more images allow lower rates"
    if baseline is not None and baseline.ood_score:
        rate = 100 * max(baseline.smallest_rate, _USUAL_RATE)
        yield (
            f"--unknown takes rates from {100 * baseline.smallest_rate:g}%: `infer --unknown {rate:g}%` marks at most "
            f"{rate:g}% of images like these as unknown, to find images of other things"
        )
        if not baseline.background:
            yield "Many images of other things pass --unknown; --background FOLDER with some of them helps most"


def _explain_ood_score(score: float, limit: float, class_id: int, slots: Sequence[Slot], metadata: Metadata) -> str:
    """Return the OOD score in words, and the slot whose score is the least usual."""
    # as many digits as tell them apart
    digits = next((digits for digits in range(2, 16) if f"{score:.{digits}f}" != f"{limit:.{digits}f}"), 16)
    text = f"OOD score {score:.{digits}f}, threshold {limit:.{digits}f}"
    if (baseline := metadata.known_baseline) is None:
        return text
    worst: tuple[float, str] | None = None
    for slot in slots:
        entry = int(metadata.class_map.entries[class_id, slot.slot])
        if (usual := baseline.find_slot(entry)) is None:
            continue
        low, high = usual.score[0], usual.score[-1]
        unusual = max(low / max(slot.score, 1e-9), slot.score / max(high, 1e-9))
        if unusual > 1 and (worst is None or unusual > worst[0]):
            whose = f"in {usual.images:,} images of this class" if entry in baseline.slots else "over all classes"
            worst = unusual, f"; slot {slot.slot} usually {low:.2g} to {high:.2g} {whose}, here {slot.score:.2g}"
    return text + (worst[1] if worst else "")


@dataclass(frozen=True, kw_only=True)
class Decision(Options):
    """Thresholds, each a number, a rate on the model's validation images such as `5%`, or None: not applied.

    A field declares a threshold. Where several hold, the first field's status is given. Options classes of commands
    inherit the fields.
    """

    unknown: Annotated[
        float | str | None,
        Option(
            "Mark an image `unknown` above this OOD score. `5%` picks the score that 5% of validation images exceed.",
            panel=_PANEL, cli=str,
        ),
        Threshold(
            "ood_score", True, "unknown", "an OOD score such as 0.7, or a rate such as 5%", _check_ood_score,
            _choose_ood_score, _explain_ood_score,
        ),
    ] = None  # fmt: skip
    min_margin: Annotated[
        float | str | None,
        Option(
            "Abstain below this margin. `5%` picks one that bounds the error rate at 5% with 95% confidence.",
            panel=_PANEL, cli=str,
        ),
        Threshold(
            "margin", False, "abstained", "a margin such as 0.05, or an error rate such as 5%", _check_margin,
            _choose_margin,
        ),
    ] = None  # fmt: skip

    @staticmethod
    def of(options: Decision) -> Decision:
        """Return the thresholds among the options of a command."""
        return Decision(**{name: getattr(options, name) for name in THRESHOLDS})

    @staticmethod
    def read(document: Mapping[str, Any]) -> Decision:
        """Return the numbers in a document that `limits` wrote, such as run.json; anything else is no threshold."""
        limits = {name: value for name, value in document.items() if name in THRESHOLDS}
        return Decision(**{name: float(value) for name, value in limits.items() if is_finite_number(value)})

    def resolve(self, path: Path, metadata: Metadata, log: Log = log_line) -> Decision:
        """Return the decision with a number for each rate, and log what that number does.

        Args:
            path, metadata: the model's file, which messages name, and its metadata.
            log: receives a line per rate.

        Raises:
            UsageError: a threshold is neither a number nor a rate, the model does not compute what it compares, or has
                too few validation images for the rate.
        """
        limits: dict[str, Any] = {}
        for name, threshold in THRESHOLDS.items():
            if (value := getattr(self, name)) is None:
                continue
            flag, text = flag_of(name), str(value)
            threshold.check(flag, path, metadata)
            if text.strip().endswith("%"):
                chosen = threshold.choose(flag, path, metadata, parse_rate(flag, text))
                log(chosen.effect)
                limits[name] = chosen.limit
                continue
            limits[name] = parse_number(text)
            # margins and OOD scores are at least 0
            if limits[name] is None or limits[name] < 0:
                raise UsageError(f"{flag} {text!r}: expected {threshold.number}")
        return replace(self, **limits)

    @property
    def limits(self) -> dict[str, float | None]:
        """The number of each threshold of a resolved decision, None where it is not applied."""
        return {name: getattr(self, name) for name in THRESHOLDS}

    def judge(
        self, values: Mapping[str, float | None], class_id: int, slots: Sequence[Slot], metadata: Metadata
    ) -> tuple[AnswerStatus, str]:
        """Return the status of an image by a resolved decision, and the reason in words, which may be empty.

        Args:
            values: the image's margin, and its outputs of one number per image, by name.
            class_id: the predicted class.
            slots: evidence for it, as the record has it.
            metadata: of the model.
        """
        for _, threshold, limit in self._rules:
            value = values.get(threshold.quantity)
            if value is not None and (value > limit if threshold.above else value < limit):
                reason = "" if threshold.explain is None else threshold.explain(value, limit, class_id, slots, metadata)
                return threshold.status, reason
        return "ok", ""

    def to_rules(self) -> list[dict[str, Any]]:
        """Return the rules of a resolved decision for JSON: name, quantity, whether above, limit and status of each."""
        return [
            {"name": name, "quantity": rule.quantity, "above": rule.above, "limit": limit, "status": rule.status}
            for name, rule, limit in self._rules
        ]

    @cached_property
    def _rules(self) -> list[tuple[str, Threshold, float]]:
        return [(name, THRESHOLDS[name], limit) for name, limit in self.limits.items() if limit is not None]


def _find_thresholds() -> dict[str, Threshold]:
    hints = get_type_hints(Decision, include_extras=True)
    return {
        field.name: next(entry for entry in hints[field.name].__metadata__ if isinstance(entry, Threshold))
        for field in fields(Decision)
    }


# the rules by the names of the thresholds, in the order in which they apply
THRESHOLDS: dict[str, Threshold] = _find_thresholds()
NO_DECISION = Decision()
