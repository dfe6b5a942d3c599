"""`opal-deploy doctor`: what this machine can run, what it lacks, and what to do about it."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Annotated, Any

import typer

from opal_deploy import __version__
from opal_deploy.cli.console import print_json, print_message
from opal_deploy.errors import UsageError
from opal_deploy.runtime import devices
from opal_deploy.runtime.devices import Device, Driver, RuntimeFact


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")] = False,
    require: Annotated[
        Device | None,
        typer.Option(help="Exit with 2 unless inference can run on this device."),
    ] = None,
) -> None:
    """Show the GPUs, the driver and the runtimes: what is usable here, and what to install."""
    from opal_deploy.preprocess import native

    driver = devices.read_driver()
    facts = devices.runtimes(driver)
    warnings = [*devices.conflicts(), *native.missing()]
    if as_json:
        print_json(_document(driver, facts, warnings))
    else:
        _tell(driver, facts, warnings)
    if require is not None and not _usable(facts, require):
        raise UsageError(_refusal(facts, require))


def _usable(facts: list[RuntimeFact], device: Device) -> bool:
    return any(fact.usable(device) for fact in facts)


def _refusal(facts: list[RuntimeFact], device: Device) -> str:
    """The one line that says why inference cannot run on `device`, and what to do."""
    by_name = {fact.name: fact for fact in facts}
    cpu, gpu = by_name["onnxruntime"], by_name["onnxruntime-gpu"]
    # of two runtimes that could serve, the one that is installed and broken says more than the one that is not there
    fact = gpu if device is Device.gpu or (cpu.version is None and gpu.version is not None) else cpu
    where = {Device.cpu: "the CPU", Device.gpu: "a GPU", Device.any: "this machine"}[device]
    return f"inference cannot run on {where}: {fact.name}: {fact.problem}" + (f": {fact.advice}" if fact.advice else "")


def _document(driver: Driver, facts: list[RuntimeFact], warnings: list[str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "opal_deploy": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "driver": asdict(driver),
        "runtimes": [asdict(fact) for fact in facts],
        "warnings": warnings,
        "usable": {device.value: _usable(facts, device) for device in Device},
        "never_run": list(devices.NEVER_RUN),
    }


def _tell(driver: Driver, facts: list[RuntimeFact], warnings: list[str]) -> None:
    print_message(
        f"opal-deploy {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    )
    print_message("\nGPU")
    if driver.version:
        newest = ".".join(map(str, driver.cuda)) if driver.cuda else "unknown"
        print_message(f"  NVIDIA driver {driver.version}, runs CUDA up to {newest}")
    for gpu in driver.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB" if gpu.memory is not None else "memory not told"
        major, minor = gpu.compute_capability
        print_message(f"  {gpu.index}: {gpu.name}, {memory}, compute capability {major}.{minor}")
    if driver.problem:
        print_message(f"  {driver.problem}")
    print_message("\nRuntimes")
    for fact in facts:
        print_message(f"  {fact.name:<16} {fact.version or '-':<12} {_state(fact)}")
    for warning in warnings:
        print_message(f"\nwarning: {warning}")
    print_message("\nNot proven")
    for line in devices.NEVER_RUN:
        print_message(f"  {line}")
    answers = ", ".join(f"{name} {'yes' if _usable(facts, Device(name.lower())) else 'no'}" for name in ("CPU", "GPU"))
    print_message(f"\nInference here: {answers}")


def _state(fact: RuntimeFact) -> str:
    places = [name for name, usable in (("the CPU", fact.cpu), ("the GPU (never run on hardware)", fact.gpu)) if usable]
    parts = ["usable on " + " and ".join(places)] if places else []
    if fact.problem:
        on_gpu = "not on the GPU: " if fact.cpu else ""
        parts.append(on_gpu + fact.problem + (f": {fact.advice}" if fact.advice else ""))
    return "; ".join(parts)
