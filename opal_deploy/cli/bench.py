"""`opal-deploy bench`: the commands of the benchmarks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.bench.options import (
    CompareOptions,
    LatencyOptions,
    OutputOptions,
    OverheadOptions,
    PipelineOptions,
    SweepOptions,
    ThroughputOptions,
)
from opal_deploy.cli.console import Advance, print_json, print_json_line, print_message, progress
from opal_deploy.cli.help import CommandGroup, GroupedCommand
from opal_deploy.cli.options import expand_options
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.bench.diff import MeasurementDiff, Verdict
    from opal_deploy.bench.measurement import Measurement
    from opal_deploy.bench.speed import SweepKind
    from opal_deploy.bench.targets import LoadedTarget
    from opal_deploy.sources.image import InputImage

Files = Annotated[list[Path], typer.Argument(help="Files that `opal-deploy bench` wrote with --out, or folders.")]
# of each list but the regressions; --json has all
_MAX_LINES = 20
_VERDICTS: dict[str, Verdict] = {
    "REGRESSIONS": "regression",
    "doubtful, since a measurement is marked": "doubtful",
    "improvements": "improvement",
}


def overhead(options: OverheadOptions) -> None:
    """Count parameters and operations of backbones and their heads, as in the paper's overhead table.

    The heads are OPAL, the paper's linear head, which normalises its features to length 1, and the network's own
    classifier (plain).
    """
    for package in ("torch", "torchvision"):
        require(package, "train", "opal-deploy bench overhead")
    require("ptflops", "bench", "opal-deploy bench overhead")
    from opal_deploy.bench import overhead as overheads

    paper = overheads.load_paper()
    unchanged = OverheadOptions(check=True, out=options.out, as_json=options.as_json, table=options.table)
    if options.check and replace(options, size=None if options.size == paper.input_size else options.size) != unchanged:
        raise UsageError(
            "--check compares the paper's own table: leave out every option but --format, --out and --json"
        )
    columns = [(overheads.format_classes(number), number) for number in dict.fromkeys(options.classes)]
    rows = overheads.count_rows(
        options.backbone or paper.backbones,
        columns or list(paper.datasets.items()),
        options.prototypes,
        options.input_size,
        strides=options.stride or (None,),
        keep_layers=options.keep_layers,
        log=print_message,
    )
    for measurement in overheads.build_measurements(rows, options.input_size):
        _write(measurement, options)
    if not options.as_json:
        markdown = options.table == "markdown"
        print(overheads.format_tables(rows, options.input_size, paper.titles, markdown=markdown), end="", flush=True)
    if options.check:
        cells = overheads.compare_with_paper(rows, paper)
        for line in overheads.format_comparison(cells):
            print_message(line)
        overheads.require_agreement(cells)


def latency(options: LatencyOptions) -> None:
    """Measure milliseconds per batch: p50, p90, p95, p99 and mean; on a GPU also copies and computation separately.

    --profile adds the time per node or layer, and the sums of backbone, projection and head.
    """
    _measure_speed("latency", options, profile=options.profile)


def throughput(options: ThroughputOptions) -> None:
    """Measure images per second over batch sizes.

    A batch size that does not fit into memory is named, and ends that model's sweep.
    """
    _measure_speed("throughput", options)


def compare(
    options: CompareOptions,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[A B]...", help="Models; the others are compared with A.")
    ] = None,
) -> None:
    """Compare speed in interleaved rounds: the median ratio of the rounds with its 95 % interval.

    Give two models, or --question. In each round every model runs once, A B in even rounds and B A in odd ones, so that
    a drifting machine favours none.
    """
    from opal_deploy.bench.compare import measure_comparison, prepare_comparisons

    for comparison in prepare_comparisons(files or [], options, print_message):
        for batch in options.batch:
            with progress("rounds") as advance:
                measurements = measure_comparison(comparison, batch, options, progress=advance)
            _deliver(measurements, options)


def pipeline(
    images: Annotated[list[str], typer.Argument(help="Images: folders, files, globs, or - for a list on stdin.")],
    model: Annotated[Path, typer.Option(help="Exported model or checkpoint.")],
    options: PipelineOptions,
) -> None:
    """Measure `infer` against the bare session: time by stage, bottleneck and memory, with and without overlays.

    With --no-network precomputed outputs are replayed, so that only the pipeline is measured.
    """
    require("psutil", "bench", "opal-deploy bench pipeline")
    from opal_deploy.bench.monitor import monitor_devices
    from opal_deploy.bench.pipeline import build_measurement, measure_pipeline
    from opal_deploy.bench.targets import load_for_inference

    items = _find_items(images, options.limit)
    loaded = load_for_inference(model, options)
    device = loaded.target.device
    with monitor_devices(device) as monitor, progress("passes") as advance:
        result = measure_pipeline(loaded.session, items, options, print_message, device=device, progress=advance)
    _deliver([build_measurement(result, loaded, monitor, options)], options)


def report(files: Files) -> None:
    """Write measurements as Markdown to stdout: one table per kind, and the commands that repeat them."""
    from opal_deploy.bench.measurement import read_measurements
    from opal_deploy.bench.report import build_report

    text = build_report(read_measurements(files))
    if not text:
        raise UsageError("no measurements in these files; `opal-deploy bench ... --out FILE` writes them")
    print_json_line(text.rstrip("\n"))


def diff(
    old: Annotated[Path, typer.Argument(help="Measurements before: a file of `--out`, or a folder of *.jsonl.")],
    new: Annotated[Path, typer.Argument(help="Measurements after.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Ignore changes up to this many percent.")] = 3.0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if only one side has a measurement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the differences to stdout as JSON.")] = False,
) -> None:
    """List figures that became worse by more than the noise; exit with 1 if there are any.

    For this command exit code 1 means a regression, and its last line says so. Changes in measurements marked noisy or
    throttled are listed as doubtful and do not fail.
    """
    from opal_deploy.bench.diff import compare_measurements
    from opal_deploy.bench.measurement import read_measurements

    result = compare_measurements(read_measurements([old]), read_measurements([new]), tolerance / 100)
    _print_diff(result)
    if as_json:
        print_json(result.to_dict())
    reasons = []
    if worse := len(result.with_verdict("regression")):
        reasons.append(f"{worse} regression{'s' if worse > 1 else ''} beyond the noise")
    if strict and result.missing:
        reasons.append(f"{result.missing} not in both (--strict)")
    if reasons:
        print_message(f"failed: {', '.join(reasons)}; exit code 1")
        raise typer.Exit(1)
    print_message("no regression beyond the noise" if result.changes else "nothing to compare: no figure is in both")


bench = typer.Typer(
    name="bench",
    help="Measure speed, memory and cost; each result records its settings and machine.",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (overhead, latency, throughput, compare, pipeline, report, diff):
    bench.command(cls=GroupedCommand)(expand_options(command))


def _load_targets(options: SweepOptions) -> Iterator[LoadedTarget]:
    from opal_deploy.bench.targets import build_setups, load_targets

    setups = build_setups(options)
    if not options.backbone:
        return load_targets(options.model, iter(()), setups, print_message)
    for package in ("torch", "torchvision"):
        require(package, "export", "timing a backbone")
    from opal_deploy.bench.networks import build_networks

    return load_targets(options.model, build_networks(options, options.head), setups, print_message)


def _measure_speed(kind: SweepKind, options: SweepOptions, *, profile: bool = False) -> None:
    """Measure each model at all batch sizes, with the progress over its repeats."""
    from opal_deploy.bench.speed import measure_speed

    for loaded in _load_targets(options):
        with progress("repeats") as advance:
            timing = replace(options, on_repeat=_count_up(advance, options.repeats * len(options.batch)))
            _deliver(measure_speed(kind, loaded, options.batch, timing, profile=profile), options)


def _count_up(advance: Advance, total: int) -> Callable[[], None]:
    done = itertools.count(1)
    return lambda: advance(next(done), total)


def _deliver(measurements: Iterable[Measurement], options: OutputOptions) -> None:
    """Write and print each measurement as soon as it is taken, so that it survives a failure of the next."""
    from opal_deploy.bench.report import format_measurement

    for measurement in measurements:
        _write(measurement, options)
        print_message(format_measurement(measurement))


def _write(measurement: Measurement, options: OutputOptions) -> None:
    from opal_deploy.bench.measurement import append_measurement

    if options.out is not None:
        append_measurement(options.out, measurement)
    if options.as_json:
        print_json_line(measurement.to_line())


def _find_items(images: list[str], limit: int) -> list[InputImage]:
    from opal_deploy.sources.discovery import check_inputs, discover
    from opal_deploy.sources.items import Skipped

    check_inputs(images)
    items = list(itertools.islice(discover(images, Skipped(), sys.stdin), limit))
    if not items:
        raise UsageError("no images found")
    return items


def _print_diff(result: MeasurementDiff) -> None:
    _print_list("DIFFERENT MACHINES: differences may come from the machines, not the software", result.machines)
    _print_list("versions differ:", result.software)
    _print_list("measured more than once; the last one counts:", result.repeated)
    for title, verdict in _VERDICTS.items():
        lines = [change.describe() for change in result.with_verdict(verdict)]
        _print_list(f"{title} ({len(lines)}):", lines, len(lines) if verdict == "regression" else _MAX_LINES)
    lists = {"only in OLD": result.only_old, "only in NEW": result.only_new, "not comparable": result.not_comparable}
    for title, names in lists.items():
        _print_list(f"{title} ({len(names)}):", names)
    unchanged = len(result.with_verdict("unchanged"))
    print_message(f"unchanged within the noise: {unchanged} of {len(result.changes)} figures")


def _print_list(title: str, lines: Sequence[str], limit: int = _MAX_LINES) -> None:
    """Print the first lines below a title; nothing without lines."""
    for line in (title, *(f"  {line}" for line in lines[:limit])) if lines else ():
        print_message(line)
    if len(lines) > limit:
        print_message(f"  ... and {len(lines) - limit} more, in --json")
