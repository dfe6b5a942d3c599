"""best.pt and last.pt of a run: what is measured for them, writing them, and resuming from last.pt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.class_map import find_margins
from opal_deploy.artifact.files import write_json
from opal_deploy.artifact.measurements import Calibration, ReceptiveField
from opal_deploy.artifact.opal_head import embedding
from opal_deploy.artifact.outputs import Outputs, find_largest
from opal_deploy.artifact.patches import Patches
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.evaluation.calibration import calibrate
from opal_deploy.evaluation.cells import measure_receptive_field
from opal_deploy.evaluation.metrics import ClassCounts, Evaluation, collapse_of_cells, compute_metrics, count_by_class
from opal_deploy.evaluation.patches import MAX_IMAGES, cut_patches
from opal_deploy.evaluation.record import baseline_of, measure_baseline, pool_features
from opal_deploy.evaluation.session import choose_samples, photographs
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model.checkpoint import Checkpoint, build_metadata, save
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.neighbours import Neighbours, max_images
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.state_dicts import load_torch_file
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.decision import describe_supported_rates
from opal_deploy.runtime.torch_session import TorchSession, to_outputs
from opal_deploy.train import machine
from opal_deploy.train.images import Batches, Loaders, normalize
from opal_deploy.train.network import Run
from opal_deploy.train.out_of_fold import OutOfFold, TrainingOutputs, choose_neighbours
from opal_deploy.train.run_directory import (
    RESUME_ADVICE,
    EpochRecord,
    TrainResult,
    TrainRunDirectory,
    WithoutCopies,
    refuse_other_run,
    stop_when_full,
)

# the key in last.pt next to the checkpoint's own
RESUME_KEY = "resume"


class LabelledOutputs(NamedTuple):
    """The outputs for n images and their labels, as far as metrics need them."""

    logits: NDArray[np.float32]  # [n, C]
    labels: NDArray[np.int64]  # [n]
    collapse: NDArray[np.float64] | None  # [n], of the label's slots; None for a network without slots
    margins: NDArray[np.float64] | None  # [n], of the two best classes; None for a network without anchors

    @staticmethod
    def of(outputs: Outputs, labels: NDArray[np.int64], config: NetworkConfig) -> LabelledOutputs:
        """Return the metrics' inputs for n images from a network's outputs."""
        class_map, collapse, margins = config.class_map, None, None
        if outputs.argmax is not None:
            collapse = collapse_of_cells(class_map.take(outputs.argmax, labels), labels, class_map)
        if outputs.scores is not None:
            values, best = embedding(outputs.scores, config.head.epsilon), find_largest(outputs.logits, 2)
            margins = find_margins(class_map.totals(class_map.take(values, best), best))
        return LabelledOutputs(outputs.logits, labels, collapse, margins)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each image is answered right, bool [n]."""
        return np.asarray(self.logits.argmax(axis=1) == self.labels)

    def compute_metrics(self, scale: float = 1.0) -> Evaluation:
        """Return the metrics over all images, the loss of logits times `scale`."""
        return compute_metrics(np.float32(scale) * self.logits, self.labels, self.collapse, self.margins)


def predict(
    network: OpalNetwork, batches: Batches, fabric: Fabric | None = None, *, lower_precision: bool = False,
    progress: Progress = no_progress,
) -> LabelledOutputs:  # fmt: skip
    """Return the outputs of all batches, at least one, computed on the device of the network in evaluation mode.

    They are those of all processes of `fabric`; None is this one. With `lower_precision` the backbone computes in the
    run's precision; the head stays float32, as in exported files.

    UsageError: names an image that cannot be decoded.
    """
    network.eval()
    device, config = next(network.parameters()).device, network.config
    parts, done = list[LabelledOutputs](), 0
    with torch.inference_mode():
        for images, labels in batches:
            inputs = normalize(images.to(device, non_blocking=True), config.mean, config.std)
            with fabric.autocast() if fabric is not None and lower_precision else nullcontext():
                features = network.backbone(inputs)
            outputs = to_outputs(network.head.explain(network.head.project(features.float())))
            parts.append(LabelledOutputs.of(outputs, labels.numpy(), config))
            done += len(labels)
            progress(done, len(batches.images), "evaluating")
    parts = [part for share in machine.gather(fabric, parts) for part in share]
    whole: list[Any] = [None if column[0] is None else np.concatenate(column) for column in zip(*parts, strict=True)]
    return LabelledOutputs(*whole)


