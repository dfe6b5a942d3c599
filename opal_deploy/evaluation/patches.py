"""The patches of images that show what each slot of a model found (`artifact.patches`), and the atlas, their page."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.api.options import AtlasOptions
from opal_deploy.artifact.files import check_output
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.patches import PER_SLOT, Patch, Patches, SlotPatches
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import check_classes
from opal_deploy.evaluation.session import choose_samples, evaluate_session
from opal_deploy.logs import Progress, as_progress, no_progress
from opal_deploy.options import StrPath, keywords
from opal_deploy.predict import setup
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import Box, Geometry, compute_geometry
from opal_deploy.preprocess.resize import fit_input
from opal_deploy.records.evidence import find_boxes, find_evidence
from opal_deploy.runtime.select import open_sessions, read_model_metadata
from opal_deploy.runtime.session import Session
from opal_deploy.visualization.overlay import cut_patch
from opal_deploy.visualization.pages import render_page, save_page

_PACKAGE = "opal_deploy.visualization.pages"
# more images take minutes on a processor
MAX_IMAGES = 4_000
_SIDE = 96
# of one patch as JPEG: two of each of five slots in the 20 kB of a class
_BYTES, _QUALITIES = 2_000, (85, 75, 65, 55, 45, 35, 25)


def collect_patches(
    session: Session, samples: Sequence[Sample], split: str, *, boxes: bool = True, progress: Progress = no_progress
) -> Patches:
    """Return the best patches of each slot from up to 4,000 images; see `cut_patches`."""
    chosen = [samples[index] for index in choose_samples(samples, MAX_IMAGES)]
    outputs = evaluate_session(session, chosen, boxes=boxes, progress=progress, note="choosing patches").outputs
    return cut_patches(outputs, chosen, session.metadata, split, boxes=boxes)


def cut_patches(
    outputs: Outputs, samples: Sequence[Sample], metadata: Metadata, split: str, *, boxes: bool = True
) -> Patches:
    """Return the best four patches of each slot, from different images that are answered correctly.

    They are ranked by contribution to the cosine, or by score if the distance has no such sum; of equal ones the first
    image's.

    Args:
        outputs: of a model with `exact` evidence for the N samples.
        samples: of the data set's `split`.
        boxes: crop images to the samples' boxes.
    """
    labels = np.array([sample.label for sample in samples], np.int64)
    # boxes follow when the images are decoded
    geometries = [Geometry.whole(*metadata.input_size[::-1])] * len(samples)
    evidence = find_evidence(outputs, labels, geometries, metadata)
    values = evidence.scores if evidence.contributions is None else evidence.contributions  # [N, m]
    right = outputs.logits.argmax(1) == labels
    wanted: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    patches: dict[tuple[int, int], list[Patch]] = {}
    for class_id in range(metadata.num_classes):
        rows = np.flatnonzero(right & (labels == class_id))
        for place, slot in enumerate(metadata.class_map.slots(class_id)):
            patches[class_id, slot] = []
            for row in rows[np.argsort(-values[rows, place], kind="stable")[:PER_SLOT]].tolist():
                wanted[row].append((class_id, slot, place))
    for row, cuts in sorted(wanted.items()):
        sample = samples[row]
        image = decode(sample.path).convert("RGB")
        _, geometry = fit_input(image, compute_geometry(image.size, sample.box if boxes else None), metadata.form)
        own = find_boxes(metadata, [geometry], *np.moveaxis(evidence.cells[row][None], 2, 0))[0]
        for class_id, slot, place in cuts:
            cut = _cut(image, tuple(own[place].tolist()), metadata.reach, float(values[row, place]), sample.path.name)
            patches[class_id, slot].append(cut)
    ordered = {key: sorted(cut, key=lambda patch: -patch.value) for key, cut in patches.items()}
    return Patches(split, len(samples), tuple(SlotPatches(*key, tuple(cut)) for key, cut in ordered.items()))


def _cut(image: Image.Image, box: Box, reach: float, value: float, name: str) -> Patch:
    """Return a slot's box with its surroundings, as JPEG at the best of some qualities that takes at most 2 kB."""
    cut, cell = cut_patch(image, box, reach, image.size)
    left, top, right, bottom = (round(min(max(share, 0.0), 1.0), 4) for share in cell)
    cut.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    encoded = b""
    for quality in _QUALITIES:
        buffer = io.BytesIO()
        cut.save(buffer, "JPEG", quality=quality, optimize=True)
        encoded = buffer.getvalue()
        if len(encoded) <= _BYTES:
            break
    return Patch(name, round(value, 6), (left, top, right, bottom), base64.b64encode(encoded).decode())


@dataclass(frozen=True)
class CreatedAtlas:
    """The outcome of `create_atlas`: the page, and the patches on it."""

    path: Path
    patches: Patches


@keywords(AtlasOptions)
def create_atlas(model: StrPath | None, options: AtlasOptions) -> CreatedAtlas:
    """Write a page with the patches of training images in which each slot of a model was strongest.

    Args:
        model: an exported model or a checkpoint; None: found as by `opal-deploy infer`.

    Raises:
        UsageError: the model keeps no patches, or it, the data or the output cannot be used.
    """
    path = Path(model) if model is not None else setup.find_default_model(options.device, log=options.log)
    out = Path(options.out)
    check_output("--out", out, [".html"], inputs=[str(path)], overwrite=options.overwrite)
    metadata = read_model_metadata(path)
    if metadata.evidence != "exact":
        raise UsageError(f"{path}: has no slots (evidence {metadata.evidence}); expected a head with anchors")
    if options.data is None:
        patches = metadata.known_patches
    else:
        session = open_sessions(path, device=options.device, threads=options.threads)[0]
        dataset = read_dataset(Path(options.data), options.dataset, needs_validation=lambda _: options.split == "val")
        samples = getattr(dataset, options.split)
        check_classes(path, list(metadata.class_names), dataset)
        if not samples:
            raise UsageError(f"{options.data}: no {options.split} images found; give another --split")
        patches = collect_patches(
            session, samples, options.split, boxes=options.boxes, progress=as_progress(options.progress)
        )
    if patches is None:
        raise UsageError(f"{path}: keeps no patches of training images; give the data set: opal-deploy atlas DATA")
    text = render_page(
        _PACKAGE, "atlas", title=path.name, patches=patches, class_names=metadata.class_names,
        empty=sum(not row.patches for row in patches.slots),
    )  # fmt: skip
    save_page(out, text)
    return CreatedAtlas(out, patches)
