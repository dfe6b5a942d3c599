"""Records as tables: `results.parquet`, `results.csv` and pandas.

A table has one row per image, in input order, with the columns of `COLUMNS`; missing fields are null in Parquet and
empty in CSV. The lists of `LISTS` follow, as lists of structs in Parquet and as JSON in CSV.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import StoppedEarly, UsageError, first_line, require
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
    "ood_score": "float64",
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
# columns that a record has in other places
_DERIVED = frozenset({"class_id", "prediction", "logit", "cosine", "calibrated_probability", "correct", "error_code",
                      "error_message"})  # fmt: skip
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


def read_table(path: Path) -> Iterator[Record]:
    """Yield the records of a table that `write_table` wrote; fields that tables lack are missing.

    Raises:
        UsageError: the file cannot be read, or is not such a table.
        MissingExtra: pyarrow, for Parquet, is not installed.
    """
    from opal_deploy.records.record import is_record

    try:
        for number, row in enumerate(_read_parquet(path) if path.suffix == ".parquet" else _read_csv(path), 1):
            record = _row_to_record(row)
            if not is_record(record):
                raise ValueError(f"row {number} is no record")
            yield record
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or first_line(error)})") from None
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UsageError(f"{path}: not a table of `infer --format` ({first_line(error)}); give results.jsonl") from None


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    require("pyarrow", "tables", f"reading {path}")
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_GROUP_ROWS):
            yield from batch.to_pylist()


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    numbers: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
    types = {name: numbers.get(kind.rstrip("0123456789"), str) for name, kind in COLUMNS.items()}
    types |= dict.fromkeys(LISTS, json.loads)
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            yield {name: types.get(name, str)(text) if text else None for name, text in row.items()}


def _row_to_record(row: Mapping[str, Any]) -> Record:
    """Return the record of a row: the reverse of `record_to_row`."""
    from opal_deploy.records.record import RECORD_SCHEMA

    answer = {"label": row["prediction"], **{name: row.get(name) for name in ("class_id", "logit", "cosine")}}
    failed = row["status"] == "error"
    parts: dict[str, Any] = {"error": {"code": row["error_code"], "message": row["error_message"] or ""}}
    if not failed:
        parts = {"prediction": answer, "margin": row["margin"], "top": row["top"], "evidence": row["evidence"]}
        for slot in parts["evidence"] or ():
            slot["cell"], slot["box"] = [slot["row"], slot["col"]], [slot[side] for side in ("x0", "y0", "x1", "y1")]
            if slot["name"] is None:
                del slot["name"]
        for each in (*(parts["top"] or ()), answer):
            if each.get("calibrated_probability") is None:
                each.pop("calibrated_probability", None)
    given = {name: row[name] for name in COLUMNS if name not in _DERIVED and row.get(name) is not None}
    values = {"schema": RECORD_SCHEMA, "image": row["image"], **given, **parts}
    return cast("Record", {name: value for name, value in values.items() if name not in LISTS or value is not None})
