"""The public `edit_model`, which `opal-deploy edit` calls: slots are taken out of a model, and the effect measured."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy._version import __version__
from opal_deploy.artifact.drops import check_drops, name_slot, parse_slots, read_drops, write_slot
from opal_deploy.artifact.files import ModelKind, check_output, compute_sha256, model_kind, remove_temporary_files
from opal_deploy.artifact.measurements import Calibration
from opal_deploy.artifact.metadata import Metadata, check_all_outputs
from opal_deploy.editing.options import EditOptions
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.options import StrPath, keywords, to_arguments

if TYPE_CHECKING:
    from opal_deploy.api.model import Model
    from opal_deploy.editing.data import ScoredData
    from opal_deploy.editing.scores import Effect, Scores
    from opal_deploy.editing.suggestions import Suggestion

# options that tell how --data is read and measured
_OF_DATA = ("dataset", "partition", "skip_missing", "boxes", "annotations", "split", "batch")


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
        model: a checkpoint, or an exported ONNX file with all outputs; or what `Model.without` returned, to drop the
            same slots. Slots to drop or restore are texts such as "Gull/2", or pairs such as ("Gull", 2).

    Raises:
        ArtifactError: the model is missing or damaged.
        MissingExtra: a package is not installed.
        UsageError: a class or slot does not exist, options or files do not fit together, or a file is in the way.
        VerificationError: the edited graph does not reproduce the closed form; nothing is written.
    """
    # not at the top: `opal-deploy --help` loads no numpy
    from opal_deploy.api.model import Model

    drops = [*map(write_slot, options.drop)]
    if isinstance(model, Model) and model.whole is not None:
        drops += [slot for slot in map(write_slot, model.left_out) if slot not in drops]
        model = model.whole
    path = Path(model)
    options = replace(options, drop=tuple(drops), restore=tuple(map(write_slot, options.restore)))
    kind, metadata = _read_model(path)
    listed = read_drops(Path(options.drops)) if options.drops else []
    drop = parse_slots([*listed, *options.drop], metadata, "--drop")
    restore = parse_slots(options.restore, metadata, "--restore")
    check_drops(drop, restore, metadata)
    _check_options(path, kind, options, bool(drop or restore))
    data, effect, suggested_effect, atlas = None, None, None, None
    suggestions: list[Suggestion] = []
    suspected: list[int] = []
    suggested: list[int] = []
    if options.atlas is not None:
        from opal_deploy.predict.setup import fingerprint_model
        from opal_deploy.run.sheets import load_atlas

        atlas = load_atlas(path, metadata, fingerprint_model(path), Path(options.atlas))
    if options.data is not None:
        require("torch", "train", "reading a data set")
        from opal_deploy.editing.data import score_data

        data = score_data(path, metadata, options, restore)
        if drop or restore:
            edited_map = metadata.class_map.with_dropped({*metadata.dropped, *drop} - {*restore})
            effect = data.scores.compare(metadata.class_map, edited_map)
        if options.suggest:
            from opal_deploy.editing.suggestions import choose_drops, suggest_slots

            suggestions = suggest_slots(data)
            suspected, suggested = choose_drops(data, suggestions)
            if chosen := suggested or suspected:
                own_map = data.metadata.class_map
                suggested_effect = data.scores.compare(own_map, own_map.drop(chosen))
    out, page = (None if name is None else Path(name) for name in (options.out, options.page))
    edited = metadata
    if out is not None:
        edited = _describe_edited(path, metadata, drop, restore, data, effect, options)
        _write(path, kind, edited, out, options)
        # figures that were measured before the edit
        lost = ["--unknown 5%", "drift"] if metadata.baseline and not edited.baseline else []
        lost += ["--min-margin 5%"] if metadata.risk and not edited.risk else []
        if lost:
            again = shlex.join(["opal-deploy", "evaluate", "DATA", "--model", str(out), "--split", "val", "--record"])
            options.log(f"{out}: its parent's baseline is not its own; before {', '.join(lost)}: {again}")
    if page is not None and data is not None:
        from opal_deploy.editing.page import write_page

        write_page(page, path, data, drop, effect, suggestions, atlas, options)
    suspected_names, suggested_names = (
        [name_slot(channel, metadata) for channel in channels] for channels in (suspected, suggested)
    )
    scores = None if data is None else data.scores
    return EditResult(
        out, edited, scores, effect, suggestions, suspected_names, suggested_names, suggested_effect, page
    )


