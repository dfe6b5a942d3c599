"""`opal-deploy verify`: does this artifact still answer as its reference did, here?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import emit_json, say
from opal_deploy.errors import ArtifactError, UsageError


def verify(
    model: Annotated[Path, typer.Argument(help="An ONNX file or an engine that `opal-deploy export` wrote.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="On the CPU.")] = None,
    expect_sha256: Annotated[
        str | None, typer.Option("--expect-sha256", help="The file's sha256 as given to you by a trusted way.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON.")] = False,
) -> None:
    """Check a model's digest, then run the test vectors that it carries on this machine.

    Needs neither the checkpoint nor PyTorch.
    """
    from opal_deploy.artifact.engine_file import ENGINE_SUFFIX
    from opal_deploy.artifact.files import check_pinned, sha256_of_file
    from opal_deploy.runtime.select import ONNX_SUFFIX, open_sessions
    from opal_deploy.runtime.verify import verify_vectors

    if not model.is_file():
        raise ArtifactError(f"{model}: no such file; expected a file of `opal-deploy export`")
    if model.suffix not in (ONNX_SUFFIX, ENGINE_SUFFIX):
        raise UsageError(f"{model}: only exported models carry test vectors; export the checkpoint, then verify that")
    found = check_pinned(model, expect_sha256) if expect_sha256 is not None else sha256_of_file(model)
    session = open_sessions(model, device=device, threads=threads)[0]
    comparison = verify_vectors(session, str(model))
    say(f"{model}: {comparison.images} test vectors reproduced in {session.description}")
    if comparison.max_cosine is not None:
        say(
            f"largest differences: logit {comparison.max_logit:.2g}, cosine {comparison.max_cosine:.2g}, "
            f"score {comparison.max_score:.2g}; {comparison.cells_different} of {comparison.cells} cells differ"
        )
        if not comparison.cells:
            say("no cell of these pictures leads clearly enough to be compared: cells are not proven here")
    if session.metadata.unverified:
        say(f"NOT VERIFIED on pictures: this model was {session.metadata.unverified}")
    if as_json:
        emit_json({"path": str(model), "sha256": found, "session": session.description, **comparison.to_dict()})
