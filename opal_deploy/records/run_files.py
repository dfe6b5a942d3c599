"""The files of a run directory: their names, and writing and removing its overlays."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from opal_deploy.errors import StoppedEarly

# options, records, counts, and the HTML page
RUN, RESULTS, SUMMARY, REPORT = "run.json", "results.jsonl", "summary.json", "report.html"
# folders of drawings, and of the runs that a run with several processes consists of
OVERLAYS, SHARDS = "overlays", "shards"
# from the ten-thousandth image on, files are in subfolders, so that no folder holds millions
FILES_PER_FOLDER = 10_000

_OVERLAY = re.compile(r"(\d{6,})-.*\.jpg|\.\d{6,}-.*\.part")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_LENGTH = 80


def overlay_name(index: int, image: str | None) -> str:
    """Return the path of an image's overlay in the run directory: unique and safe; `index` counts images from 0."""
    # a frame of a video is named after the video's suffix
    stem = re.sub(r"\.[A-Za-z0-9]{1,5}$", "", Path(image).name) if image else ""
    safe = _UNSAFE.sub("_", stem)[:_STEM_LENGTH].strip("._") or "image"
    folder, name = index // FILES_PER_FOLDER, f"{index:06d}-{safe}.jpg"
    return f"{OVERLAYS}/{folder:04d}/{name}" if folder else f"{OVERLAYS}/{name}"


def write_image_file(out: Path, name: str, encoded: bytes) -> None:
    """Write `out/name`; a process that is killed meanwhile leaves no partial file under that name.

    Raises:
        StoppedEarly: the disk is full or gone.
    """
    path = out / name
    temporary = path.with_name(f".{path.name}.part")
    try:
        try:
            temporary.write_bytes(encoded)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(encoded)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoppedEarly(f"{path}: cannot be written ({error.strerror or error}); make room and run again") from None


def remove_overlays(out: Path, first: int = 0) -> None:
    """Remove the overlays from the image `first` on, and partial files; raise OSError."""
    root = out / OVERLAYS
    if root.is_symlink():
        return
    for folder in (root, *root.glob("[0-9][0-9][0-9][0-9]*")):
        # the other folders hold only earlier images
        if folder is not root and not (folder.name.isdecimal() and int(folder.name) >= first // FILES_PER_FOLDER):
            continue
        for path in folder.glob("*"):
            overlay = _OVERLAY.fullmatch(path.name)
            if overlay is not None and int(overlay[1] or first) >= first:
                path.unlink(missing_ok=True)
        if folder is not root:
            with contextlib.suppress(OSError):  # it holds something else
                folder.rmdir()
