"""Latency, throughput and profile of one model.

A profile is the time per node of an exported graph, or per layer of an engine, with the sums of backbone, projection
and head. ONNX Runtime's own profiler and TensorRT's layer profiler measure; both slow a batch down, so their sums are
larger than the latency. On a GPU, ONNX Runtime measures kernels if it was built with CUDA profiling.
Otherwise CUDA_LAUNCH_BLOCKING=1 in the environment makes the host's time of a node include its kernels, and their
launches. The profilers were never run on a GPU when this was written.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.measurement import NOISY, Figure, Measurement, Scalar, provenance
from opal_deploy.bench.monitor import monitor_devices, peak_memory_mb, reset_peak_memory
from opal_deploy.bench.options import TimingOptions
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.bench.timing import pinned_noise, random_batches, rotate_inputs, time_repeats, time_stages
from opal_deploy.errors import StoppedEarly, UsageError, require
from opal_deploy.runtime.engine_session import EngineSession
from opal_deploy.runtime.onnx_session import CPU, CUDA, OnnxSession, prepare_input, translate_errors

SweepKind = Literal["latency", "throughput"]
# with "1" in this variable, CUDA finishes every kernel before the host continues
BLOCKING = "CUDA_LAUNCH_BLOCKING"
PARTS = ("backbone", "projection", "head")
# layers of unknown part: of an engine without its ONNX file, or made by the builder
OTHER = "other"
# profiled batches, and those before them
_RUNS, _WARM_UP = 10, 3
_SUFFIX = "_kernel_time"


def measure_speed(
    kind: SweepKind, loaded: LoadedTarget, batches: Sequence[int], options: TimingOptions, *, profile: bool = False
) -> Iterator[Measurement]:
    """Yield one measurement per batch size as soon as it is taken.

    A batch size that fails, usually for lack of memory, has no figures and is the last.

    Args:
        kind: `latency` waits for each batch before the next.
        profile: also time every node, see `profile_batch`.

    Raises:
        UsageError: this model cannot be profiled.
    """
    if profile:
        check_profile(loaded)
    for batch in batches:
        case: dict[str, Scalar] = {"batch": batch, "threads": loaded.threads}
        try:
            measured = _measure_batch(kind, loaded, batch, options, profile=profile)
        except (StoppedEarly, MemoryError) as error:
            timed = loaded.describe_timing(1 if kind == "latency" else loaded.depth)
            marks = (f"failed: {str(error) or 'out of memory'}",)
            yield Measurement(kind, loaded.target, case, {}, timed=timed, marks=marks, **provenance())
            return
        yield Measurement(kind, loaded.target, case, **measured, **provenance())


def _measure_batch(
    kind: SweepKind, loaded: LoadedTarget, batch: int, options: TimingOptions, *, profile: bool
) -> dict[str, Any]:
    """Return the fields of a `Measurement` of one batch size."""
    reset_peak_memory()
    with (
        rotate_inputs(loaded, batch, options.buffers, one_by_one=kind == "latency") as batches,
        monitor_devices(loaded.target.device) as monitor,
    ):
        timing = time_repeats(batches, options)
    rate, peak = timing.throughput(batch), Figure(peak_memory_mb(), "MB", "lower")
    details = {}
    if kind == "latency":
        figures = {f"p{percent}_ms": timing.latency(percent) for percent in (50, 90, 95, 99)}
        figures |= {"mean_ms": timing.latency(), "images_per_second": rate, "peak_memory": peak}
        if loaded.target.device != "cpu":
            with pinned_noise(loaded, options.buffers, batch) as images:
                figures |= time_stages(loaded.session, images)
        if profile:
            profiled = profile_batch(loaded, batch)
            figures, details = {**figures, **profiled.figures()}, {"profile": asdict(profiled)}
    else:
        percentiles = {f"p{percent}_ms": timing.latency(percent) for percent in (50, 99)}
        figures = {"images_per_second": rate, **percentiles, "peak_memory": peak}
    marks = [f"{NOISY}: the repeats differ by {rate.spread:.0%}"] if rate.is_noisy else []
    if loaded.target.device != "cpu" and os.environ.get(BLOCKING) == "1":
        marks.append(f"blocking: {BLOCKING}=1 slows the GPU down")
    return {
        "figures": figures,
        "settings": {**timing.settings(), "buffers": options.buffers},
        "timed": loaded.describe_timing(timing.depth),
        "marks": (*monitor.marks, *marks),
        "conditions": monitor.conditions,
        "details": details,
    }


@dataclass(frozen=True)
class NodeTime:
    """The time of one node or layer.

    Attributes:
        operator: ONNX's operator; empty for a layer of an engine.
        part: one of PARTS; several, joined by `+`, for a layer that fuses them; or OTHER.
        calls: executions, over all profiled batches; on a GPU the kernels.
        mean_us: mean microseconds of one.
        share: of the total time, in [0, 1].
    """

    name: str
    operator: str
    part: str
    calls: int
    mean_us: float
    share: float


@dataclass(frozen=True)
class Profile:
    """The profile of a model at one batch size.

    Attributes:
        source: what measured, for people.
        runs: profiled batches.
        nodes: in the order of execution.
    """

    source: str
    runs: int
    nodes: tuple[NodeTime, ...]

    def figures(self) -> dict[str, Figure]:
        """Return the milliseconds per batch of each part."""
        sums: defaultdict[str, float] = defaultdict(float)
        for node in self.nodes:
            sums[node.part] += node.calls * node.mean_us / self.runs / 1e3
        return {f"profile.{part}_ms": Figure(value, "ms") for part, value in sums.items()}


def check_profile(loaded: LoadedTarget) -> None:
    """Raise UsageError unless a loaded model can be profiled: an ONNX file, or an engine without CUDA graphs."""
    if loaded.path is None or not isinstance(loaded.session, OnnxSession | EngineSession):
        raise UsageError(
            f"{loaded.target.name}: --profile takes ONNX files and engines; export it and give the file with --model"
        )
    if "graph" in loaded.target.options.lower():
        raise UsageError(f"--profile: {loaded.target.options} hides the single kernels; leave it out")
    require("onnx", "export", "bench latency --profile")


def profile_batch(loaded: LoadedTarget, batch: int) -> Profile:
    """Profile a model that `check_profile` accepts on batches of noise.

    Raises:
        UsageError: ONNX Runtime measures no kernels on this GPU. The errors of `Session.run`.
    """
    assert loaded.path is not None
    if isinstance(loaded.session, EngineSession):
        return _profile_engine(loaded, loaded.session, batch)
    assert isinstance(loaded.session, OnnxSession)
    return _profile_onnx(loaded, loaded.path, loaded.session, batch)


def _profile_onnx(loaded: LoadedTarget, path: Path, session: OnnxSession, batch: int) -> Profile:
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = session.threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = [CPU]
    if session.device != "cpu":
        index = session.device.partition(":")[2]
        cuda = {"device_id": index, "use_tf32": "0", **loaded.cuda_options.provider_options(session.metadata.precision)}
        providers = [(CUDA, cuda), CPU]
    elif session.metadata.precision == "int8":
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        # the graph whose nodes are timed
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        with translate_errors(batch):
            profiled = onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
            images = prepare_input(random_batches(1, batch, session.metadata.input_size)[0], session.metadata)
            for _ in range(_WARM_UP + _RUNS):
                profiled.run(None, {"images": images})
            events = json.loads(Path(profiled.end_profiling()).read_text(encoding="utf-8"))
        graph = onnx.load(options.optimized_model_filepath, load_external_data=False).graph
    source, times = _read_events(events, gpu=session.device != "cpu")
    parts = find_parts(graph, session.metadata)
    operators = {node.name: node.op_type for node in graph.node}
    return _build_profile(source, times, parts, operators)


def _read_events(events: Sequence[dict[str, Any]], *, gpu: bool) -> tuple[str, dict[str, list[float]]]:
    """Return the timer's description and, by node, the microseconds of its executions after the warm-up."""
    runs = sorted(event["ts"] for event in events if event["name"] == "model_run")
    counted = [event for event in events if event["ts"] >= runs[_WARM_UP]]
    kernels = [event for event in counted if event["cat"] == "Kernel" and "parent_name" in event["args"]]
    if gpu and not kernels and os.environ.get(BLOCKING) != "1":
        raise UsageError(
            f"--profile: this ONNX Runtime was built without CUDA profiling; set {BLOCKING}=1 in the environment, so "
            "that the host's time of a node includes its kernels"
        )
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in kernels or counted:
        if event["cat"] in ("Node", "Kernel"):
            name = str(event["args"].get("parent_name", event["name"])) if kernels else str(event["name"])
            times[name.removesuffix(_SUFFIX)].append(float(event["dur"]))
    how = "CUDA kernels" if kernels else "the host's time per node, each waited for" if gpu else "time per node"
    return f"ONNX Runtime's profiler ({how})", dict(times)


