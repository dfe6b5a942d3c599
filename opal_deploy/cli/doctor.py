"""`opal-deploy doctor`: what this machine can run, what it lacks, and what to do about it."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Annotated, get_args

import typer

from opal_deploy import __version__
from opal_deploy.cli.console import print_json, print_output
from opal_deploy.errors import UsageError
from opal_deploy.runtime import devices
from opal_deploy.runtime.devices import Driver
from opal_deploy.runtime.diagnostics import NEVER_RUN, RequiredDevice, RuntimeStatus, find_conflicts, inspect_runtimes


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")] = False,
    require: Annotated[
        RequiredDevice | None, typer.Option(help="Exit with 2 unless inference can run on this device.")
    ] = None,
) -> None:
    """Show the GPUs, the driver and the runtimes: what is usable here, and what to install."""
    driver = devices.read_driver()
    statuses = inspect_runtimes(driver)
    warnings = find_conflicts()
    usable = {device: any(status.usable(device) for status in statuses) for device in get_args(RequiredDevice)}
    if as_json:
        print_json({
            "schema": 1,
            "opal_deploy": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "driver": asdict(driver),
            "runtimes": [asdict(status) for status in statuses],
            "warnings": warnings,
            "usable": usable,
            "never_run": list(NEVER_RUN),
        })  # fmt: skip
    else:
        _print(driver, statuses, warnings)
        summary = ", ".join(f"{device.upper()} {'yes' if usable[device] else 'no'}" for device in ("cpu", "gpu"))
        print_output(f"\nInference here: {summary}")
    if require is not None and not usable[require]:
        raise UsageError(_explain_unusable(statuses, require))


def _explain_unusable(statuses: list[RuntimeStatus], device: RequiredDevice) -> str:
    """Return one line that says why inference cannot run on `device`, and what to do."""
    by_name = {status.name: status for status in statuses}
    cpu, gpu = by_name["onnxruntime"], by_name["onnxruntime-gpu"]
    # if either runtime would do, explain the one that is installed and broken, not the missing one
    status = gpu if device == "gpu" or (cpu.version is None and gpu.version is not None) else cpu
    where = {"cpu": "the CPU", "gpu": "a GPU", "any": "this machine"}[device]
    return f"inference cannot run on {where}: {status.name}: {_problem(status)}"


def _print(driver: Driver, statuses: list[RuntimeStatus], warnings: list[str]) -> None:
    system = f"{platform.system()} {platform.machine()}"
    print_output(f"opal-deploy {__version__}, Python {platform.python_version()}, {system}")
    print_output("\nGPU")
    if driver.version:
        newest = ".".join(map(str, driver.cuda)) if driver.cuda else "unknown"
        print_output(f"  NVIDIA driver {driver.version}, runs CUDA up to {newest}")
    for gpu in driver.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB" if gpu.memory is not None else "memory unknown"
        major, minor = gpu.compute_capability
        print_output(f"  {gpu.index}: {gpu.name}, {memory}, compute capability {major}.{minor}")
    if driver.problem:
        print_output(f"  {driver.problem}")
    print_output("\nRuntimes")
    for status in statuses:
        print_output(f"  {status.name:<16} {status.version or '-':<12} {_describe(status)}")
    for warning in warnings:
        print_output(f"\nwarning: {warning}")
    print_output("\nNot proven")
    for line in NEVER_RUN:
        print_output(f"  {line}")


def _describe(status: RuntimeStatus) -> str:
    on_gpu = "the GPU (never run on hardware)" if status.name.startswith("tensorrt") else "the GPU"
    usable_on = [name for name, usable in (("the CPU", status.cpu), (on_gpu, status.gpu)) if usable]
    parts = ["usable on " + " and ".join(usable_on)] if usable_on else []
    if status.problem:
        parts.append(("not on the GPU: " if status.cpu else "") + _problem(status))
    return "; ".join(parts)


def _problem(status: RuntimeStatus) -> str:
    return status.problem + (f": {status.advice}" if status.advice else "")
