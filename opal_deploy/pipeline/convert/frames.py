"""Records as a table for pandas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from opal_deploy.errors import require
from opal_deploy.explain.records import Record
from opal_deploy.pipeline.run.tables import COLUMNS, LISTS, row_of

Rows = Literal["images", "evidence"]
DIGESTS = ("file_sha256", "model_sha256")


def table(records: Iterable[Record], rows: Rows = "images") -> tuple[list[str], list[dict[str, object]]]:
    """The columns and the rows of `to_pandas`, without pandas."""
    if rows == "evidence":
        columns = ["image", "class_id", "label", *LISTS["evidence"], "name"]
        return columns, [row for record in records for row in _slots(record)]
    columns = list(dict.fromkeys([*COLUMNS, *DIGESTS, *LISTS]))
    # a later key wins: what the row has of these already is the same
    return columns, [{**{name: record.get(name) for name in DIGESTS}, **row_of(record)} for record in records]


def to_pandas(records: Iterable[Record], rows: Rows = "images") -> Any:
    """Records as a `pandas.DataFrame`.

    Args:
        records: of `Model.explain`, or the lines of a results.jsonl.
        rows: `images`: one row an image, with the columns of `infer --format csv` and the two digests; `top` and
            `evidence` are lists. `evidence`: one row a slot of each answered image.

    Raises:
        MissingExtra: pandas is not installed.
    """
    require("pandas", "pandas", "to_pandas")
    import pandas

    columns, found = table(records, rows)
    return pandas.DataFrame(found, columns=columns)


def _slots(record: Record) -> list[dict[str, object]]:
    flat = row_of(record)
    names = [slot.get("name") for slot in record.get("evidence", [])]
    about = {name: flat[name] for name in ("image", "class_id", "label")}
    return [{**about, **slot, "name": name} for slot, name in zip(flat["evidence"] or [], names, strict=True)]
