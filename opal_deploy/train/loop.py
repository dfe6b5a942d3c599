"""Training: prepare, fit the head, train and validate epochs, finish.

The paper's protocol (Sec. 4.1, Supp. B.2): Adam at a fixed learning rate of 1e-4, batches of 64, cross-entropy on the
logits, 30 epochs, the weights of the epoch with the lowest validation cross-entropy. Recipes may let the rate fall
(`learning_rate`). With `head_steps` the head is fitted to the frozen backbone first, at a rate of its own (`head_fit`):
that network is epoch 0, a candidate like those after it (`is_best`). The head of the best epoch is fitted once more to
its backbone (`refit_head`). Out-of-distribution images (`background`) enter no loss: the OOD score is measured against
them.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from opal_deploy.artifact.files import lock_directory
from opal_deploy.datasets.checks import read_background
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import Evaluation, mean_with_interval
from opal_deploy.evaluation.record import pool_features
from opal_deploy.evaluation.session import choose_samples
from opal_deploy.logs import WarningLine, as_progress, no_progress
from opal_deploy.model.backbones import get_library
from opal_deploy.model.neighbours import MAX_IMAGES
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import checkpoints, head_fit, machine, out_of_fold
from opal_deploy.train.checkpoints import LabelledOutputs, Measurements, RunWriter, TrainState
from opal_deploy.train.images import MEGABYTE, Batches, Loaders, normalize, prepare_images
from opal_deploy.train.losses import NetworkTerms, Objective, make_objective, read_regions_channel
from opal_deploy.train.network import (
    PASSES,
    Run,
    build_network,
    describe_cost,
    describe_run,
    describe_weights,
    find_kept_slots,
    load_start,
    package_versions,
    settle_stride,
)
from opal_deploy.train.options import TrainOptions
from opal_deploy.train.out_of_fold import OutOfFold, TrainingOutputs
from opal_deploy.train.run_directory import (
    EpochRecord,
    TrainResult,
    TrainRunDirectory,
    fingerprint_dataset,
    has_same_images,
    refuse_other_run,
    stop_when_full,
)

# training images up to which a logistic regression takes no more than minutes
_MAX_COMPARED = 10_000
# reading a loss waits until the GPU has caught up, so losses are read every so many steps
_GPU_STEPS_BETWEEN_READS = 10
# share of a cosine schedule in which the learning rate rises after a fitted head: Adam's first steps are the largest
_WARM_UP = 0.1


class DivergenceError(StoppedEarly):
    """The loss is NaN or infinite; earlier checkpoints are kept."""


class Fitted(NamedTuple):
    """The outcome of fitting the head to the frozen backbone."""

    loss: float  # mean training loss of the last tenth of the steps, in nats
    accuracy: float  # of the same steps, 0 ... 1
    images_per_second: float  # feature maps computed per second by this process
    answers: OutOfFold | None  # to the training images; None where there are validation images
    training: TrainingOutputs | None  # of the fitted head; None where no single process knows them


@dataclass(frozen=True)
class Trained:
    """A network in training: in `model`, with `optimizer` wrapped by Fabric."""

    network: OpalNetwork
    model: Any
    optimizer: Any
    objective: Objective


def fit(data: DataSet, options: TrainOptions, *, again: bool = False) -> TrainResult:
    """Train a network, keep the best weights, and evaluate them on the test split.

    Under torchrun every process calls this function; only the first one writes and reports. On a CPU with the same
    number of threads a resumed run ends with the weights of an uninterrupted one, bit by bit.

    There are validation images unless the head only is fitted. Options are resolved, with `out`. With `again`, best.pt
    stays until it is replaced: the run continues another way.

    Raises:
        UsageError: the directory holds a run, or not the one to resume; an option is impossible.
        DivergenceError: the loss is NaN or infinite.
        StoppedEarly: disk or memory are full. As after a DivergenceError, the files are those of earlier epochs.
    """
    run_dir = TrainRunDirectory(Path(options.out or "run"))
    run_dir.check(may_hold_run=options.resume or options.overwrite)
    fabric, precision = machine.start_fabric(options.device, options.precision)
    progress, log = as_progress(options.progress), options.log
    if not fabric.is_global_zero:
        progress, log = no_progress, lambda line: None
    last = checkpoints.read_checkpoint(run_dir.last) if options.resume and run_dir.last.is_file() else None
    stored = None if last is None else last["training"]
    run = Run(data, options, fabric, precision, progress, log, load_start(options, data), {})
    new_classes = run.new_classes
    options = options.plan(len(data.train), new_classes=new_classes)
    if options.epochs == 0 and not options.fits_head(new_classes=new_classes):
        raise UsageError("epochs 0: expected at least 1; 0 fits the head only, and --start-from has a fitted head")
    options = settle_stride(options, run.start, stored)
    run = replace(run, options=options, fingerprint=fingerprint_dataset(data, options.keep_off))
    if stored is not None and (stored.get("data") or {}).get("val") == 0:
        whole = replace(run, fingerprint=fingerprint_dataset(data.whole or data, options.keep_off))
        refuse_other_run(run_dir.last, stored, whole.identify())
        if data.val:
            log("the head was fitted to all images: fine-tuning sets a fifth aside and fits a head to the others first")
        # there is no epoch to go on from, and its answers out of fold are not kept: fitting again takes a minute
        last, again = None, True
    with machine.explained_memory_errors():
        result = _train(run, run_dir, last, again=again)
    if result.best_epoch or not options.epochs or data.whole is None:
        return result
    frozen = replace(options, epochs=0, resume=False, overwrite=True)
    if frozen.validates_out_of_fold(len(data.whole.train), new_classes=new_classes):
        log("fine-tuning gained nothing: fitting the head to all images, those set aside too")
        result = fit(data.whole, frozen, again=True)
    return result


def _train(run: Run, run_dir: TrainRunDirectory, last: dict[str, Any] | None, *, again: bool) -> TrainResult:
    """Train from new weights or the start's, or go on from the state in `last`, the content of last.pt; see `fit`."""
    began, fabric = time.perf_counter(), run.fabric
    background = [] if run.options.background is None else read_background(run.options.background, run.data)
    background = [background[index] for index in choose_samples(background, MAX_IMAGES)]
    machine.set_tf32(run.options.tf32)
    data, loaders, batch_config = prepare_images(run.data, run.options, fabric, run.progress, run.log)
    run, options = replace(run, data=data), run.options
    network = build_network(options, data.class_names, run.start).to(fabric.device)
    fits = last is None and options.fits_head(new_classes=run.new_classes)
    if last is None and fabric.is_global_zero:
        heads = int(fits) + (out_of_fold.count_folds(len(data.train)) if fits and loaders.val is None else 0)
        run.log(describe_cost(run, network, loaders.train.images, heads))
    fitted = fit_frozen(run, network, loaders, background) if fits else None
    trained, epochs = start_training(run, network), options.epochs or 0
    weights = run.start.training.get("weights") if run.start else describe_weights(network, options.weights_name)
    config = run.identify() | {
        "epochs": epochs, "batch_size": options.batch_size, "data": data.summary(), "weights": weights,
        "device": str(fabric.device), **batch_config, "versions": package_versions(),
    }  # fmt: skip
    with lock_directory(run_dir.root) if fabric.is_global_zero else nullcontext():
        run_dir.check(may_hold_run=options.resume or options.overwrite)
        state = TrainState()
        if last is not None:
            state = checkpoints.restore(run_dir.last, last, config, network, trained.optimizer, fabric)
            if not has_same_images(last["training"], config, "measured"):
                warning = "warning: validation or test images have changed since epochs were measured on them"
                run.log(WarningLine(warning))
            epochs = epochs if state.planned_epochs is None else state.planned_epochs
        fabric.barrier()  # no process writes before all have read
        if fabric.is_global_zero:
            with stop_when_full():
                run_dir.start(config, options.to_toml(), data.root, is_new=last is None and not again)
        run.log(describe_run(run, epochs))
        writer = RunWriter(run_dir, run, network, loaders, background, config)
        if last is not None:
            run.log(f"resuming after epoch {state.epoch}")
        elif fitted is not None:
            epochs = finish_head_fit(trained, fitted, time.perf_counter() - began, state, writer)
        train_epochs(trained, state, writer, epochs)
        fits_again = run.fits_again and refit_head(trained, state, writer)
        # slots that fine-tuning did not improve are fitted to all images by `fit`
        if run.ends_on_all and state.best is not None and (state.best[0] or options.head == "plain"):
            measured = writer.write_best(state, is_last=False)
            writer = train_on_all(writer, measured, state, epochs, fits_again=fits_again)
        return writer.finish(state)


