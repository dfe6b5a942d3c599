"""Write the folder of static files that `export --web` makes.

    index.html, site.css             the page, which asks no other host for anything
    site.js, model.js, ...           its scripts: the page, the model, and code shared with other pages
    model.onnx, model.json           the graph with its metadata, and everything else that the page needs
    ort/                             ONNX Runtime Web
    examples/                        pictures to try

ONNX Runtime Web is copied from its npm package: its WebAssembly is 14 MB, too much for a Python package, and only files
tested with the page are accepted. `model.json` lists the site's files: only these are replaced later.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import compute_sha256, write_json
from opal_deploy.artifact.heads import MOST_LISTED
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import PER_IMAGE
from opal_deploy.datasets.samples import list_images
from opal_deploy.errors import ArtifactError, ImageError, UsageError
from opal_deploy.predict.setup import fingerprint_model
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.resize import to_display
from opal_deploy.records.build import RECORDED_OUTPUTS
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.runtime.gates import Gate
from opal_deploy.synthetic import example_images
from opal_deploy.synthetic.creatures import MAX_SPECIES, list_species
from opal_deploy.visualization.pages import (
    load_templates,
    read_asset,
    read_class_map_script,
    read_evidence_script,
    read_style,
)

ORT_WEB = "onnxruntime-web@1.30.0"
# that version's files, script first, by execution provider; others were never tried with the page
_ORT_FILES = {
    "wasm": {
        "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
        "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    },
    "webgpu": {
        "ort.webgpu.bundle.min.mjs": "0730816731ce2cdfb06f273da065d4a1c7091eb9d1756a83b2916c8a89d015e2",
        "ort-wasm-simd-threaded.asyncify.wasm": "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
    },
}
_DEFAULT_ORT = Path("node_modules/onnxruntime-web")
_KIND = "opal-web"
_MODEL, _DOCUMENT, _PAGE = "model.onnx", "model.json", "index.html"
_SCRIPTS = ("site.js", "model.js", "onnx.js", "pictures.js", "pixels.js", "worker.js", "crop.js")
_EXAMPLES, _GENERATED = 6, 3


@dataclass(frozen=True)
class Site:
    """The folder to write.

    Attributes:
        folder: new, empty, or with the site of an earlier export; a link to a folder is followed.
        ort_web: the npm package, or its folder `dist`; None: in `node_modules` of the working directory.
        examples: a folder of pictures to try, of which six are taken, from its subfolders in turn. None: generated
            creatures if the model knows these, else no pictures.
        decision: thresholds that mark answers.
        webgpu: include ONNX Runtime's files for WebGPU, which the page prefers where their answers are exact.
        overwrite: replace an earlier site's files; others in the folder stay.
    """

    folder: Path
    ort_web: Path | None = None
    examples: Path | None = None
    decision: Decision = NO_DECISION
    webgpu: bool = False
    overwrite: bool = False

    def check(self) -> None:
        """Raise UsageError unless the folder can be written and every input exists."""
        self._check_folder()
        self._find_ort()
        self._list_examples()

    def _check_folder(self) -> None:
        try:
            others = self.folder.exists() and any(self.folder.iterdir())
        except OSError as error:
            raise self._unwritable(error) from None
        if others and not _read_manifest(self.folder):
            raise UsageError(f"--web {self.folder}: holds files that are no site's; give a new or an empty folder")
        if others and not self.overwrite:
            raise UsageError(f"--web {self.folder}: the site exists; pass --overwrite to replace it")

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"--web {self.folder}: cannot be written ({error.strerror or error}); give another folder")

    def write(self, model: Path) -> WrittenSite:
        """Write the site of an exported ONNX file, which the caller has verified.

        Raises:
            ArtifactError: the file was not exported by opal-deploy, or is damaged.
            UsageError: a browser cannot run and explain it, or the disk refuses the files.
        """
        self._check_folder()
        metadata = onnx_file.read_metadata(model)
        _check_model(model, metadata)
        described = self._describe(model, fingerprint_model(model)["sha256"], metadata)
        try:
            # a link to a folder stays a link
            folder = self.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as staging:
                examples = self._write_files(Path(staging), model, metadata, described)
                size = _replace_files(folder, Path(staging))
        except OSError as error:
            raise self._unwritable(error) from None
        return WrittenSite(self.folder, metadata, size, examples)

    def _write_files(self, folder: Path, model: Path, metadata: Metadata, described: dict[str, Any]) -> int:
        """Write all files, and return the number of pictures to try."""
        (folder / "ort").mkdir()
        for source in self._find_ort():
            shutil.copyfile(source, folder / "ort" / _served_name(source.name))
        shutil.copyfile(model, folder / _MODEL)
        texts = {"evidence.js": read_evidence_script(), "class_map.js": read_class_map_script()}
        texts |= {"site.css": read_style(__package__, "site.css")}
        texts |= {name: read_asset(__package__, name) for name in _SCRIPTS}
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        examples = list(self._write_examples(folder, metadata))
        files = [*_list_files(folder), _PAGE, _DOCUMENT]
        document = json.dumps(described | {"files": files}, allow_nan=False).encode() + b"\n"
        (folder / _DOCUMENT).write_bytes(document)
        page = load_templates(__package__).get_template("site.html.jinja")
        text = page.render(
            model=model.name, classes=metadata.class_names, document=hashlib.sha256(document).hexdigest(),
            slots=metadata.class_map.max_slots, examples=examples, cropped=metadata.crop == "boxes",
            regions=metadata.evidence == "regions",
        )  # fmt: skip
        (folder / _PAGE).write_text(text, encoding="utf-8", errors="backslashreplace")
        return len(examples)

    @property
    def _providers(self) -> tuple[str, ...]:
        return ("wasm", "webgpu") if self.webgpu else ("wasm",)

    def _find_ort(self) -> list[Path]:
        """Return the files of ONNX Runtime Web; UsageError if they are missing or differ from the tested ones."""
        root = self.ort_web or _DEFAULT_ORT
        paths = []
        wanted = {name: sha256 for provider in self._providers for name, sha256 in _ORT_FILES[provider].items()}
        for name, sha256 in wanted.items():
            path = next((path for path in (root / name, root / "dist" / name) if path.is_file()), None)
            if path is None or compute_sha256(path) != sha256:
                place = f"--ort-web {root}" if self.ort_web else f"--web: {root}"
                advice = f"npm install {ORT_WEB}, then give --ort-web {_DEFAULT_ORT}"
                raise UsageError(f"{place}: no {name} of {ORT_WEB}; get it with: {advice}")
            paths.append(path)
        return paths

    def _list_examples(self) -> list[Path]:
        """Return the pictures of `examples` to show, from its subfolders in turn."""
        if self.examples is None:
            return []
        if not (pictures := list_images(self.examples)):
            raise UsageError(f"--examples {self.examples}: no pictures there; expected JPEG or PNG files")
        folders = groupby(pictures, key=lambda path: path.parent)
        turns = zip_longest(*(list(islice(group, _EXAMPLES)) for _, group in islice(folders, _EXAMPLES)))
        return [path for turn in turns for path in turn if path is not None][:_EXAMPLES]

    def _write_examples(self, folder: Path, metadata: Metadata) -> Iterator[tuple[str, str]]:
        """Write pictures to try, upright and no larger than a screen; yield their paths and descriptions."""
        shown: list[tuple[str, Image.Image]] = []
        for number, path in enumerate(self._list_examples(), 1):
            try:
                shown.append((f"example {number}", to_display(decode(path).convert("RGB"))))
            except ImageError as error:
                raise UsageError(f"--examples {path}: {error}; remove what is not a picture") from None
        if not shown and {species.name for species in list_species(MAX_SPECIES)}.issuperset(metadata.class_names):
            images = example_images(_GENERATED, 320, 320)
            shown = [(f"generated creature {i}", Image.fromarray(image)) for i, image in enumerate(images, 1)]
        (folder / "examples").mkdir()
        for number, (text, picture) in enumerate(shown, 1):
            name = f"examples/{number}.{'png' if text.startswith('generated') else 'jpg'}"
            picture.save(folder / name, quality=92)
            yield name, text

    def _describe(self, path: Path, digest: str, metadata: Metadata) -> dict[str, Any]:
        """Return the content of model.json, without the list of files."""
        patches = metadata.known_patches
        return {
            "kind": _KIND,
            "source": path.name,
            "model_sha256": digest,
            "gate": Gate.of_model(metadata).to_dict(),
            "temperature": metadata.temperature,
            "per_image": [name for name in PER_IMAGE if metadata.has_output(name)],
            "recorded_outputs": RECORDED_OUTPUTS,
            "most_listed": MOST_LISTED,
            "decision": self.decision.resolve(path, metadata).to_rules(),
            "runtimes": {
                provider: dict(zip(("script", "wasm"), map(_served_name, _ORT_FILES[provider]), strict=True))
                for provider in self._providers
            },
            "reach": metadata.reach,
            "patches": [patches.to_page(class_id) if patches else {} for class_id in range(metadata.num_classes)],
            "class_map": metadata.class_map.to_dict(),
        }


@dataclass(frozen=True)
class WrittenSite:
    """A site that was written, the metadata of its model, its size in bytes, and its number of pictures to try."""

    folder: Path
    metadata: Metadata
    size: int
    examples: int

    def to_dict(self) -> dict[str, Any]:
        """Return the folder and the size for JSON."""
        return {"site": str(self.folder), "bytes": self.size}


def _list_files(folder: Path) -> list[str]:
    """Return the paths of the files below a folder, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _read_manifest(folder: Path) -> list[str]:
    """Return the files that a site lists as its own; none for a folder that is not a site."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads((folder / _DOCUMENT).read_text("utf-8"))
        files = [str(file) for file in document["files"]]
        if document["kind"] == _KIND and not any(
            PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts for file in files
        ):
            return files
    return []


def _replace_files(folder: Path, new: Path) -> int:
    """Move the files of a new site into a folder, in place of an earlier site's, and return their size.

    Other files stay. While files are missing or mixed, the page detects that its model.json is from another export.

    Raises:
        UsageError: another file is in the way; nothing was changed.
    """
    before, files = _read_manifest(folder), _list_files(new)
    for file in files:
        if file not in before and os.path.lexists(folder / file):
            raise UsageError(f"{folder / file}: not of the site, which needs its name; move it, or give a new folder")
    size = sum((new / file).stat().st_size for file in files)
    document = json.loads((new / _DOCUMENT).read_text("utf-8"))
    # lists every file of both sites, even while they are moved
    write_json(folder / _DOCUMENT, document | {"files": [*files, *before]})
    for file in set(before) - {*files}:
        (folder / file).unlink(missing_ok=True)
    # the list of files comes last
    for file in sorted(files, key=lambda file: file == _DOCUMENT):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(new / file, folder / file)
    return size


def _check_model(path: Path, metadata: Metadata) -> None:
    wanted = {
        "evidence exact or regions": metadata.evidence in ("exact", "regions"),
        "distance l2": metadata.distance == "l2" or not metadata.is_opal,
        "precision fp32": metadata.precision == "fp32",
        "images of one size": metadata.input_kind != "image",
        "all classes as outputs": metadata.top_k is None,
    }
    if missing := [name for name, has in wanted.items() if not has]:
        raise UsageError(f"{path}: --web needs a model with {', '.join(missing)}, and this has not; export it so")
    if not metadata.test_vectors:
        raise ArtifactError(f"{path}: has no test vectors, which the page needs to check the browser; export it again")


def _served_name(name: str) -> str:
    # some web servers do not know .mjs, and browsers run no script of an unknown type
    return name.replace(".mjs", ".js")
