"""A model within another application."""

import asyncio
import io

import httpx
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.routing import Mount

import opal_deploy


def test_a_model_answers_below_the_path_at_which_it_is_mounted(exact_model):
    model, stream = opal_deploy.load(exact_model, device="cpu", threads=1), io.BytesIO()
    Image.new("RGB", (90, 70), (40, 90, 30)).save(stream, "PNG")
    png = stream.getvalue()
    with opal_deploy.ModelApp(model, name="trees", batch=2, workers=1, min_margin=2.0) as app:
        outer = Starlette(routes=[Mount("/model", app)])

        async def ask():
            transport = httpx.ASGITransport(outer)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
                explained = await client.post("/model/explain", content=png)
                return explained, *[await client.get(f"/model{path}") for path in ("/", "/v2/health/ready", "/nope")]

        explained, page, ready, missing = asyncio.run(ask())
    record = explained.json()
    assert record["status"] == "abstained"
    assert record["prediction"]["label"] == model.predict(png).label
    assert 'src="page.js"' in page.text
    assert ready.status_code == 200
    assert missing.json()["try"][0] == "curl --data-binary @IMAGE http://shop.example/model/explain"


def test_options_of_the_process_are_the_programs_own(exact_model):
    model = opal_deploy.load(exact_model, device="cpu", threads=1)
    with pytest.raises(TypeError, match="unexpected keyword 'port'; options are batch"):
        opal_deploy.ModelApp(model, port=1)
