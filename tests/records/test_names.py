"""Names of images as text that any JSON reader accepts, and names of slots."""

import json
import os
import random

import pytest

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.errors import UsageError
from opal_deploy.records.names import escape_name, find_common_folder, read_slot_names, unescape_name


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("für.jpg".encode(), "für.jpg"),
        (b"a\xff.jpg", "a\\xff.jpg"),
        (b"a\\xff.jpg", "a\\\\xff.jpg"),
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
        (["/data/birds/1.jpg", "/data/birds2/1.jpg"], "/data/"),
        (["/data/a.zip/1.jpg", "b/1.jpg", "", "s3://bucket/1.jpg"], "/data/a.zip/"),
        (["/data/1.jpg", "/home/1.jpg"], ""),
        (["birds/1.jpg"], ""),
        ([], ""),
    ],
)
def test_the_common_folder_is_that_of_all_absolute_paths(names, folder):
    assert find_common_folder(names) == folder


CLASSES = ("ash", "birch", "oak")
MAP = ClassMap.blocks(len(CLASSES), 3)


def names_file(tmp_path, text):
    path = tmp_path / "names.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_names_are_read_by_class_and_slot(tmp_path):
    names = read_slot_names(names_file(tmp_path, '[oak]\n0 = "leaf"\n2 = " bark "\n["ash"]\n1 = "bud"\n'), CLASSES, MAP)
    assert names == {(2, 0): "leaf", (2, 2): "bark", (0, 1): "bud"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[oka]\n0 = 'x'", "did you mean oak"),
        ("[oak]\n3 = 'x'", "no slot '3'; expected 0 to 2"),
        ("[oak]\n0 = 7", "expected a name of 1 to 100"),
        ("oak = 'x'", "not a table"),
        ("[oak", "not TOML"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(tmp_path, text, complaint):
    with pytest.raises(UsageError, match=rf"\A.*{complaint}.*\Z"):
        read_slot_names(names_file(tmp_path, text), CLASSES, MAP)
