"""File names as text that any JSON reader accepts, and back."""

import json
import os
import random

import pytest

from opal_deploy.records.names import escape_name, find_common_folder, unescape_name


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        (b"a b.jpg", "a b.jpg"),
        (b"a\nb.jpg", "a\nb.jpg"),
        (b"<script>\"'&.jpg", "<script>\"'&.jpg"),
        ("für.jpg".encode(), "für.jpg"),
        (b"a\xff.jpg", "a\\xff.jpg"),
        (b"a\\xff.jpg", "a\\\\xff.jpg"),
        (b"\\", "\\\\"),
        (b"\\\xff\\", "\\\\\\xff\\\\"),
        # the first half of a two-byte character
        (b"\xc3.jpg", "\\xc3.jpg"),
    ],
)
def test_only_bytes_that_are_not_utf8_are_escaped(name, escaped):
    assert escape_name(os.fsdecode(name)) == escaped


def test_escaping_is_reversible_for_every_name_a_file_can_have():
    source = random.Random(7)
    # weighted towards what escaping could trip over
    alphabet = b"\\\\\\\\xxffdc80\xff\x80\xc3\xa9\n\"'<>" + bytes(range(1, 256))
    for _ in range(20_000):
        name = os.fsdecode(bytes(source.choice(alphabet) for _ in range(source.randrange(1, 12))))
        text = escape_name(name)
        assert unescape_name(text) == name
        # as it will be written and read
        assert json.loads(json.dumps(text, ensure_ascii=False).encode("utf-8")) == text


@pytest.mark.skipif(os.name == "nt", reason="paths of POSIX")
@pytest.mark.parametrize(
    ("names", "folder"),
    [
        (["/home/ann/birds/a/1.jpg", "/home/ann/birds/b/1.jpg"], "/home/ann/birds/"),
        (["/home/ann/birds/1.jpg"], "/home/ann/birds/"),
        (["/data/birds/1.jpg", "/data/birds2/1.jpg"], "/data/"),
        (["/data/a.zip/1.jpg", "b/1.jpg", "", "s3://bucket/1.jpg"], "/data/a.zip/"),
        (["/data/1.jpg", "/home/1.jpg"], ""),
        (["/1.jpg"], ""),
        (["birds/1.jpg"], ""),
        ([], ""),
    ],
)
def test_the_common_folder_is_that_of_all_absolute_paths(names, folder):
    assert find_common_folder(names) == folder
