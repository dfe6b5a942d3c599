"""The model card of a model file: its use, limits and facts, as a README for a model hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.inspection import describe_metadata

_EVIDENCE = {
    "exact": "Each answer comes from scores that are each read at one cell of the image. The graph outputs the cells.",
    "map": "Scores are averages over the image: no single cell is the evidence.",
    "none": "The model returns logits only. Its answers cannot be explained.",
}


def describe_card(metadata: Metadata, path: Path, *, use: str) -> str:
    """Return the card of a model, in Markdown with a hub's front matter.

    Args:
        path: the file that commands name.
        use: how to use it, in Markdown.
    """
    limits, facts = ("\n".join(f"- {_escape(line)}" for line in lines) for lines in (
        _list_limits(metadata),
        (f"{name}: {value}" if name else value for name, value in describe_metadata(metadata, path)),
    ))  # fmt: skip
    return (
        f"{_format_front_matter(metadata)}\n# {_escape(path.stem)}\n\n"
        f"{metadata.num_classes} classes, {metadata.backbone}. {_EVIDENCE[metadata.evidence]}\n\n"
        f"## Use\n\n{use}\n## Limits\n\n{limits}\n\n## Facts\n\n{facts}\n\n"
        f"## Classes\n\n{_escape(', '.join(metadata.class_names))}\n"
    )


def _format_front_matter(metadata: Metadata) -> str:
    tags = ["opal-deploy", "onnx", *(["interpretable"] if metadata.evidence == "exact" else [])]
    lines = ["library_name: opal-deploy", "pipeline_tag: image-classification", f"tags: [{', '.join(tags)}]"]
    metrics = metadata.training.get("metrics") or {}
    if "test_accuracy" in metrics:
        # strings as JSON, which YAML reads
        name = json.dumps(str((metadata.training.get("data") or {}).get("root") or "test images"))
        lines += [
            "model-index:", f"- name: {json.dumps(metadata.backbone)}", "  results:",
            "  - task: {type: image-classification}", f"    dataset: {{type: {name}, name: {name}}}",
            f"    metrics: [{{type: accuracy, value: {metrics['test_accuracy']:.4f}}}]",
        ]  # fmt: skip
    return "\n".join(["---", *lines, "---", ""])


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