def start_training(run: Run, network: OpalNetwork) -> Trained:
    """Return a network, whose head may be fitted, ready for its first epoch."""
    options, fabric = run.options, run.fabric
    # initial weights are the same in every process, random numbers drawn while training are not
    torch.manual_seed(options.seed + 1_000_003 * fabric.global_rank)
    if fabric.world_size > 1 and fabric.device.type == "cuda":
        get_library(options.backbone).convert_sync_batch_norm(network)
    objective = make_objective(options, run.data, network.head)
    model: Any = NetworkTerms(network, adversarial=options.adversarial > 0)
    model, optimizer = fabric.setup(model, torch.optim.Adam(network.parameters(), lr=options.lr))
    return Trained(network, model, optimizer, objective)


def fit_frozen(
    run: Run, network: OpalNetwork, loaders: Loaders, background: list[Sample], *,
    measures: bool = True, again: bool = False,
) -> Fitted:  # fmt: skip
    """Fit the head to the frozen backbone on the training images; without validation images, answer out of fold.

    Without `measures` the head is fitted, and nothing else is computed or logged. Slots of classes that the start has
    too begin where they are there; those of the folds do not, since they were fitted to images that a fold must not
    know. `again`, after fine-tuning, all slots begin where they are, and may meet.
    """
    fabric, options, head = run.fabric, run.options, network.head
    # as many workers as in fine-tuning: with none, a GPU waits for the augmentation
    batches = Batches(
        loaders.train.images, head_fit.BATCH, shuffle_seed=options.seed, workers=loaders.train.workers,
        share=(fabric.global_rank, fabric.world_size),
    )  # fmt: skip
    frozen = head_fit.compute_frozen_features(
        network, batches, fabric,
        memory=options.cache_megabytes * MEGABYTE, foreground=options.foreground > 0, progress=run.progress,
    )  # fmt: skip
    answers = training = None
    # several processes keep a share of the features each, so the first one answers all images later
    known = pool_features(network, background if fabric.world_size == 1 else (), progress=run.progress)
    if loaders.val is None and measures:
        answers = out_of_fold.answer_out_of_fold(run, network, frozen, known)
    elif measures and fabric.world_size == 1 and len(run.data.train) <= _MAX_COMPARED:
        run.log(out_of_fold.compare_plainly(run, network, frozen))
    if frozen.basis is not None:
        head = out_of_fold.new_head(network, frozen, options.seed)
        kept = None if run.start is None else find_kept_slots(run.data.class_names, run.start)[0]
        kept = torch.arange(head.num_prototypes) if again else kept
        if kept is not None:
            frozen.basis.copy_slots(network.head, kept, head)
    objective = make_objective(options, run.data, head, fitting=True)
    if again:
        # fine-tuned slots have found different parts
        objective = replace(objective, apart=0.0)
    fit_of_head = head_fit.fit_head(head, frozen, objective, fabric, steps=options.head_steps, progress=run.progress)
    if fabric.world_size == 1 and measures:
        training = out_of_fold.answer_images_in_memory(run, network, head, frozen, known)
    if frozen.basis is not None:
        frozen.basis.set_projection(network.head, head)
    return Fitted(*fit_of_head, frozen.images_per_second, answers, training)


