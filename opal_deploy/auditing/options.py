"""The options of `verify`, `diff`, `drift` and `convert`, as commands and as Python functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import Device, ExpectSha256, Option, Options, RuntimeChoice, StrPath, Threads
from opal_deploy.records.decision import Decision

_RESULTS = "Only for results"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Decision):
    """The options of `verify` and `opal-deploy verify`; thresholds apply to results without a run.json."""

    model: Annotated[
        StrPath | None, Option("Results: the model that made them.", cli=Path, default="only signatures are checked")
    ] = None
    sample: Annotated[int, Option("Number of records to check.", min=1, panel=_RESULTS)] = 100
    every: Annotated[bool, Option("Check all records.", flag="--all", panel=_RESULTS)] = False
    seed: Annotated[int | None, Option("Seed of the sample.", default="a new one each time", panel=_RESULTS)] = None
    root: Annotated[StrPath, Option("Folder that image names are relative to.", cli=Path, panel=_RESULTS)] = Path()
    boxes: Annotated[StrPath | None, Option("The run's --boxes file.", cli=Path, panel=_RESULTS)] = None
    public_key: Annotated[
        tuple[StrPath, ...],
        Option("Check all signatures with this public key (PEM); repeatable.", cli=list[Path], panel=_RESULTS),
    ] = ()
    allow_incomplete: Annotated[
        bool, Option("Accept a signed run that stopped early, or an earlier state of one.", panel=_RESULTS)
    ] = False
    reseal: Annotated[
        StrPath | None, Option("Write the digest again if the outputs are those of this original.", cli=Path)
    ] = None
    device: Device = "auto"
    threads: Threads = None
    runtime: RuntimeChoice = "auto"
    expect_sha256: ExpectSha256 = None
    images: Sequence[StrPath] = ()
    log: Log = log_line
    progress: ProgressChoice | None = None


@dataclass(frozen=True, kw_only=True)
class DiffOptions(Options):
    """The options of `diff` and `opal-deploy diff`."""

    out: Annotated[
        StrPath | None, Option("Write an HTML page of the largest changes, with both overlays.", cli=Path)
    ] = None
    overwrite: Annotated[bool, Option("Replace --out if it exists.")] = False
    worst: Annotated[int, Option("Largest changes on the page and in --json.", min=0)] = 20
    tolerance: Annotated[
        float, Option("Largest difference of contributions and margins that counts as equal.", min=0)
    ] = 1e-3
    fail_on: Annotated[
        Literal["error", "class", "cell", "contribution", "margin", "any"] | None,
        Option("Exit with 4 if any image has this kind of change or a larger one."),
    ] = None
    root: Annotated[StrPath, Option("Folder that the results' image names are relative to.", cli=Path)] = Path()
    device: Device = "auto"
    threads: Threads = None
    images: Sequence[StrPath] = ()
    log: Log = log_line
    progress: ProgressChoice | None = None


@dataclass(frozen=True, kw_only=True)
class DriftOptions(Options):
    """The options of `find_drift` and `opal-deploy drift`."""

    baseline: Annotated[
        StrPath | None,
        Option("Model of the results, with its baseline.", default="the run's, in the working directory", cli=Path),
    ] = None
    against: Annotated[
        StrPath | None, Option("Earlier results of the same model, to compare with instead.", cli=Path)
    ] = None
    max_q: Annotated[float, Option("Largest false discovery rate of a shift.", min=0, max=1)] = 0.01
    min_effect: Annotated[float, Option("Smallest effect of a shift, 0 to 1.", min=0, max=1)] = 0.1
    fail_on: Annotated[
        Literal["any", "evidence"] | None, Option("Exit with 4 on `any` shift, or only on shifts in the `evidence`.")
    ] = None
    html: Annotated[StrPath | None, Option("Write an HTML page of the ten strongest shifts.", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace --html if it exists.")] = False
    root: Annotated[StrPath, Option("--html: folder that the results' image names are relative to.", cli=Path)] = Path()


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """The options of `convert_results` and `opal-deploy convert`."""

    to: Annotated[
        Literal["coco", "megadetector"],
        Option("`coco` (for Label Studio too), or `megadetector`: a detector's results."),
    ]
    out: Annotated[StrPath | None, Option("Output file.", default="standard output", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace --out if it exists.")] = False
    boxes: Annotated[
        StrPath | None, Option("megadetector: the detector's results given to infer as --boxes.", cli=Path)
    ] = None
