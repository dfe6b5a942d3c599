"""The page of an edit, in a real browser."""

import itertools

import pytest
from playwright.sync_api import expect

from opal_deploy.editing.api import edit_model
from tests.browser import open_browser


@pytest.mark.browser
def test_ticking_slots_shows_the_accuracy_that_edit_reports(files, names, tmp_path):
    page_file = tmp_path / "slots.html"
    keywords = {"data": files / "data", "split": "val", "device": "cpu", "threads": 1, "log": print}
    # class 1 has lost a slot, and another is ticked at first
    edit_model(files / "model.pt", drop=[(names[1], 1)], out=tmp_path / "parent.pt", threads=1, log=print)
    given = edit_model(tmp_path / "parent.pt", drop=[(names[0], 2)], suggest=True, page=page_file, **keywords)
    others = [f"{name}/{slot}" for name in (names[0], names[2]) for slot in range(3)]
    known = {*given.effect.accuracy}
    # each accuracy that is shown differs from the one before
    drop = next(
        pair
        for pair in itertools.combinations(others, 2)
        if f"{names[0]}/2" not in pair and given.scores.try_drop(pair).accuracy[1] not in known
    )
    edited = edit_model(tmp_path / "parent.pt", drop=drop, **keywords)

    problems = []
    with open_browser() as browser, browser.new_context(viewport={"width": 390, "height": 900}) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.goto(page_file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        accuracy = page.locator("#accuracy")
        expect(accuracy).to_have_text(f"Accuracy {100 * given.effect.accuracy[1]:.1f} %")
        page.get_by_label(f"{names[0]}/2").uncheck()
        expect(accuracy).to_have_text(f"Accuracy {100 * edited.effect.accuracy[0]:.1f} %")
        # by keys
        for name in drop:
            page.get_by_label(name).focus()
            page.keyboard.press("Space")
        before, after = edited.effect.accuracy
        expect(accuracy).to_have_text(f"Accuracy {100 * after:.1f} %")
        counts = f"{edited.effect.gained} become right, {edited.effect.lost} become wrong"
        expect(page.locator("#change")).to_contain_text(f"{100 * before:.1f} % with all slots; {counts}")
        command = page.locator("#command").text_content() or ""
        assert f" --drop {drop[0]} --drop {drop[1]} --data " in command
        assert command.endswith("--out parent.edited.pt --device cpu --threads 1")
        # the last slot of a class cannot be ticked
        page.get_by_label(f"{names[1]}/0").check()
        expect(page.get_by_label(f"{names[1]}/2")).to_be_disabled()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert problems == []
