"""The model card of a model file: its use, limits and facts, as a README for a model hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.inspection import describe_metadata
from opal_deploy.runtime.select import read_model_metadata


def write_card(path: Path) -> str:
    """Return the card of a model file, in Markdown with a hub's front matter; raise ArtifactError if it is damaged."""
    metadata = read_model_metadata(path)
    limits, facts = ("\n".join(f"- {_escape(line)}" for line in lines) for lines in (
        _list_limits(metadata),
        (f"{name}: {value}" if name else value for name, value in describe_metadata(metadata, path)),
    ))  # fmt: skip
    return (
        "---\nlibrary_name: opal-deploy\npipeline_tag: image-classification\n"
        f"tags: [opal-deploy, onnx{', interpretable' * (metadata.evidence == 'exact')}]\n---\n\n"
        f"# {_escape(path.stem)}\n\n"
        f"## Use\n\n    opal-deploy infer images/ --explain --model {path.name}\n\n## Limits\n\n{limits}\n\n"
        f"## Facts\n\n{facts}\n\n"
        f"## Classes\n\n{_escape(', '.join(metadata.class_names))}\n"
    )


def _list_limits(metadata: Metadata) -> Iterator[str]:
    if metadata.evidence == "exact":
        yield "A box shows where a score was read, not everything that it depends on."
    yield "Images of other things get one of the classes, too."
    if "ood_score" in metadata.outputs:
        yield "`--unknown 5%` marks images whose OOD score exceeds that of 95% of the validation images."
    if metadata.crop == "boxes":
        yield "Trained on images cropped to the object; whole images are answered less accurately."
    if metadata.unverified:
        yield f"NOT VERIFIED: {metadata.unverified}."


def _escape(text: str) -> str:
    """Return text of a file that neither HTML nor Markdown reads as markup."""
    cleaned = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{sign}" if sign in "*_[]|#" else sign for sign in cleaned)
