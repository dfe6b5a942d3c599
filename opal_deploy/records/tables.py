"""Records for other tools: the tables `results.parquet` and `results.csv`, pandas, and COCO annotations.

A table has one row per image, in input order, with the columns of `COLUMNS`; missing fields are null in Parquet and
empty in CSV. The lists of `LISTS` follow, as lists of structs in Parquet and as JSON in CSV. Both follow from the
fields that `record` declares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import UNSET, inspect
from msgspec.structs import asdict

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import StoppedEarly, UsageError, require
from opal_deploy.records.lines import csv_writer
from opal_deploy.records.names import readable_name
from opal_deploy.records.record import Answer, Answered, Failed, Label, Record, Slot, to_record

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
_SLOT = _arrow_types(Slot)
LISTS: dict[str, dict[str, Any]] = {
    "top": _arrow_types(Answer), "evidence": _SLOT, "labels": {**_arrow_types(Label), "evidence": _SLOT}
}  # fmt: skip
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
        values["labels"] = None if record.labels is None else [_flatten(label) for label in record.labels]
    return {name: values.get(name) for name in (*COLUMNS, *LISTS)}


def _flatten(part: Answer | Slot | Label) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, value in asdict(part).items():
        if name == "evidence":
            value = [_flatten(slot) for slot in value]
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

    def list_of(fields: dict[str, Any]) -> Any:
        return pa.list_(pa.struct([(name, list_of(t) if isinstance(t, dict) else t) for name, t in fields.items()]))

    schema = pa.schema([*COLUMNS.items(), *((name, list_of(fields)) for name, fields in LISTS.items())])
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


def to_pandas(records: Iterable[Record | Mapping[str, Any]]) -> Any:
    """Return records, including `Model.predict`'s, as a `pandas.DataFrame` with the columns of `infer --format csv`.

    The column `prediction` is the predicted class, `label` the true one; `explode("evidence")` gives a row per slot.

    Raises:
        MissingExtra: pandas is not installed.
    """
    require("pandas", "pandas", "to_pandas")
    import pandas

    table = [record_to_row(to_record(record)) for record in records]
    return pandas.DataFrame(table, columns=[*COLUMNS, *LISTS])


def to_coco(records: Iterable[Record | Mapping[str, Any]]) -> dict[str, Any]:
    """Return a COCO document (`images`, `annotations`, `categories`) with one annotation per slot.

    `bbox` is [x, y, width, height] in pixels of the whole oriented image, `score` the slot's score; `attributes` hold
    slot, channel, cell, contribution and the predicted label. IDs start at 1, as in COCO's own files. Images with an
    error have no size and are left out; `info` has their number.

    Categories are the predicted classes that occur, with class_id + 1 as ID.

    Args:
        records: records, those of `Model.predict` included, or the lines of a results.jsonl.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    categories: dict[int, dict[str, Any]] = {}
    failed = 0
    for record in map(to_record, records):
        if isinstance(record, Failed):
            failed += 1
            continue
        image_id = len(images) + 1
        image = {"id": image_id, "file_name": readable_name(record.image)}
        image |= {"width": record.width, "height": record.height}
        # distinguishes images of the same name
        images.append(image if record.image_index is None else {**image, "image_index": record.image_index})
        answers = record.labels or (record.prediction,)
        pairs = ((answer, slot) for answer in answers for slot in getattr(answer, "evidence", record.evidence))
        for answer, slot in pairs:
            category_id = answer.class_id + 1
            categories[category_id] = {"id": category_id, "name": answer.label, "supercategory": ""}
            x0, y0, x1, y1 = slot.box
            attributes = {"label": answer.label, "slot": slot.slot, "channel": slot.channel, "cell": list(slot.cell)}
            annotations.append({
                "id": len(annotations) + 1, "image_id": image_id, "category_id": category_id,
                "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0, "score": slot.score,
                "attributes": {**attributes, "contribution": slot.contribution},
            })  # fmt: skip
    return {
        "info": {"description": "Evidence for the predicted classes, by opal-deploy", "failed_images": failed},
        "images": images,
        "annotations": annotations,
        "categories": [categories[number] for number in sorted(categories)],
    }
