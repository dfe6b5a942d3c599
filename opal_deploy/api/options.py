"""The options of `create_atlas` and `write_sheets`. Light to import: the commands declare theirs by these classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import (
    DEFAULT_CONFIDENCE,
    BoxConfidence,
    CropFile,
    CropToBoxes,
    DatasetName,
    Device,
    ExpectSha256,
    LabelSource,
    MaxPixels,
    Option,
    Options,
    RuntimeChoice,
    SlotNameFile,
    StrPath,
    Threads,
)
from opal_deploy.records.decision import Decision


@dataclass(frozen=True, kw_only=True)
class AtlasOptions(Options):
    """The options of `create_atlas` and `opal-deploy atlas`; `data` is a data set to choose patches from."""

    # None: the patches that the model keeps
    data: StrPath | None = None
    out: Annotated[StrPath, Option("The page to write.", cli=Path)] = Path("atlas.html")
    dataset: DatasetName = None
    split: Annotated[Literal["test", "val", "train"], Option("Split of DATA.")] = "train"
    boxes: CropToBoxes = True
    overwrite: Annotated[bool, Option("Replace the page.")] = False
    device: Device = "auto"
    threads: Threads = None
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
