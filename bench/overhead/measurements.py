"""The overhead table as measurements: one line per backbone and number of classes."""

from __future__ import annotations

from collections.abc import Iterator

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.overhead.formatting import CONVENTIONS, operation_rows
from opal_deploy.bench.overhead.operations import head_title
from opal_deploy.bench.overhead.table import Row, Table


def measurements(table: Table) -> Iterator[Measurement]:
    """Of every row; counted, so that there is nothing timed, no repeats and no better."""
    origin = provenance()
    for row in table.rows:
        yield Measurement(
            kind="overhead",
            target=Target(
                name=f"{row.backbone.name} + {head_title(table.head)}",
                backbone=row.backbone.name,
                head=head_title(table.head),
                input_size=table.input_size,
                num_classes=row.shape.num_classes,
                prototypes_per_class=row.shape.prototypes_per_class,
            ),
            case={"dataset": row.dataset},
            figures=_figures(row),
            settings={"conventions": CONVENTIONS},
            details={
                "letters": row.shape.letters,
                "linear_operations": operation_rows(table.linear_operations, row.shape),
                "opal_operations": operation_rows(table.opal_operations, row.shape),
            },
            **origin,
        )


def _figures(row: Row) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    counts = row.backbone.counts
    figures["backbone_params"] = Figure(counts.params, "parameters")
    figures["backbone_macs_paper"] = Figure(counts.paper, "operations")
    figures["backbone_macs"] = Figure(counts.macs, "MACs")
    figures["backbone_flops"] = Figure(counts.flops, "FLOPs")
    for name, head in (("linear", row.linear), ("opal", row.opal)):
        figures[f"{name}_params"] = Figure(head.params, "parameters")
        figures[f"{name}_macs_paper"] = Figure(head.paper, "operations")
        figures[f"{name}_macs"] = Figure(head.macs, "MACs")
        figures[f"{name}_flops"] = Figure(head.flops, "FLOPs")
        figures[f"{name}_graph_operations"] = Figure(head.graph, "operations")
        figures[f"{name}_params_percent"] = Figure(getattr(row, f"{name}_params"), "%")
        figures[f"{name}_macs_paper_percent"] = Figure(getattr(row, f"{name}_paper"), "%")
        figures[f"{name}_flops_percent"] = Figure(getattr(row, f"{name}_flops"), "%")
    return figures
