"""The training loop: one network, on one device or on several, in one sitting or in many.

The paper's protocol: Adam at a fixed 1e-4, batches of 64, cross-entropy on the logits, 30 epochs, the weights of the
epoch with the lowest validation cross-entropy.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opal_deploy.artifact.files import lock_directory
from opal_deploy.datasets.samples import DataSet, ProgressCallback
from opal_deploy.errors import CheckpointError, StoppedEarly, UsageError, require
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import resume as resuming
from opal_deploy.train import setup
from opal_deploy.train.checkpoint_manager import CheckpointManager, describe_kept, has_finite_weights
from opal_deploy.train.distributed import ProcessGroup, convert_sync_batch_norm, join_process_group, wrap_ddp
from opal_deploy.train.epoch import (
    EpochMetrics,
    NonFiniteLossError,
    TrainStep,
    compile_model,
    open_summary_writer,
    train_epoch,
)
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.recipe import Recipe, TrainOptions
from opal_deploy.train.resume import Progress
from opal_deploy.train.run_directory import EpochRecord, TrainRunDirectory
from opal_deploy.train.transforms import PaperAugmentation
from opal_deploy.train.validation import Evaluation, evaluate_batches

_MEGABYTE = 1 << 20


class DivergenceError(StoppedEarly):
    """The loss is no number any more; the weights of the epochs before are kept."""


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        best: the checkpoint to use.
        best_epoch: counted from 1.
        epochs: one record each.
        val: of the best weights.
        test: of the best weights; None where the data set has no test pictures.
    """

    best: Path
    best_epoch: int
    epochs: list[EpochRecord]
    val: Evaluation
    test: Evaluation | None


def _no_report(done: int, total: int | None, note: str) -> None: ...


def _no_log(line: str) -> None: ...


def fit(
    data: DataSet,
    options: TrainOptions,
    out: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    recipe: Recipe | None = None,
    report: ProgressCallback = _no_report,
    log: Callable[[str], None] = _no_log,
) -> TrainResult:
    """Train, keep the best, test it. Under torchrun every process calls this; the first one writes and reports.

    Args:
        data: from `data.catalogue.read`, or put together in code; needs training and validation pictures.
        options: see Options.
        out: the run's folder; `run_folder` says what is written to it after each epoch.
        overwrite: replace a run that is there.
        resume: continue the run that is there, or begin where there is none. On a CPU with as many threads the end is
            that of an uninterrupted run, bit by bit.
        recipe: how the data set was read, for the recipe that is stored beside the run; `options` count.
        report: called with pictures done, pictures in all, and a note.
        log: called with one line an epoch.

    Raises:
        UsageError: the folder holds a run, or another one than is to be resumed; an option is impossible; a picture
            cannot be decoded.
        Diverged: the loss is no longer a number. StoppedEarly: the disk is full. Either way last.pt and best.pt are of
            the epochs before.
    """
    require("matplotlib", "train", "training")
    options.check()
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them")
    if not data.train or not data.val:
        raise UsageError(f"{data.root}: it needs training and validation pictures; add a val/ folder")
    if options.tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")
    with join_process_group(options.device) as group:
        if group.size > 1 and min(options.batch_size, len(data.train)) < 2 * group.size:
            raise UsageError(
                f"batches of {options.batch_size} from {len(data.train)} pictures over {group.size} processes: "
                "at least 2 pictures for each are needed; start fewer"
            )
        if not group.is_writer:
            report, log = _no_report, _no_log
        how = Recipe(options) if recipe is None else replace(recipe, options=options)
        run = _TrainingRun(data, options, TrainRunDirectory(out), group, report, log)
        try:
            return run.whole(overwrite, resume, how)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            raise StoppedEarly(
                f"out of memory on {group.device} with batches of {options.batch_size} pictures of "
                f"{options.input_size[0]}x{options.input_size[1]} in {options.backbone}; close other programs and "
                "repeat the command with --resume, or begin again with a smaller --batch-size and --overwrite"
            ) from None


