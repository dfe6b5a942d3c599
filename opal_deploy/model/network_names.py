"""Names of torchvision's and timm's networks, and of torchvision's weights, found without importing torch.

Importing either library imports torch, which takes seconds; both register their networks with a decorator in their
source, which is read here instead, so that a wrong name is refused at once.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from opal_deploy.errors import UsageError, require, suggest_names

# networks of timm are named `timm:NAME` or `timm:NAME.TAG`
TIMM_PREFIX = "timm:"
_WEIGHTS_SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors")
_REGISTERED = re.compile(r"^@register_model\b.*\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
_MEMBER = re.compile(r"^    (\w+) = Weights\(", re.MULTILINE)


def list_torchvision_networks() -> list[str]:
    """Return torchvision's names of image classifiers, sorted."""
    return sorted(_find_networks("torchvision"))


def list_torchvision_weights(name: str) -> list[str]:
    """Return the names of torchvision's weights for one of its networks, oldest first."""
    text = _find_networks("torchvision")[name].read_text("utf-8")
    kind = re.search(rf"^def {name}\([^)]*?\bweights: Optional\[(\w+)\]", text, re.MULTILINE)
    members = kind and re.search(rf"^class {kind[1]}\(WeightsEnum\):\n((?:[ \t].*\n|\n)+)", text, re.MULTILINE)
    return _MEMBER.findall(members[1]) if members else []


def check_network(name: str) -> None:
    """Raise UsageError if a backbone's library has no such network, MissingExtra if the library is not installed."""
    if name.startswith(TIMM_PREFIX):
        require("timm", "timm", "a timm backbone")
        title, network, names = "timm has no such network", split_timm_name(name)[0], list(_find_networks("timm"))
    else:
        require("torchvision", "train", "a backbone")
        title, network, names = "torchvision has no such classifier", name, list_torchvision_networks()
    if network not in names:
        raise UsageError(f"backbone {name!r}: {title}{suggest_names(network, names)}")


def is_weights_file(weights: str) -> bool:
    """Return whether `--weights` means a file; any other text is a name of the library's own weights."""
    return Path(weights).suffix in _WEIGHTS_SUFFIXES


def check_weights(name: str, weights: str) -> None:
    """Raise UsageError if there is no such file or, for a torchvision network, no such name of weights.

    Args:
        name: a network that exists.
        weights: `--weights`, without `imagenet` and `none`.
    """
    if is_weights_file(weights):
        if not Path(weights).is_file():
            raise UsageError(f"{weights}: no such weights file")
    elif not name.startswith(TIMM_PREFIX) and weights not in (known := [*list_torchvision_weights(name), "DEFAULT"]):
        raise UsageError(
            f"weights {weights!r}: no such file (.pth, .ckpt, .safetensors) and not torchvision's for {name} "
            f"({', '.join(known[:-1])})"
        )


def split_timm_name(name: str) -> tuple[str, str]:
    """Return architecture and tag of `timm:NAME.TAG`; the tag of `timm:NAME` is empty."""
    architecture, _, tag = name.removeprefix(TIMM_PREFIX).partition(".")
    return architecture, tag


@cache
def _find_networks(library: str) -> dict[str, Path]:
    """Return the source file of each network of an installed library."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return {name: file for file in folder.glob("*.py") for name in _REGISTERED.findall(file.read_text("utf-8"))}
