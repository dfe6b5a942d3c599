"""`opal-deploy convert` and `schema`: records in other formats, and the schema of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.auditing.options import ConvertOptions
from opal_deploy.cli.console import print_json, print_message, print_output


def convert(
    results: Annotated[Path, typer.Argument(help="results.jsonl of `opal-deploy infer`, or its folder.")],
    options: ConvertOptions,
) -> None:
    """Convert records to a COCO or MegaDetector file; COCO has the evidence boxes.

    Label Studio imports COCO. For tables use `infer --format csv` or `--format parquet`.
    """
    from opal_deploy.auditing.convert import convert_results

    document = convert_results(results, **options.keywords())
    if options.out is None:
        print_output(json.dumps(document, ensure_ascii=True))
    else:
        print_message(f"{options.out}: {len(document['images'])} images")
    if options.to == "megadetector":
        print_message(f"Classifier: {document['info']['classifier']}")


def schema() -> None:
    """Write the JSON schema (draft 2020-12) of a record, a line of results.jsonl, to stdout."""
    from opal_deploy.records.record import json_schema

    print_json(json_schema())
