"""Training: prepare, fit the head, choose the stride, train and validate epochs, finish.

The paper's protocol (Sec. 4.1, Supp. B.2): Adam at a fixed learning rate of 1e-4, batches of 64, cross-entropy on the
logits, 30 epochs, the weights of the epoch with the lowest validation cross-entropy. With `head_steps` the head is
fitted to the frozen backbone first (`head_fit`): that network is epoch 0, a candidate like those after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from opal_deploy.artifact.files import lock_directory, without_folders
from opal_deploy.datasets.background import read_background
from opal_deploy.datasets.samples import DataSet, shorten_list
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.logs import Log, Progress, WarningLine, as_progress, no_progress
from opal_deploy.model.backbones import get_library, own_stride
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import head_fit, machine
from opal_deploy.train.augmentation import PaperAugmentation
from opal_deploy.train.balance import balanced_weights
from opal_deploy.train.checkpoints import RunWriter, copy_weights, restore
from opal_deploy.train.cost import PASSES, describe_cost
from opal_deploy.train.head_fit import HeadFit, fit_head, prefer_all_layers
from opal_deploy.train.images import Batches, TrainImages, leave_out, normalize, read_images
from opal_deploy.train.losses import NetworkTerms, Objective, find_logit_scale, read_regions_channel
from opal_deploy.train.measure import EVALUATION_BATCH, Loaders, compare_with_classifiers, predict
from opal_deploy.train.network import (
    build_network,
    check_batch_norm,
    describe_run,
    describe_start,
    describe_weights,
    load_start,
    package_versions,
    settle_stride,
)
from opal_deploy.train.options import TrainOptions
from opal_deploy.train.regions import read_regions
from opal_deploy.train.run_directory import (
    EpochRecord,
    TrainResult,
    TrainRunDirectory,
    TrainState,
    check_same_run,
    fingerprint_dataset,
    load_finished_result,
    stop_when_full,
    stops_after,
)

_MEGABYTE = 1 << 20
# reading a loss waits until the GPU has caught up, so losses are read every so many steps
_GPU_STEPS_BETWEEN_READS = 10


class DivergenceError(StoppedEarly):
    """The loss is NaN or infinite; earlier checkpoints are kept."""


@dataclass(frozen=True)
class Run:
    """The data, options and devices that all steps of a run share.

    Attributes:
        data: the data set, without images that cannot be decoded.
        options: the options.
        fabric: processes, device and precision.
        progress: called with images done, all images, and a note; in the first process only.
        log: called with lines of text; in the first process only.
    """

    data: DataSet
    options: TrainOptions
    fabric: Fabric
    progress: Progress
    log: Log

    @property
    def rank_of(self) -> dict[str, int]:
        """This process and the number of all, for `Batches`."""
        return {"rank": self.fabric.global_rank, "size": self.fabric.world_size}


@dataclass(frozen=True)
class Fitted:
    """A network whose head was fitted, with torch's random state after it was built."""

    options: TrainOptions
    network: OpalNetwork
    random_state: Tensor
    fit: HeadFit
    val: Evaluation


@dataclass(frozen=True)
class Trained:
    """A network in training: in `model`, with `optimizer` wrapped by Fabric."""

    network: OpalNetwork
    model: Any
    optimizer: Any
    objective: Objective


def fit(data: DataSet, options: TrainOptions) -> TrainResult:
    """Train a network, keep the best weights, and evaluate them on the test split.

    Under torchrun every process calls this function; only the first one writes and reports. On a CPU with the same
    number of threads a resumed run ends with the weights of an uninterrupted one, bit by bit.

    Args:
        data: a data set with training and validation images.
        options: resolved, with `out`.

    Raises:
        UsageError: the directory holds a run, or not the one to resume; an option is impossible.
        DivergenceError: the loss is NaN or infinite.
        StoppedEarly: disk or memory are full. As after a DivergenceError, the files are those of earlier epochs.
    """
    options.check()
    run_dir = TrainRunDirectory(Path(options.out or "run"))
    run_dir.check_writable()
    if not data.train or not data.val:
        raise UsageError(f"{data.root}: training and validation images are needed; add a val/ folder")
    fabric, precision = machine.start_fabric(options.device, options.precision)
    progress, log = as_progress(options.progress), options.log
    if not fabric.is_global_zero:
        progress, log = no_progress, lambda line: None
    stored = run_dir.read_config() if options.resume else None
    start = load_start(options, data)
    run = Run(data, settle_stride(options, start, stored), fabric, progress, log)
    with _explained_memory_errors(run):
        return _fit(run, run_dir, start, stored, precision)


