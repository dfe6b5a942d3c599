"""Recipes: what a TOML file says, what the command line says instead, and what is saved."""

import math
import tomllib

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig
from opal_deploy.train import recipe
from opal_deploy.train.options import TrainRunOptions
from opal_deploy.train.recipe import Recipe, TrainOptions, load_recipe, resolve_recipe


def _head(**said):
    return resolve_recipe(load_recipe("paper"), {"head": said}).options.head


def test_the_papers_recipe_is_the_papers_protocol():
    options = resolve_recipe(load_recipe("paper"), {}).options
    assert (options.epochs, options.batch_size, options.lr) == (30, 64, 1e-4)
    assert options.input_size == (224, 224)
    assert options.head == HeadConfig()
    assert options.backbone == "convnext_tiny"
    assert options.weights == "IMAGENET1K_V1"
    assert options.augment == "paper"
    assert (options.precision, options.tf32) == ("fp32", False)


def test_weights_follow_the_backbone_unless_they_are_given():
    paper = load_recipe("paper")
    assert resolve_recipe(paper, {"model": {"backbone": "resnet50"}}).options.weights == "IMAGENET1K_V2"
    assert resolve_recipe(paper, {"model": {"weights": "none"}}).options.weights is None
    assert resolve_recipe(paper, {"model": {"weights": "mine.pth"}}).options.weights == "mine.pth"


def test_the_command_line_overrides_and_its_silence_does_not():
    found = resolve_recipe(
        {"training": {"epochs": 7, "seed": 4}, "data": {"dataset": "cub"}},
        {"training": {"epochs": 2, "seed": None}, "data": {"dataset": None, "partition": 3}},
    )
    assert (found.options.epochs, found.options.seed) == (2, 4)
    assert (found.dataset, found.partition) == ("cub", 3)


def test_head_options_make_the_papers_variants():
    assert _head(kind="opal") == HeadConfig()
    assert _head(kind="linear") == LINEAR_BASELINE
    assert _head(kind="plain") == PLAIN_CLASSIFIER
    assert _head(cws=False).evidence == "exact"
    assert _head(cws=False, anchors=False).evidence == "none"
    assert _head(prototypes_per_class=3, distance="kl") == HeadConfig(prototypes_per_class=3, distance="kl")
    for said, message in (
        ({"anchors": False}, "eleven variants"),
        ({"kind": "linear", "pooling": "max"}, "--head linear pools by average"),
        ({"kind": "linear", "prototypes_per_class": 3, "cws": False}, "linear head has no cws, prototypes_per_class"),
        ({"kind": "plain", "pooling": "avg"}, "the plain head has no pooling"),
    ):
        with pytest.raises(UsageError, match=message):
            _head(**said)


def test_a_kind_on_the_command_line_replaces_the_recipes_variant():
    ablated = {"head": {"cws": False, "pooling": "avg", "prototypes_per_class": 3}}
    assert resolve_recipe(ablated, {}).options.head == HeadConfig(cws=False, pooling="avg", prototypes_per_class=3)
    assert resolve_recipe(ablated, {"head": {"kind": "opal"}}).options.head == HeadConfig(prototypes_per_class=3)
    assert resolve_recipe(ablated, {"head": {"kind": "linear"}}).options.head == LINEAR_BASELINE


