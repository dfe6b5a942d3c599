"""What the benchmarks call heads and runtimes; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Runtime = Literal["eager", "compile", "onnxruntime", "tensorrt"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
Head = Literal["opal", "linear"]
OPAL: Head = "opal"
LINEAR: Head = "linear"


def head_name(head: Mapping[str, Any]) -> str:
    """`opal`, `linear`, or which of the head's parts are on, for a head's configuration as metadata records it."""
    parts = [part for part in ("projection", "cws", "anchors") if head.get(part)]
    pooling = head.get("pooling")
    if len(parts) == 3 and pooling == "max":
        distance = head.get("distance", "l2")
        return OPAL if distance == "l2" else f"{OPAL} {distance}"
    if not parts and pooling == "avg":
        return LINEAR
    return "+".join([*parts, str(pooling)])