def _fit(
    run: Run, run_dir: TrainRunDirectory, start: Checkpoint | None, stored: dict[str, Any] | None, precision: str
) -> TrainResult:
    fabric, began = run.fabric, time.perf_counter()
    fingerprint = fingerprint_dataset(run.data, run.options.keep_off)

    def identify(options: TrainOptions) -> dict[str, Any]:
        return {
            "options": without_folders(options.to_config()), "fingerprint": fingerprint,
            "processes": fabric.world_size, "precision": precision, "start": describe_start(options, start),
        }  # fmt: skip

    resume = run.options.resume
    if resume and run_dir.is_finished:
        options = plan(run, stored).options
        return load_finished_result(run_dir, identify(options), options)
    background = [] if run.options.background is None else read_background(run.options.background, run.data)

    # images, network, and what the run will cost ----------------------------------------------------------------------
    machine.set_tf32(run.options.tf32)
    run, loaders, batch_config = prepare_images(run, stored)
    choices = [run.options]
    if run.options.compare_strides:
        finer = replace(run.options, compare_strides=False)
        choices = [finer, replace(finer, stride=own_stride(finer.backbone))]
    network = build_network(choices[0], run.data.num_classes, start).to(fabric.device)
    batch_size, epochs = run.options.batch_size or 1, run.options.epochs or 0
    check_batch_norm(network, batch_size // fabric.world_size)
    is_new = not (resume and run_dir.last.is_file())
    fits = run.options.head_steps > 0 and start is None and is_new
    if is_new and fabric.is_global_zero:
        with machine.unchanged_random_state(fabric.device):
            run.log(describe_cost(network, choices, run.data, loaders.train.images, fabric.world_size, fits=fits))

    # the head, at one stride or two -----------------------------------------------------------------------------------
    try:
        fitted = choose_stride(run, choices, network, loaders) if fits else None
    except DivergenceError as error:
        raise DivergenceError(f"{error}; nothing was kept; check the initial weights, or give others") from None
    if fitted is not None:
        run, network = replace(run, options=fitted.options), fitted.network
        torch.set_rng_state(fitted.random_state)
    if fabric.global_rank:
        # initial weights are the same in every process, random numbers drawn while training are not
        torch.manual_seed(run.options.seed + 1_000_003 * fabric.global_rank)
    config = identify(run.options) | {
        "epochs": epochs,
        "batch_size": batch_size,
        "data": run.data.summary(),
        "weights": start.training.get("weights") if start else describe_weights(network, run.options.weights_name),
        "device": str(fabric.device),
        **batch_config,
        "versions": package_versions(),
    }
    trained = set_up(run, network)

    # epochs, with the directory locked against other processes --------------------------------------------------------
    with lock_directory(run_dir.root) if fabric.is_global_zero else nullcontext():
        if not resume and not run.options.overwrite:
            run_dir.check_free()
        state = TrainState()
        if not is_new:
            state, known = restore(run_dir, identify(run.options), epochs, network, trained.optimizer, fabric)
            epochs = epochs if state.planned_epochs is None else state.planned_epochs
            config |= {name: known.get(name) for name in ("linear_accuracy", "classifier_accuracy")}
        elif resume:
            check_same_run(run_dir, stored, identify(run.options))
        fabric.barrier()  # no process writes before all have read
        if fabric.is_global_zero:
            with stop_when_full():
                run_dir.start(config, run.options.to_toml(), run.data.root, is_new=is_new)
        run.log(describe_run(run.options, config, epochs))
        # what edits dropped is still dropped, unless it starts anew
        edits = () if start is None or run.options.reset_dropped else start.edits
        writer = RunWriter(run_dir, run.data, network, loaders, background, config, edits, fabric, run.progress)
        if not is_new:
            run.log(f"resuming after epoch {state.epoch}")
        elif fitted is not None:
            epochs = finish_head_fit(run, fitted, time.perf_counter() - began, state, writer, trained, loaders)
        with _open_tensorboard(run, run_dir, state.epoch + 1) as log_epoch:
            for epoch in range(state.epoch + 1, epochs + 1):
                if why := reason_to_stop(run, state):
                    run.log(f"stopping: {why}")
                    break
                try:
                    record, val = run_epoch(run, trained, loaders, epoch, epochs)
                except DivergenceError as error:
                    raise explain_divergence(error, state, writer) from None
                note_epoch(run, record, val, state, writer)
                finish_epoch(run, record, state, writer, trained.optimizer, epochs)
                log_epoch(record)
        return writer.finish(state)


# prepare --------------------------------------------------------------------------------------------------------------


def prepare_images(run: Run, stored: dict[str, Any] | None) -> tuple[Run, Loaders, dict[str, Any]]:
    """Decode every image; return the run with its epochs planned, its batches, and their entries in config.json.

    Images that cannot be decoded are left out with a warning. Where all fit into `--cache-megabytes`, they are kept.

    Raises:
        UsageError: no images are left, or too few for the processes.
    """
    options, fabric, data = run.options, run.fabric, run.data
    augmentation = None
    if options.augment != "none":
        augmentation = PaperAugmentation(options.input_size, erase=options.augment == "erase")
    regions = None
    if options.keep_off is not None:
        regions = read_regions(data, str(options.keep_off))
        run.log(f"keeping the attention off regions of {len(regions):,} of {len(data.train):,} images")
    splits = [TrainImages(data.train, options.input_size, augmentation, regions, options.seed)]
    splits += [TrainImages(samples, options.input_size) for samples in (data.val, data.test)]
    # every process caches all images, because its share of them changes with each epoch
    room = options.cache_megabytes * _MEGABYTE / machine.local_processes()
    cached = splits[0].num_bytes + splits[1].num_bytes <= room
    keep_test = cached and sum(images.num_bytes for images in splits) <= room
    problems: list[str] = []
    for split, keep in enumerate((cached, cached, keep_test)):
        images = splits[split]
        indices = range(len(images)) if keep else range(fabric.global_rank, len(images), fabric.world_size)
        pixels, unusable = read_images(images, indices, run.progress, keep=keep)
        unusable = {index: text for share in machine.gather(fabric, unusable) for index, text in share.items()}
        splits[split] = leave_out(replace(images, pixels=pixels), unusable)
        problems += [unusable[index] for index in sorted(unusable)]
    train, val, test = splits
    if not len(train) or not len(val):
        raise UsageError(f"{data.root}: no training or no validation image can be decoded: {shorten_list(problems)}")
    if problems:
        advice = f"{shorten_list(problems)}; replace or remove them"
        run.log(WarningLine(f"warning: left out {len(problems)} image(s) that cannot be decoded: {advice}"))
    run = plan(replace(run, data=replace(data, train=train.samples, val=val.samples, test=test.samples)), stored)
    batch_size = run.options.batch_size or 1
    if fabric.world_size > 1 and min(batch_size, len(train)) < 2 * fabric.world_size:
        raise UsageError(
            f"batches of {batch_size} from {len(train)} images over {fabric.world_size} processes: "
            "each needs at least 2 images; start fewer processes"
        )
    workers = machine.default_num_workers(fabric.device, cached) if options.workers is None else options.workers
    once = 0 if keep_test or fabric.device.type == "cpu" else workers
    loaders = Loaders(
        Batches(train, batch_size, shuffle_seed=options.seed, workers=workers, **run.rank_of),
        Batches(val, EVALUATION_BATCH, workers=0 if cached else workers, **run.rank_of),
        Batches(test, EVALUATION_BATCH, workers=once, **run.rank_of) if len(test) else None,
        Batches(test if len(test) else val, EVALUATION_BATCH, workers=once),
    )
    return run, loaders, {"workers": workers, "cached": cached}


def plan(run: Run, stored: dict[str, Any] | None) -> Run:
    """Return the run with the batch size and the epochs of its number of images, or those of the stored run."""
    batch_size, epochs = run.options.plan_epochs(len(run.data.train), stored)
    return replace(run, options=replace(run.options, batch_size=batch_size, epochs=epochs))


def make_objective(run: Run, network: OpalNetwork) -> Objective:
    """Return the training loss of a network."""
    options, weights = run.options, None
    if options.class_weights == "balanced":
        weights = torch.tensor(balanced_weights(run.data), device=run.fabric.device)
    scale = find_logit_scale(network.head, options.anchor_probability)
    return Objective(options.agreement, options.kept_off_weight(), options.adversarial, weights, scale)


def set_up(run: Run, network: OpalNetwork) -> Trained:
    """Return the network with its optimizer, wrapped by Fabric."""
    options, fabric = run.options, run.fabric
    if fabric.world_size > 1 and fabric.device.type == "cuda":
        get_library(options.backbone).convert_sync_batch_norm(network)
    if options.freeze_backbone:
        network.backbone.requires_grad_(False)
    model: Any = NetworkTerms(network, agreement=options.agreement > 0, adversarial=options.adversarial > 0)
    if options.compile:
        model = torch.compile(model)
    parameters = [weight for weight in network.parameters() if weight.requires_grad]
    model, optimizer = fabric.setup(model, torch.optim.Adam(parameters, lr=options.lr))
    return Trained(network, model, optimizer, make_objective(run, network))


# fit the head, choose the stride --------------------------------------------------------------------------------------


def choose_stride(run: Run, choices: list[TrainOptions], first: OpalNetwork, loaders: Loaders) -> Fitted:
    """Fit a head to the network of each choice, of which `first` is built; return the one to train."""
    fitted = [fit_network(replace(run, options=choices[0]), first, loaders)]
    for options in choices[1:]:
        network = build_network(options, run.data.num_classes, None).to(run.fabric.device)
        fitted.append(fit_network(replace(run, options=options), network, loaders))
    if len(fitted) == 1:
        return fitted[0]
    finer, all_layers = fitted
    shares = ", ".join(f"{each.val.accuracy:.1%} at stride {each.options.stride}" for each in fitted)
    line = f"fitted heads, {finer.val.images} validation images correct: {shares}; "
    if prefer_all_layers(finer.val, all_layers.val):
        run.log(f"{line}keeping all layers, whose cells are coarser (fine cells: --stride {finer.options.stride})")
        return all_layers
    run.log(f"{line}no clear difference: keeping fine cells (all layers: --stride {all_layers.options.stride})")
    return finer


def fit_network(run: Run, network: OpalNetwork, loaders: Loaders) -> Fitted:
    """Fit the head to the frozen backbone on the training images, and validate the network."""
    options, random_state, objective = run.options, torch.get_rng_state(), make_objective(run, network)
    # as many workers as in fine-tuning: with none, a GPU waits for the augmentation
    images, workers = loaders.train.images, loaders.train.workers
    batches = Batches(images, head_fit.BATCH, shuffle_seed=options.seed, workers=workers, **run.rank_of)
    outcome = fit_head(
        network, batches, objective, run.fabric, steps=options.head_steps,
        memory=options.cache_megabytes * _MEGABYTE, progress=run.progress,
    )  # fmt: skip
    val = validate(run, network, objective, loaders, epoch=0, progress=run.progress)
    return Fitted(options, network, random_state, outcome, val)


def finish_head_fit(
    run: Run, fitted: Fitted, seconds: float, state: TrainState, writer: RunWriter, trained: Trained, loaders: Loaders
) -> int:
    """Write a network with a fitted head as epoch 0; return the number of epochs that time is left for."""
    options, data, outcome, val = run.options, run.data, fitted.fit, fitted.val
    speed, epochs = outcome.images_per_second, options.epochs or 0
    record = EpochRecord(0, outcome.loss, outcome.accuracy, val.loss, val.accuracy, seconds, speed, data_wait=0.0)
    epoch_seconds = (PASSES * len(data.train) + len(data.val)) / speed
    if options.minutes is not None:
        # of all processes, since their clocks differ
        planned = min(machine.gather(run.fabric, max(0, int((60 * options.minutes - seconds) / epoch_seconds))))
        epochs = state.planned_epochs = min(epochs, planned)
    note_epoch(run, record, val, state, writer)
    if run.fabric.is_global_zero:
        split = "test" if data.test else "validation"
        writer.config |= compare_with_classifiers(
            outcome, fitted.network, loaders.whole_test, options.weights_name, split, run.progress, run.log
        )
    # only now: a classifier's new weights come from the generator whose state is written
    finish_epoch(run, record, state, writer, trained.optimizer, epochs)
    if epochs:
        minutes = max(round(epochs * epoch_seconds / 60), 1)
        run.log(f"fine-tuning takes about {minutes} min for {epochs} epochs; best.pt can be used meanwhile")
    return epochs


# an epoch -------------------------------------------------------------------------------------------------------------


def run_epoch(run: Run, trained: Trained, loaders: Loaders, epoch: int, epochs: int) -> tuple[EpochRecord, Evaluation]:
    """Train and validate one epoch, counted from 1.

    Raises:
        DivergenceError: a loss is not finite; raised in every process alike.
    """
    options, fabric, batches, optimizer = run.options, run.fabric, loaders.train, trained.optimizer
    num_train, num_val = len(run.data.train), len(run.data.val)
    before, total = (epoch - 1) * (num_train + num_val), epochs * (num_train + num_val)
    trained.model.train()
    if options.freeze_backbone:
        trained.network.backbone.eval()
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
            parameters["lr"] = options.learning_rate((epoch - 1 + step / len(plan)) / epochs)
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
            run.progress(before + seen, total, f"epoch {epoch}/{epochs}, {note}")
        ended = time.perf_counter()
    seconds = time.perf_counter() - began
    # without synchronised batch norm, processes differ in their statistics: evaluate those that will be saved
    machine.share_buffers(fabric, trained.network)

    def after_batch(done: int, _: int | None, __: str) -> None:
        # every process does as many, but for the last batch
        share = min(done * fabric.world_size, num_val)
        run.progress(before + num_train + share, total, f"epoch {epoch}/{epochs}, validating")

    val = validate(run, trained.network, trained.objective, loaders, epoch=epoch, progress=after_batch)
    record = EpochRecord(
        epoch, loss / seen, correct / seen, val.loss, val.accuracy, time.perf_counter() - began, seen / seconds,
        waited / seconds, kept_off / seen,
    )  # fmt: skip
    return record, val


def train_step(fabric: Fabric, trained: Trained, images: Tensor, labels: Tensor, global_batch: int) -> Tensor:
    """Do one optimizer step on this process's n images of a global batch of N.

    Args:
        fabric: processes, device and precision.
        trained: changed in place.
        images: uint8 [n, H0, W0, 3], or [n, H0, W0, 4] with regions.
        labels: int64 [n].
        global_batch: N, the number of images over all processes.

    Returns:
        Over the n images the summed, weighted cross-entropy, the number of correct predictions and the summed penalty
        of kept-off regions, float64 [3] on the device.
    """
    config = trained.network.config
    labels = labels.to(fabric.device, non_blocking=True)
    images = images.to(fabric.device, non_blocking=True)
    inputs = normalize(images[..., :3], config.mean, config.std)
    terms = trained.model(inputs, labels, read_regions_channel(images))
    total, cross_entropy = trained.objective(terms, labels)
    trained.optimizer.zero_grad(set_to_none=True)
    # gradients are averaged over processes, whose shares may differ by an image: this factor makes them the gradients
    # of the global batch's mean loss
    fabric.backward(total * (fabric.world_size / global_batch))
    trained.optimizer.step()
    correct = (terms.logits[: len(labels)].detach().argmax(1) == labels).sum()
    return torch.stack([cross_entropy.double(), correct.double(), terms.kept_off.detach().sum().double()])


def validate(
    run: Run, network: OpalNetwork, objective: Objective, loaders: Loaders, *, epoch: int, progress: Progress
) -> Evaluation:
    """Return the metrics of the validation images; raise DivergenceError if their loss is not finite."""
    # float32 would take a GPU as long as training in lower precision; the best weights are judged in float32
    lower = epoch > 0 and run.fabric.device.type == "cuda"
    outputs = predict(network, loaders.val, run.fabric, lower_precision=lower, progress=progress)
    val = outputs.compute_metrics(network.config.class_map, objective.scale)
    if not math.isfinite(val.loss):
        raise DivergenceError(
            f"the validation loss is {val.loss} in epoch {epoch}, at learning rate {run.options.lr:g}"
        )
    return val


def explain_divergence(error: DivergenceError, state: TrainState, writer: RunWriter) -> DivergenceError:
    """Write best.pt with the best epoch so far; return the error that says so, and what to do."""
    kept = "no epoch was finished"
    if state.best is not None:
        writer.write_best(state)
        kept = f"best.pt holds {f'epoch {state.best[0]}' if state.best[0] else 'the fitted head'}"
    precision = "" if writer.config["precision"] == "fp32" else " or --precision fp32"
    return DivergenceError(f"{error}; {kept}; train again with --overwrite and a lower --lr{precision}")


def note_epoch(run: Run, record: EpochRecord, val: Evaluation, state: TrainState, writer: RunWriter) -> None:
    """Update the progress by an epoch, or by the frozen network (epoch 0); write the first best.pt."""
    state.records.append(record)
    state.epoch = record.epoch
    state.checkpoint_metrics = {"epoch": record.epoch, **val.to_dict("val")}
    # few validation images: a lower loss may come with fewer correct answers than fine-tuning began with
    least = state.records[0].val_accuracy if state.records[0].epoch == 0 else 0.0
    is_better = state.best is None or (val.loss < state.best[1].loss and val.accuracy >= least)
    # validation images are not attacked, so their figures do not show what adversarial training gains
    if is_better or run.options.adversarial:
        is_first = state.best is None
        state.best, state.best_weights = (record.epoch, val), copy_weights(writer.network)
        if is_first:
            # before last.pt: a process that is killed between the two repeats this epoch
            writer.write_best(state)


def finish_epoch(
    run: Run, record: EpochRecord, state: TrainState, writer: RunWriter, optimizer: Any, epochs: int
) -> None:
    """Write the files of an epoch, and report it."""
    writer.write_last(state, optimizer)
    run.log(record.describe(epochs, is_best=state.best is not None and state.best[0] == record.epoch))
    images = len(run.data.train) + len(run.data.val)
    run.progress(record.epoch * images, epochs * images, f"epoch {record.epoch}/{epochs}")


def reason_to_stop(run: Run, state: TrainState) -> str:
    """Return why no epoch should follow, the same in every process; else nothing."""
    options = run.options
    if state.best is not None and stops_after(options, state.epoch, state.best[0]):
        return f"no lower validation loss since epoch {state.best[0]}"
    seconds = [record.seconds for record in state.records]
    if options.minutes is not None and state.epoch:
        # another epoch as long as the last one
        fits = sum(seconds) + seconds[-1] <= 60 * options.minutes
        if not all(machine.gather(run.fabric, fits)):
            return f"another epoch after epoch {state.epoch} would exceed --minutes"
    return ""


@contextmanager
def _open_tensorboard(
    run: Run, run_dir: TrainRunDirectory, first_epoch: int
) -> Iterator[Callable[[EpochRecord], None]]:
    """Yield what logs an epoch with `--tensorboard`; hides earlier logs from `first_epoch` on."""
    if not (run.options.tensorboard and run.fabric.is_global_zero):
        yield lambda record: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_dir.tensorboard), purge_step=first_epoch) as writer:

        def log_epoch(record: EpochRecord) -> None:
            for name, value in asdict(record).items():
                writer.add_scalar(name, value, record.epoch)

        yield log_epoch


@contextmanager
def _explained_memory_errors(run: Run) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "DataLoader worker" in str(error):
            raise StoppedEarly(
                "a process that prepares images died: killed for lack of memory, or started by a script that "
                'trains outside of `if __name__ == "__main__":`; repeat the command with --resume and --workers 0'
            ) from None
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        batch_size, _ = run.options.plan_epochs(len(run.data.train))
        raise StoppedEarly(
            f"out of memory on {run.fabric.device} with batches of {batch_size} images of "
            f"{run.options.input_size[0]}x{run.options.input_size[1]} in {run.options.backbone}; close other programs "
            "and repeat the command with --resume, or start again with a smaller --batch-size and --overwrite"
        ) from None