def finish_head_fit(trained: Trained, fitted: Fitted, seconds: float, state: TrainState, writer: RunWriter) -> int:
    """Write a network with a fitted head as epoch 0; return the number of epochs that time is left for."""
    run, answers, files = writer.run, fitted.answers, writer.run_dir
    if answers is None:
        outputs, val = validate(run, trained, writer.loaders, epoch=0)
        writer.measure(0, outputs, training=fitted.training)
    else:
        measured = writer.measure(0, None, answers, fitted.training)
        val = measured.val
        with stop_when_full():
            temperature = measured.calibration.temperature
            doubtful = out_of_fold.write_answers(files.answers, files.doubtful, answers, run.data, temperature)
        for line in out_of_fold.describe_answers(answers, run.data):
            run.log(line)
        if doubtful:
            run.log(f"the other folds contradict {doubtful} labels: look at {files.doubtful}")
    (speed,) = machine.sum_over_processes(run.fabric, fitted.images_per_second)
    epochs, epoch_seconds = run.options.epochs or 0, (PASSES * len(run.data.train) + len(run.data.val)) / speed
    if run.options.minutes is not None:
        # of all processes, since their clocks differ
        planned = min(machine.gather(run.fabric, max(0, int((60 * run.options.minutes - seconds) / epoch_seconds))))
        epochs = state.planned_epochs = min(epochs, planned)
    record = EpochRecord(0, fitted.loss, fitted.accuracy, val.loss, val.accuracy, seconds, speed, data_wait=0.0)
    record_epoch(record, val, state, writer, trained.optimizer, epochs)
    if epochs:
        minutes = max(round(epochs * epoch_seconds / 60), 1)
        run.log(f"fine-tuning takes about {minutes} min for {epochs} epochs; best.pt can be used meanwhile")
    return epochs


