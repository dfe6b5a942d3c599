"""What cannot be exported: one line, the right exit code, and nothing left behind. The commands around an export."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from opal_deploy import cli
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportOptions
from opal_deploy.export.checkpoint_export import export_checkpoint
from opal_deploy.export.graph import ExportGraph, trace
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.head import OpalHead


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str


RunCli = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunCli:
    def run_cli(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["opal-deploy", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        said = capfd.readouterr()
        return Ran(code, said.out, said.err)

    return run_cli


@pytest.fixture(scope="module")
def saved(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c.pt"
    checkpoints.save(path, make_checkpoint("resnet18", size=(32, 64)))
    return path


@pytest.fixture(scope="module")
def exported(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "c.onnx"
    return export_checkpoint(make_checkpoint(), out, ExportOptions(out=out, threads=2)).path


def _is_one_line(ran: Ran) -> bool:
    return ran.stderr.count("\n") == 1 and ran.stderr.startswith("opal-deploy: ") and "Traceback" not in ran.stderr


class TestTooLarge:
    def test_a_network_over_two_gigabytes_is_refused_before_it_is_traced(self, make_checkpoint: Any) -> None:
        network = make_checkpoint(sharp=False).network
        with torch.device("meta"):
            network.head = OpalHead(2048, 60_000, network.config.head)
        with pytest.raises(UsageError, match=r"2\.5 GB of parameters, over ONNX's limit of 2 GB"):
            trace(ExportGraph(network, "uint8", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))

    def test_buffers_count_too(self, make_checkpoint: Any) -> None:
        network = make_checkpoint(sharp=False).network
        network.register_buffer("large", nn.Parameter(torch.empty(1 << 29, device="meta")).detach())
        with pytest.raises(UsageError, match="over ONNX's limit"):
            trace(ExportGraph(network, "uint8", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))


class TestPlaces:
    def test_a_place_that_cannot_be_written_to_is_one_line(self, make_checkpoint: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        out = tmp_path / "file" / "c.onnx"
        with pytest.raises(UsageError, match="cannot be written"):
            export_checkpoint(make_checkpoint(), out, ExportOptions(out=out, threads=2))

    def test_a_folder_of_that_name_is_left_alone(self, make_checkpoint: Any, tmp_path: Path) -> None:
        out = tmp_path / "c.onnx"
        out.mkdir()
        (out / "precious").write_text("")
        with pytest.raises(UsageError, match="cannot be written"):
            export_checkpoint(make_checkpoint(), out, ExportOptions(out=out, threads=2))
        assert [path.name for path in tmp_path.iterdir()] == ["c.onnx"]
        assert (out / "precious").exists()

    def test_another_suffix_is_refused(self, make_checkpoint: Any, tmp_path: Path) -> None:
        out = tmp_path / "c.bin"
        with pytest.raises(UsageError, match=r"ends in \.onnx"):
            export_checkpoint(make_checkpoint(), out, ExportOptions(out=out, threads=2))
        assert list(tmp_path.iterdir()) == []

    def test_too_few_photographs_are_refused(self, make_checkpoint: Any, tmp_path: Path) -> None:
        folder = tmp_path / "pictures"
        folder.mkdir()
        for index in range(9):
            Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(folder / f"{index}.png")
        (folder / "broken.png").write_bytes(b"no picture")
        out = tmp_path / "c.onnx"
        with pytest.raises(UsageError, match="9 readable pictures; verification needs at least 10"):
            export_checkpoint(make_checkpoint(), out, ExportOptions(out=out, pictures=folder, threads=2))


class TestExportCommand:
    def test_a_checkpoint_becomes_a_file_beside_it(self, run: RunCli, saved: Path) -> None:
        ran = run("export", saved, "--json", "--threads", 2)
        assert ran.code == 0, ran.stderr
        document = json.loads(ran.stdout)
        assert document["path"] == str(saved.with_suffix(".onnx"))
        assert document["verification"]["passed"] is True
        assert saved.with_suffix(".onnx").is_file()

    def test_a_missing_file(self, run: RunCli, tmp_path: Path) -> None:
        ran = run("export", tmp_path / "nowhere.pt")
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr
        assert "nowhere.pt: no such file" in ran.stderr

    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".onnx"])
    def test_random_bytes(self, run: RunCli, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"c{suffix}"
        path.write_bytes(random.Random(0).randbytes(5000))
        ran = run("export", path, *(["--precision", "fp16"] if suffix == ".onnx" else []))
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    @pytest.mark.parametrize("suffix", [".bin", ".engine", ""])
    def test_an_unknown_suffix(self, run: RunCli, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"c{suffix}"
        path.write_bytes(b"x")
        ran = run("export", path)
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr

    @pytest.mark.parametrize("lines", ["a\nb\n", "a\nb\nc\nd\ne\n", "a\na\nb\nc\n", ""])
    def test_a_class_names_file_that_does_not_fit(self, run: RunCli, saved: Path, tmp_path: Path, lines: str) -> None:
        names = tmp_path / "names.txt"
        names.write_text(lines)
        out = tmp_path / "c.onnx"
        ran = run("export", saved, "--classes", names, "--out", out)
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr
        assert not out.exists()

    def test_options_for_the_authors_files_are_refused_for_ours(self, run: RunCli, saved: Path, tmp_path: Path) -> None:
        ran = run("export", saved, "--distance", "l1", "--out", tmp_path / "c.onnx")
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr

    def test_a_graph_that_fails_its_gate_exits_with_4(
        self, run: RunCli, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from opal_deploy.export import checkpoint_export

        def faulty(graph: ExportGraph) -> Any:
            model = trace(graph)
            (bias,) = [t for t in model.graph.initializer if t.name.endswith("projection.bias")]
            bias.raw_data = b"\0" * len(bias.raw_data)
            return model

        monkeypatch.setattr(checkpoint_export, "trace", faulty)
        out = tmp_path / "c.onnx"
        ran = run("export", saved, "--out", out, "--threads", 2)
        assert ran.code == 4
        assert ran.stderr.splitlines()[-1].startswith("opal-deploy: c.onnx was not written")
        assert "Traceback" not in ran.stderr
        assert list(tmp_path.iterdir()) == []

    def test_an_onnx_file_of_somebody_elses(self, run: RunCli, tmp_path: Path) -> None:
        import onnx
        from onnx import TensorProto, helper

        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
        model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out]))
        path = tmp_path / "theirs.onnx"
        onnx.save(model, path)
        ran = run("export", path, "--precision", "fp16")
        assert ran.code == 2
        assert "without opal metadata" in ran.stderr
        assert _is_one_line(ran), ran.stderr


class TestVerifyCommand:
    def test_an_intact_file_passes(self, run: RunCli, exported: Path) -> None:
        digest = hashlib.sha256(exported.read_bytes()).hexdigest()
        ran = run("verify", exported, "--device", "cpu", "--threads", 2, "--json", "--expect-sha256", digest.upper())
        assert ran.code == 0, ran.stderr
        document = json.loads(ran.stdout)
        assert (document["passed"], document["images"], document["sha256"]) == (True, 4, digest)

    def test_another_digest_than_expected_is_refused(self, run: RunCli, exported: Path) -> None:
        ran = run("verify", exported, "--expect-sha256", "0" * 64)
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr
        assert "not the file you were told of" in ran.stderr

    def test_a_corrupted_file_is_refused(self, run: RunCli, exported: Path, tmp_path: Path) -> None:
        content = bytearray(exported.read_bytes())
        content[len(content) // 4] ^= 0x10
        path = tmp_path / "c.onnx"
        path.write_bytes(content)
        ran = run("verify", path, "--device", "cpu")
        assert ran.code == 2
        assert _is_one_line(ran), ran.stderr

    def test_a_file_whose_answers_changed_exits_with_4(self, run: RunCli, exported: Path, tmp_path: Path) -> None:
        # edited and sealed again: the digest is right, the answers are not
        import onnx

        from opal_deploy.artifact import onnx_file

        model = onnx.load(exported)
        (bias,) = [t for t in model.graph.initializer if t.name.endswith("projection.bias")]
        bias.raw_data = b"\0" * len(bias.raw_data)
        (entry,) = model.metadata_props
        entry.value = entry.value.replace(onnx_file.read_metadata(exported).file_sha256, "0" * 64)
        path = tmp_path / "c.onnx"
        onnx.save(model, path)
        onnx_file.embed_digest(path)
        ran = run("verify", path, "--device", "cpu")
        assert ran.code == 4
        assert "does not reproduce its own test vectors" in ran.stderr
        assert _is_one_line(ran), ran.stderr


class TestInspectCommand:
    def test_an_export_is_described(self, run: RunCli, exported: Path) -> None:
        ran = run("inspect", exported, "--json")
        assert ran.code == 0, ran.stderr
        document = json.loads(ran.stdout)
        assert (document["kind"], document["intact"], document["opset"]) == ("onnx", True, 20)
        assert document["metadata"]["class_names"][0] == "Sooty Albatross"

    def test_damage_is_shown(self, run: RunCli, exported: Path, tmp_path: Path) -> None:
        content = bytearray(exported.read_bytes())
        content[len(content) // 4] ^= 0x10
        path = tmp_path / "c.onnx"
        path.write_bytes(content)
        ran = run("inspect", path)
        assert "DOES NOT MATCH" in ran.stderr

    def test_a_checkpoint_is_described_without_torch(
        self, run: RunCli, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        ran = run("inspect", saved, "--json")
        assert ran.code == 0, ran.stderr
        document = json.loads(ran.stdout)
        assert document["kind"] == "checkpoint"
        assert document["config"]["backbone"] == "resnet18"
        assert document["tensors"]["head.projection.weight"] == [20, 512, 1, 1]
