"""`opal-deploy edit`: take slots out of a model, or find those that look at the wrong thing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.editing.api import EditResult
from opal_deploy.editing.options import EditOptions

if TYPE_CHECKING:
    from opal_deploy.editing.scores import Effect

# classes listed on a terminal
_LISTED = 10


def edit(
    model: Annotated[Path, typer.Argument(help="Checkpoint, or exported ONNX file.")],
    options: EditOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Take slots out of a model, or find those that look at the wrong thing.

    A dropped slot counts as 0 and the others of its class share its weight, so the effect on every image is known
    without training.
    """
    from opal_deploy.editing.api import edit_model

    with progress("images") as advance:
        result = edit_model(model, **replace(options, log=print_message, progress=advance).keywords())
    for line in _describe(model, result, options):
        print_message(one_line(line))
    if as_json:
        print_json(_to_json(result))


def _describe(model: Path, result: EditResult, options: EditOptions) -> Iterator[str]:
    if options.suggest:
        suspected = [each for each in result.suggestions if each.suspected]
        yield f"Suspected: {len(suspected)} of {int(result.metadata.class_map.counts.sum())} slots"
        for each in result.suggestions:
            yield f"  {each.name}: {'; '.join(reason.text for reason in each.reasons)}"
            if each.effect is not None:
                yield f"    dropped alone: {_format(each.effect)}"
        kept = [each.name.rpartition("/")[0] for each in suspected if each.name not in result.suggested]
        for class_name in dict.fromkeys(kept):
            yield f"{class_name}: every slot is suspected, and one must stay; train again with --keep-off"
        if result.suggested and not options.drop:
            yield f"Try: {shlex.join(options.repeat(model, result.suggested))}"
    if result.effect is not None:
        yield f"{len(result.effect.labels):,} {options.split} images: {_format(result.effect)}"
        classes = list(result.effect.by_class())
        for class_id, images, before, after in classes[:_LISTED]:
            yield f"  {result.metadata.class_names[class_id]}: {before} of {images} right, then {after}"
        if len(classes) > _LISTED:
            yield f"  and {len(classes) - _LISTED} more classes"
    if result.path is not None:
        yield f"Model: {result.path}"
    if result.page is not None:
        yield f"Page: {result.page}"


def _format(effect: Effect) -> str:
    before, after = effect.accuracy
    changed = len(effect.changed)
    text = f"accuracy {before:.1%} before, {after:.1%} after; {changed:,} "
    text += "answer changes" if changed == 1 else "answers change"
    if effect.gained or effect.lost:
        text += (
            f", {effect.gained} to right and {effect.lost} to wrong (McNemar's exact test: p = {effect.p_value:.2g})"
        )
    return text


def _to_json(result: EditResult) -> dict[str, Any]:
    def figures(effect: Effect | None) -> dict[str, Any] | None:
        if effect is None:
            return None
        before, after = effect.accuracy
        return {
            "images": len(effect.labels), "accuracy_before": before, "accuracy_after": after,
            "changed": len(effect.changed), "gained": effect.gained, "lost": effect.lost, "p_value": effect.p_value,
        }  # fmt: skip

    return {
        "model": None if result.path is None else str(result.path),
        "dropped": list(result.metadata.dropped),
        "effect": figures(result.effect),
        "suggested": result.suggested,
        "suggestions": [
            {
                "slot": each.name, "channel": each.channel, "images": each.images, "suspected": each.suspected,
                "reasons": [vars(reason) for reason in each.reasons], "effect": figures(each.effect),
            }
            for each in result.suggestions
        ],
    }  # fmt: skip