def _profile_engine(loaded: LoadedTarget, session: EngineSession, batch: int) -> Profile:
    times: defaultdict[str, list[float]] = defaultdict(list)
    with pinned_noise(loaded, 1, batch) as (images,):
        for _ in range(_WARM_UP):
            session.run(images)
        for _ in range(_RUNS):
            session.run_profiled(images, lambda layer, ms: times[layer].append(1e3 * ms))
    assert loaded.path is not None
    onnx_file = loaded.path.with_name(str(session.sidecar.onnx["file"]))
    parts: dict[str, str] = {}
    if onnx_file.is_file():
        import onnx

        parts = find_parts(onnx.load(onnx_file).graph, session.metadata)
    layers = {layer: _part_of_layer(layer, parts) for layer in times}
    return _build_profile("TensorRT's layer profiler", times, layers, {})


def _part_of_layer(layer: str, parts: dict[str, str]) -> str:
    """Return the parts of the ONNX nodes that a layer's name lists, such as `a + b` or `{ForeignNode[a...b]}`."""
    names = re.split(r"\.\.\.|[^\w./:]+", layer)
    found = {parts[name] for name in names if name in parts}
    return "+".join(part for part in PARTS if part in found) or OTHER


def _build_profile(
    source: str, times: dict[str, list[float]], parts: dict[str, str], operators: dict[str, str]
) -> Profile:
    total = sum(map(sum, times.values()))
    nodes = tuple(
        NodeTime(
            name, operators.get(name, ""), parts.get(name, OTHER), len(each), sum(each) / len(each), sum(each) / total
        )
        for name, each in times.items()
    )
    return Profile(source, _RUNS, nodes)


def find_parts(graph: Any, metadata: Metadata) -> dict[str, str]:
    """Return the part of each node of an ONNX graph of ours, optimised or not, by the node's name.

    The head follows the body's output, and the projection is the body's last convolution with what converts its output.
    A model without projection has backbone and head only.
    """
    from opal_deploy.export.graph_edit import BODY_OUTPUT, nodes_of

    convolutions = [node.output[0] for node in graph.node if "Conv" in node.op_type]
    # an optimiser may have renamed or removed the body's output; no convolution follows it
    made = {name for node in graph.node for name in node.output}
    body = nodes_of(graph, [BODY_OUTPUT if BODY_OUTPUT in made else convolutions[-1]])
    backbone = body
    if metadata.head.get("projection", True):
        last = [name for name in convolutions if name in body][-1]
        backbone = nodes_of(graph, [last]) - {last}
    return {node.name: _part_of_node(node.output, backbone, body) for node in graph.node}


def _part_of_node(outputs: Iterable[str], backbone: set[str], body: set[str]) -> str:
    first = next(iter(outputs))
    return "backbone" if first in backbone else "projection" if first in body else "head"