@pytest.mark.parametrize(
    "options",
    [
        TrainOptions(),
        TrainOptions(head=LINEAR_BASELINE, weights="IMAGENET1K_V2", backbone="resnet50"),
        TrainOptions(head=PLAIN_CLASSIFIER, stride=16, keep_layers=True),
        TrainOptions(head=HeadConfig(cws=False, distance="linf", prototypes_per_class=1), workers=3, tf32=True, seed=9),
        TrainOptions(
            input_size=(224, 448), augment="none", precision="bf16", compile=True, save_every=10, tensorboard=True
        ),
    ],
)
def test_what_is_saved_resolves_to_the_same_run(options, tmp_path):
    original = Recipe(options, "dtd", partition=4, skip_missing=True)
    path = tmp_path / "recipe.toml"
    path.write_text(original.to_toml())
    assert resolve_recipe(load_recipe(str(path)), {}) == original
    assert tomllib.loads(path.read_text())["model"]["backbone"] == options.backbone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 3", r"unknown section 'epochs'; expected one of data, model, head, training, machine"),
        ("[training]\nepoch = 3", r"\[training\] has no key 'epoch'; expected one of head_steps, epochs"),
        ("[training]\nepoch = 3\nlr = 'x'\n[modle]\n", r"'epoch'.*lr = 'x'.*'modle'"),
        ("[training]\nepochs = '3'", r"\[training\] epochs = '3': expected a whole number"),
        ("[training]\nepochs = true", r"epochs = True: expected a whole number"),
        ("[training]\nlr = 'fast'", r"lr = 'fast': expected a number"),
        ("[head]\nkind = 'dense'", r"kind = 'dense': expected opal or linear or plain"),
        ("[training", r"not TOML"),
        ("[head]\nkind = 'linear'\npooling = 'max'", r"kind = 'linear' takes no other keys; remove pooling"),
    ],
)
def test_a_recipe_that_says_something_else_is_refused(text, message, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_recipe(str(path))


def test_the_grounded_recipe_is_the_papers_head_on_finer_cells():
    grounded, paper = (resolve_recipe(load_recipe(name), {}).options for name in ("grounded", "paper"))
    assert (grounded.stride, grounded.head) == (16, paper.head)
    assert (grounded.augment, paper.augment) == ("erase", "paper")
    assert resolve_recipe(load_recipe("grounded"), {"model": {"stride": 8}}).options.stride == 8
    resnet50 = resolve_recipe(load_recipe("grounded-resnet50"), {}).options
    assert (resnet50.backbone, resnet50.stride, resnet50.keep_layers, resnet50.head) == (
        "resnet50", 16, True, grounded.head,
    )  # fmt: skip
    with pytest.raises(UsageError, match="--keep-layers without --stride"):
        resolve_recipe(load_recipe("paper"), {"model": {"keep_layers": True}})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "grounded"),
        ({"weights": "resnet18.pth", "epochs": 3}, "grounded"),
        ({"recipe": "paper", "backbone": "resnet34"}, "paper"),
    ],
)
def test_the_grounded_recipe_is_the_default(options, name):
    assert TrainRunOptions(**options).recipe_name() == name


def test_naming_the_default_changes_nothing_and_other_heads_take_the_whole_network():
    default = resolve_recipe(load_recipe("grounded"), {})
    assert resolve_recipe(load_recipe("grounded"), {"model": {"backbone": "resnet18"}}) == default
    for kind in ("plain", "linear"):
        options = resolve_recipe(load_recipe("grounded"), {"head": {"kind": kind}}).options
        assert (options.stride, options.head_steps) == (None, default.options.head_steps)
    random = resolve_recipe(load_recipe("grounded"), {"model": {"weights": "none"}}).options
    assert (random.head_steps, random.stride) == (0, 16)


@pytest.mark.parametrize(
    ("images", "expected"), [(60, (16, 24)), (1_000, (16, 24)), (1_001, (32, 8)), (60_000, (64, 4))]
)
def test_the_number_of_images_determines_batches_and_epochs_that_are_not_given(images, expected):
    assert TrainOptions().plan_epochs(images) == expected
    assert TrainOptions(batch_size=5, epochs=0).plan_epochs(images) == (5, 0)


def test_the_cosine_falls_from_the_rate_to_zero_and_rises_first_after_a_fitted_head():
    options = TrainOptions(lr=0.4, schedule="cosine")
    assert [options.learning_rate(share) for share in (0, 0.5, 1)] == pytest.approx([0.4, 0.2, 0])
    fitted = TrainOptions(lr=0.4, schedule="cosine", head_steps=600)
    assert [fitted.learning_rate(share) for share in (0, 0.5, 1)] == pytest.approx([0, 0.2, 0])
    assert max(fitted.learning_rate(share / 100) for share in range(100)) == pytest.approx(0.4, rel=0.03)
    assert TrainOptions(lr=0.4).learning_rate(0.9) == 0.4


def test_an_unknown_recipe_names_those_there_are():
    with pytest.raises(
        UsageError, match=r"recipe 'papers': no such file, .* one of grounded, grounded-resnet50, paper"
    ):
        load_recipe("papers")
    assert recipe.recipe_names() == ["grounded", "grounded-resnet50", "paper"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        *(
            ({"model": {"input_size": size}}, "expected two whole numbers")
            for size in ([224], [224, 0], [224.0, 224], ["a", 3])
        ),
        ({"training": {"augment": "strong"}}, "expected one of paper, erase, none"),
        ({"training": {"precision": "int8"}}, "expected one of auto, fp32"),
        ({"training": {"schedule": "step"}}, "expected one of constant, cosine"),
        ({"training": {"agreement": -1.0}}, "at least 0"),
        ({"training": {"agreement": 0.1}, "head": {"pooling": "avg"}}, "this head has none"),
        ({"training": {"lr": 0.0}}, "lr (0.0|inf): expected a number above 0"),
        ({"training": {"lr": math.inf}}, "lr (0.0|inf): expected a number above 0"),
        ({"training": {"seed": 1 << 64}}, r"the seed must be below 2\^63"),
    ],
    ids=str,
)
def test_values_are_checked(sections, message):
    with pytest.raises(UsageError, match=message):
        resolve_recipe(sections, {})
