"""`opal-deploy bench decoding`."""

from __future__ import annotations

from typing import Annotated

import typer

from opal_deploy.cli.bench.options import Images, Json, find_items
from opal_deploy.cli.console import emit_json, say


def decoding(
    images: Images,
    limit: Annotated[int, typer.Option(min=1, help="At most so many pictures.")] = 200,
    size: Annotated[int, typer.Option(min=1, help="Input size in pixels.")] = 224,
    as_json: Json = False,
) -> None:
    """Every decode path against plain Pillow: largest and mean difference in counts, and pictures a second."""
    from opal_deploy.bench.decoding import compare
    from opal_deploy.bench.harness.machine import provenance

    results = compare([item.path for item in find_items(images, limit)], (size, size))
    for r in results:
        say(
            f"{r.name}: {r.images} pictures, largest difference {r.largest}, mean {r.mean:.4f} counts, "
            f"{r.share_equal:.1%} equal; {r.path_per_second:.0f}/s, plain Pillow {r.pillow_per_second:.0f}/s, one "
            f"thread each; {r.path_cpu_milliseconds:.2f} and {r.pillow_cpu_milliseconds:.2f} ms of processor time each"
        )
    if as_json:
        emit_json({"paths": [r.to_dict() for r in results], **provenance()})
