"""`report.html`: one file that shows a run to a person, with nothing to install and nothing fetched.

Written as a stream: cards go to a temporary file as they come, and the head, whose totals are known only at the end,
is put before them when the report is closed. Memory does not grow with the number of images.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from PIL import Image

from opal_deploy.explain.bars import SCORE, Bar, bars_of, number
from opal_deploy.explain.legend import NO_EVIDENCE, prediction_of
from opal_deploy.explain.overlay import photograph_size
from opal_deploy.explain.palette import css, text_color
from opal_deploy.explain.records import Answer, Record
from opal_deploy.explain.report_template import CONTENT_POLICY, HOW_TO_READ, STYLE
from opal_deploy.explain.text import visible

THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT, THUMBNAIL_QUALITY = 480, 640, 80
# a picture that would shrink by less than this is embedded at its own size
_SMALL_ENOUGH = 0.75
CLASSES_LISTED = 30
_MESSAGE_LIMIT = 500

Fact = tuple[str, str]


class ReportWriter:
    """Collects records in order and writes `path` when closed; before that, and after an error, `path` is untouched.

    Usable as a context manager: leaving the block closes the report, leaving it by an exception discards it and its
    temporary files (a report of an earlier run stays as it was). Not for use from several threads at once.

    Args:
        path: the report; its folder must exist. `<name>.body.tmp` and `<name>.tmp` beside it are used meanwhile.
        title: the report's heading.
        facts: what the head lists, in order: model, runtime, versions, ...
        limit: at most so many images, and so many failures, are shown; all are counted.

    Raises:
        OSError: the folder is missing or cannot be written; from `add` and `close`, the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], *, title: str, facts: Sequence[Fact], limit: int = 200) -> None:
        self._path = Path(path)
        self._title, self._facts, self._limit = title, list(facts), limit
        self._counts: Counter[str] = Counter()
        self._classes: Counter[tuple[int, str]] = Counter()
        self._codes: Counter[str] = Counter()
        self._failures: list[str] = []
        self._cards = 0
        self._body_path = self._path.with_name(self._path.name + ".body.tmp")
        self._whole_path = self._path.with_name(self._path.name + ".tmp")
        self._body: TextIO | None = _open(self._body_path)

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif self._body is not None:
            self.close()

    @property
    def full(self) -> bool:
        """Whether the images to come are only counted, so that no overlay needs to be made for this report."""
        return self._cards >= self._limit

    def add(self, record: Record, overlay: bytes | Image.Image | None) -> None:
        """Count a record and, up to the limit, show it.

        Args:
            record: of any status.
            overlay: what `encode_overlay` or `draw_overlay` made of it; None for a card without a picture.

        Raises:
            ValueError: the report is closed already.
        """
        if self._body is None:
            raise ValueError(f"{self._path} is closed already")
        self._counts[record["status"]] += 1
        if record["status"] == "error":
            self._add_failure(record)
            return
        answer = prediction_of(record)
        self._classes[answer["class_id"], answer["label"]] += 1
        if not self.full:
            self._cards += 1
            self._body.write(_card(record, None if overlay is None else thumbnail(overlay, record)))

    def close(self, summary: Sequence[Fact] = ()) -> None:
        """Write the report; `summary`: facts known only now, listed after `facts`. On an error nothing is left."""
        if self._body is None:
            raise ValueError(f"{self._path} is closed already")
        try:
            self._body.close()
            with _open(self._whole_path) as whole, _open(self._body_path, "r") as body:
                whole.write(self._head([*self._facts, *summary]))
                shutil.copyfileobj(body, whole)
                whole.write(_TAIL)
            os.replace(self._whole_path, self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Give up: remove the temporary files. Does nothing to a report that was closed."""
        if self._body is not None:
            # on a full disk the last flush fails too, and the file must go all the same
            with contextlib.suppress(OSError):
                self._body.close()
            self._body = None
            self._body_path.unlink(missing_ok=True)
            self._whole_path.unlink(missing_ok=True)

    def _add_failure(self, record: Record) -> None:
        problem = record.get("error", {"code": "unknown", "message": ""})
        self._codes[problem["code"]] += 1
        if len(self._failures) < self._limit:
            message = problem["message"]
            message = message if len(message) <= _MESSAGE_LIMIT else message[:_MESSAGE_LIMIT] + " …"
            self._failures.append(
                f"<tr><td>{_name(record)}</td><td><code>{_text(problem['code'])}</code></td>"
                f"<td>{_text(message)}</td></tr>\n"
            )

    def _head(self, facts: Sequence[Fact]) -> str:
        answered = self._counts["ok"] + self._counts["abstained"]
        parts = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{_text(self._title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            f"<header>\n<h1>{_text(self._title)}</h1>\n{self._tiles()}",
        ]
        if facts:
            rows = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>\n" for k, v in facts)
            parts.append(f'<dl class="facts">\n{rows}</dl>\n')
        parts += ["</header>\n<main>\n", HOW_TO_READ, self._classes_predicted(answered), self._failed()]
        parts.append(f'<h2 id="images">Images</h2>\n<p>{self._which_are_shown(answered)}</p>\n<div class="cards">\n')
        return "".join(parts)

    def _tiles(self) -> str:
        total = self._counts.total()
        shown = [("", total, "image" if total == 1 else "images"), ("", self._counts["ok"], "answered")]
        if self._counts["abstained"]:
            shown.append(("warn", self._counts["abstained"], "abstained"))
        shown.append(("alert" if self._counts["error"] else "", self._counts["error"], "failed"))
        items = "".join(f'<li class="{c}"><b>{n:,}</b><span>{name}</span></li>\n' for c, n, name in shown)
        return f'<ul class="tiles">\n{items}</ul>\n'

    def _classes_predicted(self, answered: int) -> str:
        if not self._classes:
            return ""
        # equal counts in the order of the classes, so that the same run gives the same report
        ranked = sorted(self._classes.items(), key=lambda item: (-item[1], item[0]))
        most = ranked[0][1]
        rows = "".join(
            f'<tr><td><bdi>{_text(label)}</bdi></td><td class="n">{count:,}</td>'
            f"<td>{_track(0.0, count / most)}</td></tr>\n"
            for (_, label), count in ranked[:CLASSES_LISTED]
        )
        rest = len(ranked) - CLASSES_LISTED
        more = f'<p class="note">{_several(rest, "more class", "more classes")} not listed.</p>\n' if rest > 0 else ""
        return (
            '<h2 id="classes">Classes predicted</h2>\n'
            f"<p>{_several(len(ranked), 'class', 'classes')} in {_several(answered, 'answer', 'answers')}, "
            "abstentions included.</p>\n"
            '<table class="classes"><thead><tr><th scope="col">class</th><th scope="col" class="n">images</th>'
            f"<th></th></tr></thead><tbody>\n{rows}</tbody></table>\n{more}"
        )

    def _failed(self) -> str:
        failed = self._counts["error"]
        if not failed:
            return ""
        codes = ", ".join(f"<code>{_text(c)}</code> {n:,}" for c, n in self._codes.most_common(CLASSES_LISTED))
        first = f" The first {len(self._failures):,} are listed; all are in results.jsonl."
        return (
            '<h2 id="failed">Failed images</h2>\n'
            f"<p>{_several(failed, 'image has', 'images have')} no answer: {codes}."
            f"{first if len(self._failures) < failed else ''}</p>\n"
            f"<details{' open' if len(self._failures) <= 20 else ''}><summary>Names and reasons</summary>\n"
            '<table class="failed"><thead><tr><th scope="col">image</th><th scope="col">code</th>'
            f'<th scope="col">reason</th></tr></thead><tbody>\n{"".join(self._failures)}</tbody></table></details>\n'
        )

    def _which_are_shown(self, answered: int) -> str:
        if not answered:
            return "No image has an answer."
        if self._cards < answered:
            return f"The first {self._cards:,} of {answered:,} answered images are shown; all are in results.jsonl."
        return f"{_several(answered, 'answered image', 'answered images')}, in the order of the input."


_TAIL = """</div>
</main>
<footer>Written by opal-deploy. Every record, in full precision: results.jsonl.</footer>
</body>
</html>
"""


def thumbnail(overlay: bytes | Image.Image, record: Record) -> bytes:
    """The overlay's photograph as JPEG, at most 480 x 640 pixels, or a little more where that spares a resize."""
    image = Image.open(io.BytesIO(overlay)) if isinstance(overlay, bytes) else overlay
    whole = image.size
    width, height = photograph_size(record.get("width", whole[0]), record.get("height", whole[1]))
    share = min(1.0, THUMBNAIL_WIDTH / width, THUMBNAIL_HEIGHT / height)
    if share > _SMALL_ENOUGH:
        share = 1.0
    if isinstance(overlay, bytes):
        # the decoder itself halves large pictures: a 24-megapixel overlay costs little
        image.draft("RGB", (round(whole[0] * share), round(whole[1] * share)))
    # cut first: a resize of a part would blend the legend into its last rows
    part = (max(1, width * image.size[0] // whole[0]), max(1, height * image.size[1] // whole[1]))
    size = (max(1, round(width * share)), max(1, round(height * share)))
    cut = image.convert("RGB").crop((0, 0, *part))
    small = cut if cut.size == size else cut.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY, subsampling=0)
    return buffer.getvalue()


def _card(record: Record, picture: bytes | None) -> str:
    answer = prediction_of(record)
    label = _text(answer["label"])
    if picture is None:
        figure = '<div class="nopicture">no picture kept</div>'
    else:
        boxes = "with the evidence boxes" if record.get("evidence") else "without boxes"
        alt = f"{_text(record['image'] or 'image')}, {boxes}; predicted {label}"
        figure = f'<img alt="{alt}" src="data:image/jpeg;base64,{base64.b64encode(picture).decode()}">'
    flag = '<p class="flag">abstained: margin below the threshold</p>' if record["status"] == "abstained" else ""
    if answer["cosine"] is None:
        measures = _measure("logit", answer["logit"])
    else:
        measures = _measure("cosine", answer["cosine"]) + _measure("margin", record.get("margin"))
    return (
        f'<article>{figure}<div class="body"><h3>{_name(record)}</h3><p class="answer"><bdi>{label}</bdi></p>{flag}'
        f'<dl class="measures">{measures}</dl>{_slots(record)}{_top(record.get("top", []))}</div></article>\n'
    )


def _measure(name: str, value: float | None) -> str:
    return f"<div><dt>{name}</dt><dd>{number(value)}</dd></div>"


def _slots(record: Record) -> str:
    bars = bars_of(record)
    if not bars.bars:
        return f'<p class="note">{NO_EVIDENCE}</p>'
    scores = bars.meaning != SCORE
    cells = [slot["cell"] for slot in record.get("evidence", [])]
    rows = "".join(_slot_row(bar, cell, scores) for bar, cell in zip(bars.bars, cells, strict=True))
    score_head = '<th scope="col" class="n">score</th>' if scores else ""
    return (
        '<table class="slots"><thead><tr><th scope="col">slot</th>'
        f'<th scope="col" colspan="2">{bars.meaning}</th>{score_head}'
        f'<th scope="col" class="n" title="row, column of the feature map">cell</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _slot_row(bar: Bar, cell: Sequence[int], scores: bool) -> str:
    color = css(bar.color)
    score = f'<td class="n">{number(bar.score)}</td>' if scores else ""
    return (
        f'<tr><td><span class="slot" style="background:{color};color:{css(text_color(bar.color))}">{bar.slot}</span>'
        "</td>"
        f'<td>{_track(bar.start, bar.stop, color)}</td><td class="n">{number(bar.value)}</td>{score}'
        f'<td class="n">{cell[0]}, {cell[1]}</td></tr>'
    )


def _top(answers: Sequence[Answer]) -> str:
    if not answers:
        return ""
    with_cosine = answers[0]["cosine"] is not None
    rows = "".join(
        f'<tr><td><bdi>{_text(a["label"])}</bdi></td><td class="n">'
        f"{number(a['cosine'] if with_cosine else a['logit'])}</td></tr>"
        for a in answers
    )
    return (
        f"<details><summary>{_several(len(answers), 'closest class', 'closest classes')}</summary><table><thead>"
        f'<tr><th scope="col">class</th><th scope="col" class="n">{"cosine" if with_cosine else "logit"}</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></details>"
    )


def _track(start: float, stop: float, color: str | None = None) -> str:
    paint = f";background:{color}" if color else ""
    return (
        f'<span class="track"><i style="left:{100 * start:.1f}%;width:{100 * (stop - start):.1f}%{paint}"></i></span>'
    )


def _name(record: Record) -> str:
    return "<bdi>" + (_text(record["image"]) if record["image"] else "(no name)") + "</bdi>"


def _text(text: str) -> str:
    return html.escape(visible(text))


def _several(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _open(path: Path, mode: str = "w") -> TextIO:
    return open(path, mode, encoding="utf-8", errors="backslashreplace", newline="\n")  # type: ignore[return-value]