@dataclass(frozen=True)
class Measurements:
    """The measurements of a network for its checkpoint, in float32."""

    epoch: int
    val: Evaluation  # on the validation split, or out of fold
    test: Evaluation | None
    without_copies: WithoutCopies | None  # of the test images that are no near copies of training images
    classes: list[ClassCounts]  # answers per class on the test split, or on the validation split without one
    calibration: Calibration  # fitted to the validation split
    # only of the process that writes the checkpoint
    receptive_field: ReceptiveField | None = None
    baseline: Baseline | None = None
    neighbours: Neighbours | None = None
    patches: Patches | None = None

    @property
    def metrics(self) -> dict[str, Any]:
        """The epoch and the metrics of both splits, as the checkpoint keeps them."""
        others = {} if self.without_copies is None else asdict(self.without_copies)
        return {
            "epoch": self.epoch, **self.val.to_dict("val"), **(self.test.to_dict("test") if self.test else {}),
            **{f"test_{name}_without_copies": value for name, value in others.items()},
        }  # fmt: skip


@dataclass
class TrainState:
    """The progress of a run after an epoch."""

    epoch: int = 0  # number of finished epochs
    records: list[EpochRecord] = field(default_factory=list)  # one per finished epoch
    best: tuple[int, Evaluation] | None = None  # epoch and validation metrics of the best weights so far
    planned_epochs: int | None = None  # the number of epochs that `--minutes` leaves time for; None without it
    best_weights: dict[str, Tensor] | None = None  # on the CPU


def copy_weights(network: OpalNetwork) -> dict[str, Tensor]:
    """Return a network's state as contiguous copies on the CPU."""
    state = network.state_dict()
    return {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in state.items()}


