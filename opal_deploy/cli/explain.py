"""`opal-deploy explain`: one evidence sheet per image."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.errors import ExitCode, ImageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opal_deploy.inference.sheets import SheetBuilder
    from opal_deploy.inference.sources.counting import ImageCounter
    from opal_deploy.inference.types import Result
FORMATS = ("png", "svg")
_DEFAULT_DIR = Path("sheets")


def explain(
    images: Annotated[
        list[str], typer.Argument(help="Images: files, folders, globs, archives, or - for a list on stdin.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="An exported model, or a checkpoint; default: the one here, or of the newest run in runs/.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="For one image a file, .png or .svg; for several a folder. Default: NAME.evidence.png; sheets.",
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
    receptive_field: Annotated[
        bool, typer.Option("--receptive-field", help="Draw also what each cell mostly depends on, dashed.")
    ] = False,
    atlas: Annotated[
        Path | None,
        typer.Option(
            help="Folder of `opal-deploy atlas`: show patches of other images of the class.", show_default=False
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Patches a slot to show of --atlas.")] = 4,
    slot_names: Annotated[
        Path | None,
        typer.Option(help="TOML file that names slots; default: names.toml in --atlas.", show_default=False),
    ] = None,
    boxes: Annotated[
        Path | None,
        typer.Option(
            help="Crop first: CSV (image,x0,y0,x1,y1 or image,x,y,width,height), COCO JSON, CUB's bounding_boxes.txt, "
            "or Stanford Dogs' Annotation folder."
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="True labels, to show beside the answer: `folders` (the folders' names), or a CSV file (image,label)."
        ),
    ] = None,
    min_margin: Annotated[float | None, typer.Option(help="Mark answers with a smaller margin as abstained.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the runtime; default: all cores.")] = None,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="Expected SHA-256 of the model's file; any other is refused.")
    ] = None,
    max_pixels: Annotated[int, typer.Option(min=1, help="Refuse images with more pixels than this.")] = 100_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Write what the sheets say to stdout, as JSON.")] = False,
) -> None:
    """Show why: what the model saw in an image, what else it considered, and how far apart the two are.

    The sheet has the places that decided, each enlarged, what each added to the answer, and the same for the runner-up.
    """
    from opal_deploy.artifact.files import check_sha256
    from opal_deploy.inference import setup
    from opal_deploy.inference import sheets as sheet_setup
    from opal_deploy.inference.decoding.budget import raise_pillow_limit
    from opal_deploy.inference.executor import predict_stream
    from opal_deploy.inference.sheets import SheetBuilder, SheetOptions, check_effective_field, with_attention
    from opal_deploy.inference.sources import discovery
    from opal_deploy.inference.sources.annotations import read_boxes, read_labels
    from opal_deploy.inference.sources.counting import ImageCounter
    from opal_deploy.inference.sources.items import Skipped
    from opal_deploy.inference.types import InferenceOptions, build_requests
    from opal_deploy.runtime.select import open_sessions

    discovery.check_inputs(images)
    output = _Output.parse(images, out, file_format, overwrite=overwrite)
    crops = read_boxes(boxes) if boxes else None
    truths = read_labels(labels) if labels else None
    path = model or setup.find_default_model(device, log=print_message)
    raise_pillow_limit(max_pixels)
    if expect_sha256 is not None:
        check_sha256(path, expect_sha256)
    sessions = open_sessions(path, device=device, threads=threads)[:1]
    metadata = sessions[0].metadata
    if receptive_field:
        check_effective_field(metadata, str(path))
    opened_atlas = None
    if atlas is not None:
        opened_atlas = sheet_setup.load_atlas(path, metadata, setup.fingerprint_model(path), atlas)
    names = sheet_setup.load_slot_names(metadata, sheet_setup.find_names_file(slot_names, atlas))
    options = SheetOptions(heatmap, opened_atlas, rows, names, min_margin, receptive_field)
    builder = SheetBuilder(metadata, options, model=str(path))
    if heatmap:
        sessions = with_attention(sessions, str(path))
    setup.log_cautions(metadata, boxed=crops is not None, log=print_message)
    inference = InferenceOptions(batch=1, workers=1, max_pixels=max_pixels, keep_images=True, keep_outputs=True)
    requests = build_requests(discovery.discover(images, Skipped(), sys.stdin), crops, truths)
    results = predict_stream(requests, sessions, inference)
    with ImageCounter(images) as counter:
        _write_sheets(results, counter, builder, output, as_json=as_json)


class _Output:
    """Where sheets are written: one file, or a folder of files.

    Attributes:
        path: the file or the folder.
        one: whether there is only one sheet.
    """

    def __init__(self, path: Path, file_format: str, *, one: bool, overwrite: bool) -> None:
        self.path, self.one = path, one
        self._format, self._overwrite = file_format, overwrite

    @staticmethod
    def parse(images: list[str], out: Path | None, file_format: str | None, *, overwrite: bool) -> _Output:
        """Read the output off the call.

        Raises:
            UsageError: an unknown format, a file for several images, or a sheet that is there already.
        """
        from opal_deploy.inference.sources.archives import is_archive_name
        from opal_deploy.inference.sources.video import parse_frame_name

        if file_format is not None and file_format not in FORMATS:
            raise UsageError(f"--format {file_format!r}: expected {' or '.join(FORMATS)}")
        frame = parse_frame_name(images[0])
        one = len(images) == 1 and (frame is not None or (Path(images[0]).is_file() and not is_archive_name(images[0])))
        suffix = "" if out is None else out.suffix.lower().lstrip(".")
        if out is not None and suffix and suffix not in FORMATS and not out.is_dir():
            raise UsageError(f"--out {out}: expected a file called .png or .svg, or a folder")
        if suffix in FORMATS and out is not None and not out.is_dir():
            if not one:
                raise UsageError(f"--out {out}: a file, but there may be several images; give a folder")
            if file_format is not None and file_format != suffix:
                raise UsageError(f"--out {out} and --format {file_format} disagree; leave one out")
            output = _Output(out, suffix, one=True, overwrite=overwrite)
        elif one and out is None:
            file_format = file_format or FORMATS[0]
            stem = Path(images[0]).stem if frame is None else f"{Path(frame.video).stem}.frame-{frame.index:06d}"
            path = Path(f"{stem}.evidence.{file_format}")
            output = _Output(path, file_format, one=True, overwrite=overwrite)
        else:
            output = _Output(out or _DEFAULT_DIR, file_format or FORMATS[0], one=False, overwrite=overwrite)
        if output.one:
            output.check(output.path)
            if frame is None and output.path.exists() and output.path.samefile(images[0]):
                raise UsageError(f"--out {output.path}: that is the image itself; give another name")
        return output

    def check(self, path: Path) -> None:
        """Raise UsageError for a file that is there already, unless --overwrite was given."""
        if path.exists() and not self._overwrite:
            raise UsageError(f"{path}: it is there already; give another --out, or --overwrite")

    def name_sheet(self, index: int, image_name: str | None) -> Path:
        """Return the file of one image's sheet."""
        from opal_deploy.inference.run_files import overlay_name

        if self.one:
            return self.path
        return self.path / Path(overlay_name(index, image_name)).with_suffix(f".{self._format}").name


