"""Build atlases from data sets: the work of `opal-deploy atlas`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opal_deploy.api.options import AtlasOptions
from opal_deploy.artifact.files import lock_directory
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import display_path
from opal_deploy.errors import ImageError, MissingExtra, UsageError, install_command, is_installed
from opal_deploy.logs import Progress, WarningLine, as_progress, no_progress, one_line
from opal_deploy.options import StrPath, keywords
from opal_deploy.predict import setup
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions, content_sha256, raise_pillow_limit
from opal_deploy.records.build import error_record
from opal_deploy.records.names import escape_name
from opal_deploy.records.record import Answered
from opal_deploy.run.drawing import check_exact_evidence
from opal_deploy.runtime.devices import default_batch, default_workers
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session
from opal_deploy.sources.annotations import FolderLabels, annotate
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import InputImage, Skipped
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.entries import Atlas
from opal_deploy.visualization.atlas.storage import check_out_dir, write_atlas


@dataclass(frozen=True)
class CreatedAtlas:
    """The outcome of `create_atlas`: the atlas, and the seconds that it took."""

    atlas: Atlas
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return counts for JSON."""
        return {
            "atlas": self.atlas.root.as_posix(),
            "model": dict(self.atlas.model),
            "data": dict(self.atlas.data),
            "patches": self.atlas.count_patches(),
            "seconds": self.seconds,
        }


@keywords(AtlasOptions)
def create_atlas(data: StrPath, model: StrPath | None, options: AtlasOptions) -> CreatedAtlas:
    """Collect the patches with the strongest evidence for each class and slot, and write them as an atlas.

    Args:
        data: a data set as for `train`, or any folder or archive with a folder per class.
        model: an exported model or a checkpoint; None: found as by `opal-deploy infer`.

    Raises:
        UsageError: the data, the model or the output folder cannot be used. StoppedEarly: a device was lost.
    """
    data, out, log = Path(data), Path(options.out), options.log
    if not data.exists():
        raise UsageError(f"{data}: no such file or folder")
    check_out_dir(out, overwrite=options.overwrite)
    path = Path(model) if model is not None else setup.find_default_model(options.device, log=log)
    raise_pillow_limit(options.max_pixels)
    sessions = open_sessions(path, device=options.device, threads=options.threads)
    metadata = sessions[0].metadata
    check_exact_evidence(metadata, str(path))
    images, description, total = _read_images(data, options)
    setup.log_cautions(metadata, boxed=True, crop_hint="", log=log)
    inference = InferenceOptions(
        batch=options.batch or default_batch(sessions[0]),
        workers=options.workers or default_workers(),
        max_pixels=options.max_pixels,
    )
    log(one_line(f"Building an atlas of {description} with {path} in {sessions[0].description}"))
    with lock_directory(out):
        started = time.perf_counter()
        collector = AtlasCollector(metadata, options.top)
        collect_images(images, sessions, inference, collector, as_progress(options.progress), total)
        answered = collector.images - collector.failed
        if not answered:
            raise UsageError(f"{data}: none of {collector.images} images can be used; nothing is written")
        about = {
            "description": description, "images": collector.images, "answered": answered, "failed": collector.failed,
        }  # fmt: skip
        atlas = write_atlas(collector, out, setup.fingerprint_model(path), about)
        return CreatedAtlas(atlas, time.perf_counter() - started)


def collect_images(
    images: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    collector: AtlasCollector,
    progress: Progress = no_progress,
    total: int | None = None,
) -> None:
    """Run the model on every image and hand the records to the collector; raise StoppedEarly if a device is lost.

    Args:
        images: the images, with their labels.
        sessions: sessions of one model with `exact` evidence.
        options: how images are decoded and batched.
        collector: receives the records.
        progress: receives the number of images done after each image, and `total`.
        total: number of images, if it is known.
    """
    for result in predict_stream(images, sessions, replace(options, keep_images=True)):
        record, prepared = result.record, result.prepared
        sha256 = prepared.image_sha256
        if sha256 is None and isinstance(record, Answered):
            try:
                sha256 = content_sha256(prepared.input.source)
            except ImageError as error:
                record = error_record(record.image, error.code, str(error))
        collector.add(record, label=prepared.input.label, sha256=sha256 or "", image=prepared.image)
        progress(collector.images, total, "")


def _read_images(data: Path, options: AtlasOptions) -> tuple[Iterator[InputImage], str, int | None]:
    """Return the images of a data set with their labels, a description, and their number if it is known.

    The data set is read as the trainer does; without scikit-learn, no validation images are set aside.

    Raises:
        UsageError: the data set cannot be read, or lacks the split.
    """
    if options.plain or (options.dataset is None and not data.is_dir()):
        found = annotate(discover([str(data)], Skipped()), None, FolderLabels())
        plain = (replace(image, name=escape_name(image.relative), index=None) for image in found)
        return plain, f"{data.name or data} (a folder per class)", None
    sets_aside = options.split == "val" or (options.split == "train" and is_installed("sklearn"))
    try:
        dataset = read_dataset(
            data, options.dataset,
            needs_validation=lambda _: sets_aside, progress=as_progress(options.progress),
        )  # fmt: skip
    except MissingExtra as error:
        raise UsageError(f"{error}; or use every image, labelled by its folder, with --plain") from None
    if options.split == "train" and not (sets_aside or dataset.val):
        options.log(
            WarningLine(
                "warning: the images that training set aside for validation are used too; install scikit-learn to "
                f"leave them out: {install_command('train')}"
            )
        )
    for line in dataset.warnings:
        options.log(WarningLine(one_line(f"warning: {line}")))
    samples = {"train": dataset.train, "val": dataset.val, "test": dataset.test}[options.split]
    if not samples:
        raise UsageError(f"{data}: has no {options.split} split; choose another --split")
    images = (
        InputImage(
            escape_name(display_path(sample.path, dataset.root)),
            sample.path,
            sample.box if options.boxes else None,
            dataset.class_names[sample.label],
        )
        for sample in samples
    )
    crop_note = ", cropped to boxes" if options.boxes and dataset.crop == "boxes" else ""
    return images, f"{data.name or data} ({dataset.layout}, {options.split} split{crop_note})", len(samples)