@dataclass
class RunWriter:
    """Measures a network for its checkpoints and writes them; every process calls it, and the first one writes."""

    run_dir: TrainRunDirectory
    run: Run
    network: OpalNetwork
    loaders: Loaders
    background: list[Sample]  # out-of-distribution images, perhaps none
    config: dict[str, Any]  # the content of config.json, which checkpoints carry too
    measured: Measurements | None = None  # of the weights in best.pt

    def measure(
        self, epoch: int, outputs: LabelledOutputs | None = None, answers: OutOfFold | None = None,
        training: TrainingOutputs | None = None,
    ) -> Measurements:  # fmt: skip
        """Measure the network as it is, the weights of an epoch, on all images but the test images.

        `outputs` are those for the validation images, in float32, and `training` those for training images, where they
        are known. Out-of-fold `answers` stand in for validation images where the head was fitted to all images.
        """
        run = self.run
        # measuring must not change the run's random numbers
        with torch.random.fork_rng([run.fabric.device] if run.fabric.device.type == "cuda" else []):
            machine.set_tf32(enabled=False)
            if answers is not None:
                outputs = LabelledOutputs.of(answers.outputs, answers.labels, self.network.config)
            elif outputs is None:
                assert self.loaders.val is not None  # without out-of-fold answers
                outputs = predict(self.network, self.loaders.val, run.fabric, progress=run.progress)
            val, calibration = outputs.compute_metrics(), calibrate(outputs.logits, outputs.labels)
            if answers is not None:
                calibration = replace(calibration, split="out-of-fold")
            # only the process that writes them measures them, on a bounded number of images
            own = self._measure_evidence(answers, training) if run.fabric.is_global_zero else {}
            classes = count_by_class(outputs.logits, outputs.labels, run.data.class_names)
        machine.set_tf32(run.options.tf32)
        self.measured = Measurements(epoch, val, None, None, classes, calibration, **own)
        return self.measured

    def measure_after(self, held_out: Measurements) -> None:
        """Measure what needs no validation images; other figures stay those of the network that had not seen them."""
        machine.set_tf32(enabled=False)
        evidence = {"baseline": held_out.baseline, **self._measure_evidence(None, None)}
        machine.set_tf32(self.run.options.tf32)
        if evidence["baseline"] is not None:
            evidence["baseline"] = replace(evidence["baseline"], split="held-out")
        calibration = replace(held_out.calibration, split="held-out")
        # test images are answered again, by the weights that are kept
        self.measured = replace(held_out, test=None, without_copies=None, calibration=calibration, **evidence)

    def _measure_test(self, test: Batches, measured: Measurements) -> Measurements:
        """Return the measurements with those on the test split."""
        run = self.run
        machine.set_tf32(enabled=False)
        outputs, others = predict(self.network, test, run.fabric, progress=run.progress), None
        machine.set_tf32(run.options.tf32)
        if (copied := self.loaders.copied) is not None and 0 < copied.sum() < len(copied):
            right = outputs.right[~copied]
            others = WithoutCopies(len(right), float(right.mean()))
        classes = count_by_class(outputs.logits, outputs.labels, run.data.class_names)
        return replace(measured, test=outputs.compute_metrics(), without_copies=others, classes=classes)

    def _measure_evidence(self, answers: OutOfFold | None, training: TrainingOutputs | None) -> dict[str, Any]:
        """Return the receptive field, neighbours, patches and, with images that it was not trained on, the baseline."""
        network, data, progress = self.network, self.run.data, self.run.progress
        field = measure_receptive_field(network, data.val or data.train)
        if network.config.head.evidence != "exact":
            return {"receptive_field": field}
        model = Checkpoint(network, data.class_names, receptive_field=field)
        metadata = build_metadata(model)
        if training is None:
            training = answer_training_images(self.run, network, self.background)
        neighbours = training.neighbours
        samples = [data.train[position] for position in training.positions]
        patches = cut_patches(training.outputs, samples, metadata, "train")
        measured: dict[str, Any] = {"receptive_field": field, "neighbours": neighbours, "patches": patches}
        if answers is not None:
            kept = 0 if neighbours is None else neighbours.num_background
            measured["baseline"] = baseline_of(answers.outputs, metadata, kept, "out-of-fold")
        elif data.val:
            network.neighbours = neighbours
            session = TorchSession(model, device=str(self.run.fabric.device))
            measured["baseline"] = measure_baseline(session, data.val, neighbours, progress=progress)
            network.neighbours = None
        return measured

    def write_best(self, state: TrainState, *, is_last: bool = True) -> Measurements:
        """Measure the best weights so far, then write best.pt; leaves them in the network.

        Test images are answered by the last weights only: they may be many, and nothing depends on them.
        """
        assert state.best is not None  # called after an epoch
        network, measured = self.network, self.measured
        network.load_state_dict(state.best_weights or {})
        if measured is None or measured.epoch != state.best[0]:
            measured = self.measure(state.best[0])
        if is_last and measured.test is None and self.loaders.test is not None:
            measured = self.measured = self._measure_test(self.loaders.test, measured)
        network.neighbours = measured.neighbours
        self._save(
            self.run_dir.best, measured.metrics, {"state_dict": state.best_weights},
            receptive_field=measured.receptive_field, calibration=measured.calibration, baseline=measured.baseline,
            patches=measured.patches,
        )  # fmt: skip
        network.neighbours = None
        return measured

    def write_last(self, state: TrainState, optimizer: Any, val: Evaluation) -> None:
        """Write last.pt with everything that the next epoch depends on and the epoch's metrics, then metrics.csv."""
        resume = {
            "progress": asdict(replace(state, best_weights=None)),
            "optimizer": optimizer.state_dict(),
            "scaler": self.run.fabric.strategy.precision.state_dict(),
            # every process draws random numbers of its own
            "random": machine.gather(self.run.fabric, machine.get_random_state(self.run.fabric.device)),
            "best_weights": None if state.best and state.best[0] == state.epoch else state.best_weights,
        }
        content = {"state_dict": copy_weights(self.network), RESUME_KEY: resume}
        self._save(self.run_dir.last, {"epoch": state.epoch, **val.to_dict("val")}, content)
        if self.run.fabric.is_global_zero:
            with stop_when_full():
                self.run_dir.write_epochs(state.records)

    def finish(self, state: TrainState) -> TrainResult:
        """Measure the best weights, and write best.pt and summary.json."""
        run_dir, records, measured = self.run_dir, state.records, self.write_best(state)
        if self.run.fabric.is_global_zero:
            summary = {
                **measured.metrics,
                "calibration": measured.calibration.to_dict(),
                "classes": [asdict(counts) for counts in measured.classes],
                "epochs": state.epoch,
                "seconds": sum(record.seconds for record in records),
                "images_per_second": records[-1].images_per_second,
            }
            with stop_when_full():
                write_json(run_dir.summary, summary)
        self.run.fabric.barrier()
        rates = [*describe_supported_rates(measured.val.risk or {}, measured.baseline)]
        return TrainResult(
            run_dir.best, measured.epoch, records, measured.val, measured.test, measured.without_copies,
            measured.calibration, run_dir.last, self.config, measured.classes, rates,
        )  # fmt: skip

    def _save(self, path: Path, metrics: dict[str, Any], content: dict[str, Any], **measurements: Any) -> None:
        run = self.run
        if run.fabric.is_global_zero:
            checkpoint = Checkpoint(
                self.network, run.data.class_names, crop=run.data.crop, metrics=metrics, training=self.config,
                edits=() if run.start is None or run.new_classes else run.start.edits, **measurements,
            )  # fmt: skip
            with stop_when_full():
                save(path, checkpoint, extra=content)


