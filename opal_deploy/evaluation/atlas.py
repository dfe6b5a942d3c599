"""The page of the patches that each slot of a model stands for: the work of `opal-deploy atlas`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opal_deploy.api.options import AtlasOptions
from opal_deploy.artifact.files import check_output
from opal_deploy.artifact.patches import Patches
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import check_classes
from opal_deploy.evaluation.patches import collect_patches
from opal_deploy.logs import as_progress
from opal_deploy.options import StrPath, keywords
from opal_deploy.predict import setup
from opal_deploy.runtime.select import open_sessions, read_model_metadata
from opal_deploy.visualization.pages import render_page, save_page

_PACKAGE = "opal_deploy.visualization.pages"


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
        if patches is None:
            raise UsageError(f"{path}: keeps no patches of training images; give the data set: opal-deploy atlas DATA")
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
    assert patches is not None  # with exact evidence
    text = render_page(
        _PACKAGE, "atlas", title=path.name, patches=patches, class_names=metadata.class_names,
        empty=sum(not row.patches for row in patches.slots),
    )  # fmt: skip
    save_page(out, text)
    return CreatedAtlas(out, patches)
