"""Building an atlas: pictures through a model once, the best patches of every slot kept.

Beside plain inference this costs the cutting of patches that enter a slot's best, and the digest of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.prepare import content_sha256
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sheets import check_exact_evidence
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.preprocess.decode import decode
from opal_deploy.runtime.session import Session
from opal_deploy.visualization.atlas.collector import AtlasCollector, PatchCandidate, list_findings
from opal_deploy.visualization.atlas.entries import AtlasPatch, Finding, SlotEntry
from opal_deploy.visualization.atlas.storage import Atlas, write_patch

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Labelled:
    """A picture and, where it is known, the class that it shows."""

    request: Request
    label: str | None = None


@dataclass
class Counts:
    """What became of the pictures.

    Attributes:
        images: all of them. failed: could not be used. wrong: predicted as another class than their label's, and
            left out; unlabelled: left out because they have no label.
        first_failures: names and reasons of the first few.
    """

    images: int = 0
    failed: int = 0
    wrong: int = 0
    unlabelled: int = 0
    first_failures: list[str] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """Pictures that the atlas rests on."""
        return self.images - self.failed - self.wrong - self.unlabelled

    def fail(self, why: str) -> None:
        """Count a picture that could not be used."""
        self.failed += 1
        if len(self.first_failures) < 3:
            self.first_failures.append(why)


def collect(
    pictures: Iterable[Labelled],
    sessions: Sequence[Session],
    options: InferenceOptions,
    top: int,
    *,
    only_correct: bool = False,
    model: str = "the model",
    report: Callable[[int], None] = lambda _: None,
) -> tuple[AtlasCollector, Counts]:
    """Run every picture, and keep the best `top` patches a slot.

    A picture counts for the class that it is predicted as; with `only_correct` only where that is its label.

    Raises:
        UsageError: no cell of the model is evidence. StoppedEarly: a device was lost.
    """
    metadata = sessions[0].metadata
    check_exact_evidence(metadata, model)
    collector, counts = AtlasCollector(metadata, top), Counts()
    labels: dict[int, str | None] = {}

    def requests() -> Iterator[Request]:
        for index, picture in enumerate(pictures):
            if only_correct:
                labels[index] = picture.label
            yield picture.request

    for result in predict_stream(
        requests(), sessions, replace(options, keep_images=True), print_message=lambda _: None
    ):
        label = labels.pop(counts.images, None)
        record, request = result.record, result.prepared.request
        counts.images += 1
        report(counts.images)
        if record["status"] == "error":
            counts.fail(f"{record['image']}: {record['error']['message']}")
        elif only_correct and label is None:
            counts.unlabelled += 1
        elif only_correct and label != record["prediction"]["label"]:
            counts.wrong += 1
        else:
            try:
                collector.add(record, partial(content_sha256, request.source), result.prepared.image, request.source)
            except ImageError as error:
                counts.fail(f"{record['image']}: {error}")
    _cut(list(collector.uncut()), options)
    return collector, counts


def write_patches(collector: AtlasCollector, root: Path, model: Mapping[str, Any], data: Mapping[str, Any]) -> Atlas:
    """Write the patches that were kept, and put the atlas together; `write_atlas` makes it the folder's.

    Raises:
        UsageError: a patch cannot be written.
    """
    metadata = collector.metadata
    entries: dict[tuple[int, int], SlotEntry] = {}
    findings: list[Finding] = []
    for class_id, label in enumerate(metadata.class_names):
        slots = range(metadata.prototypes_per_class)
        for slot in slots:
            patches = tuple(_written(candidate, root) for candidate in collector.best(class_id, slot))
            entries[class_id, slot] = SlotEntry(class_id, slot, collector.figures(class_id, slot), patches)
        findings += list_findings(class_id, label, [entries[class_id, slot].figures for slot in slots])
    cells = tuple(int(count) for count in collector.cells())
    about = {**model, **_of_metadata(metadata)}
    return Atlas(root, about, metadata.class_names, dict(data), collector.top, entries, tuple(findings), cells)


def _cut(missing: list[PatchCandidate], options: InferenceOptions) -> None:
    """Patches of pictures too large to be kept: each is read again, once, however many of its patches are wanted."""
    by_image: dict[str, list[PatchCandidate]] = {}
    for candidate in missing:
        by_image.setdefault(candidate.sha256, []).append(candidate)

    def cut(candidates: list[PatchCandidate]) -> None:
        try:
            picture = decode(candidates[0].source, max_pixels=options.max_pixels)
        except ImageError:
            return  # it is gone by now, and so are its patches
        for candidate in candidates:
            candidate.cut(picture)

    with ThreadPoolExecutor(options.workers, "patches") as pool:
        list(pool.map(cut, by_image.values()))


def _written(candidate: PatchCandidate, root: Path) -> AtlasPatch:
    slot = candidate.slot
    x0, y0, x1, y1 = slot["box"]
    return AtlasPatch(
        candidate.image,
        candidate.sha256,
        (slot["cell"][0], slot["cell"][1]),
        (x0, y0, x1, y1),
        slot["score"],
        slot["contribution"],
        write_patch(root, candidate.jpeg or b""),
    )


def _of_metadata(metadata: Metadata) -> dict[str, Any]:
    return {
        "checkpoint_sha256": metadata.source.get("sha256"),
        "backbone": metadata.backbone,
        "precision": metadata.precision,
        "prototypes_per_class": metadata.prototypes_per_class,
        "grid": list(metadata.grid),
        "distance": metadata.distance,
    }
