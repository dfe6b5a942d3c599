"""`opal-deploy bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import print_json_line, print_message
from opal_deploy.errors import UsageError


def report(
    files: Annotated[list[Path], typer.Argument(help="Files that `opal-deploy bench` wrote with --out, or folders.")],
    out: Annotated[
        Path | None, typer.Option(help="Write one page of HTML.", show_default="report.html unless --markdown is given")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write Markdown, without charts; - writes it to stdout.", allow_dash=True)
    ] = None,
    title: Annotated[str, typer.Option(help="The page's heading.")] = "Benchmarks",
) -> None:
    """Measurements as a page with charts and tables, and how to repeat each."""
    from opal_deploy.artifact.files import atomic_write
    from opal_deploy.bench.measurement import read_measurements
    from opal_deploy.bench.report.content import build_report
    from opal_deploy.bench.report.page import to_html, to_markdown

    if out is None and markdown is None:
        out = Path("report.html")
    for target in (out, markdown):
        if target is not None and target.exists() and any(f.exists() and target.samefile(f) for f in files):
            raise UsageError(f"{target}: is one of the files to read; give another name for the report")
    content = build_report(read_measurements(files), title)
    if not content.sections:
        raise UsageError("no measurements in these files; `opal-deploy bench ... --out FILE` writes them")
    if markdown is not None:
        text = to_markdown(content)
        if str(markdown) == "-":
            print_json_line(text.rstrip("\n"))
        else:
            with atomic_write(markdown) as temporary:
                temporary.write_text(text, encoding="utf-8")
            print_message(f"{markdown}: {content.measured} measurements")
    if out is not None:
        page = to_html(content)
        with atomic_write(out) as temporary:
            temporary.write_text(page, encoding="utf-8")
        print_message(f"{out}: {content.measured} measurements")
    if content.doubtful:
        print_message(f"{content.doubtful} of them are marked as doubtful")
