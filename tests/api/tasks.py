"""Tasks of a Python user, with types: `test_tasks.py` checks this file with mypy in strict mode, and runs it."""

import asyncio
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount

import opal_deploy

model_path, images, out = (Path(argument) for argument in sys.argv[1:])
paths = sorted(images.glob("*.png"))

model = opal_deploy.load(model_path, threads=1)
answers = model.predict(paths)
label: str = answers[0].label
margin: float | None = answers[0].margin
box: tuple[float, float, float, float] = answers[0].slots[0].box
picture = answers[0].overlay()
sheet = answers[0].save_sheet(out / "sheet.png")
report = answers[:2].save_report(out / "report")
annotations = answers.to_coco()
refused = model.predict(paths[0], min_margin=2.0).status
one = asyncio.run(model.apredict(paths[0].read_bytes()))
reduced = model.without(f"{label}/0")
other = [each.label for each in reduced.stream(images)]
checked = opal_deploy.verify(model_path)
facts: str = str(opal_deploy.inspect(model_path))
changes = opal_deploy.diff(report.parent, report.parent)
with opal_deploy.ModelApp(model, workers=1) as app:  # in somebody's own: shop.mount("/model", app)
    shop = Starlette(routes=[Mount("/model", app)])
lines: list[str] = [str(answer) for answer in answers]
print(label, margin, box, picture.size, sheet.name, len(annotations["images"]), refused, one.label, len(other))
print(checked.passed, changes.changed, len(lines), facts.split()[0])
