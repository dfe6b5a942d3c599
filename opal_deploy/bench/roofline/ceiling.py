"""The peak performance of a device, from its data sheet or measured, and the share of it that a measurement reached."""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import NOISY, Figure, Measurement, Target, read_measurements
from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Work
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    import torch

Bound = Literal["compute", "memory"]
# larger than any cache
COPY_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
# large enough that arithmetic takes the time, not its start
MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
# counted repeats, and uncounted ones before them
_REPEATS, _WARM_UP = 10, 3
# runs of a repeat: starting one run on a GPU and waiting for it takes 1 to 2 % as long as the run itself
_RUNS = {"cpu": 1, "cuda": 10}
_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Ceiling:
    """The peak performance of one device.

    Attributes:
        flops: FLOPs per second by precision, dense (int8: integer operations), without precisions that the device lacks
            or that were not measured.
        device: the device that a measured ceiling holds for; empty for a data sheet.
    """

    name: str
    flops: Mapping[str, float]
    bytes_per_second: float
    source: str
    device: str = ""
    threads: int | None = None

    def attainable(self, intensity: float, precision: str) -> float:
        """Return the FLOPs per second that are possible at an intensity in FLOPs per byte: the roofline.

        Raises:
            UsageError: the device has no figure for the precision.
        """
        return min(self.peak(precision), intensity * self.bytes_per_second)

    def peak(self, precision: str) -> float:
        """Return the FLOPs per second of arithmetic; UsageError if the device has no figure for the precision."""
        if precision not in self.flops:
            raise UsageError(f"{self.name} has no figure for {precision}; it has {', '.join(self.flops)}")
        return self.flops[precision]

    def ridge(self, precision: str) -> float:
        """Return the FLOPs per byte from which arithmetic is the bound; raises as `peak`."""
        return self.peak(precision) / self.bytes_per_second

    def images_per_second(self, work: Work, batch: int, precision: str) -> float:
        """Return a network's maximum images per second at a batch size; raises as `peak`."""
        return batch * self.attainable(work.intensity(batch, precision), precision) / work.flops(batch)

    def bound(self, work: Work, batch: int, precision: str) -> Bound:
        """Return which of the two limits a network at a batch size; raises as `peak`."""
        return "compute" if work.intensity(batch, precision) >= self.ridge(precision) else "memory"


@dataclass(frozen=True)
class Share:
    """The share of its ceiling that a measurement reached.

    Attributes:
        fraction: measured over ceiling; above 1 if layers are fused or cached, which the ceiling ignores.
    """

    ceiling: float
    fraction: float
    bound: Bound
    source: str


def compute_share(
    work: Work,
    batch: int,
    precision: str,
    device_name: str,
    images_per_second: float,
    measured: Ceiling | None = None,
) -> Share | None:
    """Return the share of its ceiling that a throughput reached; None without a known ceiling.

    Args:
        device_name: NVML's or CUDA's name, with or without a leading `cuda:0 `.
        measured: a ceiling to use instead of the data sheet, if it has the precision.
    """
    sheet = find_by_driver_name(device_name)
    for ceiling in (measured, sheet):
        if ceiling is not None and precision in ceiling.flops and precision in BYTES_PER_ELEMENT:
            limit = ceiling.images_per_second(work, batch, precision)
            return Share(limit, images_per_second / limit, ceiling.bound(work, batch, precision), ceiling.source)
    return None


def find_by_driver_name(name: str) -> Ceiling | None:
    """Return the GPU with this name in NVML and CUDA; None if it is unknown.

    The whole name must match: an L40 is not an L4, and a MIG instance is not its GPU.
    """
    normalized = _normalize(name)
    for device in _read_devices():
        if normalized in {_normalize(known) for known in device.names}:
            return device.ceiling
    return None


def find_device(text: str) -> Ceiling:
    """Return the GPU that `--gpu` names, by a short name such as `a100-80gb-sxm` or by its driver's name.

    Raises:
        UsageError: the name is unknown; the message lists the known ones.
    """
    for device in _read_devices():
        if text.casefold() == device.key:
            return device.ceiling
    if ceiling := find_by_driver_name(text):
        return ceiling
    raise UsageError(f"--gpu {text!r}: unknown GPU; expected one of {', '.join(known_devices())}")


def known_devices() -> list[str]:
    """Return the short names of all GPUs, in file order."""
    return [device.key for device in _read_devices()]


@dataclass(frozen=True)
class _Device:
    key: str
    names: tuple[str, ...]
    ceiling: Ceiling


@cache
def _read_devices() -> tuple[_Device, ...]:
    raw = tomllib.loads(files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))
    devices = []
    for key, entry in raw["devices"].items():
        flops = {precision: value * 1e12 for precision, value in entry["tflops"].items()}
        ceiling = Ceiling(entry["title"], flops, entry["gb_per_second"] * 1e9, entry["source"])
        devices.append(_Device(key, tuple(entry["names"]), ceiling))
    return tuple(devices)