class _TrainingRun:
    def __init__(
        self,
        data: DataSet,
        options: TrainOptions,
        folder: TrainRunDirectory,
        group: ProcessGroup,
        report: ProgressCallback,
        log: Callable[[str], None],
    ) -> None:
        self.data, self.options, self.folder, self.group = data, options, folder, group
        self.report, self.log = report, log

    def whole(self, overwrite: bool, resume: bool, recipe: Recipe) -> TrainResult:
        """From an empty folder, or one with a part of the run, to its result."""
        options, folder, group = self.options, self.folder, self.group
        amp = setup.MixedPrecision.choose(group.device, options.precision)
        wanted = {
            "options": asdict(options),
            "fingerprint": resuming.fingerprint_dataset(self.data),
            "processes": group.size,
            "precision": amp.name,
        }
        if resume and folder.is_finished:
            return _load_finished_result(folder, wanted)
        if not resume and not overwrite:
            folder.check_free()

        # the network, the pictures ------------------------------------------------------------------------------------
        setup.set_tf32(options.tf32)
        torch.manual_seed(options.seed)
        config = NetworkConfig(options.backbone, self.data.num_classes, options.input_size, options.head)
        network = OpalNetwork(config, weights=options.weights).channels_last().to(group.device)
        setup.check_batch_norm(network, options.batch_size // group.size)
        if group.rank:
            # the weights are the same everywhere, what is drawn while training is not
            torch.manual_seed(options.seed + 1_000_003 * group.rank)
        train_batches, val_batches, described = self._batches()
        resolved = {
            **wanted,
            "data": self.data.summary(),
            "weights": setup.describe_weights(network, options.weights),
            "device": str(group.device),
            **described,
            "versions": setup.package_versions(),
        }
        if group.size > 1 and group.device.type == "cuda":
            network = convert_sync_batch_norm(network)
        self.network = network
        optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)
        learner = TrainStep(compile_model(wrap_ddp(network, group), options.compile), optimizer, amp, group)
        self.keeper = CheckpointManager(folder, self.data, group, network, resolved)

        # the loop, with the folder for itself -------------------------------------------------------------------------
        with lock_directory(folder.root) if group.is_writer else nullcontext():
            if not resume and not overwrite:
                folder.check_free()
            last = resuming.load_run_file(folder.last) if resume and folder.last.is_file() else None
            if resume:
                resuming.check_same_run(folder, last, wanted)
            progress = Progress() if last is None else self._restore(last, learner)
            # nobody writes before all have read
            group.wait()
            self.keeper.begin(recipe.to_toml(), anew=last is None)
            if progress.epoch or progress.step:
                self.log(f"continuing after epoch {progress.epoch}, step {progress.step}")
            logs = folder.tensorboard if options.tensorboard and group.is_writer else None
            with open_summary_writer(logs, progress.epoch + 1) as board:
                for epoch in range(progress.epoch + 1, options.epochs + 1):
                    record = self._epoch(epoch, progress, learner, train_batches, val_batches)
                    if board is not None:
                        for name, value in asdict(record).items():
                            board.add_scalar(name, value, epoch)
            return self._finish(progress)

    def _batches(self) -> tuple[Batches, Batches, dict[str, Any]]:
        """Of training and validation; and what was chosen for them."""
        options, group = self.options, self.group
        augmentation = PaperAugmentation(options.input_size) if options.augment == "paper" else None
        train = TrainImages(self.data.train, options.input_size, augmentation=augmentation, seed=options.seed)
        val = TrainImages(self.data.val, options.input_size)
        # every process keeps all pictures: which of them it needs changes with each epoch
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", group.size)) if group.size > 1 else 1
        cached = processes * (train.cache_bytes + val.cache_bytes) <= options.cache_megabytes * _MEGABYTE
        if cached:
            train.fill_cache(self.report)
            val.fill_cache(self.report)
        workers = setup.default_num_workers(group.device, cached) if options.workers is None else options.workers
        share = {"rank": group.rank, "size": group.size}
        train_batches = Batches(train, options.batch_size, shuffle_seed=options.seed, workers=workers, **share)
        val_batches = Batches(val, options.batch_size, workers=0 if cached else workers, **share)
        return train_batches, val_batches, {"workers": workers, "cached": cached}

    def _restore(self, last: dict[str, Any], learner: TrainStep) -> Progress:
        folder = self.folder
        if resuming.RESUME_KEY not in last:
            raise UsageError(
                f"{folder.last}: it holds no training state, so the run cannot be continued; "
                "give another --out, or --overwrite"
            )
        try:
            progress = resuming.restore_state(last, self.network, learner, self.group)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise CheckpointError(
                f"{folder.last}: its training state is damaged ({type(error).__name__}: {reason}); "
                "give another --out, or --overwrite"
            ) from None
        if progress.epoch > self.options.epochs:
            raise UsageError(
                f"{folder.root}: {progress.epoch} epochs are done, and {self.options.epochs} were asked for; "
                "give --epochs at least as many, or another --out"
            )
        stored = resuming.load_run_file(folder.best)["metrics"] if folder.best.is_file() else {}
        if stored.get("epoch") == progress.epoch + 1:
            # killed between best.pt and last.pt: the epoch is done again, but its weights have replaced the best before
            progress.best = (progress.epoch + 1, resuming.parse_evaluation(stored, "val"))
        elif progress.best is not None and stored.get("epoch") != progress.best[0]:
            raise UsageError(
                f"{folder.best}: it is not the checkpoint of epoch {progress.best[0]}, the best of this run; "
                "put it back, or begin again with --overwrite"
            )
        # last, since building a network draws from the same generator
        resuming.set_random_state(last[resuming.RESUME_KEY]["random"][self.group.rank], self.group.device)
        return progress

    def _epoch(
        self, epoch: int, progress: Progress, learner: TrainStep, train_batches: Batches, val_batches: Batches
    ) -> EpochRecord:
        options, group = self.options, self.group
        per_epoch = len(self.data.train) + len(self.data.val)
        train_batches.epoch, train_batches.first = epoch, progress.step
        last_saved = progress.step

        def after_step(step: int, sums: EpochMetrics) -> None:
            nonlocal last_saved
            self.report(
                (epoch - 1) * per_epoch + int(sums.seen),
                options.epochs * per_epoch,
                f"epoch {epoch}/{options.epochs}, loss {sums.loss / sums.seen:.3f}, "
                f"{sums.seen / sums.seconds:.0f} images/s, {sums.waited / sums.seconds:.0%} waiting for data",
            )
            due = options.save_every and step - last_saved >= options.save_every and step < len(train_batches.plan())
            if due and has_finite_weights(self.network):
                last_saved = step
                progress.step, progress.figures = step, {"epoch": epoch - 1, "step": step}
                self.keeper.last(progress, learner)

        try:
            train_epoch(learner, train_batches, progress.sums, after_step=after_step)
        except NonFiniteLossError as found:
            raise self._not_finite(epoch, found, progress) from None
        sums, started = progress.sums, time.perf_counter()
        # batch statistics of processes without a common batch norm: those that are saved are those that are judged
        group.share_buffers(self.network)
        val = evaluate_batches(self.network, val_batches, gather=group.everyone if group.size > 1 else None)
        if not math.isfinite(val.loss):
            raise DivergenceError(
                f"the validation loss is {val.loss} in epoch {epoch} at learning rate {options.lr:g}; "
                f"{describe_kept(progress)}; "
                "train again with a smaller --lr and --overwrite, and look at the weights if that does not help"
            )
        record = EpochRecord(
            epoch,
            sums.loss / sums.seen,
            sums.correct / sums.seen,
            val.loss,
            val.accuracy,
            sums.seconds + time.perf_counter() - started,
            sums.seen / sums.seconds,
            sums.waited / sums.seconds,
        )
        progress.records.append(record)
        progress.epoch, progress.step, progress.sums = epoch, 0, EpochMetrics()
        progress.figures = {"epoch": epoch, **val.to_dict("val")}
        if progress.best is None or val.loss < progress.best[1].loss:
            # before last.pt: should the process end between the two, this epoch is done again
            self.keeper.best(progress, epoch, val)
        self.keeper.last(progress, learner)
        self.keeper.epochs(progress)
        assert progress.best is not None
        self.report(epoch * per_epoch, options.epochs * per_epoch, f"epoch {epoch}/{options.epochs}")
        self.log(_format_epoch(record, options.epochs, is_best=progress.best[0] == epoch))
        return record

    def _finish(self, progress: Progress) -> TrainResult:
        """The best weights on the test pictures."""
        folder, group = self.folder, self.group
        assert progress.best is not None  # there was at least one epoch
        best_epoch, val = progress.best
        group.wait()
        self.network.load_state_dict(resuming.load_run_file(folder.best)["state_dict"])
        test = None
        if self.data.test:
            pictures = TrainImages(self.data.test, self.options.input_size)
            workers = setup.default_num_workers(group.device, False) if group.device.type == "cuda" else 0
            batches = Batches(pictures, self.options.batch_size, workers=workers, rank=group.rank, size=group.size)
            gather = group.everyone if group.size > 1 else None
            test = evaluate_batches(self.network, batches, report=self.report, gather=gather)
        figures = {"epoch": best_epoch, **val.to_dict("val"), **(test.to_dict("test") if test else {})}
        # others may still be reading the file that is written next
        group.wait()
        self.keeper.finish(progress, figures)
        group.wait()
        return TrainResult(folder.best, best_epoch, progress.records, val, test)

    def _not_finite(self, epoch: int, found: NonFiniteLossError, progress: Progress) -> DivergenceError:
        amp = "" if self.keeper.resolved["precision"] == "fp32" else " or --precision fp32"
        return DivergenceError(
            f"the training loss is {found.loss} in epoch {epoch}, step {found.step + 1}, "
            f"at learning rate {self.options.lr:g}; {describe_kept(progress)}; its batch of "
            f"{len(found.files)} pictures is listed in {self.keeper.bad_batch(found.files)}; "
            f"train again with --overwrite and a smaller --lr{amp}, "
            "and look at those pictures and the weights if that does not help"
        )


