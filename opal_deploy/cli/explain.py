"""`opal-deploy explain`: an evidence sheet an image."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.errors import ImageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opal_deploy.inference.sheets import SheetBuilder
    from opal_deploy.inference.types import Request
    from opal_deploy.visualization.atlas.storage import Atlas

SOME_IMAGES_FAILED = 3
FORMATS = ("png", "svg")
_SHEETS = Path("sheets")


def explain(
    images: Annotated[
        list[str], typer.Argument(help="Pictures: files, folders, globs, archives, or - for a list on stdin.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="An exported model, or a checkpoint; default: the one in this directory.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="For one picture a file, .png or .svg; for several a folder. Default: NAME.evidence.png; sheets.",
            show_default=False,
        ),
    ] = None,
    file_format: Annotated[
        str | None, typer.Option("--format", help="png or svg; default: by --out, else png.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace sheets that are there already.")] = False,
    heatmap: Annotated[
        bool, typer.Option("--heatmap", help="Show each slot's attention map; an export needs --outputs attention.")
    ] = False,
    atlas: Annotated[
        Path | None,
        typer.Option(help="Of `opal-deploy atlas`: show patches of other pictures of the class.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Patches a slot to show of --atlas.")] = 4,
    slot_names: Annotated[
        Path | None,
        typer.Option(help="TOML file that names slots; default: names.toml in --atlas.", show_default=False),
    ] = None,
    boxes: Annotated[
        Path | None, typer.Option(help="Crop first: CSV (image,x0,y0,x1,y1 or image,x,y,width,height) or COCO JSON.")
    ] = None,
    min_margin: Annotated[float | None, typer.Option(help="Mark answers with a smaller margin as abstained.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the runtime on the CPU; default: all cores.")] = None,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="Of the model's file, as given to you by a trusted way.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse pictures with more pixels than this.")] = 100_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Write what the sheets say to stdout, as JSON.")] = False,
) -> None:
    """Show why: what the model saw in a picture, what else it considered, and how far apart the two are.

    The sheet has the places that decided, each enlarged, what each added to the answer, and the same for the runner-up.
    """
    from opal_deploy.artifact.files import check_sha256
    from opal_deploy.cli.infer import setup
    from opal_deploy.inference.sheets import SheetBuilder
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.annotations import read_boxes
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.types import build_requests
    from opal_deploy.runtime.select import open_sessions

    discovery.check_inputs(images)
    place = _Place.of(images, out, file_format, overwrite=overwrite)
    crops = read_boxes(boxes) if boxes else None
    path = model or setup.find_default_model(device)
    setup.raise_pillow_limit(max_pixels)
    if expect_sha256 is not None:
        check_sha256(path, expect_sha256)
    session = open_sessions(path, device=device, threads=threads)[0]
    metadata = session.metadata
    neighbours = None
    if atlas is not None:
        neighbours = setup.load_atlas(path, metadata, setup.fingerprint_model(path), atlas)
    names = setup.load_slot_names(metadata, setup.find_names_file(slot_names, atlas))
    maker = SheetBuilder(
        session, heatmap=heatmap, min_margin=min_margin, names=names, max_pixels=max_pixels, model=str(path)
    )
    setup.print_cautions(metadata, boxed=crops is not None)
    requests = build_requests(discovery.discover(images, Skipped(), sys.stdin), crops)
    _explain_all(requests, maker, place, neighbours, rows, as_json=as_json)


class _Place:
    """Where sheets go: one file, or a folder of them."""

    def __init__(self, path: Path, kind: str, *, one: bool, overwrite: bool) -> None:
        self.path, self.kind, self.one, self._overwrite = path, kind, one, overwrite

    @staticmethod
    def of(images: list[str], out: Path | None, kind: str | None, *, overwrite: bool) -> _Place:
        """Read it off the call.

        Raises:
            UsageError: another format; a file for several pictures; a sheet that is there already.
        """
        from opal_deploy.inference.sources.archives import is_archive_name

        if kind is not None and kind not in FORMATS:
            raise UsageError(f"--format {kind!r}: expected {' or '.join(FORMATS)}")
        one = len(images) == 1 and Path(images[0]).is_file() and not is_archive_name(images[0])
        suffix = "" if out is None else out.suffix.lower().lstrip(".")
        if out is not None and suffix and suffix not in FORMATS and not out.is_dir():
            raise UsageError(f"--out {out}: expected a file called .png or .svg, or a folder")
        if suffix in FORMATS and out is not None and not out.is_dir():
            if not one:
                raise UsageError(f"--out {out}: a file, but there may be several pictures; give a folder")
            if kind is not None and kind != suffix:
                raise UsageError(f"--out {out} and --format {kind} disagree; leave one out")
            place = _Place(out, suffix, one=True, overwrite=overwrite)
        elif one and out is None:
            kind = kind or FORMATS[0]
            place = _Place(Path(f"{Path(images[0]).stem}.evidence.{kind}"), kind, one=True, overwrite=overwrite)
        else:
            place = _Place(out or _SHEETS, kind or FORMATS[0], one=False, overwrite=overwrite)
        if place.one:
            place.check(place.path)
            if place.path.exists() and place.path.samefile(images[0]):
                raise UsageError(f"--out {place.path}: that is the picture itself; give another name")
        return place

    def check(self, path: Path) -> None:
        """Refuse to replace a file, unless that is wanted."""
        if path.exists() and not self._overwrite:
            raise UsageError(f"{path}: it is there already; give another --out, or --overwrite")

    def of_image(self, index: int, name: str | None) -> Path:
        """The file of one picture's sheet."""
        from opal_deploy.inference.run_files import overlay_name

        if self.one:
            return self.path
        return self.path / Path(overlay_name(index, name)).with_suffix(f".{self.kind}").name


