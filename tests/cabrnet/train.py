"""Train PIP-Net and ProtoPNet with CaBRNet's own trainer, as the table in docs/howto/other-networks.md has them.

    PYTHONPATH=. .venv-cabrnet/bin/python tests/cabrnet/train.py PIPNet --seed 1 --out runs/pipnet1

Both start from ImageNet weights, at stride 16, on the ten species and crops that `opal-deploy train` takes, and keep
the epoch that is best on the images that it sets aside. Settings are those of CaBRNet's configurations for birds, with
smaller batches and fewer epochs for 240 photographs; nothing was tuned. Then export and evaluate:

    opal-deploy export runs/pipnet1/final/model_state.pth --arch runs/pipnet1/final/model_arch.yml \
        --classes runs/pipnet1/classes.txt --outputs attention --input float32
    opal-deploy evaluate ../shared/data/cub_mini --model runs/pipnet1/final/model_state.onnx
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cabrnet.core.utils.data import DatasetManager
from cabrnet.core.utils.optimizers import OptimizerManager
from cabrnet.core.utils.train import training_loop
from PIL import Image

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet
from opal_deploy.evaluation.session import prepared_batches
from tests.cabrnet.compare import BIRDS, MEAN, SIDE, STD, build, train

STRIDE = {"stride_divider": {"ratio": 2, "min_channels": 200}}
PREPROCESS = "cabrnet.core.utils.custom_preprocess"
TENSOR = [{"type": "ToTensor"}, {"type": "Normalize", "params": {"mean": list(MEAN), "std": list(STD)}}]


def write_images(data: DataSet, folder: Path) -> None:
    """Write the crops that `train` takes, as a folder per split and class."""
    for split in ("train", "val", "test"):
        samples = data.select(split)
        done = 0
        for pixels, _ in prepared_batches(samples, (SIDE, SIDE), batch=16):
            for image in pixels:
                path = folder / split / f"{samples[done].label:03}" / f"{done}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)
                done += 1


def describe_split(folder: Path, split: str, batch: int, transform: Any = None, **settings: Any) -> dict[str, Any]:
    """Return CaBRNet's document of a folder of images."""
    plain = {"type": "Compose", "transforms": TENSOR}
    return {
        "module": "torchvision.datasets",
        "name": "ImageFolder",
        "params": {"root": str(folder / split), "transform": transform or plain},
        "batch_size": batch,
        "shuffle": False,
        **settings,
    }


def augment(copies: int, side: int) -> dict[str, Any]:
    """Return PIP-Net's augmentation: one change of shape, then `copies` of colour."""
    colours = [
        {"module": PREPROCESS, "type": "TrivialAugmentWideNoShape"},
        {"type": "RandomCrop", "params": {"size": [SIDE, SIDE]}},
        *TENSOR,
    ]
    shapes: list[dict[str, Any]] = [
        {"type": "Resize", "params": {"size": [side, side]}},
        {"module": PREPROCESS, "type": "TrivialAugmentWideShapeOnly"},
        {"type": "RandomHorizontalFlip"},
        {"type": "RandomResizedCrop", "params": {"size": SIDE + 4, "scale": [0.95, 1.0]}},
    ]
    if copies == 1:
        return {"type": "Compose", "transforms": shapes + colours}
    split = {"num_samples": copies, "transform": {"type": "Compose", "transforms": colours}}
    return {
        "type": "Compose",
        "transforms": [*shapes, {"module": PREPROCESS, "type": "AugmentationSplitter", "params": split}],
    }


