"""The model on a node: one copy for all actors, the right bytes, and nothing left behind."""

import threading
from contextlib import ExitStack

import pytest

from opal_deploy.cluster.actor import compute_digests, local_model
from opal_deploy.errors import ArtifactError

FILES = {"m.engine": b"plan" * 1000, "m.engine.json": b"{}"}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_actors_of_a_node_share_one_copy_which_the_last_one_removes(temporary):
    fetched = []

    def fetch():
        fetched.append(threading.get_ident())
        return FILES

    with ExitStack() as one:
        path = one.enter_context(local_model(compute_digests(FILES), fetch))
        assert {file.name: file.read_bytes() for file in path.parent.iterdir() if file.name in FILES} == FILES
        with local_model(compute_digests(FILES), fetch) as other:
            assert other == path
            one.close()
            assert other.is_file()
    assert len(fetched) == 1
    assert not list(temporary.glob("opal-deploy-*/*"))


def test_other_bytes_are_refused(temporary):
    changed = {**FILES, "m.engine": b"another"}
    with (
        pytest.raises(ArtifactError, match=r"m\.engine: sha256 .* expected"),
        local_model(compute_digests(FILES), lambda: changed),
    ):
        pass


def test_what_a_killed_actor_left_is_removed_and_a_damaged_copy_written_again(temporary):
    with local_model(compute_digests(FILES), lambda: FILES) as path:
        root, name = path.parent.parent, path.parent.name
    (root / "of-a-killed-actor").mkdir()
    (root / name).mkdir()
    (root / name / "m.engine").write_bytes(b"half")
    with local_model(compute_digests(FILES), lambda: FILES) as path:
        assert path.read_bytes() == FILES["m.engine"]
        assert [folder.name for folder in root.iterdir()] == [name]
