"""Results in formats that other tools read: the work of `opal-deploy convert`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import atomic_write, check_output, compute_sha256
from opal_deploy.auditing.options import ConvertOptions
from opal_deploy.auditing.results import find_results, read_records, read_run_options
from opal_deploy.errors import UsageError
from opal_deploy.options import StrPath, keywords
from opal_deploy.records.names import readable_name, unescape_name
from opal_deploy.records.record import Answer, Failed, Record
from opal_deploy.records.run_files import RUN, SUMMARY
from opal_deploy.records.tables import to_coco
from opal_deploy.sources.annotations import PathLookup, normalize_name, read_boxes


@keywords(ConvertOptions)
def convert_results(results: StrPath, options: ConvertOptions) -> Any:
    """Return a results.jsonl, given as file or folder, as a JSON document; write it to `out` if given.

    Raises:
        UsageError: the results cannot be read, or an option does not fit the format.
    """
    if (options.boxes is None) == (options.to == "megadetector"):
        raise UsageError("--boxes: goes with --to megadetector, which adds classifications to that detector's results")
    path = find_results(results)
    out, boxes = (None if name is None else Path(name) for name in (options.out, options.boxes))
    if out is not None:
        inputs = [path, boxes, *(path.with_name(name) for name in (RUN, SUMMARY))]
        check_output("--out", out, [".json"], inputs=inputs, overwrite=options.overwrite)
    records = read_records(path)
    document = to_coco(records) if boxes is None else add_classifications(boxes, read_run_options(path), records)
    try:
        text = json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n"
    except ValueError:
        raise UsageError(
            f"{path}: a box is not finite, or too large to have an area; write the records again"
        ) from None
    if out is not None:
        with atomic_write(out, replace=options.overwrite) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return document


def add_classifications(path: Path, run: dict[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """Return a detector's results with the records of a run as classifications; other detections and keys stay.

    The format is https://lila.science/megadetector-output-format. A detection's classes stand best first, with their
    calibrated probability, or with the cosine where none is fitted. An answer that is `abstained` or `unknown` adds
    none. An image with nothing but errors gets a `failure`, and null for its detections. Classifications of an earlier
    classifier are removed.

    Args:
        path: the results that the run had as --boxes.
        run: its options, see `read_run_options`.

    Raises:
        UsageError: the results are not the run's, or records name no detection or have no such number.
    """
    if not read_boxes(path).from_detector:
        raise UsageError(f"{path}: not MegaDetector's results; expected the file that infer had as --boxes")
    if f"sha256 {compute_sha256(path)}" not in str(run.get("boxes")):
        raise UsageError(f"{path}: not the boxes of this run, which are {run.get('boxes') or 'none'}")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    images = PathLookup({normalize_name(image["file"]): image for image in document["images"]})
    for image in document["images"]:
        for detection in image.get("detections") or ():
            detection.pop("classifications", None)
    categories: dict[str, str] = {}
    failures: dict[str, str] = {}
    answered: set[str] = set()
    digest, with_cosines = None, False
    for record in records:
        name, digest = unescape_name(record.image or ""), record.model_sha256 or digest
        if isinstance(record, Failed):
            failures[name] = f"{record.error.code}: {record.error.message}"
            continue
        answered.add(name)
        try:
            detection = images[images.matches(name)[0]]["detections"][record.detection]
        except (IndexError, TypeError):
            raise UsageError(f"{readable_name(record.image)}: {path.name} lacks the detection of its record") from None
        if record.status == "ok":
            classes = [(str(answer.class_id), _find_confidence(answer)) for answer in record.top]
            detection["classifications"] = sorted(classes, key=lambda pair: -pair[1])
            with_cosines |= any(answer.calibrated_probability is None for answer in record.top)
            categories |= {str(answer.class_id): answer.label for answer in record.top}
    for name in (name for name in failures if name not in answered):
        matches = images.matches(name)
        image = images[matches[0]] if len(matches) == 1 else {"file": name}
        if len(matches) != 1:
            document["images"].append(image)
        image |= {"failure": failures[name], "detections": None}
    document["classification_categories"] = dict(sorted(categories.items(), key=lambda pair: int(pair[0])))
    document.pop("classification_category_descriptions", None)
    confidence = "cosines, no calibrated probabilities" if with_cosines else "calibrated probabilities"
    classifier = f"opal-deploy, model sha256 {digest}" + (f"; confidences are {confidence}" if categories else "")
    document["info"] = {**document.get("info", {}), "classifier": classifier}
    return document


def _find_confidence(answer: Answer) -> float:
    value = answer.cosine if answer.calibrated_probability is None else answer.calibrated_probability
    if value is None:
        raise UsageError("the model has neither calibrated probabilities nor cosines; one of them is needed")
    return round(float(value), 5)
