"""Records as tables: `results.parquet`, `results.csv` and pandas.

A table has one row per image, in input order, with the columns of `COLUMNS`; missing fields are null in Parquet and
empty in CSV. The lists of `LISTS` follow, as lists of structs in Parquet and as JSON in CSV. Both follow from the
fields that `record` declares.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, inspect
from msgspec.structs import asdict

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import StoppedEarly, UsageError, first_line, require
from opal_deploy.records.lines import csv_writer
from opal_deploy.records.record import RECORD_SCHEMA, Answer, Answered, Failed, Record, Slot, to_record

Rows = Literal["images", "evidence"]
Format = Literal["parquet", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)
TABLES: dict[Format, str] = {"parquet": "results.parquet", "csv": "results.csv"}

# several columns of an array's entries
_ENTRIES = {"cell": ("row", "col"), "box": ("x0", "y0", "x1", "y1")}
# columns that a record has in other places, or not at all
_DERIVED = {"prediction": "string", "correct": "bool", "error_code": "string", "error_message": "string"}
_LEFT_OUT = ("schema", "drawing_error", "signature")
# the order of the first columns is that of the first version; others follow as they are declared
_FIRST = (
    "image", "status", "class_id", "prediction", "logit", "cosine", "margin", "width", "height", "label", "correct",
    "error_code", "error_message", "overlay", "sheet", "image_sha256", "model_sha256", "image_index",
    "calibrated_probability", "frame", "time",
)  # fmt: skip


def _arrow_types(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the columns of a record's part, with their types in Arrow; fields that are parts themselves have none."""
    columns: dict[str, str] = {}
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        for name in _ENTRIES.get(field.name, (field.name,)):
            if (arrow := _arrow_type(field.type)) is not None and field.name not in _LEFT_OUT:
                columns[name] = arrow
    return columns


def _arrow_type(info: inspect.Type) -> str | None:
    if isinstance(info, inspect.Metadata):
        return (info.extra or {}).get("arrow") or _arrow_type(info.type)
    if isinstance(info, inspect.UnionType):
        return _arrow_type(info.types[0])
    if isinstance(info, inspect.TupleType):
        return _arrow_type(info.item_types[0])
    known = {inspect.IntType: "int64", inspect.FloatType: "float64", inspect.StrType: "string"}
    return "string" if isinstance(info, inspect.LiteralType) else known.get(type(info))


_FIELDS = {**_arrow_types(Answered), **_arrow_types(Failed)}
_ALL = {**_FIELDS, **_arrow_types(Answer), **_DERIVED, "label": "string"}
# name: type in Arrow
COLUMNS = {name: _ALL[name] for name in dict.fromkeys([*_FIRST, *_ALL])}
LISTS = {"top": _arrow_types(Answer), "evidence": _arrow_types(Slot)}
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
    """Write a table of records, see `open_table`."""
    with open_table(out, kind) as add:
        for record in records:
            add(record)


@contextmanager
def open_table(out: Path, kind: Format) -> Iterator[Callable[[Record], object]]:
    """Yield a function that adds a record to a table in the folder `out`, which is written whole or not at all.

    Raises:
        StoppedEarly: the table cannot be written; the records are safe.
    """
    path, open_rows = out / TABLES[kind], {"parquet": _open_parquet, "csv": _open_csv}[kind]
    try:
        with atomic_write(path) as temporary, open_rows(temporary) as add_row:
            yield lambda record: add_row(record_to_row(record))
    except UsageError as error:
        raise StoppedEarly(f"{error}; all records are in results.jsonl") from None


def record_to_row(record: Record) -> dict[str, Any]:
    """Return a record as a row of the table."""
    values: dict[str, Any] = {name: None if value is UNSET else value for name, value in asdict(record).items()}
    if isinstance(record, Failed):
        values |= {"error_code": record.error.code, "error_message": record.error.message}
    else:
        answer = record.prediction
        values = asdict(answer) | values
        values |= {
            "prediction": answer.label,
            "correct": None if record.label is None else answer.label == record.label,
        }
        values["top"] = [_flatten(answer) for answer in record.top]
        values["evidence"] = [_flatten(slot) for slot in record.evidence] or None
    return {name: values.get(name) for name in (*COLUMNS, *LISTS)}


def _flatten(part: Answer | Slot) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in asdict(part).items():
        row |= zip(_ENTRIES[name], value, strict=True) if name in _ENTRIES else {name: value}
    return row


@contextmanager
def _open_csv(path: Path) -> Iterator[Callable[[dict[str, Any]], object]]:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream:
        write = csv_writer(stream)
        write([*COLUMNS, *LISTS])
        yield lambda row: write([_format_field(value) for value in row.values()])


def _format_field(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value, separators=(",", ":"))
    return str(value).lower() if isinstance(value, bool) else value


@contextmanager
def _open_parquet(path: Path) -> Iterator[Callable[[dict[str, Any]], object]]:
    import pyarrow as pa
    from pyarrow import parquet

    lists = [(name, pa.list_(pa.struct(list(fields.items())))) for name, fields in LISTS.items()]
    schema = pa.schema([*COLUMNS.items(), *lists])
    group: list[dict[str, Any]] = []
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:

        def flush() -> None:
            if group:
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                group.clear()

        def add(row: dict[str, Any]) -> None:
            group.append(_escape_surrogates(row))
            if len(group) == _GROUP_ROWS:
                flush()

        yield add
        flush()


def _escape_surrogates(value: Any) -> Any:
    """Return a value with lone surrogates in texts escaped as \\udcff: Arrow's texts are UTF-8."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escape_surrogates(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escape_surrogates(entry) for entry in value]
    return value


def to_pandas(records: Iterable[Record | Mapping[str, Any]], rows: Rows = "images") -> Any:
    """Return records as a `pandas.DataFrame`; its column `prediction` is the predicted class, `label` the true one.

    Args:
        records: records, including `Model.predict`'s, or the lines of a results.jsonl.
        rows: `images`: one row per image, with the columns of `infer --format csv`. `evidence`: one row per slot of
            each answered image.

    Raises:
        MissingExtra: pandas is not installed.
    """
    require("pandas", "pandas", "to_pandas")
    import pandas

    table = [record_to_row(to_record(record)) for record in records]
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
    try:
        for number, row in enumerate(_read_parquet(path) if path.suffix == ".parquet" else _read_csv(path), 1):
            try:
                yield to_record(_row_to_document(row))
            except ValueError:
                raise ValueError(f"row {number} is no record") from None
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


def _row_to_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a row as a document of JSON: the reverse of `record_to_row`."""
    document: dict[str, Any] = {name: row[name] for name in _FIELDS if row.get(name) is not None}
    document |= {"schema": RECORD_SCHEMA, "image": row["image"]}
    if row["status"] == "error":
        return document | {"error": {"code": row["error_code"], "message": row["error_message"] or ""}}
    prediction = {name: row.get(name) for name in LISTS["top"]} | {"label": row["prediction"]}
    document |= {"prediction": prediction, "margin": row["margin"], "top": row["top"]}
    if row["evidence"] is not None:
        document["evidence"] = [
            slot | {name: [slot[column] for column in columns] for name, columns in _ENTRIES.items()}
            for slot in row["evidence"]
        ]
    return document