def train_epochs(trained: Trained, state: TrainState, writer: RunWriter, epochs: int) -> None:
    """Train the epochs after `state`, up to `epochs` in all, until there is a reason to stop."""
    run = writer.run
    board: Any = nullcontext()
    if run.options.tensorboard and run.fabric.is_global_zero:
        from torch.utils.tensorboard import SummaryWriter

        # hides the logs of an epoch that is repeated
        board = SummaryWriter(str(writer.run_dir.tensorboard), purge_step=state.epoch + 1)
    with board as scalars:
        for epoch in range(state.epoch + 1, epochs + 1):
            if why := reason_to_stop(run, state):
                run.log(f"stopping: {why}")
                break
            try:
                record, val = run_epoch(run, trained, writer.loaders, epoch, epochs)
            except DivergenceError as error:
                kept = "no epoch was finished"
                if state.best is not None:
                    writer.write_best(state)
                    kept = f"best.pt holds {f'epoch {state.best[0]}' if state.best[0] else 'the fitted head'}"
                advice = "train again with --overwrite and a lower --lr or --precision fp32"
                raise DivergenceError(f"{error}; {kept}; {advice}") from None
            record_epoch(record, val, state, writer, trained.optimizer, epochs)
            for name, value in asdict(record).items() if scalars is not None else ():
                scalars.add_scalar(name, value, epoch)


def refit_head(trained: Trained, state: TrainState, writer: RunWriter) -> bool:
    """Fit the head of the best epoch again, to its frozen backbone; return whether it is kept.

    Fine-tuned features tell parts from their surroundings better than those that the head was first fitted to, and the
    loss of fine-tuning knows no background. The head is kept unless the validation images show that it costs accuracy.
    """
    run, network = writer.run, trained.network
    if state.best is None or state.best_weights is None or not state.best[0]:
        return False
    epoch, _ = state.best
    network.load_state_dict(state.best_weights)
    before, _ = validate(run, trained, writer.loaders, epoch=epoch)
    fit_frozen(run, network, writer.loaders, [], measures=False, again=True)
    after, val = validate(run, trained, writer.loaders, epoch=epoch)
    gain = mean_with_interval(after.right.astype(float) - before.right)
    kept = gain.high >= 0
    points = f"{100 * gain.mean:+.1f} points, 95 %: {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
    verdict = "" if kept else "; not kept"
    run.log(
        f"head fitted again to the network of epoch {epoch}: validation accuracy {val.accuracy:.1%} ({points}){verdict}"
    )
    if kept:
        state.best, state.best_weights, writer.measured = (epoch, val), checkpoints.copy_weights(network), None
    return kept


def learning_rate(options: TrainOptions, progress: float) -> float:
    """Return the learning rate after a share `progress` of all steps, 0 ... 1."""
    if options.schedule == "constant":
        return options.lr
    # a random head has nothing that Adam's first steps could destroy
    warm_up = min(progress / _WARM_UP, 1.0) if options.head_steps else 1.0
    return options.lr * warm_up * (1 + math.cos(math.pi * progress)) / 2


