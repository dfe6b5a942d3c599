"""What `infer` settles before a run: which model, whether it fits the call, and what makes the run what it is.

What `infer` settles before a run that draws evidence sheets or calls slots by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.cli.console import print_message
from opal_deploy.cli.infer import setup
from opal_deploy.cli.options import parse_rate
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.inference.sheets import SheetOptions
    from opal_deploy.runtime.session import Session
    from opal_deploy.visualization.atlas.storage import Atlas
    from opal_deploy.visualization.report import ImageMode
    from opal_deploy.visualization.slot_names import SlotNames


_NAMES = "names.toml"


def raise_pillows_limit(max_pixels: int) -> None:
    """Let Pillow read pictures that --max-pixels allows."""
    from PIL import Image

    # Pillow refuses twice its own limit before ours is asked
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


def found_model(device: str) -> Path:
    """The best model of the working directory that this machine can run."""
    from opal_deploy.runtime.onnx_session import cuda_is_usable
    from opal_deploy.runtime.select import find_model
    from opal_deploy.runtime.tensorrt.compatibility import find_incompatibility_here

    if device == "cpu":
        choice = find_model(Path(), gpu=False, check_engine=lambda _: "an engine runs on a GPU, and --device is cpu")
    else:
        # of several devices the first stands for all: they are of one kind, or the session of another refuses
        number = device.split(",")[0].rpartition(":")[2]
        index = int(number) if number.isdigit() else 0
        choice = find_model(Path(), gpu=cuda_is_usable(), check_engine=lambda s: find_incompatibility_here(s, index))
    print_message(f"Model: {choice.path} ({choice.reason})")
    return choice.path


def check_model(path: Path, metadata: Metadata, *, explain: bool, margin: bool, boxed: bool) -> None:
    """Say what a person should know of the model beforehand.

    Raises:
        UsageError: the call asks for what the model does not have.
    """
    if metadata.evidence == "none" and explain:
        raise UsageError(
            f"{path}: it has no anchors, so a dense layer mixes all channels and no evidence can be shown; "
            "leave out --explain, or train the OPAL head"
        )
    if metadata.evidence == "none" and margin:
        raise UsageError(f"{path}: it has no cosines, so no margin; leave out --min-margin")
    if metadata.evidence == "map" and explain:
        print_message("This model averages over cells: no single cell is its evidence, so overlays show no boxes")
    say_cautions(metadata, boxed=boxed)


def say_cautions(metadata: Metadata, *, boxed: bool) -> None:
    """What to bear in mind with a model's answers, whatever is made of them."""
    if metadata.unverified:
        print_message(
            f"NOT VERIFIED: this model was {metadata.unverified}: nobody compared its answers with the reference's"
        )
    if metadata.crop == "boxes" and not boxed:
        print_message("This model was trained on pictures cropped to boxes; without --boxes expect it to lose accuracy")


def atlas_of(path: Path, metadata: Metadata, model: Mapping[str, str], folder: Path) -> Atlas:
    """A folder's atlas, if it was built with this model; `model` is its identity.

    Raises:
        ArtifactError: there is no atlas, or it is damaged. UsageError: it is another model's.
    """
    from opal_deploy.visualization.atlas.storage import Atlas

    found = Atlas.load(folder)
    found.check_model({**model, "checkpoint_sha256": metadata.source.get("sha256")}, str(path))
    return found


def names_file(given: Path | None, atlas: Path | None) -> Path | None:
    """Where slots are named: the file that was given, or else the atlas's own, if it has one."""
    if given is None and atlas is not None and (atlas / _NAMES).is_file():
        return atlas / _NAMES
    return given


def names_of(metadata: Metadata, path: Path | None) -> SlotNames | None:
    """What a file calls the slots of a model. Raises UsageError: it does not fit the model, or cannot be read."""
    from opal_deploy.visualization.slot_names import read_slot_names

    return None if path is None else read_slot_names(path, metadata.class_names, metadata.prototypes_per_class)


