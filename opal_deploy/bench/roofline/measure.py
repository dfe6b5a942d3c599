"""The ceiling of a device as measured: a large copy and a large product of matrices, timed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import NOISY, Figure, Measurement, Target
from opal_deploy.bench.roofline.ceiling import Ceiling
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    import torch

# larger than any cache that it might be answered from
COPY_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
# large enough that arithmetic, not its start, is what takes the time
MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class CeilingOptions:
    """How a ceiling is measured.

    Attributes:
        device: `cpu`, `cuda` or `cuda:N`.
        precisions: of the products.
        threads: of the CPU; None leaves torch's choice.
        repeats: how many runs count.
        warm_up: how many runs go before and do not count.
        copy_bytes: size of the copy; None for COPY_BYTES of the device.
        matrix_size: rows and columns of the factors; None for MATRIX_SIZE of the device.
        progress: called after each run with runs done and in all, those that do not count included.
    """

    device: str = "cpu"
    precisions: Sequence[str] = ("fp32",)
    threads: int | None = None
    repeats: int = 10
    warm_up: int = 3
    copy_bytes: int | None = None
    matrix_size: int | None = None
    progress: Callable[[int, int], None] = lambda done, total: None


def measure_ceiling(options: CeilingOptions) -> Measurement:
    """Time a copy and a product per precision; a figure's value is its best repeat, since a ceiling can be reached.

    Raises:
        UsageError: there is no such device, or torch has no product of a precision.
    """
    import torch

    if unknown := [precision for precision in options.precisions if precision not in _DTYPES]:
        raise UsageError(f"--precision {unknown[0]}: a measured ceiling knows {', '.join(_DTYPES)}")
    from opal_deploy.runtime.torch_session import torch_device

    device = torch_device(options.device)
    kind = device.type
    size, copied = options.matrix_size or MATRIX_SIZE[kind], options.copy_bytes or COPY_BYTES[kind]
    done = itertools.count(1)
    total = (1 + len(options.precisions)) * (options.warm_up + options.repeats)

    def report() -> None:
        options.progress(next(done), total)

    before, backend = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    try:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        threads = torch.get_num_threads()
        figures = {"copy": _best(_copy_rates(device, copied, options, report), "GB/s")}
        for precision in options.precisions:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
            figures[f"matmul_{precision}"] = _best(_product_rates(device, size, precision, options, report), "TFLOP/s")
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
            "repeats": options.repeats, "warm_up": options.warm_up, "copy_bytes": copied, "matrix_size": size,
            "value": "best of the repeats",
        },
        timed=(
            f"copy: {copied / 2**20:.0f} MiB from one tensor to another, bytes read and written both counted; product: "
            f"{size} x {size} by {size} x {size}, 2 FLOPs for each multiply-accumulate; memory is there before"
        ),
        marks=tuple(f"{NOISY}: {key}" for key in noisy),
        **provenance(),
    )  # fmt: skip


def default_precisions(device: str) -> tuple[str, ...]:
    """Return the precisions to measure by default: on a GPU all that networks run in, on a CPU fp32 alone.

    Many CPUs have no instructions for half precision, and take minutes for one product.
    """
    return tuple(_DTYPES) if device.startswith("cuda") else ("fp32",)


def read_ceiling(measurement: Measurement) -> Ceiling:
    """Return the ceiling that a measurement of kind `ceiling` holds.

    Raises:
        UsageError: the measurement is of another kind, or holds no copy.
    """
    copy = measurement.figures.get("copy")
    if measurement.kind != "ceiling" or copy is None:
        raise UsageError(
            f"a measurement of kind {measurement.kind} is no ceiling; measure one: opal-deploy bench roofline "
            "--measure-ceiling --out FILE"
        )
    flops = {
        name.removeprefix("matmul_"): figure.value * 1e12
        for name, figure in measurement.figures.items()
        if name.startswith("matmul_")
    }
    name = measurement.target.name if measurement.target else "measured"
    when = f", {measurement.when[:10]}" if measurement.when else ""
    threads = measurement.case.get("threads")
    threads_text = "" if not threads else ", 1 thread" if threads == 1 else f", {threads} threads"
    return Ceiling(f"{name}{threads_text}", flops, copy.value * 1e9, f"measured: copy and product{when}", measured=True)


def _copy_rates(device: torch.device, copied: int, options: CeilingOptions, report: Callable[[], None]) -> list[float]:
    import torch

    source = torch.ones(max(1, copied // 4), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * 4
    return [moved / seconds / 1e9 for seconds in _times(lambda: target.copy_(source), device, options, report)]


def _product_rates(
    device: torch.device, size: int, precision: str, options: CeilingOptions, report: Callable[[], None]
) -> list[float]:
    import torch

    dtype = getattr(torch, _DTYPES[precision])
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    result = torch.empty(size, size, device=device, dtype=dtype)
    operations = 2 * size**3
    times = _times(lambda: torch.mm(left, right, out=result), device, options, report)
    return [operations / seconds / 1e12 for seconds in times]


def _times(
    run: Callable[[], Any], device: torch.device, options: CeilingOptions, report: Callable[[], None]
) -> list[float]:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for repeat in range(options.warm_up + options.repeats):
        wait()
        start = time.perf_counter()
        run()
        wait()
        if repeat >= options.warm_up:
            seconds.append(time.perf_counter() - start)
        report()
    return seconds


def _best(rates: list[float], unit: str) -> Figure:
    return Figure(max(rates), unit, "higher", tuple(rates))
