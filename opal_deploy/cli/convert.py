"""`opal-deploy convert`: records as COCO annotations or Label Studio tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from opal_deploy.cli.console import print_json_line, print_message
from opal_deploy.errors import UsageError


def convert(
    results: Annotated[Path, typer.Argument(help="results.jsonl of `opal-deploy infer`, or its folder.")],
    to: Annotated[
        Literal["coco", "label-studio"], typer.Option(help="COCO annotations, or Label Studio's JSON import.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write to; default: standard output.", show_default=False)
    ] = None,
    categories: Annotated[Literal["class", "slot"], typer.Option(help="coco: what a category is.")] = "class",
    prefix: Annotated[
        str, typer.Option(help="label-studio: what comes before each path, such as /data/local-files/?d=.")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="label-studio: write the labelling interface (XML) there too.", show_default=False),
    ] = None,
) -> None:
    """Write records as COCO-style annotations, or for Label Studio: each slot's box, with the predicted class.

    Tables come from `infer --format csv` or `--format parquet`.
    """
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.auditing.results_reader import find_results, read_all_records
    from opal_deploy.records import label_config, to_coco, to_label_studio

    if config is not None and to != "label-studio":
        raise UsageError("--config: only --to label-studio has a labelling interface")
    path = find_results(results)
    document: Any
    if to == "label-studio":
        document = to_label_studio(read_all_records(path), prefix)
    else:
        document = to_coco(read_all_records(path), categories)
    if config is not None:
        with atomic_write(config) as temporary:
            temporary.write_text(label_config(read_all_records(path)), encoding="utf-8")
        print_message(f"{config}: the labelling interface")
    text = json.dumps(document, ensure_ascii=True)
    if out is None:
        print_json_line(text)
        return
    with atomic_write(out) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    images = document["images"] if to == "coco" else document
    print_message(f"{out}: {len(images)} images")
