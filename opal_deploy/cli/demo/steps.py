"""The steps of a demo: commands and drawn data, each done once, so that an interrupted demo goes on where it was."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from opal_deploy.artifact.files import read_json, write_json
from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, install_command, is_installed

MARKER = "demo.json"


@dataclass(frozen=True)
class Training:
    """The settings of a demo's training.

    Attributes:
        size: side of the input in pixels.
        prototypes: slots per class.
        weights: file of the backbone's initial weights; None: random ones.
    """

    backbone: str
    size: int
    prototypes: int
    batch_size: int
    lr: float
    epochs: int
    train_per_class: int
    seed: int = 0
    weights: str | None = None

    def to_arguments(self) -> list[object]:
        """Return the options of `opal-deploy train`, but its --out."""
        return [
            "--backbone", self.backbone, "--weights", self.weights or "none", "--stride", 8,
            "--prototypes", self.prototypes, "--size", self.size, "--epochs", self.epochs,
            "--batch-size", self.batch_size, "--lr", f"{self.lr:g}", "--schedule", "cosine", "--augment", "none",
            "--seed", self.seed, "--device", "cpu",
        ]  # fmt: skip


@dataclass
class Demo:
    """A demo's folder, and the call that its commands run in.

    Attributes:
        context: the call of `opal-deploy demo`.
        options: the options that another call must repeat to continue in the same folder; values as in JSON.
        seconds: spent on complete steps, in earlier calls too.
        done: the complete steps, as printed.
        figures: what was measured.
    """

    context: typer.Context
    out: Path
    options: dict[str, Any]
    seconds: float = 0.0
    done: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def open(context: typer.Context, out: Path, options: dict[str, Any], *, overwrite: bool) -> Demo:
        """Return a new demo in an empty folder, or the one of the same options that the folder holds.

        Raises:
            UsageError: the folder holds something else, or cannot be written.
        """
        demo = Demo(context, out, options)
        try:
            occupied = out.is_dir() and any(out.iterdir())
        except OSError as error:
            raise UsageError(f"{out}: cannot be read ({error.strerror or error}); choose another --out") from None
        if occupied:
            earlier = read_marker(out)
            if earlier is None:
                raise UsageError(
                    f"{out}: it is not empty and holds no demo, so nothing there is removed; choose another --out"
                )
            if overwrite:
                shutil.rmtree(out)
            elif earlier.get("options") != options:
                raise UsageError(f"{out}: holds a demo of other options; choose another --out, or give --overwrite")
            else:
                demo.seconds, demo.done, demo.figures = earlier["seconds"], earlier["done"], earlier["figures"]
                print_message(f"Going on with the demo in {out}: {len(demo.done)} steps are complete")
        demo.save()
        return demo

    def save(self, **figures: Any) -> None:
        """Write demo.json with the complete steps, and with more figures."""
        self.figures |= figures
        document = {"options": self.options, "seconds": self.seconds, "done": self.done, "figures": self.figures}
        write_json(self.out / MARKER, document)

    def draw(self, folder: Path, **settings: Any) -> None:
        """Draw a data set, with the settings of `generate_dataset`."""
        from opal_deploy.synthetic import generate_dataset

        print_message(f"Drawing creatures into {folder}")

        def draw() -> None:
            with progress("drawing") as advance:
                dataset = generate_dataset(folder, **settings, progress=advance)
            print_message(f"{sum(dataset.images.values())} images of {len(dataset.classes)} species")

        self._do(f"draw {folder}", draw, [folder])

    def run(self, *arguments: object, stdout: Path | None = None, replaces: Sequence[Path] = ()) -> None:
        """Print a command as typed in a shell, and run it in this process unless it is complete.

        Args:
            stdout: file to write what the command prints on stdout to.
            replaces: leftovers of an interrupted call, files or folders, which the command would refuse.

        Raises:
            typer.Exit: the command ended with an exit code other than 0.
        """
        name, *rest = map(str, arguments)
        redirection = "" if stdout is None else f" > {shlex.quote(str(stdout))}"
        typed = f"opal-deploy {shlex.join([name, *rest])}{redirection}"
        print_message(f"\n$ {typed}")
        self._do(typed, lambda: self._call(name, rest, stdout), replaces)

    def _do(self, name: str, work: Callable[[], None], replaces: Sequence[Path]) -> None:
        if name in self.done:
            print_message("complete")
            return
        for path in replaces:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        started = time.perf_counter()
        work()
        self.seconds += time.perf_counter() - started
        self.done.append(name)
        self.save()

    def _call(self, name: str, arguments: list[str], stdout: Path | None) -> None:
        # the root of the call that is running: its commands parse as they do when typed
        command = self.context.find_root().command.commands[name]  # type: ignore[attr-defined]
        argv = sys.argv
        # a command's hint how to resume it repeats what was typed
        sys.argv = [argv[0], name, *arguments]
        try:
            with ExitStack() as stack:
                if stdout is not None:
                    stack.enter_context(redirect_stdout(stack.enter_context(stdout.open("w", encoding="utf-8"))))
                code = command.main(arguments, prog_name=f"opal-deploy {name}", standalone_mode=False)
        finally:
            sys.argv = argv
        if code:
            raise typer.Exit(code)


def print_own_folder() -> None:
    """Print the command that trains on the user's own photographs."""
    needs = "" if is_installed("torch") else f" (training needs: {install_command('all-cpu')})"
    print_message(f"\nNow your own folder, photos/<class>/*.jpg{needs}:")
    print_message("  opal-deploy train photos/ --out runs/mine")


def read_marker(out: Path) -> dict[str, Any] | None:
    """Return the document of a folder's demo.json; None without one."""
    try:
        document = read_json(out / MARKER)
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
