"""Recipes: what a TOML file says, what a caller says instead, and what is saved."""

import math
import tomllib

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig
from opal_deploy.train.loop import learning_rate
from opal_deploy.train.options import TrainOptions, load_recipe, resolve


def head(**given):
    return resolve(load_recipe("paper"), given).head_config


def test_the_papers_recipe_is_the_papers_protocol():
    options = resolve(load_recipe("paper"), {})
    assert (options.epochs, options.batch_size, options.lr, options.input_size) == (30, 64, 1e-4, (224, 224))
    assert (options.backbone, options.weights, options.augment) == ("convnext_tiny", "IMAGENET1K_V1", "paper")
    assert (options.precision, options.tf32, options.head_config) == ("fp32", False, HeadConfig())


def test_weights_follow_the_backbone_unless_they_are_given():
    paper = load_recipe("paper")
    assert resolve(paper, {"backbone": "resnet50"}).weights == "IMAGENET1K_V2"
    assert resolve(paper, {"weights": "none"}).weights_name is None
    assert resolve(paper, {"weights": "mine.pth"}).weights_name == "mine.pth"


def test_head_options_make_the_papers_variants():
    assert head(head="opal") == HeadConfig()
    assert head(head="linear") == LINEAR_BASELINE
    assert head(head="plain") == PLAIN_CLASSIFIER
    assert head(cws=False, anchors=False).evidence == "none"
    assert head(prototypes=3, distance="kl") == HeadConfig(prototypes_per_class=3, distance="kl")
    for given, message in (
        ({"anchors": False}, "need anchors"),
        ({"head": "linear", "prototypes": 3, "cws": False}, "cws, prototypes"),
    ):
        with pytest.raises(UsageError, match=message):
            head(**given)


def test_a_given_head_replaces_the_recipes_variant():
    ablated = {"cws": False, "pooling": "avg", "prototypes": 3}
    # None leaves an option to the recipe
    assert resolve(ablated, {"cws": None}).head_config == HeadConfig(cws=False, pooling="avg", prototypes_per_class=3)
    assert resolve(ablated, {"head": "opal"}).head_config == HeadConfig(prototypes_per_class=3)
    assert resolve(ablated, {"head": "linear"}).head_config == LINEAR_BASELINE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head": "linear", "weights": "IMAGENET1K_V2", "backbone": "resnet50"},
        {"stride": 16, "keep_layers": True},
        {"cws": False, "distance": "linf", "prototypes": 1, "size": (224, 448), "augment": "none", "dataset": "dtd"},
    ],
    ids=str,
)
def test_what_is_saved_resolves_to_the_same_run(options, tmp_path):
    original, path = resolve(load_recipe("paper"), options), tmp_path / "recipe.toml"
    path.write_text(original.to_toml())
    assert resolve(load_recipe(str(path)), {}) == original
    assert tomllib.loads(path.read_text())["backbone"] == original.backbone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3\nlr = 'x'", "'epoch'.*lr = 'x'"),
        ("size = [224]", "size"),
        ("head = 'dense'", "dense"),
        ("[training", "TOML"),
    ],
)
def test_a_recipe_that_says_something_else_is_refused(text, message, tmp_path):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_recipe(str(tmp_path / "r.toml"))


def test_sections_and_the_names_of_stored_options_are_read(tmp_path):
    (tmp_path / "r.toml").write_text("[model]\ninput_size = [64, 96]\n[head]\nkind = 'plain'\n[machine]\nworkers = 2\n")
    assert load_recipe(str(tmp_path / "r.toml")) == {"size": (64, 96), "head": "plain", "workers": 2}


def test_the_grounded_recipe_is_the_papers_head_on_finer_cells():
    grounded, paper = (resolve(load_recipe(name), {}) for name in ("grounded", "paper"))
    assert (grounded.stride, grounded.keep_layers, grounded.adapt_stride, grounded.augment) == (16, True, True, "erase")
    assert grounded.head_config == paper.head_config
    assert resolve(load_recipe("grounded"), {"backbone": "resnet18"}) == grounded
    given = resolve(load_recipe("grounded"), {"stride": 8})
    assert (given.stride, given.keep_layers, given.adapt_stride) == (8, False, False)
    with pytest.raises(UsageError, match="--stride"):
        resolve(load_recipe("paper"), {"keep_layers": True})


def test_other_heads_take_the_whole_network_and_random_weights_no_fitted_head():
    for kind in ("plain", "linear"):
        options = resolve(load_recipe("grounded"), {"head": kind})
        assert (options.stride, options.keep_layers, options.head_steps) == (None, False, 200)
    random = resolve(load_recipe("grounded"), {"weights": "none"})
    assert (random.head_steps, random.anchor_probability, random.stride) == (0, None, 16)


@pytest.mark.parametrize(
    ("images", "expected"), [(60, (16, 24)), (1_000, (16, 24)), (1_001, (32, 2)), (60_000, (64, 2))]
)
def test_the_number_of_images_determines_batches_and_epochs_that_are_not_given(images, expected):
    options = TrainOptions().plan(images)
    assert (options.batch_size, options.epochs) == expected
    given = TrainOptions(batch_size=5, epochs=0).plan(images)
    assert (given.batch_size, given.epochs) == (5, 0)


def test_the_cosine_falls_from_the_rate_to_zero_and_rises_first_after_a_fitted_head():
    options = TrainOptions(lr=0.4, schedule="cosine")
    assert [learning_rate(options, share) for share in (0, 0.5, 1)] == pytest.approx([0.4, 0.2, 0])
    fitted = TrainOptions(lr=0.4, schedule="cosine", head_steps=600)
    assert [learning_rate(fitted, share) for share in (0, 0.5, 1)] == pytest.approx([0, 0.2, 0])
    assert max(learning_rate(fitted, share / 100) for share in range(100)) == pytest.approx(0.4, rel=0.03)
    assert learning_rate(TrainOptions(lr=0.4), 0.9) == 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "strong"}, "augment"),
        ({"adversarial": math.nan}, "adversarial"),
        ({"adversarial": 0.1, "pooling": "avg"}, "this head has none"),
        ({"lr": -1.0}, "at least 0"),
        ({"anchor_probability": 1.0}, "at most"),
    ],
    ids=str,
)
def test_values_are_checked(options, message):
    with pytest.raises(UsageError, match=message):
        resolve(load_recipe("paper"), options)
