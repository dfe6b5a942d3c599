"""A run of several processes: N contiguous shards of the list of images, each an ordinary run in a folder of its own.

The shards are processes of this machine, tasks of a Ray cluster (`ray_tasks`), or were run by hand with `--shard i/n`,
as Kubernetes indexed jobs or SLURM arrays. They lie in `OUT/shards/i-of-n`, where each is resumed like any run. When
all are complete, their records and drawings are joined in `OUT` in the order of the images.

A process that ends during a run is started again. If it ends repeatedly, it predicts the next images one at a time,
which names the image that ends it: that one gets an error record, and the rest of the shard goes on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from opal_deploy.artifact.files import read_json
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.logs import Log
from opal_deploy.predict.setup import LoadedModel
from opal_deploy.records.record import Answered, Record
from opal_deploy.records.run_files import OVERLAYS, RESULTS, SHARDS, SHEETS, SUMMARY, overlay_name, sheet_name
from opal_deploy.remote import download_folder
from opal_deploy.run.directory import RecordWriter, RunConfig, inspect_run_dir, read_records
from opal_deploy.run.options import InferOptions, Interrupt
from opal_deploy.run.summary import Summary
from opal_deploy.runtime.devices import available_cpus, default_workers, split_devices
from opal_deploy.sources.discovery import STDIN
from opal_deploy.timing import StageTime, StageTimer, StageTimes
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool

# crashes until images are predicted one at a time, and how many of them are
_CRASHES_IN_BATCHES, ALONE = 2, 128
# the run ends after so many crashes that no image explains, or images that end a shard's process
_MAX_UNEXPLAINED, _MAX_CRASHED = 5, 20
# records that are joined at a time
_JOINED = 1000
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Recovery:
    """How a shard goes on after its process ended.

    Attributes:
        crashed: how it ended, completing "it ...", by the numbers of images that ended it, which get error records.
        note: file that receives the number of each image before it begins; then images are predicted one at a time,
            and the shard returns after `ALONE` of them.
    """

    crashed: Mapping[int, str] = field(default_factory=dict)
    note: Path | None = None


@dataclass(frozen=True)
class ShardJob:
    """One shard: the arguments of `infer`, and its run directory."""

    images: list[str]
    model: Path
    options: InferOptions
    out: Path

    @property
    def name(self) -> str:
        """The shard as messages name it, such as `shard 2/4`."""
        return f"shard {self.options.shard}"


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, i from 1 to n; raise UsageError for anything else."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])


def shard_dir(out: Path, index: int, count: int) -> Path:
    """Return the run directory of a shard of the run in `out`."""
    return out / SHARDS / f"{index}-of-{count}"


def part_url(url: str, folder: Path) -> str:
    """Return the URL of a shard in the run at `url`."""
    return f"{url.rstrip('/')}/{SHARDS}/{folder.name}"


@dataclass
class ShardedRun:
    """A run whose shards other processes run.

    Attributes:
        images, options: of the call.
        model: the model, which the shards open.
        out, config: the run directory, and the configuration of the run.
        upload_to: URL of the run; where nodes share no storage, each uploads its shards there.
        run_shard: runs a shard in its process, and returns whether it is complete; False: it was interrupted.
        interrupt: stops the shards gracefully on request.
        report: receives the number of records so far.
        devices: the device of each shard; set once a cluster's size is known.
        cpus: CPUs that each shard may keep busy.
        crashes: processes that ended.
    """

    images: list[str]
    options: InferOptions
    model: LoadedModel
    out: Path
    config: RunConfig
    upload_to: str | None
    run_shard: Callable[[ShardJob, Recovery], bool]
    interrupt: Interrupt
    report: Callable[[int], None]
    devices: tuple[str, ...]
    cpus: int = 1
    crashes: int = 0

    @property
    def folders(self) -> list[Path]:
        """The run directories of the shards, in order."""
        count = len(self.devices)
        return [shard_dir(self.out, index, count) for index in range(1, count + 1)]

    def summarize(self) -> dict[str, int]:
        """Return the entry of summary.json."""
        return {"count": len(self.devices), "crashes": self.crashes}

    def find_missing(self) -> list[ShardJob]:
        """Return the shards that are not complete; raise UsageError if one is of another run."""
        options, count, missing = self.options, len(self.devices), []
        for index, (device, folder) in enumerate(zip(self.devices, self.folders, strict=True), 1):
            if self.upload_to is not None and not folder.exists():
                # it may have been run elsewhere
                download_folder(part_url(self.upload_to, folder), folder)
            shard_config = {**self.config, "shard": f"{index}/{count}"}
            shard_config.pop("sign", None)
            if inspect_run_dir(folder, shard_config).state == "finished":
                continue
            shard_options = replace(
                options,
                out=self.out.absolute() if options.ray is None or self.upload_to is None else self.upload_to,
                shard=f"{index}/{count}", shards=None, ray=None, ray_cpus=None, device=device,
                threads=max(1, options.threads // count) if options.threads else self.cpus,
                workers=max(1, options.workers // count) if options.workers else default_workers(self.cpus),
                expect_sha256=self.model.fingerprint["sha256"], sign=None, formats=(), overwrite=False,
                log=_ignore, progress=None, interrupt=None,
            )  # fmt: skip
            missing.append(ShardJob(self.images, self.model.path.resolve(), shard_options, folder))
        return missing


def _ignore(_: str) -> None:
    """Print nothing: all shards would print the same."""


@dataclass
class RecordCounter:
    """Counts the records of shards while these append to them."""

    folders: Sequence[Path]
    _sizes: Counter[Path] = field(default_factory=Counter)
    _records: int = 0

    def count(self) -> int:
        """Return the number of records so far."""
        for path in (folder / RESULTS for folder in self.folders):
            with suppress(OSError), path.open("rb") as stream:
                stream.seek(self._sizes[path])
                while data := stream.read(1 << 20):
                    self._sizes[path] += len(data)
                    self._records += data.count(b"\n")
        return self._records


def plan_shards(images: Sequence[str], options: InferOptions, *, model_is_open: bool) -> tuple[str, ...] | None:
    """Return the device of each shard of a call; None if this process classifies all images.

    There is none yet on a cluster, whose size is not known.

    Raises:
        UsageError: options contradict each other, or an open model.
    """
    if options.ray is None and options.ray_cpus is not None:
        raise UsageError("--ray-cpus without --ray: it is the size of a shard there; give --ray auto or HOST:PORT")
    if options.ray is not None and options.device != "auto":
        raise UsageError(
            f"--device {options.device} with --ray: every shard has one GPU, or with --ray-cpus N that many CPUs; "
            "leave out --device"
        )
    asked = options.ray is not None or (options.shards or 1) > 1
    if options.shard is not None and (asked or options.sign is not None):
        raise UsageError(
            f"--shard {options.shard} runs one shard; --shards, --ray and --sign belong to the call that joins them"
        )
    if STDIN in images and (asked or options.shard is not None):
        raise UsageError("-: every shard reads the list; write it to a file, and give @FILE")
    if asked and model_is_open:
        raise UsageError("model: other processes open it; give the path of the model file")
    if options.ray is not None:
        return ()
    devices = split_devices(options.device)
    alone = options.shard is not None or model_is_open or STDIN in images
    count = 1 if alone else options.shards or len(devices)
    if count == 1:
        return None
    # GPUs in turn: of more processes than GPUs, several share one
    return tuple(devices[number % len(devices)] for number in range(count))


def run_shards(launch: Callable[[ShardedRun], None], run: ShardedRun, timer: StageTimer) -> str:
    """Run all shards that are not complete, and return their runtimes and devices in one line.

    Args:
        launch: `run_here`, or `ray_tasks.run_on_ray`.
        run: the shards.
        timer: receives the times of all shards.

    Raises:
        StoppedEarly, UsageError: a shard raised it, and the others were stopped.
    """
    launch(run)
    if run.upload_to is not None and not run.interrupt.stopped:
        # downloads those that a cluster's nodes uploaded
        run.find_missing()
    runtimes: dict[str, None] = {}
    for folder in run.folders:
        with suppress(OSError, ValueError):
            document = read_json(folder / SUMMARY)
            runtimes[document["runtime"]] = None
            stages = tuple(StageTime(**row) for row in document["time"]["stages"])
            timer.add_times(StageTimes(stages, tuple(document["time"]["waits"].items())))
    return f"{len(run.devices)} shards: {'; '.join(runtimes)}"


def run_here(run: ShardedRun) -> None:
    """Run the shards that are not complete as processes of this machine; see `run_shards`."""
    run.cpus = max(1, available_cpus() // len(run.devices))
    run.options.log(f"{len(run.devices)} shards, each with {run.cpus} of {available_cpus()} CPUs")
    jobs = run.find_missing()
    if not jobs:
        return
    stopping, counter = threading.Event(), RecordCounter(run.folders)

    def supervise(job: ShardJob) -> bool:
        try:
            return supervise_shard(job, pool, run.run_shard, stopping, run.options.log, run)
        except BaseException:
            stopping.set()
            raise

    with WorkerPool(len(jobs)) as pool, ThreadPoolExecutor(len(jobs), "shard") as threads:
        futures = [threads.submit(supervise, job) for job in jobs]
        told = False
        while wait(futures, POLL_SECONDS).not_done:
            run.report(counter.count())
            if run.interrupt.requested:
                stopping.set()
            if stopping.is_set() and not told:
                told = True
                pool.interrupt()
        run.report(counter.count())
    # all of them: the error of one is why the others were stopped
    complete = [future.result() for future in futures]
    run.interrupt.stopped = not all(complete)


def supervise_shard(
    job: ShardJob,
    pool: WorkerPool,
    run_shard: Callable[[ShardJob, Recovery], bool],
    stopping: threading.Event,
    log: Log,
    run: ShardedRun | None = None,
) -> bool:
    """Run a shard in a process of a pool until it is complete, whatever ends the process; return False if stopped.

    Raises:
        StoppedEarly: the process ends again and again.
    """
    crashed: dict[int, str] = {}
    unexplained, note = 0, None
    while not stopping.is_set():
        try:
            if pool.call(run_shard, job, Recovery(crashed, note)):
                return True
        except WorkerCrashed as crash:
            if stopping.is_set():
                break
            if run is not None:
                run.crashes += 1
            number = _read_note(note)
            if number is None:
                unexplained += 1
                log(f"{job.name}: its process {crash}; it is started again")
            else:
                unexplained, crashed[number] = 0, str(crash)
                log(f"{job.name}: its process {crash} with image {number + 1} alone, which gets an error record")
            if unexplained == _MAX_UNEXPLAINED or len(crashed) == _MAX_CRASHED:
                raise StoppedEarly(f"{job.name}: its process {crash}, again and again") from None
        else:
            # the images that were predicted alone are done, and no process ended
            unexplained = 0
        note = job.out / ".begun" if unexplained >= _CRASHES_IN_BATCHES else None
    return False


def _read_note(note: Path | None) -> int | None:
    """Return the number of the image that was begun last, and remove the note; None without one."""
    if note is None:
        return None
    try:
        number = int(note.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    note.unlink()
    return number


def join_shards(run: ShardedRun, summary: Summary, sign: Callable[[Record], Record] | None = None) -> None:
    """Write the records of complete shards to the run directory in order, and move their drawings there.

    It begins anew after an interruption: a drawing may have been moved already.

    Args:
        run: the shards, all of them complete.
        summary: counts the records.
        sign: signs each record; None: none is signed.

    Raises:
        StoppedEarly: the disk is full, or too many images failed.
    """
    numbered = enumerate((shard, record) for shard in run.folders for record in read_records(shard / RESULTS))
    with RecordWriter(run.out / RESULTS) as writer:
        records: list[Record] = []
        for number, (shard, record) in numbered:
            if run.interrupt.requested:
                run.interrupt.stopped = True
                return
            record = _move_record(record, number, shard, run.out)
            records.append(record if sign is None else sign(record))
            summary.count(records[-1])
            if len(records) == _JOINED:
                writer.write(*records)
                records = []
        writer.write(*records)
    summary.check_errors(run.options.max_errors)


def _move_record(record: Record, number: int, shard: Path, out: Path) -> Record:
    """Return a record with its number in the whole run, after moving its drawings."""
    changes: dict[str, Any] = {"image_index": number}
    if isinstance(record, Answered):
        for kind, name, rename in ((OVERLAYS, record.overlay, overlay_name), (SHEETS, record.sheet, sheet_name)):
            if name is None:
                continue
            new = rename(number, record.image)
            changes[kind.removesuffix("s")] = new
            target = out / new
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):
                    (shard / name).replace(target)
            except OSError as error:
                raise StoppedEarly(f"{target}: cannot be written ({error.strerror or error}); make room") from None
    return structs.replace(record, **changes)
