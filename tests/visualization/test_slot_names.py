import pytest

from opal_deploy.errors import UsageError
from opal_deploy.visualization.slot_names import read_slot_names

CLASSES = ("ash", "birch", "oak")


def names_file(tmp_path, text):
    path = tmp_path / "names.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_names_are_read_by_class_and_slot(tmp_path):
    names = read_slot_names(names_file(tmp_path, '[oak]\n0 = "leaf"\n2 = " bark "\n["ash"]\n1 = "bud"\n'), CLASSES, 3)
    assert [names.name(2, 0), names.name(2, 2), names.name(0, 1), names.name(0, 0)] == ["leaf", "bark", "bud", None]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[oka]\n0 = 'x'", "did you mean 'oak'"),
        ("[oak]\n3 = 'x'", "no slot '3'; expected 0 to 2"),
        ("[oak]\nleaf = 'x'", "no slot 'leaf'"),
        ("[oak]\n0 = 7", "not a text"),
        ("[oak]\n0 = ''", "not a text"),
        ("oak = 'x'", "expected a table"),
        ("[oak", "not TOML"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(tmp_path, text, complaint):
    with pytest.raises(UsageError, match=complaint) as error:
        read_slot_names(names_file(tmp_path, text), CLASSES, 3)
    assert "\n" not in str(error.value)