def train_on_all(
    held_out: RunWriter, measured: Measurements, state: TrainState, epochs: int, *, fits_again: bool
) -> RunWriter:
    """Train anew on the validation images too, for as many of `epochs` as were best; return the writer of the result.

    The head is then fitted once more with `fits_again`.

    The state's best weights become these. Metrics, calibration and thresholds stay those `measured` on the network that
    had not seen the validation images, which is kept where the loss does not stay finite.
    """
    run, best = held_out.run, measured.epoch
    data = replace(run.data, train=[*run.data.train, *run.data.val], val=[], whole=None)
    kind = f"training again for {best} epochs" if best else "fitting the classifier again"
    run.log(f"{kind} on all {len(data.train):,} images, those set aside too; best.pt can be used meanwhile")
    data, loaders, _ = prepare_images(data, run.options, run.fabric, run.progress, lambda line: None)
    run = replace(run, data=data)
    network = build_network(run.options, data.class_names, run.start).to(run.fabric.device)
    fit_frozen(run, network, loaders, [], measures=False)
    trained = start_training(run, network)
    try:
        for epoch in range(1, best + 1):
            train_epoch(run, trained, loaders, epoch, epochs)
        if fits_again:
            fit_frozen(run, network, loaders, [], measures=False, again=True)
    except DivergenceError as error:
        run.log(WarningLine(f"warning: {error}; best.pt stays as it was"))
        return held_out
    config = {**held_out.config, "data": data.summary()}
    writer = RunWriter(held_out.run_dir, run, network, loaders, held_out.background, config)
    writer.measure_after(measured)
    state.best_weights = checkpoints.copy_weights(network)
    return writer


def run_epoch(run: Run, trained: Trained, loaders: Loaders, epoch: int, epochs: int) -> tuple[EpochRecord, Evaluation]:
    """Train and validate one epoch, counted from 1; raise DivergenceError as `train_epoch` does."""
    began, per_epoch = time.perf_counter(), len(run.data.train) + len(run.data.val)
    record = train_epoch(run, trained, loaders, epoch, epochs)
    run.progress(epoch * per_epoch - len(run.data.val), epochs * per_epoch, f"epoch {epoch}/{epochs}, validating")
    _, val = validate(run, trained, loaders, epoch=epoch)
    seconds = time.perf_counter() - began
    return replace(record, val_loss=val.loss, val_accuracy=val.accuracy, seconds=seconds), val


def train_epoch(run: Run, trained: Trained, loaders: Loaders, epoch: int, epochs: int) -> EpochRecord:
    """Train one epoch, counted from 1; return its record, with no figures of validation.

    DivergenceError: a loss is not finite; raised in every process alike.
    """
    options, fabric, batches, optimizer = run.options, run.fabric, loaders.train, trained.optimizer
    per_epoch = len(run.data.train) + len(run.data.val)
    images_done, total = (epoch - 1) * per_epoch, epochs * per_epoch
    trained.model.train()
    batches.epoch = epoch
    plan = batches.plan()
    steps_between_reads = _GPU_STEPS_BETWEEN_READS if fabric.device.type == "cuda" else 1
    unread: list[Tensor] = []
    loss = correct = kept_off = waited = 0.0
    seen = 0
    began = ended = time.perf_counter()
    for step, (images, labels) in enumerate(batches):
        waited += time.perf_counter() - ended
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(options, (epoch - 1 + step / len(plan)) / epochs)
        unread.append(train_step(fabric, trained, images, labels, len(plan[step])))
        seen += len(plan[step])
        if len(unread) == steps_between_reads or step + 1 == len(plan):
            sums = machine.sum_over_processes(fabric, *torch.stack(unread).sum(0).tolist())
            unread.clear()
            if not math.isfinite(sums[0]):
                raise DivergenceError(
                    f"the training loss is {sums[0]} in epoch {epoch}, step {step + 1}, at learning rate {options.lr:g}"
                )
            loss, correct, kept_off = loss + sums[0], correct + sums[1], kept_off + sums[2]
            note = f"loss {loss / seen:.3f}, {waited / (time.perf_counter() - began):.0%} waiting for data"
            run.progress(images_done + seen, total, f"epoch {epoch}/{epochs}, {note}")
        ended = time.perf_counter()
    seconds = time.perf_counter() - began
    # without synchronised batch norm, processes differ in their statistics: evaluate those that will be saved
    machine.share_buffers(fabric, trained.network)
    return EpochRecord(
        epoch, loss / seen, correct / seen, math.nan, math.nan, seconds, seen / seconds, waited / seconds,
        kept_off / seen,
    )  # fmt: skip


