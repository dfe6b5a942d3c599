"""The public `run_inference`, which `opal-deploy infer` calls."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from opal_deploy.cluster.connection import ActorPlan, check_ray_options
from opal_deploy.cluster.process import open_driver
from opal_deploy.errors import OpalError, StoppedEarly, UsageError
from opal_deploy.logs import as_progress
from opal_deploy.options import StrPath, keywords, to_arguments
from opal_deploy.parallel.backend import ProcessPlan, open_processes, plan_processes
from opal_deploy.predict.decode_budget import raise_pillow_limit
from opal_deploy.predict.executor import fewer_collections
from opal_deploy.predict.setup import LoadedModel, check_model, describe_model, load_model
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.records.decision import Decision
from opal_deploy.records.run_files import OVERLAYS, REPORT, RESULTS, SHEETS, SUMMARY
from opal_deploy.records.signatures import Signer
from opal_deploy.records.tables import TABLES, Format, check_formats
from opal_deploy.run.bucket import acquire_bucket_run_dir
from opal_deploy.run.directory import DEFAULT_OUT, IMAGES, RunDirectory, acquire_run_dir
from opal_deploy.run.drawing import ReportOptions, list_evidence, report_facts, report_title
from opal_deploy.run.inputs import Inputs
from opal_deploy.run.interrupt import Interrupt
from opal_deploy.run.options import InferOptions
from opal_deploy.run.run import Backend, LocalBackend, RunOptions, run
from opal_deploy.run.sheets import SheetSetup, prepare_sheets
from opal_deploy.run.summary import Accuracy, ErrorLimit, Summary
from opal_deploy.runtime.devices import default_workers
from opal_deploy.sources.items import Skipped
from opal_deploy.storage.buckets import check_output
from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.urls import is_url, redact

if TYPE_CHECKING:
    from opal_deploy.api.model import Model


@dataclass(frozen=True)
class InferenceRun:
    """A complete run.

    Attributes:
        out: the run directory; a URL if it is in a bucket.
        summary: the document of summary.json: counts, accuracy, times, model and command.
        lines: what the command prints about the run.
    """

    out: Path | str
    summary: dict[str, Any] = field(repr=False)
    lines: tuple[str, ...] = field(default=(), repr=False)
    _files: frozenset[str] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        """Return the number of images and the folder, and then what the command prints about the run."""
        return "\n".join([f"run of {sum(self.counts.values()):,} images in {self.out}", *self.lines])

    @property
    def records(self) -> Path | str:
        """The file with one record per image, in input order."""
        return self._path(RESULTS)

    @property
    def report(self) -> Path | str | None:
        """The HTML page; None without `explain`."""
        return self._path(REPORT) if REPORT in self._files else None

    @property
    def overlays(self) -> Path | str | None:
        """The folder of overlays; None without `explain`. Each record names its own in `overlay`."""
        return self._path(OVERLAYS) if REPORT in self._files else None

    @property
    def sheets(self) -> Path | str | None:
        """The folder of evidence sheets; None without `sheets`. Each record names its own in `sheet`."""
        return self._path(SHEETS) if SHEETS in self._files else None

    @property
    def tables(self) -> tuple[Path | str, ...]:
        """The files of `formats`."""
        return tuple(self._path(name) for name in TABLES.values() if name in self._files)

    @property
    def counts(self) -> dict[str, int]:
        """Number of images by status: `ok`, `abstained`, `unknown`, `error`."""
        return dict(self.summary["statuses"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy against `labels`; None without labels."""
        return None if self.summary["accuracy"] is None else self.summary["accuracy"]["accuracy"]

    def _path(self, name: str) -> Path | str:
        return self.out / name if isinstance(self.out, Path) else f"{self.out}/{name}"


