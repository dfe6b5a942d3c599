"""`opal-deploy edit`: take slots out of a model, or find those that look at the wrong thing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opal_deploy.cli.console import one_line, print_json, print_message, progress
from opal_deploy.editing.api import EditOptions, EditResult, edit_model
from opal_deploy.options import to_arguments

if TYPE_CHECKING:
    from opal_deploy.editing.scores import Effect

# p values below this are more than chance
_CLEAR = 0.05


def edit(
    model: Annotated[Path, typer.Argument(help="Checkpoint, or exported ONNX file.")],
    options: EditOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Write the figures to stdout as JSON.")] = False,
) -> None:
    """Take slots out of a model, or find those that look at the wrong thing.

    A dropped slot counts as 0 and the others of its class share its weight, so the effect on every image is known
    without training.
    """
    with progress("images") as advance:
        result = edit_model(model, **replace(options, log=print_message, progress=advance).keywords())
    for line in _describe(model, result, options):
        print_message(one_line(line))
    if as_json:
        print_json(_to_json(result))


def _describe(model: Path, result: EditResult, options: EditOptions) -> Iterator[str]:
    if options.suggest:
        yield f"Suspected: {len(result.suggestions)} of {int(result.metadata.class_map.counts.sum())} slots"
        for suggestion in result.suggestions:
            yield f"  {suggestion.name}: {'; '.join(reason.text for reason in suggestion.reasons)}"
            if suggestion.effect is not None:
                yield f"    dropped alone: {_format(suggestion.effect)}"
            if suggestion.name not in result.suspected:
                yield "    its class has no other slot that finds anything; train again with --keep-off"
    if result.effect is not None:
        yield f"{len(result.effect.labels):,} {options.split} images: {_format(result.effect)}"
    if result.path is not None:
        yield f"Model: {result.path}"
    if result.page is not None:
        yield f"Page: {result.page}"
    if options.suggest:
        yield from _describe_suggested(model, result, options)


def _describe_suggested(model: Path, result: EditResult, options: EditOptions) -> Iterator[str]:
    """Yield what dropping suspected slots does, and the next command."""
    effect, suggested = result.suggested_effect, result.suggested
    if effect is None:
        yield "No slot to drop"
        return
    if suggested:
        is_clear = effect.p_value < _CLEAR
        more = "" if is_clear else "; chance explains that, so look at them, or give more images, before dropping any"
        yield f"Without {', '.join(suggested)}, the best choice on these images: {_format(effect)}{more}"
        if is_clear:
            yield f"Next: {shlex.join(options.repeat(model, suggested))}"
            return
    else:
        yield "No choice of the suspected slots makes more answers right, as where all images share a shortcut"
        yield f"Without {', '.join(result.suspected)}: {_format(effect)}"
    if result.page is None:
        look = to_arguments(replace(options, page="slots.html"))
        yield f"Next, to look at them: {shlex.join(['opal-deploy', 'edit', str(model), *look])}"
    else:
        yield f"Next: open {result.page} and look at them"


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
        "suspected": result.suspected,
        "suggested": result.suggested,
        "suggested_effect": figures(result.suggested_effect),
        "suggestions": [
            {
                "slot": suggestion.name, "channel": suggestion.channel,
                "reasons": [vars(reason) for reason in suggestion.reasons], "effect": figures(suggestion.effect),
            }
            for suggestion in result.suggestions
        ],
    }  # fmt: skip
