"""The generated data set in `evaluate`: where its parts are, and what the boxes of right answers cover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.demo import Annotation, EvidenceSummary, box_hits, read_annotations, summarise
from opal_deploy.demo.dataset import PARTS_FILE
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.train.data.samples import DataSet, Sample, shown
from opal_deploy.train.evaluation.session import Measured

PARTS = "generated_parts"


def has_annotations(data: DataSet) -> bool:
    """Whether `data` is a generated set: its parts file lies in its folder."""
    try:
        return (data.root / PARTS_FILE).is_file()
    except OSError:
        return False


def annotations_of(data: DataSet, samples: list[Sample]) -> list[Annotation]:
    """The annotations of `samples`, row for row.

    Raises:
        UsageError: the parts file is damaged, or says nothing of one of them.
    """
    known = {annotation.image: annotation for annotation in read_annotations(data.root)}
    found = []
    for sample in samples:
        name = shown(sample.path, data.root).replace("\\", "/")
        if name not in known:
            raise UsageError(
                f"{data.root / PARTS_FILE}: it has no annotation of {name}; take the picture out, or leave the parts "
                "out with --no-parts"
            )
        found.append(known[name])
    return found


def parts_covered(measured: Measured, annotations: list[Annotation], metadata: Metadata) -> EvidenceSummary | None:
    """What the evidence boxes of correctly answered pictures cover, by slot; None if there is nothing to judge.

    That is: no answer was right, or the model's evidence is not single cells.
    """
    argmax = measured.outputs.argmax
    if metadata.evidence != "exact" or argmax is None:
        return None
    m, hits = metadata.prototypes_per_class, []
    for number, (annotation, label) in enumerate(zip(annotations, measured.labels.tolist(), strict=True)):
        if int(measured.outputs.logits[number].argmax()) != label:
            continue
        whole = Geometry.whole(annotation.width, annotation.height)
        cells = argmax[number, label * m : (label + 1) * m].tolist()
        places = [divmod(cell, metadata.grid[1]) for cell in cells]
        boxes = [whole.cell_box(row, col, metadata.grid) for row, col in places]
        hits.append(box_hits(annotation, boxes, metadata.grid))
    return summarise(hits) if hits else None


def parts_document(summary: EvidenceSummary) -> dict[str, Any]:
    """For JSON."""
    return asdict(summary)


def parts_lines(summary: EvidenceSummary) -> Iterator[str]:
    """Shares, and for each species what each of its slots looks at."""
    yield (
        f"boxes on a distinguishing part {summary.distinguishing:.1%} (random cells of the creature "
        f"{summary.control_distinguishing:.1%}), on any part {summary.any_part:.1%} ({summary.control_any:.1%}); "
        f"{summary.images} right answers"
    )
    for species, slots in summary.slots.items():
        looks = [
            f"slot {number}: " + ", ".join(f"{part} {share:.0%}" for part, share in list(parts.items())[:3])
            for number, parts in enumerate(slots)
        ]
        yield f"  {species}: {'; '.join(looks)}"


def parts_rows(summary: EvidenceSummary) -> tuple[list[str], list[list[str | int | float]]]:
    """The slot-to-part confusion matrix as a table: its header, and a row for each slot of each species."""
    names = sorted({part for slots in summary.slots.values() for parts in slots for part in parts})
    rows: list[list[str | int | float]] = [
        [species, number, *(parts.get(name, 0.0) for name in names)]
        for species, slots in summary.slots.items()
        for number, parts in enumerate(slots)
    ]
    return ["species", "slot", *names], rows