@keywords(InferOptions)
def run_inference(
    images: StrPath | Sequence[StrPath], model: StrPath | Model | None, options: InferOptions
) -> InferenceRun:
    """Classify images and explain the predictions, and write a run directory, as `opal-deploy infer` does.

    The run directory holds results.jsonl with one record per image, and summary.json. Prints nothing. A run that ended
    early, by an exception, KeyboardInterrupt or a killed process, resumes when the same call is made again. A complete
    run is returned without computing it again.

    Args:
        images: folders (with subfolders), files, globs, tar and zip archives, or URLs of them (s3://, gs://, az://,
            https://); `-` or `@FILE` for a list; with `every` also videos.
        model: an exported model, a checkpoint, or what `load` returned; None: the one that the command finds.
        options: see the keywords.

    Raises:
        UsageError: an input or an option is wrong, or `out` holds another run.
        ArtifactError: the model does not exist or is damaged.
        StoppedEarly: the disk is full, a device was lost, or more than `max_errors` images failed.
        MissingExtra: an extra is not installed. KeyboardInterrupt: the run was interrupted.
    """
    with ExitStack() as stack:
        job = _prepare(images, model, options, stack)
        with job.open_directory() as directory:
            if directory.state == "finished":
                return job.complete(directory)
            if job.out is None and job.remote is None and directory.root != Path(DEFAULT_OUT):
                options.log(f"{DEFAULT_OUT} holds another run; this one writes to {directory.root}")
            return job.run(directory)


def _prepare(
    images: StrPath | Sequence[StrPath], model: StrPath | Model | None, options: InferOptions, stack: ExitStack
) -> _Job:
    """Check the call, open the model and find the first image; nothing is written."""
    # everything is checked before the model is loaded
    texts = [os.fspath(image) for image in ([images] if isinstance(images, str | os.PathLike) else images)]
    inputs = Inputs.read(texts, options)
    tables = check_formats(options.formats)
    max_errors = None if options.max_errors is None else ErrorLimit.parse(str(options.max_errors))
    out, remote = _parse_out(options)
    check_ray_options(options)
    signer = None if options.sign is None else Signer(options.sign, options.log)
    is_open = _is_open(model)
    processes = plan_processes(options, model_is_open=is_open)
    raise_pillow_limit(options.max_pixels)

    driver = None
    if options.ray is not None:
        driver = stack.enter_context(open_driver(options.ray, options.ray_cpus, options.log))
    plan = None if driver is None else driver.cluster.plan
    loaded = _open_model(model, plan or processes, options)
    path, metadata = loaded.path, loaded.metadata
    check_model(
        path, metadata, explain=options.explain, boxed=inputs.boxes is not None, top=options.top, log=options.log
    )
    decision = Decision.of(options).resolve(path, metadata, options.log)
    sheets = prepare_sheets(loaded, options, decision)
    backend: Backend
    if driver is not None:
        from opal_deploy.cluster.backend import RayBackend

        backend = RayBackend(driver, loaded, options)
        workers = options.workers or default_workers(driver.cluster.plan.cpus)
    elif processes is not None:
        backend = stack.enter_context(open_processes(loaded, processes, options))
        workers = processes.count_workers(options.workers)
    else:
        backend, workers = LocalBackend(sheets.sessions), options.workers or default_workers()
    inference = InferenceOptions(
        batch=options.batch or backend.default_batch,
        fixed_batch=True,
        workers=workers,
        max_pixels=options.max_pixels,
        decode=Decoding(options.decode),
        isolate=options.isolate,
        decode_timeout=options.decode_timeout or None,
        top=options.top,
        decision=decision,
        model_sha256=loaded.fingerprint["sha256"],
        slot_names=sheets.slot_names,
    )
    command = ["opal-deploy", "infer", *texts, *(["--model", str(path)] if model else [])]
    return _Job(options, inputs, loaded, sheets, backend, inference, tables, max_errors, out, remote, command, signer)