def _read_model(path: Path) -> tuple[ModelKind, Metadata]:
    from opal_deploy.runtime.select import read_model_metadata

    kind = model_kind(path)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected a checkpoint or an exported ONNX file")
    if kind == "engine":
        raise UsageError(f"{path}: an engine cannot be edited; edit its ONNX file or checkpoint, and build it again")
    if kind is None:
        raise UsageError(f"{path}: unknown kind of model; expected a checkpoint (.pt, .pth) or an exported .onnx file")
    if kind == "checkpoint":
        require("torch", "train", "editing a checkpoint")
    metadata = read_model_metadata(path)
    if metadata.evidence != "exact":
        raise UsageError(
            f"{path}: its answers do not come from single cells (evidence {metadata.evidence}), so it has no slots"
        )
    check_all_outputs(metadata, str(path), "`edit`")
    return kind, metadata


def _check_options(path: Path, kind: ModelKind, options: EditOptions, edits: bool) -> None:
    out = None if options.out is None else Path(options.out)
    needs_data = [name for name in ("suggest", "background", "page") if getattr(options, name)]
    if needs_data and options.data is None:
        raise UsageError(f"--{needs_data[0]}: needs labelled images; add --data")
    if options.data is None and (unused := options.changed(names=_OF_DATA)):
        raise UsageError(f"{unused}: nothing is measured; add --data, or leave out {unused}")
    if options.atlas is not None and options.page is None:
        raise UsageError("--atlas: its patches are shown on a page; add --page FILE")
    if options.background is not None and not options.suggest:
        raise UsageError("--background: serves to find slots; add --suggest")
    if not edits and not options.suggest:
        raise UsageError("nothing to do: give --drop CLASS/SLOT, or --suggest with --data to find slots to drop")
    if out is not None and not edits:
        raise UsageError("--out: the model would stay as it is; give --drop CLASS/SLOT")
    if edits and out is None and options.data is None:
        raise UsageError("--drop: give --out FILE to write the edited model, or --data to see what would change")
    if options.restore and kind == "onnx":
        raise UsageError(f"{path}: an ONNX file no longer has the scores of dropped slots; edit its checkpoint")
    if out is not None and model_kind(out) != kind:
        raise UsageError(f"--out {out}: expected a name that ends in {path.suffix}, as {path.name} does")
    inputs = (path, options.drops, options.annotations)
    for name, file, suffix in (("--out", options.out, path.suffix), ("--page", options.page, ".html")):
        if file is not None:
            check_output(name, Path(file), [suffix], inputs=inputs, overwrite=options.overwrite)
    if out is not None and options.page is not None and out.resolve() == Path(options.page).resolve():
        raise UsageError(f"{out}: --out and --page are the same file; give two names")


def _describe_edited(
    path: Path,
    metadata: Metadata,
    drop: Sequence[int],
    restore: Sequence[int],
    data: ScoredData | None,
    effect: Effect | None,
    options: EditOptions,
) -> Metadata:
    """Return the edited model's metadata: its slots and the edit, without facts that hold only for its parent.

    Calibration, risk and baseline are measured anew if `data` has the images that training set aside.
    """
    edit: dict[str, Any] = {
        "dropped": [name_slot(channel, metadata) for channel in drop],
        "restored": [name_slot(channel, metadata) for channel in restore],
        "reason": options.reason or "",
        "command": shlex.join(["opal-deploy", "edit", path.name, *to_arguments(options, folders=False)]),
        "parent": {"file": path.name, "sha256": compute_sha256(path)},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "opal_deploy": __version__,
    }
    if data is not None and effect is not None:
        before, after = effect.accuracy
        edit["measured"] = {
            "data": Path(options.data or "").name, "split": options.split, "images": len(effect.labels),
            "accuracy": [before, after], "gained": effect.gained, "lost": effect.lost, "p_value": effect.p_value,
        }  # fmt: skip
    edited = replace(
        metadata.with_dropped({*metadata.dropped, *drop} - {*restore}), edits=(*metadata.edits, edit),
        training={name: value for name, value in metadata.training.items() if name != "metrics"},
    )  # fmt: skip
    if data is None or not data.set_aside:
        return edited
    known = metadata.known_baseline
    return data.measure(edited, known.background if known else 0)


def _write(path: Path, kind: ModelKind, edited: Metadata, out: Path, options: EditOptions) -> None:
    remove_temporary_files(out)
    if kind == "onnx":
        require("onnx", "export", "editing an ONNX file")
        require("onnxruntime", "cpu", "editing an ONNX file, to verify what it writes,")
        from opal_deploy.editing.onnx_edit import write_edited_onnx
        from opal_deploy.export.options import ExportOptions

        write_edited_onnx(
            path, edited, out, ExportOptions(threads=options.threads, overwrite=options.overwrite, log=options.log)
        )
        return
    from opal_deploy.model import checkpoint

    changed = checkpoint.with_dropped_slots(checkpoint.load(path), edited.dropped)
    measured = replace(
        changed,
        edits=edited.edits,
        metrics={"val_risk": edited.risk} if edited.risk else {},
        calibration=Calibration.from_dict(edited.calibration),
        baseline=edited.known_baseline,
    )
    checkpoint.save(out, measured, overwrite=options.overwrite)