def _load_finished_result(folder: TrainRunDirectory, wanted: dict[str, Any]) -> TrainResult:
    """Of a run that is finished."""
    best, last = resuming.load_run_file(folder.best), resuming.load_run_file(folder.last)
    # where and in what precision matters to steps that are still to be done
    resuming.check_same_run(folder, last, {key: wanted[key] for key in ("options", "fingerprint")})
    asked, done = wanted["options"]["epochs"], last["metrics"].get("epoch")
    if asked != done:
        raise UsageError(
            f"{folder.root}: the run is finished after {done} epochs and cannot be given {asked}; "
            "give another --out, or --overwrite"
        )
    metrics = best["metrics"]
    test = resuming.parse_evaluation(metrics, "test") if "test_loss" in metrics else None
    val = resuming.parse_evaluation(metrics, "val")
    return TrainResult(folder.best, metrics["epoch"], folder.read_epochs(), val, test)


def _format_epoch(record: EpochRecord, epochs: int, *, is_best: bool) -> str:
    return (
        f"epoch {record.epoch}/{epochs}: training loss {record.train_loss:.4f}, {record.train_accuracy:.1%}; "
        f"validation loss {record.val_loss:.4f}, {record.val_accuracy:.1%}; {record.seconds:.1f} s, "
        f"{record.images_per_second:.0f} images/s, {record.data_wait:.0%} waiting for data"
        f"{'; best so far' if is_best else ''}"
    )
