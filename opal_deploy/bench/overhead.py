"""The overhead table: what heads add to backbones, in parameters and operations, compared with the paper's figures.

Backbones are counted on real modules, the heads `opal` and `linear` from closed forms. The linear head is the paper's,
on features normalised to length 1. The paper's tool behaves as ptflops, 0.7.2 or later, with the pytorch backend: one
operation per multiply-accumulate, per element of a bias, and per input element of an activation, a pooling or a
normalisation without weights (two with weights). Activations and pooling that a module passes on to a function count
twice. `paper.toml` holds the figures that the paper prints.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from ptflops import get_model_complexity_info
from torch import nn

from opal_deploy.bench.measurement import Figure, Measurement, Target, format_table
from opal_deploy.errors import UsageError, VerificationError
from opal_deploy.logs import Log
from opal_deploy.model.backbones import build, count_macs, list_variants

CONVENTIONS = {
    "paper": "what the paper prints as FLOPs: multiply-accumulates counted as one, with biases, activations, "
    "normalisation and pooling, as ptflops counts PyTorch modules",
    "MACs": "only multiply-accumulates of convolutions and matrix products",
    "true FLOPs": "two per multiply-accumulate of a convolution or matrix product",
}
# attributes of `Counts`: the names and units of their figures, and the titles of those given in % of the backbone
_COUNTED = {
    "params": ("params", "parameters"), "paper": ("macs_paper", "operations"), "macs": ("macs", "MACs"),
    "flops": ("flops", "FLOPs"),
}  # fmt: skip
SHARES = {"params": "parameters", "paper": "operations, paper's convention", "flops": "true FLOPs"}
_PROJECTION, _DENSE = "projection: 1x1 convolution", "logits: dense layer"
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}
_GIGA = 10**9
# how the paper prints parameters from these numbers on
_PRINTED = ((10_000_000, "0.00M"), (1_000_000, "0.000M"), (0, "0.0k"))


class Counts(NamedTuple):
    """Parameters, and operations for one image in both conventions, of a module."""

    params: int
    paper: int
    macs: int

    @property
    def flops(self) -> int:
        """True floating-point operations: two per multiply-accumulate."""
        return 2 * self.macs


class Shape(NamedTuple):
    """The sizes of a head's input and output: D, C, m and (H, W)."""

    features: int
    classes: int
    prototypes: int
    grid: tuple[int, int]


class Row(NamedTuple):
    """One backbone with one number of classes; `counts` of the `backbone` and of both heads."""

    backbone: str
    stride: int
    keep_layers: bool
    dataset: str
    shape: Shape
    counts: dict[str, Counts]

    def percent(self, head: str, count: str) -> float:
        """Return what a head adds to its backbone, in %; `count` is one of SHARES."""
        return float(100 * getattr(self.counts[head], count) / getattr(self.counts["backbone"], count))


def count_rows(
    backbones: Sequence[str],
    classes: Mapping[str, int],
    prototypes: int,
    input_size: tuple[int, int],
    *,
    strides: Sequence[int | None] = (None,),
    keep_layers: bool = False,
    log: Log = lambda line: None,
) -> list[Row]:
    """Count every backbone, cut at every stride (None: before its pooling), with every head and number of classes.

    Raises UsageError for a backbone, stride or size that does not fit.
    """
    rows: list[Row] = []
    for name, stride, keep in list_variants(backbones, strides, keep_layers):
        network = build(name, stride=stride, keep_layers=keep, input_size=input_size, device="meta").eval()
        grid, features, stride = network.grid(input_size), network.num_features, network.stride
        counted = count_module(network, (3, *input_size), name)
        log(f"Counted {_title(name, stride, keep)}")
        for dataset, number in classes.items():
            shape = Shape(features, number, prototypes, grid)
            counts = {"backbone": counted, **{head: count_head(head, shape) for head in ("linear", "opal")}}
            rows.append(Row(name, stride, keep, dataset, shape, counts))
    return rows


