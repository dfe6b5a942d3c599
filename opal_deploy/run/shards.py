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
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from opal_deploy.artifact.files import read_json
from opal_deploy.errors import StoppedEarly
from opal_deploy.logs import Log, log_line
from opal_deploy.records.record import Answered, Record
from opal_deploy.records.run_files import RESULTS, SUMMARY, overlay_name
from opal_deploy.remote import download_folder
from opal_deploy.run.directory import RecordWriter, inspect_run_dir, read_records
from opal_deploy.run.options import InferOptions, Interrupt, handle_signals
from opal_deploy.run.setup import RunSetup, part_url, shard_dir
from opal_deploy.run.summary import Summary
from opal_deploy.runtime.devices import available_cpus, default_workers
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool

# crashes until images are predicted one at a time, and how many of them are
_CRASHES_IN_BATCHES, _ALONE = 2, 128
# the run ends after so many crashes that no image explains, or images that end a shard's process
_MAX_UNEXPLAINED, _MAX_CRASHED = 5, 20
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Recovery:
    """How a shard goes on after its process ended.

    Attributes:
        crashed: how it ended, completing "it ...", by the numbers of images that ended it, which get error records.
        note: file that receives the number of each image before it begins; then images are predicted one at a time,
            and the shard returns after `_ALONE` of them.
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


@dataclass
class ShardedRun:
    """A run whose shards other processes run.

    Attributes:
        setup: of the whole call; `upload_to` is where nodes without shared storage upload their shards.
        interrupt: stops the shards gracefully on request.
        report: receives the number of records so far.
        devices: the device of each shard; set once a cluster's size is known.
        cpus: CPUs that each shard may keep busy.
    """

    setup: RunSetup
    interrupt: Interrupt
    report: Callable[[int], None]
    devices: tuple[str, ...]
    cpus: int = 1
    _sizes: Counter[Path] = field(default_factory=Counter)
    _records: int = 0

    @property
    def folders(self) -> list[Path]:
        """The run directories of the shards, in order."""
        count = len(self.devices)
        return [shard_dir(self.setup.run.out, index, count) for index in range(1, count + 1)]

    def report_progress(self) -> None:
        """Count the records that the shards have appended since the last call, and report the number of all."""
        for path in (folder / RESULTS for folder in self.folders):
            with suppress(OSError), path.open("rb") as stream:
                stream.seek(self._sizes[path])
                while data := stream.read(1 << 20):
                    self._sizes[path] += len(data)
                    self._records += data.count(b"\n")
        self.report(self._records)

    def find_missing(self) -> list[ShardJob]:
        """Return the shards that are not complete; raise UsageError if one is of another run."""
        setup, count, missing = self.setup, len(self.devices), []
        options, config, upload_to = setup.options, setup.config, setup.upload_to
        for index, (device, folder) in enumerate(zip(self.devices, self.folders, strict=True), 1):
            if upload_to is not None and not folder.exists():
                # it may have been run elsewhere
                download_folder(part_url(upload_to, folder), folder)
            shard_config = {**config, "shard": f"{index}/{count}"}
            shard_config.pop("sign", None)
            if inspect_run_dir(folder, shard_config).state == "finished":
                continue
            shard_options = replace(
                options,
                out=setup.run.out.absolute() if options.ray is None or upload_to is None else upload_to,
                shard=f"{index}/{count}", shards=None, ray=None, ray_cpus=None, device=device,
                threads=max(1, options.threads // count) if options.threads else self.cpus,
                workers=max(1, options.workers // count) if options.workers else default_workers(self.cpus),
                expect_sha256=setup.model.fingerprint["sha256"], sign=None, formats=(), overwrite=False,
                # what its process prints goes nowhere
                log=log_line, progress=None, interrupt=None,
            )  # fmt: skip
            missing.append(ShardJob(setup.inputs.images, setup.model.path.resolve(), shard_options, folder))
        return missing


def run_shards(run: ShardedRun) -> str:
    """Run all shards that are not complete, and return their runtimes and devices in one line.

    Raises the error of a shard after the others were stopped.
    """
    launch = run_here
    if run.setup.options.ray is not None:
        from opal_deploy.run.ray_tasks import run_on_ray as launch
    launch(run)
    if run.setup.upload_to is not None and not run.interrupt.stopped:
        # downloads those that a cluster's nodes uploaded
        run.find_missing()
    runtimes: dict[str, None] = {}
    for folder in run.folders:
        with suppress(OSError, ValueError):
            runtimes[read_json(folder / SUMMARY)["runtime"]] = None
    return f"{len(run.devices)} shards: {'; '.join(runtimes)}"


def run_here(run: ShardedRun) -> None:
    """Run the shards that are not complete as processes of this machine; see `run_shards`."""
    run.cpus = max(1, available_cpus() // len(run.devices))
    log = run.setup.options.log
    log(f"{len(run.devices)} shards, each with {run.cpus} of {available_cpus()} CPUs")
    jobs = run.find_missing()
    if not jobs:
        return
    stopping = threading.Event()
    with WorkerPool(len(jobs)) as pool, ThreadPoolExecutor(len(jobs), "shard") as threads:
        futures = [threads.submit(supervise_shard, job, pool, stopping, log) for job in jobs]
        while (shards := wait(futures, POLL_SECONDS, FIRST_EXCEPTION)).not_done:
            run.report_progress()
            if run.interrupt.requested or any(future.exception() for future in shards.done):
                break
        # once only: a second signal ends a process at once
        stopping.set()
        pool.interrupt()
    run.report_progress()
    # all of them: the error of one is why the others were stopped
    complete = [future.result() for future in futures]
    run.interrupt.stopped = not all(complete)


def supervise_shard(job: ShardJob, pool: WorkerPool, stopping: threading.Event, log: Log) -> bool:
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


def run_shard(job: ShardJob, recovery: Recovery) -> bool:
    """Run a shard in this process, and return whether it is complete; False: it was interrupted."""
    # which imports this module
    from opal_deploy.run.infer import infer

    begun: list[int] = []

    def stop_after(done: int, total: int | None, note: str) -> None:
        begun.append(done)
        if recovery.note is not None and done - begun[0] >= _ALONE:
            interrupt.requested = True

    with handle_signals(lambda _: None) as interrupt:
        try:
            infer(job.images, job.model, replace(job.options, interrupt=interrupt, progress=stop_after), recovery)
        except KeyboardInterrupt:
            return False
    return True


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
    """Write the records of complete shards to the run directory in order, and move their overlays there.

    It begins anew after an interruption: an overlay may have been moved already.

    Raises:
        StoppedEarly: the disk is full, or too many images failed.
    """
    numbered = enumerate((shard, record) for shard in run.folders for record in read_records(shard / RESULTS))
    out = run.setup.run.out
    with RecordWriter(out / RESULTS) as writer:
        for number, (shard, moved) in run.interrupt.stop_when_requested(numbered):
            record = _move_record(moved, number, shard, out)
            record = record if sign is None else sign(record)
            writer.write(record)
            summary.count(record)
    summary.check_errors(run.setup.options.max_errors)


def _move_record(record: Record, number: int, shard: Path, out: Path) -> Record:
    """Return a record with its number in the whole run, after moving its overlay."""
    if not isinstance(record, Answered) or record.overlay is None:
        return structs.replace(record, image_index=number)
    name = overlay_name(number, record.image)
    target = out / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (shard / record.overlay).replace(target)
    except OSError as error:
        raise StoppedEarly(f"{target}: cannot be written ({error.strerror or error}); make room") from None
    return structs.replace(record, image_index=number, overlay=name)
