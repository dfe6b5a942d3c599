"""The training loop: one network, on one device or on several, in one session or in many.

The paper's protocol (Sec. 4.1, Supp. B.2): Adam at a fixed learning rate of 1e-4, batches of 64, cross-entropy on the
logits, 30 epochs, the weights of the epoch with the lowest validation cross-entropy. With `head_steps` the head is
fitted to the frozen backbone first (`frozen`): that network is epoch 0, a candidate like those after it.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from opal_deploy.artifact.files import lock_directory, without_folders
from opal_deploy.datasets.background import read_background
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.logs import Estimate, Log, Progress, no_progress
from opal_deploy.model.backbones import get_library, own_stride
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.network import OpalNetwork
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.train import frozen, machine
from opal_deploy.train.attention import NetworkTerms
from opal_deploy.train.augmentation import PaperAugmentation
from opal_deploy.train.balance import balanced_weights
from opal_deploy.train.checkpoints import (
    CheckpointManager,
    TrainState,
    describe_kept,
    has_finite_weights,
    load_run_file,
)
from opal_deploy.train.checks import check_run
from opal_deploy.train.epoch import (
    EpochMetrics,
    NonFiniteLossError,
    Objective,
    TrainStep,
    evaluate,
    find_logit_scale,
    train_epoch,
)
from opal_deploy.train.images import Batches, TrainImages
from opal_deploy.train.machine import ProcessGroup, join_process_group
from opal_deploy.train.measure import EVALUATION_BATCH, compare_with_classifiers, measure_best
from opal_deploy.train.recipe import Recipe, TrainOptions
from opal_deploy.train.regions import read_regions
from opal_deploy.train.result import TrainResult, load_finished_result
from opal_deploy.train.resume import check_same_run, fingerprint_dataset, read_config, restore_run
from opal_deploy.train.run_directory import EpochRecord, TrainRunDirectory
from opal_deploy.train.start import build_network, describe_run, describe_start, load_start
from opal_deploy.train.stride import FittedNetwork, choose_network, settle_stride

_MEGABYTE = 1 << 20
# a training step costs about three forward passes
_PASSES = 3
# the remaining time is estimated after so many steps, or after an epoch of fewer
_ESTIMATE_STEPS = 100


class DivergenceError(StoppedEarly):
    """The loss is NaN or infinite; earlier checkpoints are kept."""


def fit(
    data: DataSet,
    options: TrainOptions,
    out: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    recipe: Recipe | None = None,
    progress: Progress = no_progress,
    log: Log = lambda line: None,
) -> TrainResult:
    """Train a network, keep the best weights, and evaluate them on the test split.

    Under torchrun every process calls this function; only the first one writes and reports.

    Args:
        data: a data set with training and validation images.
        options: see TrainOptions.
        out: the run directory, see `run_directory`.
        overwrite: replace an existing run.
        resume: continue the run in `out`, or start one. On a CPU with the same number of threads the final weights
            equal those of an uninterrupted run, bit by bit.
        recipe: how the data set was read, for the run's recipe.toml; `options` replace its options.
        progress: called with images done, all images, and a note.
        log: called with one line per epoch.

    Raises:
        UsageError: the directory holds a run, or not the one to resume; an option is impossible; an image cannot be
            decoded.
        DivergenceError: the loss is NaN or infinite.
        StoppedEarly: disk or memory are full. As after a DivergenceError, last.pt and best.pt are those of earlier
            epochs.
    """
    run_dir = TrainRunDirectory(out)
    check_run(options, run_dir, overwrite=overwrite, resume=resume)
    if not data.train or not data.val:
        raise UsageError(f"{data.root}: training and validation images are needed; add a val/ folder")
    with join_process_group(options.device) as group:
        stored = read_config(run_dir) if resume else None
        batch_size, epochs = options.plan_epochs(len(data.train), stored)
        options = replace(options, batch_size=batch_size, epochs=epochs)
        if group.size > 1 and min(batch_size, len(data.train)) < 2 * group.size:
            raise UsageError(
                f"batches of {batch_size} from {len(data.train)} images over {group.size} processes: "
                "each needs at least 2 images; start fewer processes"
            )
        if not group.is_main:
            progress, log = no_progress, lambda line: None
        recipe = Recipe(options) if recipe is None else replace(recipe, options=options)
        run = _TrainingRun(data, options, batch_size, epochs, run_dir, group, progress, log)
        try:
            return run.run(recipe, stored, overwrite=overwrite, resume=resume)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "DataLoader worker" in str(error):
                raise StoppedEarly(
                    "a process that prepares images died: killed for lack of memory, or started by a script that "
                    'trains outside of `if __name__ == "__main__":`; repeat the command with --resume and --workers 0'
                ) from None
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            raise StoppedEarly(
                f"out of memory on {group.device} with batches of {batch_size} images of "
                f"{options.input_size[0]}x{options.input_size[1]} in {options.backbone}; close other programs and "
                "repeat the command with --resume, or start again with a smaller --batch-size and --overwrite"
            ) from None


@dataclass
class _TrainingRun:
    data: DataSet
    options: TrainOptions
    batch_size: int
    epochs: int
    run_dir: TrainRunDirectory
    group: ProcessGroup
    progress: Progress
    log: Log
    network: OpalNetwork = field(init=False)
    objective: Objective = field(init=False)
    logit_scale: float = field(init=False)
    checkpoints: CheckpointManager = field(init=False)
    estimate: Estimate = field(init=False)
    background: list[Sample] = field(init=False)

    def run(self, recipe: Recipe, stored: dict[str, Any] | None, *, overwrite: bool, resume: bool) -> TrainResult:
        """Train, or continue the run in the directory, whose config.json is `stored`, to the result."""
        run_dir, group, began = self.run_dir, self.group, time.perf_counter()
        amp = machine.MixedPrecision.select(group.device, self.options.precision)
        start = load_start(self.options, self.data)
        self.options = options = settle_stride(self.options, start, stored)
        run_config = {
            "options": without_folders(asdict(options)),
            "fingerprint": fingerprint_dataset(self.data, options.keep_off),
            "processes": group.size,
            "precision": amp.name,
            "start": None if start is None else describe_start(options, start),
        }
        if resume and run_dir.is_finished:
            return load_finished_result(run_dir, run_config, options, self.epochs)
        self.background = [] if options.background is None else read_background(options.background, self.data)

        # network and batches ------------------------------------------------------------------------------------------
        machine.set_tf32(options.tf32)
        train_batches, val_batches, batch_config = self._build_batches()
        fitted = None
        if options.compare_strides:
            fitted = self._compare_strides(amp, train_batches, val_batches)
            self.options = options = fitted.options
            run_config["options"] = without_folders(asdict(options))
            network = fitted.network
            torch.set_rng_state(fitted.random_state)
        else:
            network = self._build_network(options, start)
        self._use(network)
        machine.check_batch_norm(network, self.batch_size // group.size)
        if group.rank:
            # initial weights are the same in every process, random numbers drawn while training are not
            torch.manual_seed(options.seed + 1_000_003 * group.rank)
        weights = machine.describe_weights(network, options.weights) if start is None else start.training.get("weights")
        first_images = min(_ESTIMATE_STEPS * self.batch_size, len(self.data.train))
        self.estimate = Estimate(self.log, after=first_images - self.batch_size)
        full_config = {
            **run_config,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "data": self.data.summary(),
            "weights": weights,
            "device": str(group.device),
            **batch_config,
            "versions": machine.package_versions(),
        }
        if group.size > 1 and group.device.type == "cuda":
            get_library(options.backbone).convert_sync_batch_norm(network)
        frozen_backbone = network.backbone.requires_grad_(False) if options.freeze_backbone else None
        model: Any = group.wrap_ddp(
            NetworkTerms(network, agreement=options.agreement > 0, adversarial=options.adversarial > 0)
        )
        if options.compile:
            model = torch.compile(model)
        optimizer = torch.optim.Adam([each for each in network.parameters() if each.requires_grad], lr=options.lr)
        train_step = TrainStep(
            model, optimizer, amp, group, network.config.mean, network.config.std, self.objective, frozen_backbone
        )
        # what edits dropped is still dropped, unless it starts anew
        edits = () if start is None or options.reset_dropped else start.edits
        self.checkpoints = CheckpointManager(run_dir, self.data, group, network, full_config, edits)

        # epochs, with the directory locked against other processes ----------------------------------------------------
        with lock_directory(run_dir.root) if group.is_main else nullcontext():
            if not resume and not overwrite:
                run_dir.check_free()
            last = load_run_file(run_dir.last) if resume and run_dir.last.is_file() else None
            if resume:
                check_same_run(run_dir, last, run_config)
            state = TrainState()
            if last is not None:
                state = restore_run(run_dir, last, network, train_step, group, self.epochs)
                self.epochs = self.epochs if state.planned_epochs is None else state.planned_epochs
                for name in ("linear_accuracy", "classifier_accuracy"):
                    self.checkpoints.run_config[name] = last["training"].get(name)
            group.barrier()  # no process writes before all have read
            self.checkpoints.start(replace(recipe, options=options).to_toml(), is_new=last is None)
            self.log(describe_run(options, full_config, self.epochs))
            if last is not None:
                self.log(f"resuming after epoch {state.epoch}, step {state.step}")
            elif options.head_steps and start is None:
                fitted = fitted or self._fit_head(options, network, amp, train_batches, val_batches)
                self._finish_fit(fitted, time.perf_counter() - began, state, train_step)
            writing = options.tensorboard and group.is_main
            with run_dir.open_summary_writer(state.epoch + 1) if writing else nullcontext() as writer:
                for epoch in range(state.epoch + 1, self.epochs + 1):
                    if state.best is not None and options.stops_after(state.epoch, state.best[0]):
                        self.log(f"stopping: no lower validation loss since epoch {state.best[0]}")
                        break
                    if not self._has_time(state):
                        self.log(f"stopping after epoch {state.epoch}: another one would exceed --minutes")
                        break
                    record = self._run_epoch(epoch, state, train_step, train_batches, val_batches)
                    if writer is not None:
                        for name, value in asdict(record).items():
                            writer.add_scalar(name, value, epoch)
            return self._finish(state, val_batches)

    def _class_weights(self) -> torch.Tensor | None:
        if self.options.class_weights == "none":
            return None
        return torch.tensor(balanced_weights(self.data), device=self.group.device)

    def _build_batches(self) -> tuple[Batches, Batches, dict[str, Any]]:
        """Return training and validation batches, and their entries in config.json."""
        options, group = self.options, self.group
        augmentation = None
        if options.augment != "none":
            augmentation = PaperAugmentation(options.input_size, erase=options.augment == "erase")
        regions = None
        if options.keep_off is not None:
            regions = read_regions(self.data, options.keep_off)
            self.log(f"keeping the attention off regions of {len(regions):,} of {len(self.data.train):,} images")
        train = TrainImages(
            self.data.train, options.input_size, augmentation=augmentation, regions=regions, seed=options.seed
        )
        val = TrainImages(self.data.val, options.input_size)
        # every process caches all images, because its share of them changes with each epoch
        cached = group.local_size * (train.cache_bytes + val.cache_bytes) <= options.cache_megabytes * _MEGABYTE
        if cached:
            train.fill_cache(self.progress)
            val.fill_cache(self.progress)
        workers = machine.default_num_workers(group, cached) if options.workers is None else options.workers
        share = {"rank": group.rank, "size": group.size}
        train_batches = Batches(train, self.batch_size, shuffle_seed=options.seed, workers=workers, **share)
        val_batches = Batches(val, EVALUATION_BATCH, workers=0 if cached else workers, **share)
        return train_batches, val_batches, {"workers": workers, "cached": cached}

    def _run_epoch(
        self, epoch: int, state: TrainState, train_step: TrainStep, train_batches: Batches, val_batches: Batches
    ) -> EpochRecord:
        """Train and validate one epoch, counted from 1, and write its checkpoints; updates `state`."""
        options, group = self.options, self.group
        images_per_epoch = len(self.data.train) + len(self.data.val)
        train_batches.epoch, train_batches.first_step = epoch, state.step
        last_saved = state.step
        steps = len(train_batches.plan())

        def learning_rate(step: int) -> float:
            return options.learning_rate((epoch - 1 + step / steps) / self.epochs)

        def after_step(step: int, metrics: EpochMetrics) -> None:
            nonlocal last_saved
            done, total = (epoch - 1) * images_per_epoch + int(metrics.seen), self.epochs * images_per_epoch
            self.estimate(done, total)
            self.progress(
                done,
                total,
                f"epoch {epoch}/{self.epochs}, loss {metrics.loss / metrics.seen:.3f}, "
                f"{metrics.waited / metrics.seconds:.0%} waiting for data",
            )
            is_inside = step < steps
            if options.save_every and step - last_saved >= options.save_every and is_inside:
                if not has_finite_weights(self.network):
                    return
                last_saved = step
                state.step, state.checkpoint_metrics = step, {"epoch": epoch - 1, "step": step}
                self.checkpoints.save_last(state, train_step)

        try:
            train_epoch(
                train_step, train_batches, state.epoch_metrics, learning_rate=learning_rate, after_step=after_step
            )
        except NonFiniteLossError as error:
            raise self._divergence(epoch, error, state) from None
        metrics, started = state.epoch_metrics, time.perf_counter()
        # without synchronised batch norm, processes differ in their statistics: evaluate those that will be saved
        group.broadcast_buffers(self.network)
        before = epoch * images_per_epoch - len(self.data.val)

        def after_batch(done: int, _: int | None, __: str) -> None:
            # every process does as many, but for the last batch
            seen = min(done * group.size, len(self.data.val))
            self.progress(before + seen, self.epochs * images_per_epoch, f"epoch {epoch}/{self.epochs}, validating")

        # float32 would take a GPU as long as training in lower precision; the best weights are judged in float32
        amp = train_step.amp if group.device.type == "cuda" else None
        val = self._validate(epoch, state, val_batches, amp, after_batch)
        record = EpochRecord(
            epoch,
            train_loss=metrics.loss / metrics.seen,
            train_accuracy=metrics.correct / metrics.seen,
            val_loss=val.loss,
            val_accuracy=val.accuracy,
            seconds=metrics.seconds + time.perf_counter() - started,
            images_per_second=metrics.seen / metrics.seconds,
            data_wait=metrics.waited / metrics.seconds,
            kept_off=metrics.kept_off / metrics.seen,
        )
        self._finish_epoch(record, val, state, train_step)
        self.progress(epoch * images_per_epoch, self.epochs * images_per_epoch, f"epoch {epoch}/{self.epochs}")
        return record

    def _validate(
        self,
        epoch: int,
        state: TrainState,
        val_batches: Batches,
        amp: machine.MixedPrecision | None,
        progress: Progress,
    ) -> Evaluation:
        val = evaluate(self.network, val_batches, amp=amp, progress=progress, group=self.group, scale=self.logit_scale)
        if not math.isfinite(val.loss):
            raise DivergenceError(
                f"the validation loss is {val.loss} in epoch {epoch} at learning rate {self.options.lr:g}; "
                f"{describe_kept(state)}; train again with a smaller --lr and --overwrite; if that does not help, "
                "check the initial weights"
            )
        return val

    def _finish_epoch(self, record: EpochRecord, val: Evaluation, state: TrainState, train_step: TrainStep) -> None:
        """Write the checkpoints of an epoch, or of the frozen network (epoch 0); updates `state`."""
        state.records.append(record)
        state.epoch, state.step, state.epoch_metrics = record.epoch, 0, EpochMetrics()
        state.checkpoint_metrics = {"epoch": record.epoch, **val.to_dict("val")}
        # few validation images: a lower loss may come with fewer correct answers than fine-tuning began with
        start = state.records[0].val_accuracy if state.records[0].epoch == 0 else 0.0
        is_better = state.best is None or (val.loss < state.best[1].loss and val.accuracy >= start)
        # validation images are not attacked, so their figures do not show what adversarial training gains
        if is_better or self.options.adversarial:
            # before last.pt: a process that is killed between the two repeats this epoch
            self.checkpoints.save_best(state, record.epoch, val)
        self.checkpoints.save_last(state, train_step)
        self.checkpoints.write_epochs(state)
        assert state.best is not None
        self.log(record.describe(self.epochs, is_best=state.best[0] == record.epoch))

    def _build_network(self, options: TrainOptions, start: Checkpoint | None = None) -> OpalNetwork:
        """Return the network that training starts with; the run's seed determines its new weights."""
        torch.manual_seed(options.seed)
        return build_network(options, self.data.num_classes, start).channels_last().to(self.group.device)

    def _use(self, network: OpalNetwork) -> None:
        """Train and validate this network from here on."""
        options = self.options
        self.network, self.logit_scale = network, find_logit_scale(network.head, options.anchor_probability)
        self.objective = Objective(
            options.agreement,
            options.kept_off_weight(),
            options.adversarial,
            class_weights=self._class_weights(),
            scale=self.logit_scale,
        )

    def _compare_strides(self, amp: machine.MixedPrecision, batches: Batches, val_batches: Batches) -> FittedNetwork:
        """Fit a head at the recipe's stride and one to all layers, and return the network to train."""
        finer = replace(self.options, compare_strides=False)
        fitted = []
        for options in (finer, replace(finer, stride=own_stride(finer.backbone))):
            network = self._build_network(options)
            fitted.append(self._fit_head(options, network, amp, batches, val_batches))
        chosen, why = choose_network(*fitted)
        self.log(why)
        return chosen

    def _fit_head(
        self,
        options: TrainOptions,
        network: OpalNetwork,
        amp: machine.MixedPrecision,
        batches: Batches,
        val_batches: Batches,
    ) -> FittedNetwork:
        """Fit the head to the frozen backbone on the images of `batches`, and validate the network."""
        random_state, group = torch.get_rng_state(), self.group
        self._use(network)
        # as many workers as in fine-tuning: with none, a GPU waits for the augmentation
        batches = Batches(
            batches.images, frozen.BATCH, shuffle_seed=options.seed, workers=batches.workers, rank=group.rank,
            size=group.size,
        )  # fmt: skip
        fit = frozen.fit_head(
            network, batches, self.objective, group, amp, steps=options.head_steps,
            memory=options.cache_megabytes * _MEGABYTE, progress=self.progress,
        )  # fmt: skip
        return FittedNetwork(
            options, network, random_state, fit, self._validate(0, TrainState(), val_batches, None, self.progress)
        )

    def _finish_fit(self, fitted: FittedNetwork, seconds: float, state: TrainState, train_step: TrainStep) -> None:
        """Write a network with a fitted head as epoch 0, with the seconds that it took; updates `state`."""
        options, group, fit, val = self.options, self.group, fitted.fit, fitted.validation
        record = EpochRecord(
            0, fit.loss, fit.accuracy, val.loss, val.accuracy, seconds, fit.images_per_second, data_wait=0.0
        )
        epoch_seconds = (_PASSES * len(self.data.train) + len(self.data.val)) / fit.images_per_second
        if options.minutes is not None:
            left = 60 * options.minutes - record.seconds
            # of all processes, since their clocks differ
            planned = min(group.all_gather(max(0, int(left / epoch_seconds))))
            self.epochs = state.planned_epochs = min(self.epochs, planned)
        self._finish_epoch(record, val, state, train_step)
        if group.is_main:
            self.checkpoints.run_config |= compare_with_classifiers(
                fit, self.network, self.data, options.weights, group, self.progress, self.log
            )
        if self.epochs:
            minutes = max(round(self.epochs * epoch_seconds / 60), 1)
            self.log(f"fine-tuning takes about {minutes} min for {self.epochs} epochs; best.pt can be used meanwhile")
        group.barrier()

    def _has_time(self, state: TrainState) -> bool:
        """Return whether another epoch as long as the last one fits into `--minutes`, for every process."""
        seconds = [record.seconds for record in state.records if record.epoch]
        if self.options.minutes is None or not seconds:
            return True
        total = sum(record.seconds for record in state.records)
        return all(self.group.all_gather(total + seconds[-1] <= 60 * self.options.minutes))

    def _finish(self, state: TrainState, val_batches: Batches) -> TrainResult:
        """Calibrate the best weights, evaluate them on the test split and write the final files."""
        run_dir, group = self.run_dir, self.group
        assert state.best is not None  # there was at least one epoch
        best_epoch, _ = state.best
        group.barrier()
        self.network.load_state_dict(load_run_file(run_dir.best)["state_dict"])
        measured = measure_best(self.network, self.data, val_batches, self.background, group, self.progress)
        group.barrier()  # other processes may still be reading best.pt
        self.checkpoints.finish(state, {"epoch": best_epoch, **measured.metrics}, measured)
        group.barrier()
        return TrainResult(
            run_dir.best, best_epoch, state.records, measured.val, measured.test, measured.calibration, run_dir.last,
            self.checkpoints.run_config, measured.classes,
            [*describe_supported_rates(measured.val.risk or {}, measured.baseline)],
        )  # fmt: skip

    def _divergence(self, epoch: int, error: NonFiniteLossError, state: TrainState) -> DivergenceError:
        amp = "" if self.checkpoints.run_config["precision"] == "fp32" else " or --precision fp32"
        return DivergenceError(
            f"the training loss is {error.loss} in epoch {epoch}, step {error.step + 1}, "
            f"at learning rate {self.options.lr:g}; {describe_kept(state)}; its batch of {len(error.files)} images "
            f"is listed in {self.checkpoints.write_nonfinite_batch(error.files)}; train again with --overwrite and a "
            f"smaller --lr{amp}; if that does not help, check those images and the initial weights"
        )
