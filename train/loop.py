"""The training loop: one network, on one device or on several, in one sitting or in many.

The paper's protocol: Adam at a fixed 1e-4, batches of 64, cross-entropy on the logits, 30 epochs, the weights of the
epoch with the lowest validation cross-entropy.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opal_deploy.errors import StoppedEarly, UsageError, require
from opal_deploy.model.backbones import load_torch_file
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import resume as resuming
from opal_deploy.train import setup
from opal_deploy.train.data.samples import DataSet, listed
from opal_deploy.train.distributed import Group, joined
from opal_deploy.train.epoch import Learner, LossNotFinite, compiled, summary_writer, train_epoch
from opal_deploy.train.evaluation.network import Evaluation, evaluate_batches
from opal_deploy.train.options import Options
from opal_deploy.train.pictures import Batches, Pictures, Report
from opal_deploy.train.recipe import Recipe
from opal_deploy.train.resume import Progress, Sums
from opal_deploy.train.run_folder import EpochRecord, RunFolder
from opal_deploy.train.transforms import PaperAugmentation

_MEGABYTE = 1 << 20


class Diverged(StoppedEarly):
    """The loss is no number any more; the weights of the epochs before are kept."""


@dataclass(frozen=True)
class Result:
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
    options: Options,
    out: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    recipe: Recipe | None = None,
    report: Report = _no_report,
    log: Callable[[str], None] = _no_log,
) -> Result:
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
    if not data.train or not data.val:
        raise UsageError(f"{data.root}: it needs training and validation pictures; add a val/ folder")
    if options.tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")
    with joined(options.device) as group:
        if options.batch_size < 2 * group.size and group.size > 1:
            raise UsageError(
                f"batches of {options.batch_size} over {group.size} processes: at least 2 pictures for each are needed"
            )
        if not group.is_writer:
            report, log = _no_report, _no_log
        how = Recipe(options) if recipe is None else replace(recipe, options=options)
        return _Run(data, options, RunFolder(out), group, report, log).whole(overwrite, resume, how)


class _Run:
    def __init__(
        self,
        data: DataSet,
        options: Options,
        folder: RunFolder,
        group: Group,
        report: Report,
        log: Callable[[str], None],
    ) -> None:
        self.data, self.options, self.folder, self.group = data, options, folder, group
        self.report, self.log = report, log

    def whole(self, overwrite: bool, resume: bool, recipe: Recipe) -> Result:
        """From an empty folder, or one with a part of the run, to its result."""
        options, folder, group = self.options, self.folder, self.group
        fingerprint = resuming.fingerprint(self.data)
        wanted = {"options": asdict(options), "fingerprint": fingerprint, "processes": group.size}
        state = None
        if resume:
            resuming.check_same(folder, wanted)
            if folder.is_finished:
                return _stored_result(folder)
            state = resuming.load_state(folder)
        elif not overwrite:
            folder.check_free()
        # nobody may have written yet when another looks
        group.wait()

        # the network --------------------------------------------------------------------------------------------------
        setup.allow_tf32(options.tf32)
        torch.manual_seed(options.seed)
        config = NetworkConfig(options.backbone, self.data.num_classes, options.input_size, options.head)
        network = OpalNetwork(config, weights=options.weights).channels_last().to(group.device)
        if group.rank:
            # the weights are the same everywhere, what is drawn while training is not
            torch.manual_seed(options.seed + 1_000_003 * group.rank)
        amp = setup.Amp.choose(group.device, options.precision)
        train_batches, val_batches, described = self._batches()
        self.network = network
        self.resolved = {
            **wanted,
            "data": self.data.summary(),
            "weights": setup.weights_record(network, options.weights),
            "device": str(group.device),
            "precision": amp.name,
            **described,
            "versions": setup.versions(),
        }
        # the optimizer's state and the compiled code belong to the very tensors of `network`
        if group.size > 1 and group.device.type == "cuda":
            network = self.network = _with_common_batch_norm(network)
        optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)
        learner = Learner(compiled(_spread(network, group), options.compile), optimizer, amp, group)
        progress = Progress() if state is None else self._restore(state, learner)
        if group.is_writer:
            if state is None:
                folder.clear()
            folder.write_json(folder.config, self.resolved)
            folder.write_text(folder.recipe, recipe.to_toml())
            if progress.epoch or progress.step:
                self.log(f"continuing after epoch {progress.epoch}, step {progress.step}")
        group.wait()

        # the loop -----------------------------------------------------------------------------------------------------
        logs = folder.tensorboard if options.tensorboard and group.is_writer else None
        with summary_writer(logs, progress.epoch + 1) as board:
            for epoch in range(progress.epoch + 1, options.epochs + 1):
                record = self._epoch(epoch, progress, learner, train_batches, val_batches)
                if board is not None:
                    for name, value in asdict(record).items():
                        board.add_scalar(name, value, epoch)
        return self._finish(progress, learner)

    def _batches(self) -> tuple[Batches, Batches, dict[str, Any]]:
        """Of training and validation; and what was chosen for them."""
        options, group = self.options, self.group
        augmentation = PaperAugmentation(options.input_size) if options.augment == "paper" else None
        train = Pictures(self.data.train, options.input_size, augmentation=augmentation, seed=options.seed)
        val = Pictures(self.data.val, options.input_size)
        # every process keeps all pictures: which of them it needs changes with each epoch
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", group.size)) if group.size > 1 else 1
        cached = processes * (train.cache_bytes + val.cache_bytes) <= options.cache_megabytes * _MEGABYTE
        if cached:
            train.fill_cache(self.report)
            val.fill_cache(self.report)
        workers = setup.default_workers(group.device, cached) if options.workers is None else options.workers
        share = {"rank": group.rank, "size": group.size}
        train_batches = Batches(train, options.batch_size, shuffle_seed=options.seed, workers=workers, **share)
        val_batches = Batches(val, options.batch_size, workers=0 if cached else workers, **share)
        return train_batches, val_batches, {"workers": workers, "cached": cached}

    def _restore(self, state: dict[str, Any], learner: Learner) -> Progress:
        stored = state[resuming.KEY]
        progress = Progress.from_dict(stored["progress"])
        if progress.epoch > self.options.epochs:
            raise UsageError(
                f"{self.folder.root}: {progress.epoch} epochs are done, and {self.options.epochs} were asked for; "
                "give --epochs at least as many, or another --out"
            )
        self.network.load_state_dict(state["state_dict"])
        learner.optimizer.load_state_dict(stored["optimizer"])
        learner.scaler.load_state_dict(stored["scaler"])
        # killed between best.pt and last.pt: the epoch is done again, but its weights have replaced the best before it
        if self.folder.best.is_file():
            best = load_torch_file(self.folder.best)["metrics"]
            if best.get("epoch") == progress.epoch + 1:
                progress.best = (progress.epoch + 1, resuming.evaluation_of(best, "val"))
        # last, since building a network draws from the same generator
        resuming.set_random_state(stored["random"][self.group.rank], self.group.device)
        return progress

    def _epoch(
        self, epoch: int, progress: Progress, learner: Learner, train_batches: Batches, val_batches: Batches
    ) -> EpochRecord:
        options, group = self.options, self.group
        per_epoch = len(self.data.train) + len(self.data.val)
        train_batches.epoch, train_batches.first = epoch, progress.step
        last_saved = progress.step

        def after_step(step: int, sums: Sums) -> None:
            nonlocal last_saved
            self.report(
                (epoch - 1) * per_epoch + int(sums.seen),
                options.epochs * per_epoch,
                f"epoch {epoch}/{options.epochs}, loss {sums.loss / sums.seen:.3f}, "
                f"{sums.seen / sums.seconds:.0f} images/s, {sums.waited / sums.seconds:.0%} waiting for data",
            )
            if options.save_every and step - last_saved >= options.save_every and step < len(train_batches.plan()):
                last_saved = step
                progress.step, progress.figures = step, {"epoch": epoch - 1, "step": step}
                self._save_last(progress, learner)

        try:
            train_epoch(learner, train_batches, progress.sums, after_step=after_step)
        except LossNotFinite as found:
            raise self._not_finite(epoch, found, progress) from None
        sums, started = progress.sums, time.perf_counter()
        val = evaluate_batches(self.network, val_batches, gather=group.everyone if group.size > 1 else None)
        if not math.isfinite(val.loss):
            raise Diverged(
                f"the validation loss is {val.loss} in epoch {epoch} at learning rate {options.lr:g}; {_kept(progress)}"
                "; train again with a smaller --lr, and look at the weights if that does not help"
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
        figures = {"epoch": epoch, **val.to_dict("val")}
        progress.records.append(record)
        progress.epoch, progress.step, progress.sums, progress.figures = epoch, 0, Sums(), figures
        if progress.best is None or val.loss < progress.best[1].loss:
            progress.best = (epoch, val)
            # before last.pt: should the process end between the two, this epoch is done again
            self._save_best(figures, progress)
        self._save_last(progress, learner)
        if group.is_writer:
            with _stop_when_full(progress):
                self.folder.write_epochs(progress.records)
        self.report(epoch * per_epoch, options.epochs * per_epoch, f"epoch {epoch}/{options.epochs}")
        self.log(_line(record, options.epochs, is_best=progress.best[0] == epoch))
        return record

    def _finish(self, progress: Progress, learner: Learner) -> Result:
        """The best weights on the test pictures."""
        folder, group = self.folder, self.group
        assert progress.best is not None  # there was at least one epoch
        best_epoch, val = progress.best
        group.wait()
        self.network.load_state_dict(load_torch_file(folder.best)["state_dict"])
        test = None
        if self.data.test:
            pictures = Pictures(self.data.test, self.options.input_size)
            workers = setup.default_workers(group.device, False) if group.device.type == "cuda" else 0
            batches = Batches(pictures, self.options.batch_size, workers=workers, rank=group.rank, size=group.size)
            gather = group.everyone if group.size > 1 else None
            test = evaluate_batches(self.network, batches, report=self.report, gather=gather)
        figures = {"epoch": best_epoch, **val.to_dict("val"), **(test.to_dict("test") if test else {})}
        if group.is_writer:
            with _stop_when_full(progress):
                self._write(folder.best, figures)
                folder.write_epochs(progress.records)
                seconds = sum(record.seconds for record in progress.records)
                rate = progress.records[-1].images_per_second
                folder.write_json(
                    folder.summary,
                    {**figures, "epochs": len(progress.records), "seconds": seconds, "images_per_second": rate},
                )
            # from here on the run is finished, and what continued it only takes room
            self.network.load_state_dict(load_torch_file(folder.last)["state_dict"])
            with _stop_when_full(progress):
                self._write(folder.last, progress.figures)
        group.wait()
        return Result(folder.best, best_epoch, progress.records, val, test)

    def _save_best(self, figures: dict[str, Any], progress: Progress) -> None:
        if self.group.is_writer:
            with _stop_when_full(progress):
                self._write(self.folder.best, figures)

    def _save_last(self, progress: Progress, learner: Learner) -> None:
        # of every process: what it draws next
        random = self.group.everyone(resuming.random_state(self.group.device))
        if not self.group.is_writer:
            return
        state = {
            "progress": progress.to_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "scaler": learner.scaler.state_dict(),
            "random": random,
        }
        with _stop_when_full(progress):
            self._write(self.folder.last, progress.figures, {resuming.KEY: state})

    def _write(self, path: Path, metrics: dict[str, Any], beside: dict[str, Any] | None = None) -> None:
        names, crop = self.data.class_names, self.data.crop
        checkpoint = Checkpoint(self.network, names, crop=crop, metrics=metrics, training=self.resolved)
        save(path, checkpoint, beside=beside)

    def _not_finite(self, epoch: int, found: LossNotFinite, progress: Progress) -> Diverged:
        names = [str(path) for path in found.files]
        if self.group.is_writer:
            self.folder.write_text(self.folder.bad_batch, "\n".join(names) + "\n")
        amp = "; or --precision fp32" if self.resolved["precision"] != "fp32" else ""
        return Diverged(
            f"the training loss is {found.loss} in epoch {epoch}, step {found.step + 1}, "
            f"at learning rate {self.options.lr:g}; {_kept(progress)}; its batch of {len(names)} pictures is listed in "
            f"{self.folder.bad_batch}: {listed(names[:3])}{' ...' if len(names) > 3 else ''}; "
            f"train again with a smaller --lr{amp}, and look at those pictures and the weights if that does not help"
        )


def _spread(network: OpalNetwork, group: Group) -> nn.Module:
    if group.size == 1:
        return network
    devices = [group.device] if group.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(network, device_ids=devices)


def _with_common_batch_norm(network: OpalNetwork) -> OpalNetwork:
    """Batch statistics over all processes' shares, as one process with the whole batch has them; GPUs only."""
    found: OpalNetwork = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    return found