@dataclass
class _Job:
    """A checked call, with everything that its run needs."""

    options: InferOptions
    inputs: Inputs
    loaded: LoadedModel
    sheets: SheetSetup
    backend: Backend
    inference: InferenceOptions
    tables: tuple[Format, ...]
    max_errors: ErrorLimit | None
    out: Path | None
    remote: RemoteFile | None
    command: list[str]
    signer: Signer | None

    def __post_init__(self) -> None:
        self.skipped = Skipped()
        # raises if there is no image
        self.images = self.inputs.find_images(self.skipped)

    def open_directory(self) -> AbstractContextManager[RunDirectory]:
        """Acquire the run directory, on this machine's disk or in a bucket."""
        config, resume, overwrite = self._config(), self.options.resume, self.options.overwrite
        if self.remote is not None:
            return acquire_bucket_run_dir(self.remote, config, resume=resume, overwrite=overwrite)
        return acquire_run_dir(self.out, config, resume=resume, overwrite=overwrite)

    def _config(self) -> dict[str, Any]:
        """Return the options that determine records and drawings; only a run with equal ones is resumed."""
        inputs, options = self.inputs, self.options
        return {
            IMAGES: list(map(redact, inputs.images)),
            "model": self.loaded.fingerprint,
            "explain": options.explain,
            "boxes": None if inputs.boxes is None else inputs.boxes.identity,
            "labels": None if inputs.labels is None else inputs.labels.identity,
            **self.inference.decision.limits,
            "top": options.top,
            "max_pixels": options.max_pixels,
            "decode": options.decode,
            "shard": "{}/{}".format(*inputs.shard) if inputs.shard[1] > 1 else None,
            "recursive": options.recursive,
            **self.sheets.config,
            **({"every": str(inputs.video.sampling)} if inputs.video.sampling is not None else {}),
            **({"sign": self.signer.fingerprint} if self.signer is not None else {}),
        }

    def complete(self, directory: RunDirectory) -> InferenceRun:
        """Return a run that is complete already, and write any of its tables that are missing."""
        document, log = directory.read_summary(), self.options.log
        log(
            f"{directory.location}: this run is finished ({document['images']} images, ended {document['ended']}); "
            "--overwrite computes it again"
        )
        for kind in self.tables:
            if not directory.has(TABLES[kind]):
                directory.write_table(kind)
                log(f"Table: {directory.location}/{TABLES[kind]}")
        return self._result(directory, document, (f"Summary: {directory.location}/{SUMMARY}",))

    def run(self, directory: RunDirectory) -> InferenceRun:
        """Run, and write summary.json even if the run ends early."""
        options, log, backend = self.options, self.options.log, self.backend
        doing = "Explaining" if options.explain else "Classifying"
        log(f"{doing} with {self.loaded.path} in {backend.description}, batches of {self.inference.batch}")
        run_options = RunOptions(
            directory.root,
            self.inference,
            report=self._plan_report() if options.explain else None,
            sheets=self.sheets.builder,
            formats=self.tables,
            max_errors=self.max_errors,
            resume=directory.state == "unfinished",
            remote=self.remote,
            log=log,
        )
        summary, interrupt, counter = Summary(), options.interrupt or Interrupt(), self.inputs.counter()
        if self.inputs.labels is not None:
            summary.accuracy = Accuracy(frozenset(self.loaded.metadata.class_names))
        report = as_progress(options.progress)

        def report_progress(summary: Summary) -> None:
            failed = summary.statuses["error"]
            note = [backend.describe_progress(), f"{failed} failed" if failed else ""]
            report(summary.total, counter.total, "; ".join(filter(None, note)))
            directory.save_progress()

        metadata = self.loaded.metadata
        if metadata.evidence == "exact":
            # what `drift` needs of the model to read the records
            layout = {"slots": metadata.prototypes_per_class, "grid": list(metadata.grid)}
            layout |= {"classes": metadata.num_classes, "dropped": list(metadata.dropped)}
            directory.details["layout"] = layout
        directory.write_config()
        try:
            # the total is reported before the first batch is done
            with fewer_collections(), counter.notify(lambda total: report(summary.total, total, "")):
                run(
                    self.images, backend, run_options, summary=summary, interrupt=interrupt, report=report_progress,
                    sign=None if self.signer is None else partial(self.signer.sign, run=directory.run_id),
                )  # fmt: skip
            if interrupt.stopped:
                raise KeyboardInterrupt
            if summary.accuracy is not None:
                summary.accuracy.unused_rows = self.inputs.unused_labels()
            document = self._write_summary(directory, summary)
        except KeyboardInterrupt:
            self._write_early_summary(directory, summary, "interrupted")
            log(f"Interrupted: {summary.total} records are in {directory.location}; {self._resume_hint()}")
            raise
        except StoppedEarly as error:
            self._write_early_summary(directory, summary, str(error))
            raise StoppedEarly(f"{error}; {self._resume_hint()}") from None
        lines = (*summary.describe(backend.describe_progress()), *self.skipped.describe(), *self._describe_evidence())
        return self._result(directory, document, lines)

    def _result(self, directory: RunDirectory, document: dict[str, Any], lines: tuple[str, ...]) -> InferenceRun:
        files = {
            RESULTS: "Records",
            **{TABLES[kind]: "Table" for kind in self.tables},
            **({SHEETS: "Sheets"} if self.sheets.builder is not None else {}),
            **({REPORT: "Report"} if self.options.explain else {}),
        }
        if directory.state != "finished":
            lines += tuple(f"{title}: {directory.location}/{name}" for name, title in files.items())
        out = directory.root if self.remote is None else str(self.remote)
        return InferenceRun(out, document, lines, frozenset(files))

    def _describe_evidence(self) -> Iterator[str]:
        """Yield lines on the measured quality of the model's evidence; none without `explain`."""
        rows = list_evidence(self.loaded.path, self.loaded.metadata) if self.options.explain else ()
        if rows:
            yield "Evidence:"
        for name, value in rows:
            yield f"  {name + ':':<18}{value}"

    def _plan_report(self) -> ReportOptions:
        path, metadata, options = self.loaded.path, self.loaded.metadata, self.options
        # the report may be passed on, and its reader has the model elsewhere
        evidence = list_evidence(Path(path.name), metadata)
        facts = report_facts(path, metadata, self.backend.description, self._format_command(short=True))
        return ReportOptions(
            facts, options.report_limit, options.report_images, evidence, metadata.effective_field,
            options.receptive_field, report_title(self.inputs.images, path), frozenset(metadata.class_names),
        )  # fmt: skip

    def _context(self) -> dict[str, Any]:
        """Return what summary.json holds besides its counts."""
        runtime = {"runtime": self.backend.description, **self.backend.summarize()}
        return {"model": self.loaded.fingerprint, **runtime, "command": self._format_command(short=True)}

    def _write_summary(self, directory: RunDirectory, summary: Summary, stopped: str | None = None) -> dict[str, Any]:
        """Sign run.json if asked to, and write summary.json; `stopped` is why the run ended early."""
        if self.signer is not None:
            directory.sign_config(summary, self.signer, complete=stopped is None)
        return directory.write_summary(summary, self._context(), stopped)

    def _write_early_summary(self, directory: RunDirectory, summary: Summary, stopped: str) -> None:
        """Write summary.json of a run that ended early, if the disk has space for it."""
        with contextlib.suppress(OpalError):
            self._write_summary(directory, summary, stopped)

    def _resume_hint(self) -> str:
        """Return how to resume the run: with the same command, unless that would begin a new run."""
        restarts = self.options.overwrite or not self.options.resume
        command = self._format_command(replace(self.options, overwrite=False, resume=True))
        return f"resume with: {command}" if restarts else f"the same command resumes: {command}"

    def _format_command(self, options: InferOptions | None = None, *, short: bool = False) -> str:
        """Return the shell command for this run; `short`: absolute paths as their last part, without folders."""
        arguments = [*self.command, *to_arguments(options or self.options)]
        if short:
            arguments = [Path(argument).name if os.path.isabs(argument) else argument for argument in arguments]
        return redact(shlex.join(arguments))


