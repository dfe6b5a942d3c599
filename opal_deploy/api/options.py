"""The options of `create_atlas` and `write_sheets`. Light to import: the commands declare theirs by these classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import (
    DEFAULT_CONFIDENCE,
    AtlasFolder,
    Batch,
    BoxConfidence,
    CropFile,
    CropToBoxes,
    DatasetName,
    Device,
    Devices,
    ExpectSha256,
    LabelSource,
    MaxPixels,
    Option,
    Options,
    RuntimeChoice,
    SlotNameFile,
    StrPath,
    Threads,
    Workers,
)
from opal_deploy.records.decision import Decision


@dataclass(frozen=True, kw_only=True)
class AtlasOptions(Options):
    """The options of `create_atlas` and `opal-deploy atlas`."""

    out: Annotated[StrPath, Option("Output folder.", cli=Path)] = Path("atlas")
    top: Annotated[int, Option("Patches to keep per slot.", min=1, max=100)] = 8
    plain: Annotated[bool, Option("Use every image in DATA, labelled by its folder.")] = False
    dataset: DatasetName = None
    split: Annotated[Literal["test", "val", "train"], Option("Split of the data set.")] = "train"
    boxes: CropToBoxes = True
    overwrite: Annotated[bool, Option("Replace the atlas in --out.")] = False
    device: Devices = "auto"
    batch: Batch = None
    threads: Threads = None
    workers: Workers = None
    max_pixels: MaxPixels = 100_000_000
    log: Log = log_line
    progress: ProgressChoice | None = None


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Decision):
    """The options of `write_sheets` and `opal-deploy explain`."""

    out: Annotated[
        StrPath | None,
        Option(
            "For one image a .png or .svg file, for several a folder.", default="NAME.evidence.png or sheets", cli=Path
        ),
    ] = None
    overwrite: Annotated[bool, Option("Replace existing sheets.")] = False
    atlas: AtlasFolder = None
    rows: Annotated[int, Option("Patches per slot from --atlas.", min=1)] = 4
    slot_names: SlotNameFile = None
    boxes: CropFile = None
    box_confidence: BoxConfidence = DEFAULT_CONFIDENCE
    labels: LabelSource = None
    device: Device = "auto"
    threads: Threads = None
    runtime: RuntimeChoice = "auto"
    expect_sha256: ExpectSha256 = None
    max_pixels: MaxPixels = 100_000_000
    log: Log = log_line
    progress: ProgressChoice | None = None
