"""GPUs by the compute capability that an engine is built for."""

from __future__ import annotations

import re

from opal_deploy.errors import UsageError

# NVIDIA's table of compute capabilities (developer.nvidia.com/cuda-gpus), by the names that people say
_GPUS = {
    "sm75": ("t4", "rtx2060", "rtx2070", "rtx2080", "rtx2080ti", "rtx5000", "rtx6000", "rtx8000", "titanrtx"),
    "sm80": ("a100", "a30", "a800"),
    "sm86": ("a10", "a10g", "a16", "a2", "a40", "a2000", "a4000", "a4500", "a5000", "a5500", "a6000", "rtxa6000",
             "rtx3050", "rtx3060", "rtx3070", "rtx3080", "rtx3080ti", "rtx3090", "rtx3090ti"),
    "sm89": ("l4", "l40", "l40s", "l20", "rtx4000ada", "rtx5000ada", "rtx6000ada", "rtx4060", "rtx4070", "rtx4080",
             "rtx4090"),
    "sm90": ("h100", "h200", "h800", "h20", "gh200"),
    "sm100": ("b100", "b200", "gb200"),
    "sm120": ("rtx5060", "rtx5070", "rtx5080", "rtx5090", "rtxpro6000"),
    "sm121": ("gb10", "dgxspark"),
}  # fmt: skip
_BY_NAME = {name: sm for sm, names in _GPUS.items() for name in names}

# what TensorRT for RTX builds without a GPU
AHEAD_OF_TIME = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
DEFAULT_TARGET = "sm80"


def parse_target(text: str) -> str:
    """`sm80`, `8.0` or a GPU's name, such as `a100`, `RTX 4090` or `L4`, to `sm80` and so on.

    Raises:
        UsageError: neither.
    """
    name = re.sub(r"[\s_-]", "", text.lower())
    for maker in ("nvidia", "geforce", "tesla"):
        name = name.removeprefix(maker)
    if re.fullmatch(r"sm\d{2,3}", name):
        return name
    if match := re.fullmatch(r"(\d{1,2})\.(\d)", name):
        return f"sm{match[1]}{match[2]}"
    if name in _BY_NAME:
        return _BY_NAME[name]
    known = "a100, a10, l4, l40s, t4, rtx4090, h100"
    raise UsageError(
        f"--target {text!r}: not a GPU that is known here; give sm80 and the like, or a name such as {known}"
    )


def sm_of(compute_capability: tuple[int, int]) -> str:
    """`sm80` for (8, 0)."""
    return f"sm{compute_capability[0]}{compute_capability[1]}"


def examples(sm: str) -> str:
    """GPUs of a compute capability, for messages: `A100, A30`; empty for one that is not in the table."""
    return ", ".join(name.upper() for name in _GPUS.get(sm, ())[:2])