def _parse_out(options: InferOptions) -> tuple[Path | None, RemoteFile | None]:
    """Return the run directory as a path, or as a writable URL; None for both if none was given."""
    if options.out is None:
        if options.overwrite:
            raise UsageError("--overwrite without --out: give the folder whose run is to be replaced")
        return None, None
    out = os.fspath(options.out)
    return (None, check_output(out)) if is_url(out) else (Path(out), None)


def _is_open(model: StrPath | Model | None) -> TypeGuard[Model]:
    """Return whether this is a loaded model, which has a path, too."""
    return hasattr(model, "sessions")


def _open_model(
    model: StrPath | Model | None, plan: ActorPlan | ProcessPlan | None, options: InferOptions
) -> LoadedModel:
    """Open a model; if a cluster's actors or other processes open it, only read its metadata."""
    if _is_open(model):
        if model.path is None or model.sha256 is None or plan is not None:
            raise UsageError("model: an open model has no file, or other processes open it; give the path of a file")
        fingerprint = {"file": model.path.name, "sha256": model.sha256}
        return LoadedModel(model.path, model.sessions, fingerprint, model.metadata)
    path = None if model is None else Path(model)
    if plan is None:
        return load_model(
            path, device=options.device, threads=options.threads, cuda_graphs=options.cuda_graphs,
            expect_sha256=options.expect_sha256, runtime=options.runtime, log=options.log,
        )  # fmt: skip
    device = options.device
    if isinstance(plan, ActorPlan):
        device = "auto" if plan.gpus else "cpu"
    return describe_model(
        path, device=device, expect_sha256=options.expect_sha256, runtime=options.runtime, log=options.log
    )