def _explain_all(
    requests: Iterator[Request], maker: SheetBuilder, place: _Place, atlas: Atlas | None, rows: int, *, as_json: bool
) -> None:
    """Draw and write every sheet.

    Raises:
        ImageError: the only picture cannot be used. typer.Exit: some of several cannot. UsageError: a sheet cannot be
            written.
    """
    documents: list[dict[str, Any]] = []
    failed = 0
    with progress("sheets") as advance:
        for index, request in enumerate(requests):
            try:
                path = place.of_image(index, request.name)
                place.check(path)
                documents.append({**_one(request, maker, path, atlas, rows), "sheet": path.as_posix()})
            except ImageError as error:
                if place.one:
                    raise
                failed += 1
                print_message(one_line(f"{request.name}: {error.code}: {error}"))
            advance(index + 1)
    if not place.one:
        print_message(f"{len(documents)} sheets in {place.path}{f', {failed} pictures failed' if failed else ''}")
    if as_json:
        print_json(documents[0] if place.one else documents)
    if failed:
        raise typer.Exit(SOME_IMAGES_FAILED)


def _one(request: Request, maker: SheetBuilder, path: Path, atlas: Atlas | None, rows: int) -> dict[str, Any]:
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.inference.decoding.prepare import content_sha256
    from opal_deploy.visualization.atlas.exemplars import find_exemplars
    from opal_deploy.visualization.legend import format_number
    from opal_deploy.visualization.sheet.layout import layout_sheet
    from opal_deploy.visualization.sheet.rendering import encode_png, encode_svg

    seen = maker.see(request)
    content = seen.content
    looks = None
    if atlas is not None:
        looks = find_exemplars(atlas, content, exclude={content_sha256(request.source)}, rows=rows)
    drawing = layout_sheet(content, seen.photograph, looks)
    encoded = encode_svg(drawing) if path.suffix.lower() == ".svg" else encode_png(drawing)
    with atomic_write(path) as temporary:
        temporary.write_bytes(encoded)
    margin = "" if content.margin is None else f", margin {format_number(content.margin)}"
    mark = " (abstained)" if content.abstained else ""
    name = f"{request.name}: {content.predicted.label}, cosine {format_number(content.predicted.cosine)}"
    print_message(one_line(f"{name}{margin}{mark}: {path}"))
    return content.to_dict()
