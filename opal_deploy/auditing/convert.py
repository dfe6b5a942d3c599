"""Results in formats that other tools read: the work of `opal-deploy convert`. Light to import."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from opal_deploy.errors import UsageError
from opal_deploy.options import Option, Options, StrPath, keywords


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """The options of `convert_results` and `opal-deploy convert`."""

    to: Annotated[
        Literal["coco", "label-studio", "megadetector"],
        Option("COCO annotations, Label Studio's JSON import, or MegaDetector's results with our classifications."),
    ]
    out: Annotated[StrPath | None, Option("Output file.", default="standard output", cli=Path)] = None
    overwrite: Annotated[bool, Option("Replace --out and --config if they exist.")] = False
    categories: Annotated[Literal["class", "slot"], Option("coco: meaning of the categories.")] = "class"
    prefix: Annotated[str, Option("label-studio: text before each path, such as /data/local-files/?d=.")] = ""
    config: Annotated[
        StrPath | None,
        Option("label-studio: file for the labelling interface (XML).", default="standard error", cli=Path),
    ] = None

    boxes: Annotated[
        StrPath | None, Option("megadetector: the detector's results given to infer as --boxes.", cli=Path)
    ] = None


def read_label_config(results: Path) -> str:
    """Return Label Studio's labelling interface (XML) for a results.jsonl, or that of its folder."""
    from opal_deploy.auditing.results import find_results, read_all_records
    from opal_deploy.records.converters import label_config

    return label_config(read_all_records(find_results(results)))


@keywords(ConvertOptions)
def convert_results(results: StrPath, options: ConvertOptions) -> Any:
    """Return a results.jsonl, given as file or folder, as a JSON document; write it to `out` if given.

    Raises:
        UsageError: the results cannot be read, or an option does not fit the format.
    """
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.artifact.output_file import check_output
    from opal_deploy.auditing.megadetector import add_classifications
    from opal_deploy.auditing.results import find_results, read_all_records, read_run_options
    from opal_deploy.records.converters import to_coco, to_label_studio
    from opal_deploy.records.run_files import RUN, SUMMARY

    if options.config is not None and options.to != "label-studio":
        raise UsageError("--config: only --to label-studio has a labelling interface")
    for name, only in (("prefix", "label-studio"), ("categories", "coco"), ("boxes", "megadetector")):
        if options.to != only and (unused := options.changed(names=[name])):
            raise UsageError(f"{unused}: only for --to {only}; leave it out")
    if options.boxes is None and options.to == "megadetector":
        raise UsageError("--to megadetector adds classifications to a detector's results: give them as --boxes FILE")
    path = find_results(Path(results))
    out, config, boxes = (None if name is None else Path(name) for name in (options.out, options.config, options.boxes))
    inputs = [path, boxes, *(path.with_name(name) for name in (RUN, SUMMARY))]
    if out is not None:
        check_output("--out", out, [".json"], inputs=inputs, overwrite=options.overwrite)
    if config is not None:
        check_output("--config", config, [".xml"], inputs=inputs, overwrite=options.overwrite)
    document: Any
    if options.to == "label-studio":
        document = to_label_studio(read_all_records(path), options.prefix)
    elif boxes is not None:
        document = add_classifications(boxes, read_run_options(path), read_all_records(path))
    else:
        document = to_coco(read_all_records(path), options.categories)
    if config is not None:
        with atomic_write(config, replace=options.overwrite) as temporary:
            temporary.write_text(read_label_config(path), encoding="utf-8")
    if out is not None:
        with atomic_write(out, replace=options.overwrite) as temporary:
            temporary.write_text(json.dumps(document, ensure_ascii=True) + "\n", encoding="utf-8")
    return document