def answer_training_images(run: Run, network: OpalNetwork, background: Sequence[Sample]) -> TrainingOutputs:
    """Return the outputs of a network, whose evidence is single cells, for up to 4,000 images, or five per class.

    The network is left in evaluation mode. Images are not augmented; `background` has none, or 5 to 2,000.
    """
    config, samples, progress = network.config, run.data.train, run.progress
    device = next(network.eval().parameters()).device

    def answer(pixels: NDArray[np.uint8]) -> tuple[Outputs, Tensor]:
        inputs = torch.from_numpy(normalise(pixels, config.mean, config.std)).to(device)
        with torch.inference_mode():
            features = network.backbone(inputs).float()
            outputs = network.head.explain(network.head.project(features))
        return to_outputs(outputs), features.mean((2, 3)).cpu()

    positions = choose_samples(samples, max(MAX_IMAGES, max_images(config.num_classes)))
    batches = photographs(
        answer, samples, config.form, chosen=positions, progress=progress, note="answering training images"
    )
    outputs, pooled = zip(*(images.outputs for images in batches), strict=True)
    shown, known = [samples[position] for position in positions], pool_features(network, background, progress=progress)
    neighbours = choose_neighbours(network, shown, torch.cat(pooled), known)
    return TrainingOutputs(positions, Outputs.concatenate(list(outputs)), neighbours)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a run's own checkpoint; raise CheckpointError for a damaged file or one of another kind."""
    raw = load_torch_file(path)
    if not isinstance(raw, dict) or not {"state_dict", "training", RESUME_KEY} <= raw.keys():
        raise CheckpointError(f"{path}: not a checkpoint of this trainer; {RESUME_ADVICE}")
    return raw


def restore(
    path: Path, last: dict[str, Any], config: dict[str, Any], network: OpalNetwork, optimizer: Any, fabric: Fabric
) -> TrainState:
    """Put network, optimizer, scaler and torch's generators into the state of last.pt; return the progress.

    `last` is the content of last.pt, at `path`; `config` is that of the run to go on with.

    Raises:
        CheckpointError: the state is damaged.
        UsageError: last.pt is of another run, or more epochs are done than asked for.
    """
    refuse_other_run(path, last["training"], config)
    try:
        raw = last[RESUME_KEY]
        progress = raw["progress"]
        records, (best, evaluation) = [EpochRecord(**record) for record in progress["records"]], progress["best"]
        state = TrainState(progress["epoch"], records, (best, Evaluation(**evaluation)), progress["planned_epochs"])
        state.best_weights = last["state_dict"] if best == state.epoch else raw["best_weights"]
        network.load_state_dict(last["state_dict"])
        optimizer.load_state_dict(raw["optimizer"])
        if raw["scaler"]:
            fabric.strategy.precision.load_state_dict(raw["scaler"])
        # last, because building a network draws from the same generator
        machine.set_random_state(raw["random"][fabric.global_rank], fabric.device)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise CheckpointError(f"{path}: its training state is damaged ({reason}); {RESUME_ADVICE}") from None
    if state.epoch > config["options"]["epochs"]:
        raise UsageError(
            f"{path}: {state.epoch} epochs are done; give --epochs {state.epoch} or more, or another --out"
        )
    return state
