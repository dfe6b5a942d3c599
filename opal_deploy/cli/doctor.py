"""`opal-deploy doctor`: what this machine can run, what it lacks, and what to do about it."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Annotated, Any

import typer

from opal_deploy import __version__
from opal_deploy.cli.console import print_json, print_message
from opal_deploy.errors import UsageError
from opal_deploy.runtime import nvml
from opal_deploy.runtime.diagnostics import NEVER_RUN, Device, RuntimeStatus, find_conflicts, inspect_runtimes
from opal_deploy.runtime.nvml import Driver


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")] = False,
    require: Annotated[
        Device | None,
        typer.Option(help="Exit with 2 unless inference can run on this device."),
    ] = None,
) -> None:
    """Show the GPUs, the driver and the runtimes: what is usable here, and what to install."""
    from opal_deploy.preprocess import accelerated

    driver = nvml.read_driver()
    statuses = inspect_runtimes(driver)
    warnings = [*find_conflicts(), *accelerated.missing_libraries()]
    if as_json:
        print_json(_document(driver, statuses, warnings))
    else:
        _print(driver, statuses, warnings)
    if require is not None and not _usable(statuses, require):
        raise UsageError(_explain_unusable(statuses, require))


def _usable(statuses: list[RuntimeStatus], device: Device) -> bool:
    return any(status.usable(device) for status in statuses)


def _explain_unusable(statuses: list[RuntimeStatus], device: Device) -> str:
    """Return one line that says why inference cannot run on `device`, and what to do."""
    by_name = {status.name: status for status in statuses}
    cpu, gpu = by_name["onnxruntime"], by_name["onnxruntime-gpu"]
    # of two runtimes that could serve, the installed and broken one is the reason, not the one that is missing
    status = gpu if device is Device.gpu or (cpu.version is None and gpu.version is not None) else cpu
    where = {Device.cpu: "the CPU", Device.gpu: "a GPU", Device.any: "this machine"}[device]
    return f"inference cannot run on {where}: {status.name}: {status.problem}" + (
        f": {status.advice}" if status.advice else ""
    )


def _document(driver: Driver, statuses: list[RuntimeStatus], warnings: list[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "opal_deploy": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "driver": asdict(driver),
        "runtimes": [asdict(status) for status in statuses],
        "warnings": warnings,
        "usable": {device.value: _usable(statuses, device) for device in Device},
        "never_run": list(NEVER_RUN),
    }


def _print(driver: Driver, statuses: list[RuntimeStatus], warnings: list[str]) -> None:
    print_message(
        f"opal-deploy {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    print_message("\nGPU")
    if driver.version:
        newest = ".".join(map(str, driver.cuda)) if driver.cuda else "unknown"
        print_message(f"  NVIDIA driver {driver.version}, runs CUDA up to {newest}")
    for gpu in driver.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB" if gpu.memory is not None else "memory unknown"
        major, minor = gpu.compute_capability
        print_message(f"  {gpu.index}: {gpu.name}, {memory}, compute capability {major}.{minor}")
    if driver.problem:
        print_message(f"  {driver.problem}")
    print_message("\nRuntimes")
    for status in statuses:
        print_message(f"  {status.name:<16} {status.version or '-':<12} {_describe(status)}")
    for warning in warnings:
        print_message(f"\nwarning: {warning}")
    print_message("\nNot proven")
    for line in NEVER_RUN:
        print_message(f"  {line}")
    usable = {name: _usable(statuses, device) for name, device in (("CPU", Device.cpu), ("GPU", Device.gpu))}
    summary = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in usable.items())
    print_message(f"\nInference here: {summary}")


def _describe(status: RuntimeStatus) -> str:
    on_gpu = "the GPU (never run on hardware)"
    devices = [name for name, usable in (("the CPU", status.cpu), (on_gpu, status.gpu)) if usable]
    parts = ["usable on " + " and ".join(devices)] if devices else []
    if status.problem:
        parts.append(("not on the GPU: " if status.cpu else "") + _problem(status))
    return "; ".join(parts)


def _problem(status: RuntimeStatus) -> str:
    return status.problem + (f": {status.advice}" if status.advice else "")
