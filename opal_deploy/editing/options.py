"""The options of `edit_model` and `opal-deploy edit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from opal_deploy.artifact.drops import SlotName
from opal_deploy.evaluation.options import EvaluateOptions, Split
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import (
    CropToBoxes,
    DatasetName,
    Device,
    Option,
    Options,
    Partition,
    SkipMissing,
    StrPath,
    Threads,
    to_arguments,
)


@dataclass(frozen=True, kw_only=True)
class EditOptions(Options):
    """Options of an edit.

    Attributes:
        log: receives the lines that the command prints.
        progress: receives the number of images done and in all.
    """

    drop: Annotated[
        Sequence[SlotName], Option("Slot to take out: CLASS/SLOT, such as Gull/2. Repeatable.", cli=list[str])
    ] = ()
    drops: Annotated[
        StrPath | None, Option('TOML file of slots to take out: drop = ["Gull/2", "Gull/4"].', cli=Path)
    ] = None
    restore: Annotated[
        Sequence[SlotName], Option("Dropped slot to restore, in a checkpoint. Repeatable.", cli=list[str])
    ] = ()
    data: Annotated[StrPath | None, Option("A data set as `train` takes it, to measure on.", cli=Path)] = None
    suggest: Annotated[bool, Option("List slots that look at the wrong thing. Needs --data.")] = False
    background: Annotated[
        StrPath | None,
        Option("Folder of images without any object; slots that fire there as strongly are suggested.", cli=Path),
    ] = None
    split: Annotated[Split, Option("Images of --data to measure on; keep the test images for the end.")] = "val"
    page: Annotated[
        StrPath | None,
        Option("HTML page to write: suggestions to try out, and images whose answer changes.", cli=Path),
    ] = None
    atlas: Annotated[
        StrPath | None,
        Option("Folder of `opal-deploy atlas`; --page shows its patches of the slots.", cli=Path),
    ] = None
    out: Annotated[StrPath | None, Option("Edited model to write.", default="none is written", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace --out or --page if it exists.")] = False
    reason: Annotated[str | None, Option("Reason for the edit, kept in the model's file.")] = None
    dataset: DatasetName = None
    partition: Partition = 1
    skip_missing: SkipMissing = False
    boxes: CropToBoxes = True
    annotations: Annotated[
        StrPath | None,
        Option(
            "COCO file with object boxes.",
            default="the data set's boxes or masks",
            cli=Path,
        ),
    ] = None
    batch: Annotated[int, Option("Batch size.", min=1)] = 16
    device: Device = "auto"
    threads: Threads = None
    log: Log = log_line
    progress: ProgressChoice | None = None

    def evaluate_options(self) -> EvaluateOptions:
        """Return the options with which the data set is read and measured."""
        shared = ("dataset", "partition", "skip_missing", "split", "boxes", "annotations", "batch", "device", "threads")
        values = {name: getattr(self, name) for name in (*shared, "log", "progress")}
        return EvaluateOptions(**values)

    def repeat(self, model: Path, drop: Sequence[str] = (), *, folders: bool = True) -> list[str]:
        """Return the command that takes these slots out, measured on the same images; see `to_arguments`."""
        edit = replace(
            self, drop=tuple(drop), drops=None, suggest=False, background=None, page=None, atlas=None, overwrite=False,
            out=f"{model.stem}.edited{model.suffix}",
        )  # fmt: skip
        return ["opal-deploy", "edit", str(model) if folders else model.name, *to_arguments(edit, folders=folders)]