def least_margin(text: str, path: Path, metadata: Metadata) -> float:
    """The margin under which answers are marked: given as a number, or chosen for an error rate such as `5%`.

    Raises:
        UsageError: neither, or the model remembers too few validation pictures for that rate, or none.
    """
    if not text.strip().endswith("%"):
        try:
            return float(text)
        except ValueError:
            raise UsageError(
                f"--min-margin {text!r}: expected a margin such as 0.05, or an error rate such as 5%"
            ) from None
    from opal_deploy.statistics.risk import choose_threshold

    rate = parse_rate("--min-margin", text)
    if not metadata.risk:
        raise UsageError(
            f"--min-margin {text}: {path} remembers no validation pictures to choose a margin by; choose one with "
            f"`opal-deploy evaluate DATA --model {path} --target-error {text}`, and give that"
        )
    chosen = choose_threshold(metadata.risk, rate)
    if chosen.min_margin is None:
        raise UsageError(
            f"--min-margin {text}: {chosen.reason} ({chosen.images} validation pictures); allow a larger rate, or give "
            "a margin"
        )
    print_message(
        f"Margins under {chosen.min_margin:.4g} are marked: of {chosen.images} validation pictures that leaves "
        f"{chosen.coverage:.1%}, {chosen.wrong} of {chosen.answered} wrong; with {chosen.confidence:.0%} confidence at "
        f"most {chosen.bound:.2%} on such pictures"
    )
    return chosen.min_margin


def model_identity(path: Path) -> dict[str, str]:
    """Which model: its file's name, and the sha256 of its bytes."""
    return {"file": path.name, "sha256": compute_sha256(path)}


def check_pictures(text: str | None) -> ImageMode | None:
    """Where the report's pictures are to be, if somebody said so.

    Raises:
        UsageError: neither of the places.
    """
    if text is None:
        return None
    if text == "embed":
        return "embed"
    if text == "files":
        return "files"
    raise UsageError(f"--report-images {text!r}: expected embed (in the page) or files (overlays/ beside it)")


def file_identity(path: Path | None) -> str | None:
    """Which file: its name, and a digest of what is in it."""
    return None if path is None else f"{path.name}, sha256 {compute_sha256(path)}"


@dataclass(frozen=True)
class Wanted:
    """What the call asks for.

    Attributes:
        sheets: what is on them; None: no sheets.
        names: of slots; None: nobody named one.
        sessions: that answer with all that the sheets show.
        identity: what of it decides the records and drawings. Only what was asked for is in it, so that a run without
            any of it is the run that it was before there were such options.
    """

    sheets: SheetOptions | None
    names: SlotNames | None
    sessions: list[Session]
    identity: dict[str, object] = field(default_factory=dict)


def settle(
    path: Path,
    sessions: list[Session],
    model: Mapping[str, str],
    *,
    sheets: bool,
    heatmap: bool,
    atlas: Path | None,
    slot_names: Path | None,
    min_margin: float | None,
) -> Wanted:
    """Check that the model can do what is asked for, and read what belongs to it.

    Args:
        path: of the model. model: its identity.
        sheets: draw them; `heatmap` and `atlas` ask for them too.

    Raises:
        UsageError: the model has no evidence of single cells, no attention maps, is not the atlas's, or the names do
            not fit it. ArtifactError: there is no such atlas, or it is damaged.
    """
    from opal_deploy.inference.sheets import SheetBuilder, SheetOptions, check_exact_evidence, with_attention
    from opal_deploy.visualization.atlas.storage import ATLAS

    sheets = sheets or heatmap or atlas is not None
    if not sheets and slot_names is None:
        return Wanted(None, None, sessions)
    metadata = sessions[0].metadata
    identity: dict[str, object] = {}
    check_exact_evidence(metadata, str(path))
    if heatmap:
        # it refuses a model that has no attention maps to show
        SheetBuilder(sessions[0], heatmap=True, model=str(path))
        sessions = with_attention(sessions)
    if sheets:
        identity |= {"sheets": True} | ({"heatmap": True} if heatmap else {})
    neighbours = None if atlas is None else setup.atlas_of(path, metadata, model, atlas)
    if atlas is not None:
        # it names every patch by the digest of its bytes
        identity["atlas"] = setup.file_identity(atlas / ATLAS)
    slot_names = setup.names_file(slot_names, atlas)
    names = setup.names_of(metadata, slot_names)
    if slot_names is not None:
        identity["slot_names"] = setup.file_identity(slot_names)
    drawn = SheetOptions(metadata, heatmap, neighbours, names, min_margin) if sheets else None
    return Wanted(drawn, names, sessions, identity)