def _write_sheets(
    results: Iterator[Result], counter: ImageCounter, builder: SheetBuilder, output: _Output, *, as_json: bool
) -> None:
    """Draw and write the sheet of every result.

    Raises:
        ImageError: the only image cannot be used.
        typer.Exit: some of several images cannot be used.
        UsageError: a sheet cannot be written.
    """
    documents: list[dict[str, Any]] = []
    failed = 0
    with progress("sheets") as advance:
        for index, result in enumerate(results):
            name = result.prepared.request.name
            try:
                path = output.name_sheet(index, name)
                output.check(path)
                documents.append({**_write_sheet(result, builder, path), "sheet": path.as_posix()})
            except ImageError as error:
                if output.one:
                    raise
                failed += 1
                print_message(one_line(f"{name}: {error.code}: {error}"))
            advance(index + 1, counter.total)
    if not output.one:
        print_message(f"{len(documents)} sheets in {output.path}{f', {failed} images failed' if failed else ''}")
    if as_json:
        print_json(documents[0] if output.one else documents)
    if failed:
        raise typer.Exit(ExitCode.SOME_IMAGES_FAILED)


def _write_sheet(result: Result, builder: SheetBuilder, path: Path) -> dict[str, Any]:
    """Write one sheet and return its content for JSON.

    Raises:
        ImageError: the image cannot be used.
    """
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.visualization.style import format_number

    if "error" in result.record:
        raise ImageError(result.record["error"]["code"], result.record["error"]["message"])
    request = result.prepared.request
    sheet = builder.build(result)
    with atomic_write(path) as temporary:
        temporary.write_bytes(sheet.encode(path.suffix.lower().lstrip(".")))
    content = sheet.content
    margin = "" if content.margin is None else f", margin {format_number(content.margin)}"
    probability = result.record["prediction"].get("calibrated_probability")
    calibrated = "" if probability is None else f", calibrated probability {format_number(probability)}"
    mark = " (abstained)" if content.abstained else ""
    answer = f"{content.describe_answer()}, cosine {format_number(content.predicted.cosine)}"
    print_message(one_line(f"{request.name}: {answer}{margin}{calibrated}{mark}: {path}"))
    return content.to_dict()
