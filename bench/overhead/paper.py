"""The paper's table of computational overhead, from the one file that has its figures."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from opal_deploy.errors import UsageError


@dataclass(frozen=True)
class Dataset:
    """One column: its title in the paper, and C."""

    title: str
    classes: int


@dataclass(frozen=True)
class PaperBackbone:
    """One row of the paper's table, figures as printed.

    Attributes:
        title: the paper's. params, gflops: of the backbone.
        heads: by `linear_params`, `linear_gflops`, `opal_params`, `opal_gflops`, and then by data set.
    """

    title: str
    params: str
    gflops: str
    heads: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class PaperTable:
    """All that the file holds.

    Attributes:
        title: of the table. input_size: (H0, W0). prototypes_per_class: m.
        datasets, backbones: by the names used here and by torchvision's.
        percentages: of the text, by name.
        disputed: why a cell is taken to be the paper's mistake, by cell.
    """

    title: str
    input_size: tuple[int, int]
    prototypes_per_class: int
    datasets: Mapping[str, Dataset]
    backbones: Mapping[str, PaperBackbone]
    percentages: Mapping[str, str]
    disputed: Mapping[str, str]

    def cells(self) -> dict[str, str]:
        """Every figure as printed, by cell: `resnet50.params`, `resnet50.opal_gflops.cub`, `percentages.NAME`."""
        found: dict[str, str] = {}
        for name, backbone in self.backbones.items():
            found[f"{name}.params"] = backbone.params
            found[f"{name}.gflops"] = backbone.gflops
            for figure, by_dataset in backbone.heads.items():
                found.update({f"{name}.{figure}.{dataset}": text for dataset, text in by_dataset.items()})
        found.update({f"percentages.{name}": text for name, text in self.percentages.items()})
        return found


HEAD_FIGURES = ("linear_params", "linear_gflops", "opal_params", "opal_gflops")


def load(path: Path | None = None) -> PaperTable:
    """The paper's table; `path` reads another file of the same form.

    Raises:
        UsageError: it cannot be read, or is not of that form.
    """
    source: Traversable = files(__package__).joinpath("paper.toml") if path is None else path
    try:
        raw = tomllib.loads(source.read_text(encoding="utf-8"))
        height, width = raw["input_size"]
        table = PaperTable(
            title=raw["title"],
            input_size=(height, width),
            prototypes_per_class=raw["prototypes_per_class"],
            datasets={name: Dataset(**entry) for name, entry in raw["datasets"].items()},
            backbones={
                name: PaperBackbone(
                    entry["title"], entry["params"], entry["gflops"], {key: entry[key] for key in HEAD_FIGURES}
                )
                for name, entry in raw["backbones"].items()
            },
            percentages=raw["percentages"],
            disputed=raw["disputed"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{source}: not the paper's table ({error}); give one like overhead/paper.toml") from None
    if unknown := sorted(table.disputed.keys() - table.cells().keys()):
        raise UsageError(f"{source}: disputed cells that the table does not have: {', '.join(unknown)}; remove them")
    return table