def count_module(module: nn.Module, input_shape: tuple[int, ...], name: str = "module") -> Counts:
    """Count a module on the device `meta` for one input of a shape without the batch; UsageError if ptflops cannot."""
    params = sum(p.numel() for p in module.parameters() if p.requires_grad)
    macs = count_macs(module, input_shape)
    # on meta a linear layer runs as a product in Python, which ptflops would count a second time
    module.to_empty(device="cpu")
    output = io.StringIO()
    # on a failure it prints the traceback and returns None
    with torch.no_grad(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        operations, _ = get_model_complexity_info(
            module, input_shape, as_strings=False, print_per_layer_stat=False, backend="pytorch"
        )
    if operations is None:
        reason = output.getvalue().strip().splitlines()[-1:] or ["no reason given"]
        raise UsageError(f"{name}: ptflops cannot count it ({reason[0]}); leave this backbone out")
    return Counts(params, int(operations), macs)


def list_operations(head: str, shape: Shape) -> dict[str, int]:
    """Return the operations of the `opal` or the `linear` head in the paper's convention."""
    cells, features, channels = shape.grid[0] * shape.grid[1], shape.features, shape.classes * shape.prototypes
    again = "counted again as the called function"
    if head == "linear":
        means = ("scores: mean over cells", f"scores: mean over cells, {again}")
        # the bias of the dense layer changes no digit that the paper prints
        return dict.fromkeys(means, cells * features) | {_DENSE: features * shape.classes}
    others = (
        "projection: bias", "attention: softmax over channels at each cell", "scores: max over cells",
        f"scores: max over cells, {again}",
    )  # fmt: skip
    return {_PROJECTION: cells * features * channels} | dict.fromkeys(others, cells * channels)


def count_head(head: str, shape: Shape) -> Counts:
    """Count the `opal` or the `linear` head."""
    operations = list_operations(head, shape)
    outputs = shape.classes * (shape.prototypes if head == "opal" else 1)
    macs = operations.get(_PROJECTION, 0) + operations.get(_DENSE, 0)
    return Counts((shape.features + 1) * outputs, sum(operations.values()), macs)


def summarise(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return a head's smallest, largest and mean share of its backbone over all rows, in %, by head and count."""
    shares = {}
    for head, count in itertools.product(("linear", "opal"), SHARES):
        values = [row.percent(head, count) for row in rows]
        shares[head, count] = min(values), max(values), statistics.fmean(values)
    return shares


def build_measurements(rows: Sequence[Row], input_size: tuple[int, int]) -> Iterator[Measurement]:
    """Yield one measurement per row; counts are neither timed nor better or worse."""
    for row in rows:
        figures: dict[str, Figure] = {}
        for name, counts in row.counts.items():
            for count, (key, unit) in _COUNTED.items():
                figures[f"{name}_{key}"] = Figure(getattr(counts, count), unit)
            for count in SHARES if name != "backbone" else ():
                figures[f"{name}_{_COUNTED[count][0]}_percent"] = Figure(row.percent(name, count), "%")
        yield Measurement(
            "overhead",
            Target(
                f"{row.backbone} + opal", row.backbone, "opal", input_size=input_size, num_classes=row.shape.classes,
                prototypes_per_class=row.shape.prototypes,
            ),
            {"dataset": row.dataset, "stride": row.stride, "keep_layers": row.keep_layers},
            figures,
            settings={"conventions": CONVENTIONS},
            details={f"{head}_operations": list_operations(head, row.shape) for head in ("linear", "opal")},
        )  # fmt: skip


def format_like(value: float | Decimal, printed: str) -> str:
    """Return a value with a printed figure's unit and digits, halves to even: 409800 like `0.0k` is `409.8k`."""
    unit = printed[-1] if printed[-1] in _UNITS else ""
    digits = len(printed.removesuffix(unit).partition(".")[2])
    return str((Decimal(value) / _UNITS[unit]).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN)) + unit


def format_tables(rows: Sequence[Row], paper: Mapping[str, Any]) -> str:
    """Return all tables for a terminal; `paper` has the titles of its backbones and data sets."""
    titles = {name: entry["title"] for name, entry in {**paper["backbones"], **paper["datasets"]}.items()}
    operations = ["paper GFLOPs", "true GFLOPs"]
    header = ["backbone", "classes", "params", *operations, "linear params", *operations, "OPAL params", *operations]
    table = []
    for row in rows:
        classes = f"{titles[row.dataset]} ({row.shape.classes})" if row.dataset in titles else str(row.shape.classes)
        cells = [titles.get(row.backbone, row.backbone), classes]
        # the stride of the paper's nine backbones needs no mention
        if row.stride != 32:
            cells[0] = _title(cells[0], row.stride, row.keep_layers)
        for name, digits in (("backbone", "0.00"), ("linear", "0.0000"), ("opal", "0.0000")):
            counts = row.counts[name]
            like = next(like for limit, like in _PRINTED if counts.params >= limit)
            cells.append(format_like(counts.params, like))
            cells += [format_like(Decimal(n) / _GIGA, digits) for n in (counts.paper, counts.flops)]
        table.append([*cells, *(f"{row.percent('opal', count):.2f}" for count in SHARES)])
    shares = [
        [f"{'OPAL' if head == 'opal' else head}: {SHARES[count]}", *(f"{value:.3f}" for value in values)]
        for (head, count), values in summarise(rows).items()
    ]
    parts = [
        f"Parameters and operations per image, m = {rows[0].shape.prototypes}; head counts come on top of the "
        "backbone's, % are relative to the backbone. The linear head normalises its features to length 1",
        format_table([*header, "params %", "paper %", "true %"], table),
        format_table(["head, % of the backbone", "smallest", "largest", "mean"], shares),
        "\n".join(f"- {name}: {text}" for name, text in CONVENTIONS.items()),
    ]
    return "\n\n".join(parts)


def _title(name: str, stride: int, keep_layers: bool) -> str:
    return f"{name}, stride {stride}{', all layers' if keep_layers else ''}"


def load_paper() -> dict[str, Any]:
    """Return the content of paper.toml, with `cells`: every printed figure by name, such as `resnet50.params`."""
    paper = tomllib.loads(files(__package__).joinpath("paper.toml").read_text(encoding="utf-8"))
    paper["cells"] = {f"percentages.{name}": text for name, text in paper["percentages"].items()}
    for name, backbone in paper["backbones"].items():
        for figure, value in backbone.items():
            if isinstance(value, dict):
                paper["cells"] |= {f"{name}.{figure}.{dataset}": text for dataset, text in value.items()}
            elif figure != "title":
                paper["cells"][f"{name}.{figure}"] = value
    return paper


def check_paper(rows: Sequence[Row], paper: Mapping[str, Any], log: Log) -> None:
    """Report the paper's figures that differ from the counts; VerificationError unless exactly the disputed ones do."""
    values, agreed, expected, wrong = _count_cells(rows), 0, [], {}
    for name, printed in paper["cells"].items():
        is_bound = name.endswith("_below")
        counted = format_like(values[name], f"{printed}0" if is_bound else printed)
        agrees = values[name] < Decimal(printed) if is_bound else counted == printed
        agreed += agrees
        reason, line = paper["disputed"].get(name), f"{name}: printed {printed}, counted {counted}"
        if reason and not agrees:
            expected.append(f"known discrepancy of the paper: {line} ({reason})")
        elif reason or not agrees:
            wrong[name] = f"{'NO LONGER A DISCREPANCY' if reason else 'DIFFERS'}: {line}"
    log(f"{agreed} of {len(paper['cells'])} figures of the paper agree at the printed digits")
    for line in (*expected, *wrong.values()):
        log(line)
    if wrong:
        figures = f"{len(wrong)} of {len(paper['cells'])} figures are not what paper.toml expects: {', '.join(wrong)}"
        raise VerificationError(f"{figures}; torchvision's networks, ptflops or the file changed")


def _count_cells(rows: Sequence[Row]) -> dict[str, Decimal]:
    cells: dict[str, float | Decimal] = {}
    for row in rows:
        for part, counts in row.counts.items():
            prefix, suffix = ("", "") if part == "backbone" else (f"{part}_", f".{row.dataset}")
            cells[f"{row.backbone}.{prefix}params{suffix}"] = counts.params
            cells[f"{row.backbone}.{prefix}gflops{suffix}"] = Decimal(counts.paper) / _GIGA
    for (head, count), (smallest, largest, mean) in summarise(rows).items():
        figure = f"percentages.{head}_{'gflops' if count == 'paper' else count}"
        ends = {"min": smallest, "max": largest, "below": largest, "mean": mean}
        cells |= {f"{figure}_{name}": value for name, value in ends.items()}
    return {name: Decimal(value) for name, value in cells.items()}
