"""The training loop: one network, one device, one sitting.

The paper's protocol: Adam at a fixed 1e-4, batches of 64, cross-entropy on the logits, 30 epochs, the weights of the
epoch with the lowest validation cross-entropy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.errors import StoppedEarly, UsageError, require
from opal_deploy.model.checkpoint import Checkpoint, load, save
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train import setup
from opal_deploy.train.data.samples import DataSet
from opal_deploy.train.evaluation.network import Evaluation, evaluate, evaluate_batches
from opal_deploy.train.pictures import Batches, Pictures, Report, normalised
from opal_deploy.train.run_folder import EpochRecord, RunFolder
from opal_deploy.train.transforms import Augment, PaperAugmentation

_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Options:
    """Everything a run depends on besides its pictures; the defaults are the paper's.

    Attributes:
        backbone: torchvision's name.
        head: see HeadConfig.
        weights: the backbone's, a file or a name of torchvision's; None leaves them random.
        epochs, batch_size, lr: of Adam, fixed.
        input_size: (H0, W0) in pixels.
        augment: `paper` or `none`.
        seed: of weights, order and augmentation.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        workers: processes that prepare pictures; None chooses, see `setup.default_workers`.
        tf32: allow TF32 in float32 arithmetic on the GPU.
        cache_megabytes: squashed pictures are kept in memory up to this much.
    """

    backbone: str = "resnet50"
    head: HeadConfig = field(default_factory=HeadConfig)
    weights: str | None = None
    epochs: int = 30
    batch_size: int = 64
    lr: float = 1e-4
    input_size: tuple[int, int] = (224, 224)
    augment: Augment = "paper"
    seed: int = 0
    device: str = "auto"
    workers: int | None = None
    tf32: bool = False
    cache_megabytes: int = 1024


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
    report: Report = _no_report,
    log: Callable[[str], None] = _no_log,
) -> Result:
    """Train, keep the best, test it.

    Args:
        data: from `data.read`, or put together in code; needs training and validation pictures.
        options: see Options.
        out: the run's folder; `run_folder` says what is written to it after each epoch.
        overwrite: replace a run that is there.
        report: called with pictures done, pictures in all, and a note.
        log: called with one line an epoch.

    Raises:
        UsageError: the folder holds a run, an option is impossible, or a picture cannot be decoded.
        StoppedEarly: the loss is no longer a number; last.pt and best.pt are of the epochs before.
    """
    require("matplotlib", "train", "training")
    if options.epochs < 1 or options.batch_size < 1 or not options.lr > 0:
        raise UsageError("epochs and batch size must be at least 1 and the learning rate above 0")
    if not data.train or not data.val:
        raise UsageError(f"{data.root}: it needs training and validation pictures; add a val/ folder")
    folder = RunFolder(out)
    folder.check_free(overwrite=overwrite)
    device = setup.choose_device(options.device)
    setup.allow_tf32(options.tf32)
    torch.manual_seed(options.seed)
    config = NetworkConfig(options.backbone, data.num_classes, options.input_size, options.head)
    network = OpalNetwork(config, weights=options.weights).channels_last().to(device)

    # pictures ----------------------------------------------------------------------------------------------------
    augmentation = PaperAugmentation(options.input_size) if options.augment == "paper" else None
    train_pictures = Pictures(data.train, options.input_size, augmentation=augmentation, seed=options.seed)
    val_pictures = Pictures(data.val, options.input_size)
    cached = train_pictures.cache_bytes + val_pictures.cache_bytes <= options.cache_megabytes * _MEGABYTE
    if cached:
        train_pictures.fill_cache(report)
        val_pictures.fill_cache(report)
    workers = setup.default_workers(device, cached) if options.workers is None else options.workers
    train_batches = Batches(train_pictures, options.batch_size, shuffle_seed=options.seed, workers=workers)
    val_batches = Batches(val_pictures, options.batch_size, workers=0 if cached else workers)

    # records -----------------------------------------------------------------------------------------------------
    amp = setup.Amp.choose(device)
    resolved = {
        "options": asdict(options),
        "data": data.summary(),
        "weights": setup.weights_record(network, options.weights),
        "device": str(device),
        "precision": amp.name,
        "workers": workers,
        "cached": cached,
        "versions": setup.versions(),
    }
    folder.clear()
    folder.write_json(folder.config, resolved)

    def keep(path: Path, metrics: dict[str, Any]) -> None:
        save(path, Checkpoint(network, data.class_names, crop=data.crop, metrics=metrics, training=resolved))

    # the loop ----------------------------------------------------------------------------------------------------
    optimizer = torch.optim.Adam(network.parameters(), lr=options.lr)
    scaler = amp.scaler()
    epochs: list[EpochRecord] = []
    best: tuple[int, Evaluation] | None = None
    per_epoch = len(data.train) + len(data.val)
    for epoch in range(1, options.epochs + 1):
        started = time.perf_counter()
        network.train()
        train_batches.epoch = epoch
        # of this epoch: summed loss, correct answers, pictures
        loss_sum, correct, seen = 0.0, 0, 0
        for images, labels in train_batches:
            labels = labels.to(device, non_blocking=True)
            inputs = normalised(images.to(device, non_blocking=True), IMAGENET_MEAN, IMAGENET_STD)
            with amp.autocast():
                logits = network(inputs).float()  # [N, C]
            loss = functional.cross_entropy(logits, labels)
            # before the step: the weights stay those that still gave numbers
            batch_loss = loss.item()
            _require_finite(batch_loss, "training", epoch, options, best)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            loss_sum += batch_loss * len(labels)
            correct += int((logits.argmax(1) == labels).sum())
            seen += len(labels)
            note = f"epoch {epoch}/{options.epochs}, loss {loss_sum / seen:.3f}"
            report((epoch - 1) * per_epoch + seen, options.epochs * per_epoch, note)

        val = evaluate_batches(network, val_batches)
        _require_finite(val.loss, "validation", epoch, options, best)
        record = EpochRecord(
            epoch, loss_sum / seen, correct / seen, val.loss, val.accuracy, time.perf_counter() - started
        )
        epochs.append(record)
        metrics = {"epoch": epoch, **val.to_dict("val")}
        if best is None or val.loss < best[1].loss:
            best = (epoch, val)
            keep(folder.best, metrics)
        keep(folder.last, metrics)
        folder.write_epochs(epochs)
        report(epoch * per_epoch, options.epochs * per_epoch, f"epoch {epoch}/{options.epochs}")
        log(_line(record, options.epochs, is_best=best[0] == epoch))

    # the best weights on the test pictures -----------------------------------------------------------------------
    assert best is not None  # there was at least one epoch
    best_epoch, val = best
    network.load_state_dict(load(folder.best).network.state_dict())
    test = evaluate(network, data.test, batch_size=options.batch_size, report=report) if data.test else None
    figures = {"epoch": best_epoch, **val.to_dict("val"), **(test.to_dict("test") if test else {})}
    keep(folder.best, figures)
    seconds = sum(record.seconds for record in epochs)
    folder.write_json(folder.summary, {**figures, "epochs": len(epochs), "seconds": seconds})
    return Result(folder.best, best_epoch, epochs, val, test)


def _require_finite(loss: float, split: str, epoch: int, options: Options, best: tuple[int, Evaluation] | None) -> None:
    if math.isfinite(loss):
        return
    kept = f"best.pt holds epoch {best[0]}" if best else "nothing was kept yet"
    raise StoppedEarly(
        f"the {split} loss is {loss} in epoch {epoch} at learning rate {options.lr:g}; {kept}; "
        "train again with a smaller --lr, and look at the weights if that does not help"
    )


def _line(record: EpochRecord, epochs: int, *, is_best: bool) -> str:
    return (
        f"epoch {record.epoch}/{epochs}: training loss {record.train_loss:.4f}, {record.train_accuracy:.1%}; "
        f"validation loss {record.val_loss:.4f}, {record.val_accuracy:.1%}; {record.seconds:.1f} s"
        f"{'; best so far' if is_best else ''}"
    )
