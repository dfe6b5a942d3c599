"""Turn the parameters of `infer` into options: inputs, the model, and how it predicts; see `sheets` for what is drawn.

`explain`, `atlas`, `diff` and `verify` use the parts that they share with `infer`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import check_sha256, compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.console import print_message
from opal_deploy.cli.options import format_box_option, parse_rate
from opal_deploy.errors import UsageError
from opal_deploy.options import RuntimeName

if TYPE_CHECKING:
    from opal_deploy.artifact.engine_file import Sidecar
    from opal_deploy.inference.sources.annotations import Boxes, Labels
    from opal_deploy.inference.sources.counting import ImageCounter
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.sources.video import VideoOptions
    from opal_deploy.inference.types import Request
    from opal_deploy.runtime.session import Session
    from opal_deploy.visualization.report import ImageMode


@dataclass(frozen=True)
class Inputs:
    """The images of a call, with what is known of them.

    Attributes:
        images: folders, files, globs, archives, lists.
        shard: (i, n): every n-th image, beginning with the i-th, from 1.
        recursive: look into the subfolders of folders.
        boxes: crops by image; None: no image is cropped.
        labels: labels by image; None: none is known.
        video: how videos are read, and which of their frames.
    """

    images: list[str]
    shard: tuple[int, int]
    recursive: bool
    boxes: Boxes | None
    labels: Labels | None
    video: VideoOptions

    @staticmethod
    def read(
        images: list[str],
        *,
        shard: str | None,
        recursive: bool,
        boxes: Path | None,
        labels: str | None,
        video: VideoOptions,
    ) -> Inputs:
        """Check the inputs and read the files of boxes and labels.

        Raises:
            UsageError: an input that is not there, another shard, boxes or labels that cannot be used.
        """
        from opal_deploy.inference.sources import discovery
        from opal_deploy.inference.sources.annotations import read_boxes, read_labels
        from opal_deploy.preprocess.video import require_pyav

        discovery.check_inputs(images, video.sampling)
        if video.sampling is not None:
            require_pyav()
        crops = read_boxes(boxes) if boxes else None
        if crops is not None and crops.several:
            print_message(
                f"--boxes: {crops.several} annotations have several boxes, the first is taken, as in training"
            )
        return Inputs(
            images,
            parse_shard(shard) if shard else (1, 1),
            recursive,
            crops,
            read_labels(labels) if labels else None,
            video,
        )

    def build_requests(self, skipped: Skipped) -> Iterator[Request]:
        """Return the requests of the images, in their order; `skipped` counts other files.

        Raises:
            UsageError: not one image was found.
        """
        from opal_deploy.inference.sources import discovery
        from opal_deploy.inference.types import build_requests

        items = discovery.discover(self.images, skipped, sys.stdin, recursive=self.recursive, video=self.video)
        items = itertools.chain([next(items)], items)
        return build_requests(discovery.shard(items, *self.shard), self.boxes, self.labels)

    def counter(self) -> ImageCounter:
        """Return what counts the images of `build_requests` while they are worked on."""
        from opal_deploy.inference.sources.counting import ImageCounter

        videos = self.video.sampling is not None
        return ImageCounter(self.images, self.shard, recursive=self.recursive, videos=videos)


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of `i/n`, i from 1 to n.

    Raises:
        UsageError: the text is something else.
    """
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])


@dataclass(frozen=True)
class LoadedModel:
    """A model in its runtime.

    Attributes:
        path: its file.
        sessions: one a device; none where the actors of a cluster open it.
        fingerprint: name and digest of its file.
        metadata: the model's.
    """

    path: Path
    sessions: list[Session]
    fingerprint: dict[str, str]
    metadata: Metadata


def load_model(
    path: Path | None,
    *,
    device: str,
    threads: int | None,
    cuda_graphs: bool,
    expect_sha256: str | None,
    runtime: RuntimeName,
) -> LoadedModel:
    """Open the model on its devices; without a path, the best one of the working directory.

    Raises:
        ArtifactError: there is no such model, it is damaged, or its digest is not `expect_sha256`.
        UsageError: there is no such device, or the runtime does not run such a model.
        MissingExtra: its runtime is not installed.
    """
    from opal_deploy.runtime.select import open_sessions

    path = path or find_default_model(device, runtime)
    if expect_sha256 is not None:
        check_sha256(path, expect_sha256)
    sessions = open_sessions(path, device=device, threads=threads, cuda_graphs=cuda_graphs, runtime=runtime)
    return LoadedModel(path, sessions, fingerprint_model(path), sessions[0].metadata)


def prepare_batch_size(path: Path, sessions: Sequence[Session], size: int, runtime: RuntimeName) -> None:
    """Let sessions that compile for a batch size do so; say so where it takes a minute.

    Raises:
        UsageError: nothing can be compiled here. VerificationError: what was compiled computes something else.
    """
    from opal_deploy.runtime.session import PaddingSession

    if runtime == "compiled":
        print_message(f"Compiling {path} for batches of {size}, and checking the result")
    for session in sessions:
        if isinstance(session, PaddingSession):
            session.add_batch_size(size)