@contextmanager
def _stop_when_full(progress: Progress) -> Iterator[None]:
    try:
        yield
    except (UsageError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise StoppedEarly(
            f"{reason}; {_kept(progress)}, and last.pt is as it was before; "
            "make room and repeat the command with --resume"
        ) from None


def _stored_result(folder: RunFolder) -> Result:
    """Of a run that is finished."""
    metrics = load_torch_file(folder.best)["metrics"]
    test = resuming.evaluation_of(metrics, "test") if "test_loss" in metrics else None
    return Result(folder.best, metrics["epoch"], folder.read_epochs(), resuming.evaluation_of(metrics, "val"), test)


def _kept(progress: Progress) -> str:
    return f"best.pt holds epoch {progress.best[0]}" if progress.best else "nothing was kept yet"


def _line(record: EpochRecord, epochs: int, *, is_best: bool) -> str:
    return (
        f"epoch {record.epoch}/{epochs}: training loss {record.train_loss:.4f}, {record.train_accuracy:.1%}; "
        f"validation loss {record.val_loss:.4f}, {record.val_accuracy:.1%}; {record.seconds:.1f} s, "
        f"{record.images_per_second:.0f} images/s, {record.data_wait:.0%} waiting for data"
        f"{'; best so far' if is_best else ''}"
    )
