"""Tasks of a Python user; `test_tasks.py` runs them, and checks their types with pyright, `make check` with mypy."""

import asyncio
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount

import opal_deploy

model_path, images, out = (Path(argument) for argument in sys.argv[1:])
paths = sorted(images.glob("*/*.png"))

model = opal_deploy.load(model_path, threads=1)
answers = model.predict(paths)
label: str = answers[0].label
margin: float | None = answers[0].margin
box: tuple[float, float, float, float] = answers[0].slots[0].box
picture = answers[0].overlay()
sheet = answers[0].sheet(), answers[0].save_sheet(out / "sheet.png")
annotations, table = answers.to_coco(), answers.to_pandas()
report = answers[:2].save_report(out / "report")
refused = model.predict(paths[0], min_margin=0.99, unknown="5%").status
one = asyncio.run(asyncio.to_thread(model.predict, paths[0].read_bytes()))
edited = opal_deploy.edit_model(model, drop=[f"{label}/0"], out=out / "edited.onnx").path
other = [each.label for each in model.stream(images)]
checked = opal_deploy.verify(model)
facts: str = str(opal_deploy.inspect(model))
changes = opal_deploy.diff(model, edited or "", images=paths)
results = out / "results.jsonl"
results.write_text("".join(answer.to_json() + "\n" for answer in answers))
drift = opal_deploy.find_drift(results, baseline=model.path)
with opal_deploy.ModelApp(model, workers=1) as app:  # in somebody's own: shop.mount("/model", app)
    shop = Starlette(routes=[Mount("/model", app)])
head = opal_deploy.nn.OpalHead(512, num_classes=10)
network = opal_deploy.nn.build_network("shufflenet_v2_x0_5", num_classes=3, size=64, stride=None)
lines: list[str] = [str(answer) for answer in answers]
print(label, margin, box, picture.size, sheet[1].name, len(annotations["images"]), refused, one.label, len(other))
print(checked.passed, changes.changed, len(lines), facts.split()[0], len(table), drift.images, head.num_prototypes)