def find_default_model(device: str, runtime: RuntimeName = "auto") -> Path:
    """Return the best model that this machine can run, of those that the runtime runs, and print which and why.

    The models of the working directory are considered, or, if it has none, those of the newest run below `runs`.
    """
    from opal_deploy.runtime.onnx_session import cuda_is_usable
    from opal_deploy.runtime.select import find_model, find_newest_run
    from opal_deploy.runtime.tensorrt.compatibility import find_incompatibility_here

    # of several devices the first stands for all: they are of one kind, or the session of another refuses
    number = device.split(",")[0].rpartition(":")[2]
    index = int(number) if number.isdigit() else 0

    def check_engine(sidecar: Sidecar) -> str:
        if device == "cpu":
            return "an engine runs on a GPU, and --device is cpu"
        return find_incompatibility_here(sidecar, index)

    gpu = device != "cpu" and cuda_is_usable()
    run = find_newest_run(Path())
    folder, prefix, origin = (Path(), "", "") if run is None else (run, "best.", "of the newest run in runs; ")
    choice = find_model(folder, gpu=gpu, check_engine=check_engine, runtime=runtime, prefix=prefix)
    print_message(f"Model: {choice.path} ({origin}{choice.reason})")
    return choice.path


def check_model(path: Path, metadata: Metadata, *, explain: bool, margin: bool, boxed: bool, top: int) -> None:
    """Check that the model has what the call needs, and print what a person should know of it beforehand.

    Args:
        path: the model's file.
        metadata: the model's.
        explain: overlays are drawn.
        margin: predictions are marked by their margin.
        boxed: images are cropped to boxes.
        top: classes to list in each record.

    Raises:
        UsageError: the model has no evidence, no margins, or lists fewer classes than it has and than are to be listed.
    """
    if metadata.max_top < min(top, metadata.num_classes):
        raise UsageError(
            f"{path}: it lists {metadata.max_top} of {metadata.num_classes} classes; give --top {metadata.max_top}, or "
            f"a file that lists more: opal-deploy export {metadata.checkpoint_name} --outputs topk --top-k {top}"
        )
    if metadata.evidence == "none" and explain:
        raise UsageError(
            f"{path}: it has no anchors, so a dense layer mixes all channels and no evidence can be shown; "
            "leave out --explain, or train the OPAL head"
        )
    if metadata.evidence == "none" and margin:
        raise UsageError(f"{path}: it has no cosines, so no margin; leave out --min-margin")
    if metadata.evidence == "map" and explain:
        print_message("This model averages over cells: no single cell is its evidence, so overlays show no boxes")
    print_cautions(metadata, boxed=boxed)


def print_cautions(metadata: Metadata, *, boxed: bool) -> None:
    """Print what limits the use of a model's predictions: it is unverified, or was trained on crops."""
    if metadata.unverified:
        print_message(
            f"NOT VERIFIED: this model was {metadata.unverified}: nobody compared its answers with the reference's"
        )
    if metadata.crop == "boxes" and not boxed:
        print_message(
            "This model was trained on images cropped to boxes; without them expect it to lose accuracy: give "
            f"{format_box_option(metadata.training)}"
        )


def parse_min_margin(text: str, path: Path, metadata: Metadata) -> float:
    """Return the margin under which predictions abstain: a number, or the one that keeps an error rate such as `5%`.

    Raises:
        UsageError: the text is neither, or the model has too few validation images for that rate, or none.
    """
    if not text.strip().endswith("%"):
        try:
            return float(text)
        except ValueError:
            raise UsageError(
                f"--min-margin {text!r}: expected a margin such as 0.05, or an error rate such as 5%"
            ) from None
    from opal_deploy.statistics import choose_threshold, smallest_target

    rate = parse_rate("--min-margin", text)
    if not metadata.risk:
        raise UsageError(
            f"--min-margin {text}: {path} remembers no validation images to choose a margin by; choose one with "
            f"`opal-deploy evaluate DATA --model {path} --target-error {text}`, and give that"
        )
    chosen = choose_threshold(metadata.risk, rate)
    if chosen.min_margin is None:
        smallest = smallest_target(metadata.risk)
        advice = "give a margin" if smallest is None else f"the smallest rate that works is {100 * smallest:g}%"
        raise UsageError(f"--min-margin {text}: {chosen.reason} ({chosen.images} validation images); {advice}")
    print_message(
        f"Margins under {chosen.min_margin:.4g} are marked: of {chosen.images} validation images that leaves "
        f"{chosen.coverage:.1%}, {chosen.wrong} of {chosen.answered} wrong; with {chosen.confidence:.0%} confidence at "
        f"most {chosen.bound:.2%} on such images"
    )
    return chosen.min_margin


def fingerprint_model(path: Path) -> dict[str, str]:
    """Return the name of a model's file, and its sha256."""
    return {"file": path.name, "sha256": compute_sha256(path)}


def parse_report_images(text: str | None) -> ImageMode | None:
    """Return the value of --report-images.

    Raises:
        UsageError: there is no such value.
    """
    if text is None:
        return None
    if text == "embed":
        return "embed"
    if text == "files":
        return "files"
    raise UsageError(f"--report-images {text!r}: expected embed (in the page) or files (overlays/ beside it)")


def fingerprint_file(path: Path | None) -> str | None:
    """Return the name and sha256 of a file, as run.json holds them; None without a file."""
    return None if path is None else f"{path.name}, sha256 {compute_sha256(path)}"