def _normalize(name: str) -> str:
    words = name.casefold().replace("-", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla") and not word.startswith("cuda:"))


def measure_ceiling(
    device_name: str,
    precisions: Sequence[str],
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measurement:
    """Time a copy, and a product per precision; a figure's value is its best repeat.

    Args:
        device_name: `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads; None leaves torch's choice.

    Raises:
        UsageError: no such device, or torch has no product in a precision.
    """
    import torch

    if unknown := [precision for precision in precisions if precision not in _DTYPES]:
        raise UsageError(f"--measure-ceiling --precision {unknown[0]}: expected {', '.join(_DTYPES)}")
    from opal_deploy.runtime.torch_session import torch_device

    device = torch_device(device_name)
    kind = device.type
    size, copied = MATRIX_SIZE[kind], COPY_BYTES[kind]
    done, total = itertools.count(1), (1 + len(precisions)) * (_WARM_UP + _REPEATS)

    def advance() -> None:
        progress(next(done), total)

    before, backend = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        threads = torch.get_num_threads()
        figures = {"copy": _time_copy(device, copied, advance)}
        for precision in precisions:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            figures[f"matmul_{precision}"] = _time_product(device, size, precision, advance)
    finally:
        torch.set_num_threads(before)
        torch.backends.cuda.matmul.allow_tf32 = backend
    name = "cpu" if kind == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
    noisy = [key for key, figure in figures.items() if figure.is_noisy]
    return Measurement(
        kind="ceiling",
        target=Target(name=name, runtime="torch", runtime_version=torch.__version__, device=name),
        case={"threads": threads if kind == "cpu" else None},
        figures=figures,
        settings={
            "repeats": _REPEATS, "runs_per_repeat": _RUNS[kind], "warm_up": _WARM_UP, "copy_bytes": copied,
            "matrix_size": size, "value": "best of the repeats",
        },
        timed=(
            f"copy: {copied / 2**20:.0f} MiB from one tensor to another, bytes read and written both counted; product: "
            f"{size} x {size} by {size} x {size}, 2 FLOPs per multiply-accumulate; memory is allocated before; by "
            f"{'the clock' if kind == 'cpu' else 'CUDA events'}"
        ),
        marks=tuple(f"{NOISY}: {key}" for key in noisy),
        **provenance(),
    )  # fmt: skip


def default_precisions(device: str) -> tuple[str, ...]:
    """Return the default precisions: all on a GPU; on a CPU only fp32, since half precision may take minutes."""
    return tuple(_DTYPES) if device.startswith("cuda") else ("fp32",)


def read_ceilings(path: Path) -> list[Ceiling]:
    """Read the ceilings that `bench roofline --measure-ceiling` wrote into a file, the latest first.

    Raises:
        UsageError: the file cannot be read, or has no ceiling.
    """
    ceilings = [to_ceiling(m) for m in read_measurements([path]) if m.kind == "ceiling" and "copy" in m.figures]
    if not ceilings:
        raise UsageError(
            f"--ceiling {path}: no measured ceiling found; measure one: opal-deploy bench roofline --measure-ceiling "
            f"--out {path.name}"
        )
    return ceilings[::-1]


def to_ceiling(measurement: Measurement) -> Ceiling:
    """Return the ceiling in a measurement of `measure_ceiling`."""
    figures, device = measurement.figures, measurement.target.device if measurement.target else ""
    flops = {name.removeprefix("matmul_"): f.value * 1e12 for name, f in figures.items() if name.startswith("matmul_")}
    threads = measurement.case.get("threads")
    count = threads if isinstance(threads, int) else None
    name = f"{device}, {count} thread{'s' * (count != 1)}" if count else device
    source = f"measured: copy and product, {measurement.when[:10]}"
    return Ceiling(name, flops, figures["copy"].value * 1e9, source, device, count)


def format_ceiling(measurement: Measurement) -> str:
    """Return lines for a person: each figure, the timed region, and marks."""
    lines = []
    for name, figure in measurement.figures.items():
        spread = f", spread {figure.spread:.0%}" if figure.spread is not None else ""
        lines.append(f"{name}: {figure.value:.3f} {figure.unit}, best of {len(figure.repeats)}{spread}")
    return "\n".join([*lines, f"timed: {measurement.timed}", *(f"MARKED {mark}" for mark in measurement.marks)])


def _time_copy(device: torch.device, copied: int, advance: Callable[[], None]) -> Figure:
    import torch

    source = torch.ones(max(1, copied // 4), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _time(lambda: target.copy_(source), 2 * source.numel() * 4 / 1e9, "GB/s", device, advance)


def _time_product(device: torch.device, size: int, precision: str, advance: Callable[[], None]) -> Figure:
    import torch

    dtype = getattr(torch, _DTYPES[precision])
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    result = torch.empty(size, size, device=device, dtype=dtype)
    return _time(lambda: torch.mm(left, right, out=result), 2 * size**3 / 1e12, "TFLOP/s", device, advance)


def _time(
    run: Callable[[], Any], amount: float, unit: str, device: torch.device, advance: Callable[[], None]
) -> Figure:
    """Return the best rate of the counted repeats; `amount` is what one run moves or computes."""
    runs, measure = (_RUNS["cuda"], _time_on_gpu) if device.type == "cuda" else (_RUNS["cpu"], _time_on_cpu)
    rates = []
    for repeat in range(_WARM_UP + _REPEATS):
        seconds = measure(run, runs, device)
        if repeat >= _WARM_UP:
            rates.append(amount * runs / seconds)
        advance()
    return Figure(max(rates), unit, "higher", tuple(rates))


def _time_on_cpu(run: Callable[[], Any], runs: int, _: torch.device) -> float:
    start = time.perf_counter()
    for _run in range(runs):
        run()
    return time.perf_counter() - start


def _time_on_gpu(run: Callable[[], Any], runs: int, device: torch.device) -> float:
    """Return the seconds between CUDA events before and after runs that are queued without waiting."""
    import torch

    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _run in range(runs):
            run()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
