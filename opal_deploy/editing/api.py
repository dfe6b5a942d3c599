"""The public `edit_model`, which `opal-deploy edit` calls: slots are taken out of a model, and the effect measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from opal_deploy._version import __version__
from opal_deploy.artifact.drops import SlotName, check_drops, name_slot, parse_slots, write_slot
from opal_deploy.artifact.files import ModelKind, check_output, compute_sha256, model_kind, remove_temporary_files
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.artifact.metadata import Metadata, check_all_outputs
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.evaluation.api import EvaluateOptions, Split
from opal_deploy.export.options import ExportOptions
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import (
    CropToBoxes,
    DatasetName,
    Device,
    Option,
    Options,
    StrPath,
    Threads,
    keywords,
    to_arguments,
)

if TYPE_CHECKING:
    from opal_deploy.api.model import Model
    from opal_deploy.editing.scores import Effect, Scores
    from opal_deploy.editing.suggestions import Suggestion

# options that tell how --data is read and measured
_OF_DATA = ("dataset", "boxes", "annotations", "split")


@dataclass(frozen=True, kw_only=True)
class EditOptions(Options):
    """Options of an edit."""

    drop: Annotated[
        Sequence[SlotName], Option("Slot to take out: CLASS/SLOT, such as Gull/2. Repeatable.", cli=list[str])
    ] = ()
    data: Annotated[StrPath | None, Option("A data set as `train` takes it, to measure on.", cli=Path)] = None
    suggest: Annotated[bool, Option("List slots that look at the wrong thing. Needs --data.")] = False
    split: Annotated[Split, Option("Images of --data to measure on; keep the test images for the end.")] = "val"
    page: Annotated[
        StrPath | None, Option("HTML page to write: suggestions to try out, and images whose answer changes.", cli=Path)
    ] = None
    out: Annotated[StrPath | None, Option("Edited model to write.", default="none is written", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace --out or --page if it exists.")] = False
    reason: Annotated[str | None, Option("Reason for the edit, kept in the model's file.")] = None
    dataset: DatasetName = None
    boxes: CropToBoxes = True
    annotations: Annotated[
        StrPath | None, Option("COCO file with object boxes.", default="the data set's boxes or masks", cli=Path)
    ] = None
    device: Device = "auto"
    threads: Threads = None
    log: Log = log_line
    progress: ProgressChoice | None = None

    def repeat(self, model: Path, drop: Sequence[str] = (), *, folders: bool = True) -> list[str]:
        """Return the command that takes these slots out, measured on the same images; see `to_arguments`."""
        out = f"{model.stem}.edited{model.suffix}"
        edit = replace(self, drop=tuple(drop), suggest=False, page=None, overwrite=False, out=out)
        return ["opal-deploy", "edit", str(model) if folders else model.name, *to_arguments(edit, folders=folders)]


@dataclass(frozen=True)
class EditResult:
    """The outcome of an edit, done or planned.

    Attributes:
        path: the edited model; None if none was asked for.
        metadata: of the edited model.
        scores: of the images of `data`, with which other sets of drops can be tried; None without data.
        effect: what the edit changes on the images of `data`; None without data or without drops.
        suggestions: slots that look at the wrong thing, the most harmful first.
        suspected: names of the suspected slots, except where no other slot of the class finds anything.
        suggested: names of the suspected slots without which most answers are right; empty if no choice helps.
        suggested_effect: effect of dropping `suggested`, or if empty, all of `suspected`; None without any.
        page: the page; None if none was asked for.
    """

    path: Path | None
    metadata: Metadata
    scores: Scores | None
    effect: Effect | None
    suggestions: list[Suggestion]
    suspected: list[str]
    suggested: list[str]
    suggested_effect: Effect | None
    page: Path | None


@keywords(EditOptions)
def edit_model(model: StrPath | Model, options: EditOptions) -> EditResult:
    """Take slots out of a model, or suggest which, and measure what that changes.

    A dropped slot's score is 0, and its class's anchor is shared among the slots that are left; nothing else changes,
    so that the effect on images is known without running the edited model. Does what `opal-deploy edit` does.

    Args:
        model: a checkpoint, or an exported ONNX file with all outputs. Slots to drop are texts such as "Gull/2", or
            pairs such as ("Gull", 2).

    Raises:
        ArtifactError: the model is missing or damaged.
        MissingExtra: a package is not installed.
        UsageError: a class or slot does not exist, options or files do not fit together, or a file is in the way.
        VerificationError: the edited graph does not reproduce the closed form; nothing is written.
    """
    path, options = Path(model), replace(options, drop=tuple(map(write_slot, options.drop)))
    kind, metadata = _read_model(path)
    drop = parse_slots(options.drop, metadata, "--drop")
    check_drops(drop, metadata)
    _check_options(path, kind, options)
    data, effect, suggested_effect = None, None, None
    suggestions: list[Suggestion] = []
    suspected: list[int] = []
    suggested: list[int] = []
    if options.data is not None:
        require("torch", "train", "reading a data set")
        from opal_deploy.editing.scores import score_data

        names = (*_OF_DATA, "device", "threads", "log", "progress")
        measured = EvaluateOptions(**{name: getattr(options, name) for name in names})
        data = score_data(path, metadata, Path(options.data), measured)
        if drop:
            effect = data.scores.drop(drop)
        if options.suggest:
            from opal_deploy.editing.suggestions import choose_drops, suggest_slots

            suggestions = suggest_slots(data)
            suspected, suggested = choose_drops(data, suggestions)
            if chosen := suggested or suspected:
                suggested_effect = data.scores.drop(chosen)
    out, page = (None if name is None else Path(name) for name in (options.out, options.page))
    edited = metadata
    if out is not None:
        edited = _describe_edited(path, metadata, drop, effect, options)
        _write(path, kind, edited, out, options)
        if metadata.baseline or metadata.risk:
            again = shlex.join(["opal-deploy", "evaluate", "DATA", "--model", str(out), "--split", "val", "--record"])
            options.log(f"{out}: has no baseline yet; before drift, --unknown 5% or --min-margin 5%: {again}")
    if page is not None and data is not None:
        from opal_deploy.editing.page import write_page

        # without folders: the page may be passed on
        command = options.repeat(path, folders=False)
        write_page(page, data, drop, effect, suggestions, command, overwrite=options.overwrite)
    return EditResult(
        out, edited, None if data is None else data.scores, effect, suggestions,
        [name_slot(channel, metadata) for channel in suspected],
        [name_slot(channel, metadata) for channel in suggested], suggested_effect, page,
    )  # fmt: skip


def _read_model(path: Path) -> tuple[ModelKind, Metadata]:
    from opal_deploy.runtime.select import read_model_metadata

    kind = model_kind(path)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected a checkpoint or an exported ONNX file")
    if kind not in ("checkpoint", "onnx"):
        raise UsageError(f"{path}: cannot be edited; expected a checkpoint or its ONNX file, from which to build again")
    if kind == "checkpoint":
        require("torch", "train", "editing a checkpoint")
    metadata = read_model_metadata(path)
    if metadata.evidence != "exact":
        raise UsageError(f"{path}: has no slots; expected evidence from single cells, found {metadata.evidence}")
    check_all_outputs(metadata, str(path), "`edit`")
    return kind, metadata


def _check_options(path: Path, kind: ModelKind, options: EditOptions) -> None:
    out = None if options.out is None else Path(options.out)
    if (options.suggest or options.page is not None) and options.data is None:
        raise UsageError(f"{'--suggest' if options.suggest else '--page'}: needs labelled images; add --data")
    if options.data is None and (unused := options.changed(names=_OF_DATA)):
        raise UsageError(f"{unused}: nothing is measured; add --data, or leave out {unused}")
    if not options.drop and (out is not None or not options.suggest):
        raise UsageError("nothing to do: give --drop CLASS/SLOT, or --suggest with --data to find slots to drop")
    if options.drop and out is None and options.data is None:
        raise UsageError("--drop: give --out FILE to write the edited model, or --data to see what would change")
    if out is not None and model_kind(out) != kind:
        raise UsageError(f"--out {out}: expected a name that ends in {path.suffix}, as {path.name} does")
    inputs = (path, options.annotations)
    for name, file, suffix in (("--out", options.out, path.suffix), ("--page", options.page, ".html")):
        if file is not None:
            check_output(name, Path(file), [suffix], inputs=inputs, overwrite=options.overwrite)


def _describe_edited(
    path: Path, metadata: Metadata, drop: Sequence[int], effect: Effect | None, options: EditOptions
) -> Metadata:
    """Return the edited model's metadata: its slots and the edit, without facts that hold only for its parent."""
    edit: dict[str, Any] = {
        "dropped": [name_slot(channel, metadata) for channel in drop],
        "restored": [],
        "reason": options.reason or "",
        "command": shlex.join(["opal-deploy", "edit", path.name, *to_arguments(options, folders=False)]),
        "parent": {"file": path.name, "sha256": compute_sha256(path)},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "opal_deploy": __version__,
    }
    if effect is not None:
        before, after = effect.accuracy
        edit["measured"] = {
            "data": Path(options.data or "").name, "split": options.split, "images": len(effect.labels),
            "accuracy": [before, after], "gained": effect.gained, "lost": effect.lost, "p_value": effect.p_value,
        }  # fmt: skip
    return replace(
        metadata.with_dropped({*metadata.dropped, *drop}), edits=(*metadata.edits, edit),
        training={name: value for name, value in metadata.training.items() if name != "metrics"},
    )  # fmt: skip


def _write(path: Path, kind: ModelKind, edited: Metadata, out: Path, options: EditOptions) -> None:
    remove_temporary_files(out)
    if kind == "onnx":
        require("onnx", "export", "editing an ONNX file")
        require("onnxruntime", "cpu", "editing an ONNX file, to verify what it writes,")
        from opal_deploy.editing.onnx_edit import write_edited_onnx

        export_options = ExportOptions(threads=options.threads, overwrite=options.overwrite, log=options.log)
        write_edited_onnx(path, edited, out, export_options)
        return
    from opal_deploy.model import checkpoint

    changed = checkpoint.with_dropped_slots(checkpoint.load(path), edited.dropped)
    calibration = Calibration.from_dict(edited.calibration)
    checkpoint.save(out, replace(changed, edits=edited.edits, calibration=calibration), overwrite=options.overwrite)