def train_step(fabric: Fabric, trained: Trained, images: Tensor, labels: Tensor, global_batch: int) -> Tensor:
    """Do one optimizer step on this process's n images of a global batch of N, `global_batch`, over all processes.

    Images are uint8 [n, H0, W0, 3], or [n, H0, W0, 4] with regions; labels are int64 [n]. Returns the summed, weighted
    cross-entropy, the number of correct predictions and the summed penalty of kept-off regions, float64 [3].
    """
    config = trained.network.config
    images, labels = (tensor.to(fabric.device, non_blocking=True) for tensor in (images, labels))
    inputs = normalize(images[..., :3], config.mean, config.std)
    terms = trained.model(inputs, labels, read_regions_channel(images))
    total, cross_entropy = trained.objective(terms, labels)
    trained.optimizer.zero_grad(set_to_none=True)
    # gradients are averaged over processes, whose shares may differ by an image: this factor makes them the gradients
    # of the global batch's mean loss
    fabric.backward(total * (fabric.world_size / global_batch))
    trained.optimizer.step()
    correct = (terms.logits.detach().argmax(1) == labels).sum()
    return torch.stack([cross_entropy.double(), correct.double(), terms.kept_off.detach().sum().double()])


def validate(run: Run, trained: Trained, loaders: Loaders, *, epoch: int) -> tuple[LabelledOutputs, Evaluation]:
    """Return outputs and metrics of the validation images; raise DivergenceError if their loss is not finite."""
    # float32 would take a GPU as long as training in lower precision; the best weights are judged in float32
    lower = epoch > 0 and run.fabric.device.type == "cuda"
    assert loaders.val is not None  # there is nothing to validate out of fold after the head was fitted
    machine.set_tf32(lower and run.options.tf32)
    outputs = checkpoints.predict(trained.network, loaders.val, run.fabric, lower_precision=lower)
    machine.set_tf32(run.options.tf32)
    val = outputs.compute_metrics(trained.objective.scale)
    if not math.isfinite(val.loss):
        raise DivergenceError(
            f"the validation loss is {val.loss} in epoch {epoch}, at learning rate {run.options.lr:g}; check the "
            "initial weights"
        )
    return outputs, val


def is_best(run: Run, val: Evaluation, state: TrainState) -> bool:
    """Return whether an epoch, already in the state's records, is the best so far.

    By the lowest validation loss, with no less accuracy than the fitted head; with `adversarial` the last one is.
    """
    # validation images are not attacked, so their figures do not show what adversarial training gains
    if state.best is None or run.options.adversarial:
        return True
    # few validation images: a lower loss may come with fewer correct answers than fine-tuning began with
    least = state.records[0].val_accuracy if state.records[0].epoch == 0 else 0.0
    return val.loss < state.best[1].loss and val.accuracy >= least


def record_epoch(
    record: EpochRecord, val: Evaluation, state: TrainState, writer: RunWriter, optimizer: Any, epochs: int
) -> None:
    """Note an epoch, or the frozen network as epoch 0, in the state; write its files, and report it."""
    run = writer.run
    state.records.append(record)
    state.epoch = record.epoch
    is_first, improves = state.best is None, is_best(run, val, state)
    if improves:
        state.best, state.best_weights = (record.epoch, val), checkpoints.copy_weights(writer.network)
    if is_first:
        # before last.pt: a process that is killed between the two repeats this epoch
        writer.write_best(state, is_last=record.epoch >= epochs)
    writer.write_last(state, optimizer, val)
    run.log(record.describe(epochs, is_best=improves))
    per_epoch = len(run.data.train) + len(run.data.val)
    run.progress(record.epoch * per_epoch, epochs * per_epoch, f"epoch {record.epoch}/{epochs}")


def reason_to_stop(run: Run, state: TrainState) -> str:
    """Return why no epoch should follow, the same in every process; else nothing."""
    options, seconds = run.options, [record.seconds for record in state.records]
    if options.patience is not None and state.best and state.epoch - state.best[0] >= options.patience:
        return f"no lower validation loss since epoch {state.best[0]}"
    if options.minutes is None or not state.epoch:
        return ""
    # another epoch as long as the last one
    enough = all(machine.gather(run.fabric, sum(seconds) + seconds[-1] <= 60 * options.minutes))
    return "" if enough else f"another epoch after epoch {state.epoch} would exceed --minutes"