def describe_pipnet(epochs: int, steps: int) -> dict[str, Any]:
    """Return PIP-Net's training: a quarter of the epochs without labels, then all losses."""
    rate, pretrain = 5e-4, max(1, epochs // 4)
    groups = {"lr": rate, "weight_decay_rate": 0.0}
    return {
        "param_groups": {
            "backbone_to_freeze": {"start": "extractor.convnet.conv1", "stop": "extractor.convnet.layer2"},
            "backbone_to_train": ["extractor.convnet.layer3", "extractor.convnet.layer4"],
            "classifier_weights": "classifier.last_layer.weight",
        },
        "optimizers": {
            "optimizer_net": {
                "type": "AdamW",
                "params": {"lr": rate, "weight_decay": 0.0},
                "groups": {"backbone_to_freeze": dict(groups), "backbone_to_train": dict(groups)},
                "scheduler": {
                    "type": "CosineAnnealingLR",
                    "trigger": "batch",
                    "params": {"T_max": steps * (epochs - pretrain), "eta_min": rate / 100, "last_epoch": -1},
                },
            },
            "optimizer_classifier": {
                "type": "Adam",
                "params": {"lr": 0.05, "weight_decay": 0.0},
                "groups": {"classifier_weights": {"lr": 0.05, "weight_decay_rate": 0.0}},
                "scheduler": {
                    "type": "CosineAnnealingWarmRestarts",
                    "trigger": "batch",
                    "params": {"T_0": 5, "eta_min": 0.001, "T_mult": 1},
                },
            },
        },
        "num_epochs": epochs,
        "periods": {
            "pretrain": {
                "num_epochs": pretrain,
                "freeze": ["backbone_to_freeze", "classifier_weights"],
                "optimizers": "optimizer_net",
            },
            "fine_tuning": {
                "num_epochs": 2,
                "freeze": ["backbone_to_freeze", "backbone_to_train"],
                "optimizers": "optimizer_classifier",
            },
            "warmup": {
                "num_epochs": 3,
                "freeze": ["backbone_to_freeze"],
                "optimizers": ["optimizer_net", "optimizer_classifier"],
            },
            "main_training": {"optimizers": ["optimizer_net", "optimizer_classifier"]},
        },
    }


def describe_protopnet(epochs: int) -> dict[str, Any]:
    """Return ProtoPNet's training: head, then all layers; prototypes are replaced by features of images at the end."""
    head = {"addons": {"lr": 3e-3, "weight_decay": 1e-3}, "prototypes": {"lr": 3e-3}}
    return {
        "param_groups": {
            "backbone": "extractor.convnet",
            "addons": "extractor.add_on",
            "prototypes": "classifier.prototypes",
            "last_layer": "classifier.last_layer",
        },
        "optimizers": {
            "warmup_optimizer": {"type": "Adam", "groups": {name: dict(group) for name, group in head.items()}},
            "joint_optimizer": {
                "type": "Adam",
                "groups": {"backbone": {"lr": 1e-4, "weight_decay": 1e-3}, **head},
                "scheduler": {"type": "StepLR", "params": {"step_size": 10, "gamma": 0.3}},
            },
            "last_layer_optimizer": {"type": "Adam", "groups": {"last_layer": {"lr": 1e-4}}},
        },
        "num_epochs": epochs,
        "periods": {
            "warmup": {
                "epoch_range": [0, 4],
                "freeze": ["backbone", "last_layer"],
                "optimizers": "warmup_optimizer",
            },
            "main_training": {
                "epoch_range": [5, epochs - 1],
                "freeze": ["last_layer"],
                "optimizers": "joint_optimizer",
            },
        },
        "auxiliary_info": {
            "loss_coefficients": {"clustering": 0.08, "separability": -0.008, "regularization": 0.0001},
            "projection_config": {"start_epoch": 9, "frequency": 10, "num_ft_epochs": 5},
        },
    }


def main() -> None:
    """Train one network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("network", choices=("PIPNet", "ProtoPNet"))
    parser.add_argument("--data", type=Path, default=BIRDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="with cross-entropy alone, not with CaBRNet's trainer")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    name, out, epochs = arguments.network, arguments.out, arguments.epochs
    out.mkdir(parents=True)
    for set_seed in (torch.manual_seed, np.random.seed, random.seed):
        set_seed(arguments.seed)
    images = out / "images"
    data_set = read_dataset(arguments.data, needs_validation=True)
    write_images(data_set, images)
    (out / "classes.txt").write_text("\n".join(data_set.class_names) + "\n")
    network = build(name, out, STRIDE, len(data_set.class_names))
    if arguments.plain:
        batches = prepared_batches(data_set.train, (SIDE, SIDE), batch=16)
        labels = torch.tensor([sample.label for sample in data_set.train])
        train(network, name, np.concatenate([pixels for pixels, _ in batches]), labels, epochs)
        (out / "final").mkdir()
        (out / "model_arch.yml").rename(out / "final/model_arch.yml")
        torch.save(network.state_dict(), out / "final/model_state.pth")
        return
    if name == "PIPNet":
        twice, settings = 16, {"shuffle": True, "drop_last": True, "collate_fn": "concat_collate"}
        training = describe_pipnet(epochs, len(list((images / "train").rglob("*.png"))) // twice)
        data = {
            "train_set": describe_split(images, "train", twice, augment(2, 232), **settings),
            "pretrain_set": describe_split(images, "train", 2 * twice, augment(2, 256), **settings),
        }
    else:
        training = describe_protopnet(epochs)
        data = {"train_set": describe_split(images, "train", 16, augment(1, 232), shuffle=True)}
    data |= {
        "val_set": describe_split(images, "val", 32),
        "projection_set": describe_split(images, "train", 32),
        "test_set": describe_split(images, "test", 32),
    }
    files = {}
    for key, document in {"training": training, "dataset": data}.items():
        files[key] = out / f"{key}.yml"
        files[key].write_text(yaml.safe_dump(document, sort_keys=False))
    network.register_training_params(training)
    figures = training_loop(
        working_dir=str(out),
        model=network,
        epoch_range=range(epochs),
        dataloaders=DatasetManager.get_dataloaders(str(files["dataset"])),
        optimizer_mngr=OptimizerManager.build_from_config(str(files["training"]), model=network),
        metric="val_set/accuracy",
        maximize=True,
        best_metric=-1.0,
        num_epochs=epochs,
        model_arch=str(out / "model_arch.yml"),
        training_config=str(files["training"]),
        dataset_config=str(files["dataset"]),
        seed=arguments.seed,
        device="cpu",
    )
    print({key: round(value, 4) for key, value in figures.items()})


if __name__ == "__main__":
    main()
