"""`opal-deploy atlas`: which patches of a training set each slot stands for, and which slots stand for nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.cli.options import CPU_BATCH, GPU_BATCH, default_batch, default_workers
from opal_deploy.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.inference.atlas import Counts, Labelled
    from opal_deploy.visualization.atlas.storage import Atlas

SOME_IMAGES_FAILED = 3
# lines of the to-do list on a terminal; all are in atlas.json
_LISTED = 12
_KINDS = {
    "never_predicted": "classes predicted for no picture",
    "shares_its_cell": "slots that rarely have a cell to themselves",
    "adds_little": "slots that add little",
    "one_place": "slots that look at one place whatever the picture",
}


def atlas(
    data: Annotated[
        Path, typer.Argument(help="A data set as `train` takes it, or any folder or archive with a folder a class.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="An exported model, or a checkpoint; default: the one in this directory.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("atlas"),
    top: Annotated[int, typer.Option(min=1, max=100, help="Patches to keep of each slot.")] = 8,
    only_correct: Annotated[
        bool, typer.Option("--only-correct", help="Leave out pictures predicted as another class than their label's.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Take DATA as `infer` does: every picture in it, labelled by its folder.")
    ] = False,
    dataset: Annotated[
        str | None,
        typer.Option(help="The data set's name, as `train` takes it. Default: told by its files.", show_default=False),
    ] = None,
    partition: Annotated[int, typer.Option(min=1, max=10, help="Of DTD and SUN-397.")] = 1,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out pictures that are not there.")
    ] = False,
    split: Annotated[Literal["test", "val", "train"], typer.Option(help="Which pictures of a data set.")] = "train",
    boxes: Annotated[bool, typer.Option("--boxes/--no-boxes", help="Crop to the data set's boxes.")] = True,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many pictures of each label.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the atlas that is in --out.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, or GPU numbers such as 0,1.")] = "auto",
    batch: Annotated[
        int | None, typer.Option(min=1, help=f"Pictures a forward pass; default: {CPU_BATCH}, on a GPU {GPU_BATCH}.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU; default: all cores.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Pictures decoded at a time; default: as many as cores, at most 8.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse pictures with more pixels than this.")] = 100_000_000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write counts and the to-do list to stdout, as JSON.")
    ] = False,
) -> None:
    """Go through a training set once, and keep for each class and slot the patches that showed it best.

    `explain --atlas` shows them beside a picture's own. Slots that do not do what a slot is for are listed.
    """
    from opal_deploy.artifact.files import lock_directory
    from opal_deploy.cli.infer import setup
    from opal_deploy.inference.atlas import collect, write_patches
    from opal_deploy.inference.sheets import check_exact_evidence
    from opal_deploy.inference.types import InferenceOptions
    from opal_deploy.runtime.select import open_sessions
    from opal_deploy.visualization.atlas.page import write_page
    from opal_deploy.visualization.atlas.storage import check_out_dir, write_atlas

    if not data.exists():
        raise UsageError(f"{data}: no such file or folder")
    check_out_dir(out, overwrite=overwrite)
    path = model or setup.find_default_model(device)
    setup.raise_pillow_limit(max_pixels)
    sessions = open_sessions(path, device=device, threads=threads)
    metadata = sessions[0].metadata
    check_exact_evidence(metadata, str(path))
    found = _pictures(data, _Reading(dataset, partition, skip_missing, split, boxes, plain=plain))
    _check_labels(found, metadata, data, only_correct=only_correct)
    if metadata.unverified:
        print_message(
            f"NOT VERIFIED: this model was {metadata.unverified}: nobody compared its answers with the reference's"
        )
    if metadata.crop == "boxes" and not found.cropped:
        print_message(
            "This model was trained on pictures cropped to boxes, and these are not cropped: expect lower cosines"
        )
    options = InferenceOptions(
        batch=batch or default_batch(sessions[0]),
        workers=workers or default_workers(),
        max_pixels=max_pixels,
    )
    print_message(one_line(f"Building an atlas of {found.description} with {path} in {sessions[0].description}"))
    with lock_directory(out):
        started = time.perf_counter()
        with progress("pictures") as advance:
            collector, counts = collect(
                _limited(found.pictures, limit), sessions, options, top,
                only_correct=only_correct, model=str(path), report=lambda done: advance(done, found.total),
            )  # fmt: skip
        if not counts.counted:
            raise UsageError(
                f"{data}: not one of {counts.images} pictures counts ({_lost(counts)}); nothing is written"
            )
        about = {
            "description": found.description,
            "counted": "correct" if only_correct else "predicted",
            "images": counts.images, "answered": counts.counted, "failed": counts.failed,
            "wrong": counts.wrong, "unlabelled": counts.unlabelled,
        }  # fmt: skip
        built = write_patches(collector, out, setup.fingerprint_model(path), about)
        write_atlas(built)
        write_page(built)
        seconds = time.perf_counter() - started
    _tell(built, counts, seconds)
    if as_json:
        print_json(_document(built, seconds))
    if counts.failed:
        raise typer.Exit(SOME_IMAGES_FAILED)


@dataclass(frozen=True)
class _Reading:
    """How DATA is read."""

    dataset: str | None
    partition: int
    skip_missing: bool
    split: str
    boxes: bool
    plain: bool


@dataclass(frozen=True)
class _Found:
    """Pictures, how many where that is known, the labels that they may have, and whether they are cropped to boxes."""

    pictures: Iterator[Labelled]
    description: str
    total: int | None
    labels: frozenset[str] | None
    cropped: bool


def _pictures(data: Path, how: _Reading) -> _Found:
    """Read DATA as the trainer does; where it is no folder, or the trainer's packages are missing, as folders.

    Raises:
        UsageError: the data set cannot be used as it is.
    """
    from opal_deploy.datasets.registry import read_dataset

    if how.plain or (how.dataset is None and not data.is_dir()):
        return _plain(data)
    try:
        with progress("reading") as advance:
            found = read_dataset(
                data, how.dataset, partition=how.partition, skip_missing=how.skip_missing, report=advance
            )
    except MissingExtra as error:
        if how.dataset is not None:
            raise
        print_message(f"{error}; until then every picture below {data} counts, labelled by its folder")
        return _plain(data)
    for line in found.warnings:
        print_message(one_line(f"warning: {line}"))
    samples = {"train": found.train, "val": found.val, "test": found.test}[how.split]
    if not samples:
        raise UsageError(f"{data}: it has no {how.split} split; choose another --split")

    def pictures() -> Iterator[Labelled]:
        from opal_deploy.datasets.samples import display_path
        from opal_deploy.inference.atlas import Labelled
        from opal_deploy.inference.types import Request
        from opal_deploy.records.names import escape_name

        for sample in samples:
            request = Request(
                escape_name(display_path(sample.path, found.root)), sample.path, sample.box if how.boxes else None
            )
            yield Labelled(request, found.class_names[sample.label])

    cropped = how.boxes and found.crop == "boxes"
    described = f"{data.name or data} ({found.layout}, {how.split} split{', cropped to boxes' if cropped else ''})"
    return _Found(pictures(), described, len(samples), frozenset(found.class_names), cropped)


def _plain(data: Path) -> _Found:
    from opal_deploy.inference.atlas import Labelled
    from opal_deploy.inference.sources.annotations import FolderLabels
    from opal_deploy.inference.sources.discovery import discover
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.types import Request
    from opal_deploy.records.names import escape_name

    labels = FolderLabels()

    def pictures() -> Iterator[Labelled]:
        for item in discover([str(data)], Skipped()):
            request = Request(escape_name(item.relative), item.source, error=item.problem)
            yield Labelled(request, labels.find(item.path.as_posix()))

    return _Found(pictures(), f"{data.name or data} (a folder a class)", None, None, cropped=False)


def _check_labels(found: _Found, metadata: Metadata, data: Path, *, only_correct: bool) -> None:
    if found.labels is None or found.labels == set(metadata.class_names):
        return
    unknown = sorted(found.labels - set(metadata.class_names))
    if only_correct and not found.labels & set(metadata.class_names):
        raise UsageError(
            f"{data}: none of its classes is one of the model's ({unknown[0]!r}); leave --only-correct out"
        )
    if unknown:
        print_message(
            one_line(f"warning: {len(unknown)} of its classes are none of the model's ({', '.join(unknown[:3])})")
        )


def _limited(pictures: Iterator[Labelled], limit: int | None) -> Iterator[Labelled]:
    counts: Counter[str | None] = Counter()
    for picture in pictures:
        counts[picture.label] += 1
        if limit is None or counts[picture.label] <= limit:
            yield picture


def _lost(counts: Counts) -> str:
    parts = [(counts.failed, "failed"), (counts.wrong, "predicted wrong"), (counts.unlabelled, "without a label")]
    return ", ".join(f"{count:,} {what}" for count, what in parts if count) or "there are none"


def _tell(built: Atlas, counts: Counts, seconds: float) -> None:
    patches = sum(len(entry.patches) for entry in built.entries.values())
    lost = "" if counts.counted == counts.images else f" ({_lost(counts)})"
    print_message(
        f"{counts.images:,} pictures in {seconds:.1f} s{lost}: {patches:,} patches of {len(built.entries):,} slots"
    )
    for line in counts.first_failures:
        print_message(one_line(f"  {line}"))
    total = sum(built.cells)
    most = max(range(len(built.cells)), key=lambda cell: (built.cells[cell], -cell))
    row, col = divmod(most, built.model["grid"][1])
    print_message(
        f"The cell chosen most often: {row}, {col}, {built.cells[most] / total:.1%} of all "
        f"(even: {1 / len(built.cells):.1%})"
    )
    kinds = Counter(finding.kind for finding in built.findings)
    if not kinds:
        print_message("To do: nothing found")
    for kind, count in kinds.most_common():
        print_message(f"To do: {count:,} {_KINDS[kind]}")
    for finding in built.findings[:_LISTED]:
        print_message(one_line(f"  {finding.message}"))
    if len(built.findings) > _LISTED:
        print_message(f"  and {len(built.findings) - _LISTED:,} more in atlas.json")
    print_message(f"Atlas: {built.root}")


def _document(built: Atlas, seconds: float) -> dict[str, Any]:
    return {
        "atlas": built.root.as_posix(),
        "model": dict(built.model),
        "data": dict(built.data),
        "patches": sum(len(entry.patches) for entry in built.entries.values()),
        "seconds": seconds,
        "findings": [vars(finding) for finding in built.findings],
    }
