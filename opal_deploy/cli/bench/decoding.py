"""`opal-deploy bench decoding`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.bench.options import Images, Json, find_items
from opal_deploy.cli.console import print_json, print_message, progress
from opal_deploy.errors import UsageError


def decoding(
    images: Images,
    limit: Annotated[int, typer.Option(min=1, help="At most so many images.")] = 200,
    size: Annotated[int, typer.Option(min=1, help="Input size in pixels.")] = 224,
    as_json: Json = False,
) -> None:
    """Compare every decode path with plain Pillow: largest and mean difference in counts, and images per second."""
    from opal_deploy.bench.decoding import compare_paths
    from opal_deploy.bench.machine import provenance

    files = [item.path for item in find_items(images, limit) if isinstance(item.path, Path)]
    if not files:
        raise UsageError("bench decoding compares files of this machine; download the images first")
    with progress("images") as advance:
        results = compare_paths(files, (size, size), advance)
    for r in results:
        print_message(
            f"{r.name}: {r.images} images, largest difference {r.largest}, mean {r.mean:.4f} counts, "
            f"{r.share_equal:.1%} equal; {r.path_per_second:.0f}/s, plain Pillow {r.pillow_per_second:.0f}/s on one "
            f"thread; {r.path_cpu_milliseconds:.2f} and {r.pillow_cpu_milliseconds:.2f} ms of CPU time each"
        )
    if as_json:
        print_json({"paths": [r.to_dict() for r in results], **provenance()})
