"""What a measurement ran on: the machine itself apart from the software on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opal_deploy.bench.tables import flatten_facts, format_value

# of `Measurement.machine`: what an update changes; everything else is the machine itself
SOFTWARE = ("versions", "python", "system", "driver", "cuda", "governor")


def identity(machine: Mapping[str, Any]) -> str:
    """Equal for the same machine with the same software."""
    return json.dumps(machine, sort_keys=True)


def hardware(machine: Mapping[str, Any]) -> dict[str, str]:
    """The machine itself, by name of the fact."""
    return dict(flatten_facts({key: value for key, value in machine.items() if key not in SOFTWARE}))


def software(machine: Mapping[str, Any]) -> dict[str, str]:
    """Versions and settings, by name of the fact."""
    return dict(flatten_facts({key: machine[key] for key in SOFTWARE if key in machine}))


def title(machine: Mapping[str, Any]) -> str:
    """One line for a person: the GPUs if there are any, and the processor."""
    gpus = machine["gpus"] if isinstance(machine.get("gpus"), list) else []
    named = [format_value(gpu.get("name", "GPU")) for gpu in gpus if isinstance(gpu, Mapping)]
    parts = [f"{named.count(name)} x {name}" if named.count(name) > 1 else name for name in dict.fromkeys(named)]
    if machine.get("processor"):
        cores = machine.get("usable_cores") or machine.get("cores")
        parts.append(format_value(machine["processor"]) + (f", {format_value(cores)} cores" if cores else ""))
    return "; ".join(parts) or "a machine that was not recorded"


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs between two sets of facts, a text each: `versions: torch 2.9.0 -> 2.9.1`."""
    out = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, "none"), new.get(name, "none")
        if before != after:
            out.append(f"{name} {before} -> {after}")
    return out
