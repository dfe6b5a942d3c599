"""Records as tables: `results.parquet`, `results.csv` and pandas.

A table has one row per image, in input order, with the columns of `COLUMNS`; missing fields are null in Parquet and
empty in CSV. The lists of `LISTS` follow, as lists of structs in Parquet and as JSON in CSV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import StoppedEarly, UsageError, require
from opal_deploy.records.lines import write_csv

if TYPE_CHECKING:
    from opal_deploy.records.record import Record

Rows = Literal["images", "evidence"]
Format = Literal["parquet", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)
TABLES: dict[Format, str] = {"parquet": "results.parquet", "csv": "results.csv"}

# name: type in Arrow
COLUMNS = {
    "image": "string",
    "status": "string",
    "class_id": "int32",
    "prediction": "string",
    "logit": "float64",
    "cosine": "float64",
    "margin": "float64",
    "width": "int32",
    "height": "int32",
    "label": "string",
    "correct": "bool",
    "error_code": "string",
    "error_message": "string",
    "overlay": "string",
    "sheet": "string",
    "image_sha256": "string",
    "model_sha256": "string",
    "image_index": "int64",
    "calibrated_probability": "float64",
    "frame": "int64",
    "time": "float64",
    "strangeness": "float64",
    "reason": "string",
}
LISTS: dict[str, dict[str, str]] = {
    "top": {
        "class_id": "int32",
        "label": "string",
        "logit": "float64",
        "cosine": "float64",
        "calibrated_probability": "float64",
    },
    "evidence": {
        "slot": "int32",
        "name": "string",
        "channel": "int32",
        "row": "int32",
        "col": "int32",
        "score": "float64",
        "contribution": "float64",
        "x0": "float64",
        "y0": "float64",
        "x1": "float64",
        "y1": "float64",
    },
}
# rows per Parquet row group: a few megabytes in memory
_GROUP_ROWS = 5_000


def check_formats(names: Iterable[str]) -> tuple[Format, ...]:
    """Return the formats of `--format` without duplicates.

    Raises:
        UsageError: a format is unknown.
        MissingExtra: a format's library is not installed.
    """
    formats = []
    for name in dict.fromkeys(names):
        if name not in FORMATS:
            raise UsageError(f"--format {name!r}: expected {' or '.join(FORMATS)}; results.jsonl is always written")
        formats.append(name)
    if "parquet" in formats:
        require("pyarrow", "tables", "--format parquet")
    return tuple(formats)


def write_table(records: Iterable[Record], out: Path, kind: Format) -> None:
    """Write a table of records to the folder `out`, whole or not at all.

    Raises:
        StoppedEarly: the table cannot be written; the records are safe.
    """
    path = out / TABLES[kind]
    try:
        with atomic_write(path) as temporary:
            write = _write_parquet if kind == "parquet" else _write_csv
            write(temporary, map(record_to_row, records))
    except UsageError as error:
        raise StoppedEarly(f"{error}; all records are in results.jsonl") from None


def record_to_row(record: Record) -> dict[str, Any]:
    """Return a record as a row of the table."""
    answer: Any = record.get("prediction", {})
    problem: Any = record.get("error", {})
    label, evidence = record.get("label"), record.get("evidence")
    values = {
        **record,
        **answer,
        "label": label,
        "prediction": answer.get("label"),
        "correct": None if label is None or not answer else answer["label"] == label,
        "error_code": problem.get("code"),
        "error_message": problem.get("message"),
        "evidence": None if evidence is None else [_flatten_slot(slot) for slot in evidence],
    }
    return {name: values.get(name) for name in (*COLUMNS, *LISTS)}


def _flatten_slot(slot: Any) -> dict[str, Any]:
    values = {**slot, **dict(zip(("row", "col", "x0", "y0", "x1", "y1"), (*slot["cell"], *slot["box"]), strict=True))}
    return {name: values.get(name) for name in LISTS["evidence"]}


def _write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream:
        names = [*COLUMNS, *LISTS]
        write_csv(stream, names, ([_format_field(row[name]) for name in names] for row in rows))


def _format_field(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value, separators=(",", ":"))
    return str(value).lower() if isinstance(value, bool) else value


def _write_parquet(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    lists = [(name, pa.list_(pa.struct(list(fields.items())))) for name, fields in LISTS.items()]
    schema = pa.schema([*COLUMNS.items(), *lists])
    remaining = map(_escape_surrogates, rows)
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(islice(remaining, _GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _escape_surrogates(value: Any) -> Any:
    """Return a value with lone surrogates in texts escaped as \\udcff: Arrow's texts are UTF-8."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escape_surrogates(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escape_surrogates(entry) for entry in value]
    return value


def to_pandas(records: Iterable[Mapping[str, Any]], rows: Rows = "images") -> Any:
    """Return records as a `pandas.DataFrame`.

    Args:
        records: records from `Model.explain`, or the lines of a results.jsonl.
        rows: `images`: one row per image, with the columns of `infer --format csv`. `evidence`: one row per slot of
            each answered image.

    Raises:
        MissingExtra: pandas is not installed.
    """
    require("pandas", "pandas", "to_pandas")
    import pandas

    table = [record_to_row(record) for record in cast("Iterable[Record]", records)]
    if rows == "images":
        return pandas.DataFrame(table, columns=[*COLUMNS, *LISTS])
    shared = ("image", "image_index", "class_id", "prediction")
    slots = [{name: row[name] for name in shared} | slot for row in table for slot in row["evidence"] or []]
    return pandas.DataFrame(slots, columns=[*shared, *LISTS["evidence"]])
