"""The cases of `bench pipeline`, and their images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.bench.pipeline.cases import (
    Case,
    build_cases,
    decode_batches,
    parse_counts,
    parse_sizes,
    resized_copies,
)
from opal_deploy.errors import UsageError
from opal_deploy.inference.sources.items import Item


@pytest.fixture
def items(tmp_path: Path, make_pictures: Callable) -> list[Item]:
    return [Item(path, path.name) for path in make_pictures(tmp_path / "pictures", 5)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [Case(8, 2)]),
        ({"batches": [4]}, [Case(4, 2)]),
        ({"batches": [1, 8, 32]}, [Case(8, 2), Case(1, 2), Case(32, 2)]),
        ({"batches": [16, 32]}, [Case(16, 2), Case(32, 2)]),
        ({"batches": [16], "workers": [1, 2, 4]}, [Case(16, 2), Case(16, 1), Case(16, 4)]),
        ({"batches": [1, 8], "workers": [1, 2]}, [Case(8, 2), Case(8, 1), Case(1, 2)]),
        ({"sizes": [(50, 40)]}, [Case(8, 2, (50, 40))]),
        ({"sizes": [(50, 40), (90, 80)]}, [Case(8, 2), Case(8, 2, (50, 40)), Case(8, 2, (90, 80))]),
        ({"batches": [8, 8]}, [Case(8, 2)]),
    ],
    ids=str,
)
def test_each_value_is_varied_on_its_own_around_one_base_case(values: dict, expected: list[Case]) -> None:
    assert list(build_cases(Case(8, 2), **values)) == expected


def test_counts_and_sizes_may_have_spaces() -> None:
    assert parse_counts("--batch", "1, 8,32") == [1, 8, 32]
    assert parse_sizes("--image-size", "250x188, 500x375") == [(250, 188), (500, 375)]
    assert parse_counts("--batch", None) == parse_sizes("--image-size", None) == []


@pytest.mark.parametrize(
    ("parse", "option", "texts", "expected"),
    [
        (parse_counts, "--batch", ["", "0", "1,,2", "a", "-1", "1.5", "1;2", "1,0"], "whole numbers from 1 on"),
        (
            parse_sizes, "--image-size",
            ["", "500", "500x", "0x10", "500x375x3", "500X375", "65501x10", "a,b"], "WIDTHxHEIGHT",
        ),
    ],
    ids=["counts", "sizes"],
)  # fmt: skip
def test_other_texts_are_refused(parse: Callable, option: str, texts: list[str], expected: str) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=f"{option} .* expected {expected}"):
            parse(option, text)


def test_copies_have_their_size_and_are_removed_afterwards(items: list[Item]) -> None:
    items[1].path.write_bytes(b"no image")
    with resized_copies(items, (200, 100)) as copies:
        paths = [copy.path for copy in copies]
        # a broken image stays what it is
        assert [path == item.path for path, item in zip(paths, items, strict=True)] == [False, True, *[False] * 3]
        del paths[1]
        assert len(set(paths)) == 4
        for path in paths:
            with Image.open(path) as copy:
                assert (copy.size, copy.format) == ((200, 100), "JPEG")
    assert not any(path.exists() for path in paths)
    with resized_copies(items, None) as same:
        assert same == items


def test_batches_hold_every_usable_image(items: list[Item]) -> None:
    items[1].path.write_bytes(b"no image")
    assert [batch.shape for batch in decode_batches(items, (32, 48), 3)] == [(3, 32, 48, 3), (1, 32, 48, 3)]
    with pytest.raises(UsageError, match=r"4 usable images, and a batch takes 6; give more, or a smaller --batch"):
        decode_batches(items, (32, 32), 6)
