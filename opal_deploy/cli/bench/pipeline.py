"""`opal-deploy bench pipeline`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.bench.options import Images, JsonLines, Out, find_items, write_measurement
from opal_deploy.cli.console import print_message, progress
from opal_deploy.cli.options import default_workers
from opal_deploy.errors import UsageError, require
from opal_deploy.options import RuntimeName

if TYPE_CHECKING:
    from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline

_BATCH = 8


def pipeline(
    images: Images,
    model: Annotated[Path, typer.Option(help="An exported model, or a checkpoint.")],
    limit: Annotated[int, typer.Option(min=1, help="At most so many images.")] = 256,
    batch: Annotated[
        str | None, typer.Option(help=f"Images a forward pass; several: 1,8,32. Default: {_BATCH}.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Threads that decode, and that draw; several: 1,2,4. Default: as in infer.")
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option(help="WIDTHxHEIGHT: use copies of the images in this size; several: 500x375,2000x1500."),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Run the network, or only replay its answers.")
    ] = True,
    decoding: Annotated[
        bool, typer.Option("--decoding/--no-decoding", help="Decode the images, or find their pixels in memory.")
    ] = True,
    hold_ms: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --no-network: milliseconds that a pretended GPU takes for a batch.", show_default=False
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain/--no-explain", help="Time overlays too, which take far longer than the rest.")
    ] = True,
    decode: Annotated[str, typer.Option(help="As in infer: default, exact, fast.")] = "default",
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Decode in processes, as infer does, or in threads.")
    ] = True,
    plain: Annotated[
        Path | None,
        typer.Option(
            help="The model's checkpoint, to run as a research script would, too: Pillow, PyTorch, one process.",
            show_default=False,
        ),
    ] = None,
    runtime: Annotated[
        RuntimeName,
        typer.Option(help="As in infer: auto: by the model's file; compiled: a checkpoint by torch.compile."),
    ] = "auto",
    cuda_graphs: Annotated[
        bool,
        typer.Option("--cuda-graphs", help="As in infer."),
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    out: Out = None,
    as_json: JsonLines = False,
) -> None:
    """Measure what `infer` loses against the bare session: time by stage, the bottleneck, memory; with overlays too.

    Of several values each is varied on its own around a base case. With --no-network the network's outputs are replayed
    at no cost, so that the pipeline alone is measured; with --no-decoding too, what is left of it in this process.
    """
    from opal_deploy.bench.memory import release_memory
    from opal_deploy.bench.monitor import monitor_devices
    from opal_deploy.bench.pipeline.cases import Case, build_cases, parse_counts, parse_sizes, resized_copies
    from opal_deploy.bench.pipeline.formatting import build_measurement, format_result, format_summary
    from opal_deploy.bench.pipeline.measure import PipelineOptions, measure_case
    from opal_deploy.bench.targets.loading import load_for_inference
    from opal_deploy.preprocess.decode import parse_decoding

    if hold_ms is not None and network:
        raise UsageError("--hold-ms goes with --no-network: a real network takes its own time")
    path = parse_decoding(decode)
    batches, counts = parse_counts("--batch", batch), parse_counts("--workers", workers)
    sizes = parse_sizes("--image-size", image_size)
    default = Case(_BATCH, default_workers(), decode=path, isolate=isolate)
    require("psutil", "bench", "opal-deploy bench pipeline")
    items = find_items(images, limit)
    baseline = None if plain is None else _load_baseline(plain, device, threads)
    results = []
    for case in build_cases(default, batches=batches, workers=counts, sizes=sizes):
        # a new session each time, since one keeps the memory of its largest batch
        loaded = load_for_inference(model, device=device, threads=threads, runtime=runtime, cuda_graphs=cuda_graphs)
        if baseline is not None:
            baseline.check_source(loaded.metadata)
        with (
            resized_copies(items, case.image_size) as copies,
            monitor_devices(loaded.target.device) as monitor,
            progress("passes") as advance,
        ):
            options = PipelineOptions(
                repeats, network, decoding, (hold_ms or 0.0) / 1e3, explain, baseline, loaded.target.device,
                progress=advance,
            )  # fmt: skip
            result = measure_case(loaded.session, copies, case, options, print_message)
        measurement = build_measurement(result, loaded, monitor, options)
        for line in (*format_result(result), *(f"  marked {mark}" for mark in measurement.marks)):
            print_message(line)
        write_measurement(measurement, out, as_json=as_json)
        results.append(result)
        del loaded
        release_memory()
    if len(results) > 1:
        for line in format_summary(results):
            print_message(line)


def _load_baseline(checkpoint: Path, device: str, threads: int | None) -> EagerBaseline:
    require("torchvision", "train", "bench pipeline --plain")
    from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline
    from opal_deploy.runtime.torch_session import torch_device

    return EagerBaseline(checkpoint, str(torch_device(device)), threads)
