"""The model card of a model file: its figures, limits and origin, as a README for a model hub (`inspect --card`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opal_deploy.artifact.measurements import ReceptiveField, describe_calibration, describe_edits, list_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.options import StrPath

_METRICS = {
    "test_accuracy": "accuracy, test images", "test_macro_f1": "macro F1, test images", "test_images": "test images",
    "val_accuracy": "accuracy, validation images", "val_images": "validation images",
}  # fmt: skip
_EVIDENCE = {
    "exact": "Each answer comes from scores that are each read at one cell of the image. The graph outputs the cells.",
    "map": "Scores are averages over the image: no single cell is the evidence.",
    "none": "The model returns logits only. Its answers cannot be explained.",
}
_USE = """```console
$ pip install 'opal-deploy[{extras}]'
$ opal-deploy infer images/ --model {file}{explain}
```
"""


def write_card(model: StrPath) -> str:
    """Return the model card of an exported file, an engine or a checkpoint, in Markdown with a hub's front matter.

    Figures are those in the file, from training and `evaluate --record`. Missing measurements are named.

    Raises:
        ArtifactError: no such file, or it is damaged. UsageError: not a model by its suffix.
    """
    from opal_deploy.runtime.select import read_model_metadata

    path = Path(model)
    return describe_card(read_model_metadata(path), path)


def describe_card(metadata: Metadata, path: Path, *, use: str | None = None) -> str:
    """Return the card of a model.

    Args:
        path: the file that commands name.
        use: how to use it, in Markdown; None: with `opal-deploy infer`.
    """
    sections = [
        ("Answers", [*_list_answers(metadata)]),
        ("Evidence", [*_list_evidence(metadata, path)]),
        ("Limits", [*_list_limits(metadata)]),
        ("Origin", [*_list_origin(metadata)]),
    ]
    explain = "" if metadata.evidence == "none" else " --explain"
    head = f"{metadata.num_classes} classes, {metadata.backbone}. {_EVIDENCE[metadata.evidence]}"
    body = "\n".join(f"## {title}\n\n" + "\n".join(f"- {_escape(line)}" for line in lines) + "\n"
                     for title, lines in sections if lines)  # fmt: skip
    use = use or _USE.format(extras=metadata.cpu_extras, file=path.name, explain=explain)
    classes = ", ".join(metadata.class_names)
    return (
        f"{_format_front_matter(metadata)}\n# {_escape(path.stem)}\n\n{head}\n\n## Use\n\n{use}\n{body}\n"
        f"## Classes\n\n{_escape(classes)}\n"
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


def _list_answers(metadata: Metadata) -> Iterator[str]:
    metrics = metadata.training.get("metrics") or {}
    for key, label in _METRICS.items():
        if isinstance(value := metrics.get(key), int | float):
            yield f"{label}: {value:.1%}" if isinstance(value, float) else f"{label}: {value:,}"
    if not metrics:
        yield "accuracy: not recorded in the file"
    if risk := metadata.risk:
        shares = ", ".join(
            f"{float(share):.0%} at {float(error):.0%} errors" for error, share in risk["coverage_at_error"].items()
        )
        yield f"images that can be answered at an error rate ({risk['images']} {risk['split']} images): {shares}"
    yield f"calibration: {describe_calibration(metadata.calibration)}"


def _list_evidence(metadata: Metadata, path: Path) -> Iterator[str]:
    if metadata.evidence != "exact":
        return
    for name, line in list_evaluation(metadata.evaluation, path, export_of=metadata.find_checkpoint(path)):
        yield f"{name}: {line}" if name else line
    field = ReceptiveField.from_dict(metadata.receptive_field)
    if field is not None:
        yield from field.describe(metadata.input_size)


def _list_limits(metadata: Metadata) -> Iterator[str]:
    if metadata.evidence == "exact":
        yield "A box shows where a score was read, not everything that it depends on."
    if "ood_score" in metadata.outputs:
        yield (
            "Images of other things get one of the classes, too. `--unknown 5%` marks images whose OOD score exceeds "
            "that of 95% of the validation images."
        )
    else:
        yield "Images of other things get one of the classes, too, and the file has no OOD score that would tell."
    if metadata.crop == "boxes":
        yield "Trained on images cropped to the object; whole images are answered less accurately."
    if metadata.unverified:
        yield f"NOT VERIFIED: {metadata.unverified}."
    for line in describe_edits(metadata.edits):
        yield f"edited: {line}"


def _list_origin(metadata: Metadata) -> Iterator[str]:
    training: Mapping[str, Any] = metadata.training
    if data := training.get("data"):
        counts = ", ".join(
            f"{data[name]:,} {name}" for name in ("train", "val", "test") if isinstance(data.get(name), int)
        )
        yield f"data: {data.get('root') or 'image folder'}" + (f" ({counts} images)" if counts else "")
    if weights := training.get("weights"):
        licence = (weights.get("pretrained_cfg") or {}).get("license")
        yield f"initial weights: {weights.get('origin')}" + (f", licence {licence}" if licence else "")
    yield f"source: {metadata.source.get('file')}, sha256 {metadata.source.get('sha256')}"
    if metadata.exporter:
        yield f"exported by {metadata.describe_exporter()}, precision {metadata.precision}"
    if report := metadata.verification:
        different = f"{report.get('cells_different')} of {report.get('cells')} cells differ"
        yield f"verified on {report.get('image_set')}: {different}"


def _escape(text: str) -> str:
    """Return text of a file that neither HTML nor Markdown reads as markup."""
    cleaned = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{sign}" if sign in "*_[]|#" else sign for sign in cleaned)
