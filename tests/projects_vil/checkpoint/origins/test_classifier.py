"""Classifiers from the files of timm's runs, converted ones, official ones and plain state dicts."""

import argparse

import pytest
import timm
import torch

from backbones import InputError, create_classifier, timm_models
from backbones.utils.files import write_checkpoint
from projects_vil.checkpoint import convert_file, load_classifier
from tests import wrapping
from tests.backbones.helpers import random_images, randomise
from tests.backbones.official import official_forward, official_state_dict

NAME = "vil_tiny_1_1_3_1_rpb"
SIZE = (64, 64)
IMAGES = random_images(2, 3, *SIZE, dtype=torch.float32)


@pytest.fixture(scope="module")
def classifier():
    """Of 7 classes, at 64 pixels."""
    return randomise(create_classifier(NAME, num_classes=7, img_size=SIZE)).eval()


@torch.inference_mode()
def logits(model):
    return model.float()(IMAGES)


def save(folder, contents, name="weights.pth.tar"):
    torch.save(contents, folder / name)
    return folder / name


def timm_run(state_dict, **arguments):
    """What timm's train.py saves, as far as it concerns the weights."""
    given = {"model": NAME, "img_size": 64, "input_size": None, "model_kwargs": {}} | arguments
    return {"epoch": 3, "arch": NAME, "state_dict": state_dict, "args": argparse.Namespace(**given), "metric": 81.5}


def test_a_run_of_timm_says_what_it_is(tmp_path, classifier):
    loaded = load_classifier(save(tmp_path, timm_run(classifier.state_dict())))
    assert (loaded.variant, loaded.img_size, loaded.num_classes, loaded.source) == (NAME, SIZE, 7, "weights")
    assert isinstance(loaded.model, timm_models.TimmClassifier) and not loaded.model.training
    torch.testing.assert_close(logits(loaded.model), logits(classifier))


def test_averaged_weights_are_asked_for(tmp_path, classifier):
    average = {name: tensor * 0.5 for name, tensor in classifier.state_dict().items()}
    path = save(tmp_path, timm_run(classifier.state_dict()) | {"state_dict_ema": average})
    assert torch.equal(load_classifier(path).model.head.bias, classifier.head.bias)
    loaded = load_classifier(path, averaged=True)
    assert torch.equal(loaded.model.head.bias, average["head.bias"]) and loaded.source == "averaged weights"


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"input_size": [3, 96, 64]}, (96, 64)),
        # DeiT's arguments, which LIT-Ti's official files hold too.
        ({"input_size": 96}, (96, 96)),
        ({"model_kwargs": {"img_size": 96}}, (64, 64)),
        ({"img_size": None}, (224, 224)),
        ({"img_size": None, "model_kwargs": {"img_size": 96}}, (224, 224)),
    ],
    ids=["input size", "side", "tables and images", "none", "tables"],
)
def test_the_size_of_images_is_that_of_the_run(tmp_path, classifier, arguments, size):
    assert load_classifier(save(tmp_path, timm_run(classifier.state_dict(), **arguments))).img_size == size


@pytest.mark.parametrize(
    ("name", "options", "tables"),
    [
        (NAME.removesuffix("_rpb"), {}, (224, 224)),
        (NAME.removesuffix("_rpb"), {"img_size": 96}, (96, 96)),
        (NAME.removesuffix("_rpb"), {"img_size": 96, "position_resizing": "map"}, (96, 96)),
        (NAME, {"img_size": 96, "attention": "dense"}, (96, 96)),
    ],
    ids=["own", "tables", "resized to the map", "bias"],
)
def test_images_smaller_than_the_tables_are_judged_as_in_training(tmp_path, name, options, tables):
    """The trained model takes a part of its tables, or resizes them itself: they are not resized when it is read."""
    trained = randomise(timm.create_model(name, num_classes=7, **options)).eval()
    contents = timm_run(trained.state_dict(), model=name, img_size=64, model_kwargs=options)
    loaded = load_classifier(save(tmp_path, contents))
    assert (loaded.img_size, loaded.table_img_size) == (SIZE, tables)
    assert torch.equal(logits(loaded.model), logits(trained))
    given = load_classifier(save(tmp_path, contents), img_size=64)
    assert (given.img_size, given.table_img_size) == (SIZE, SIZE)


def test_tables_that_a_script_made_for_its_images(tmp_path):
    """As those of timm do that resolve --img-size for models of a fixed size."""
    name = NAME.removesuffix("_rpb")
    trained = randomise(create_classifier(name, num_classes=7, img_size=SIZE)).eval()
    loaded = load_classifier(save(tmp_path, timm_run(trained.state_dict(), model=name)))
    assert loaded.table_img_size == SIZE and torch.equal(logits(loaded.model), logits(trained))
    plain = load_classifier(save(tmp_path, trained.state_dict()), name)
    assert plain.img_size == SIZE and torch.equal(logits(plain.model), logits(trained))


def test_the_preparation_of_images_is_that_of_the_run(tmp_path, classifier):
    said = {"mean": [0.5], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "crop_pct": 0.9}
    loaded = load_classifier(save(tmp_path, timm_run(classifier.state_dict(), **said)))
    assert loaded.preparation == said | {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.3, 0.4)}
    unsaid = timm_run(classifier.state_dict(), mean=None, std=None, interpolation="", crop_pct=None)
    assert load_classifier(save(tmp_path, unsaid)).preparation == {}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"mean": [0.5, 0.5]}, r"args.mean is \[0.5, 0.5\] in it: it is three numbers, or one"),
        ({"std": [0.0]}, r"args.std is \[0.0\] in it: it is three numbers above 0, or one"),
        ({"interpolation": "cubic"}, "args.interpolation is 'cubic' in it: it is one of nearest, "),
        ({"crop_pct": "0.9"}, "args.crop_pct is '0.9' in it: it is a number above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_preparation_that_is_none(tmp_path, classifier, said, message):
    path = save(tmp_path, timm_run(classifier.state_dict(), **said))
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        load_classifier(path)


def test_options_of_the_run_count(tmp_path):
    model = create_classifier(NAME, num_classes=7, img_size=SIZE, window_size=5)
    contents = timm_run(model.state_dict(), model_kwargs={"window_size": 5, "redraw_epoch_length": 10})
    loaded = load_classifier(save(tmp_path, contents))
    assert [stage.window_size for stage in loaded.model.backbone.variant.stages] == [5] * 4


def test_a_plain_state_dict_needs_the_name(tmp_path, classifier):
    path = save(tmp_path, {f"module.{name}": tensor for name, tensor in classifier.state_dict().items()})
    with pytest.raises(InputError, match="does not say which variant it is of: add --model"):
        load_classifier(path)
    torch.testing.assert_close(logits(load_classifier(path, NAME, img_size=64).model), logits(classifier))


def test_another_size_is_as_timm_loads_it(tmp_path):
    """Tables of absolute positions are resized."""
    name = NAME.removesuffix("_rpb")
    path = tmp_path / "weights.safetensors"
    state_dict = create_classifier(name, num_classes=7, img_size=96).state_dict()
    write_checkpoint(path, {"model": state_dict})
    expected = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(path), "num_classes": 7},
        num_classes=7,
        img_size=SIZE,
    ).eval()
    loaded = load_classifier(path, name, img_size=64).model
    assert (
        loaded.state_dict()["backbone.stages.0.positions.rows"].shape
        != state_dict["backbone.stages.0.positions.rows"].shape
    )
    torch.testing.assert_close(logits(loaded), logits(expected))


def test_an_official_file_and_its_conversion_are_the_same(tmp_path):
    weights = official_state_dict(relative_bias=True, num_classes=7)
    path = save(tmp_path, wrapping.vision_longformer(weights), "official.pth")
    convert_file(path, tmp_path / "ours.safetensors", NAME, img_size=SIZE, classifier=True)
    official, ours = load_classifier(path, NAME, img_size=64), load_classifier(tmp_path / "ours.safetensors")
    assert official.source == "official, vision-longformer" and (ours.variant, ours.img_size) == (NAME, SIZE)
    images = random_images(2, 3, 50, 43)
    _, expected = official_forward(weights, images)
    with torch.inference_mode():
        torch.testing.assert_close(official.model.double()(images), expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(ours.model.double()(images), official.model(images))


def _without(part):
    return lambda state_dict: {name: tensor for name, tensor in state_dict.items() if not name.startswith(part)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("head."), "is of no classifier: it has no backbone.stages with head.weight"),
        (_without("backbone."), "is of no classifier"),
        (_without("head.bias"), r"head.bias is missing, or its shape is not \(7,\), as it is for " + NAME),
        (_without("backbone.stages.2."), "the checkpoint is of another model: .* names or shapes differ"),
        (lambda state_dict: state_dict | {"head.weight": torch.zeros(7, 100)}, r"head.weight .* is not \(7, 384\)"),
        (lambda state_dict: state_dict | {"norm.bias": "text"}, "norm.bias is no tensor"),
        (lambda state_dict: wrapping.mmdetection(official_state_dict(relative_bias=True))["state_dict"], "head"),
    ],
    ids=["no head", "no backbone", "no bias", "no stage", "other head", "text", "detector"],
)
def test_a_file_that_does_not_fit(tmp_path, classifier, change, message):
    path = save(tmp_path, {"state_dict": change(classifier.state_dict())})
    with pytest.raises(InputError, match=f"^{path}.*{message}") as caught:
        load_classifier(path, NAME)
    assert "\n" not in str(caught.value)


def test_another_name_than_the_file_says(tmp_path, classifier):
    path = save(tmp_path, timm_run(classifier.state_dict()))
    with pytest.raises(InputError, match=f"says that it is of {NAME}, and --model is lit_ti: leave --model out"):
        load_classifier(path, "lit_ti")
    with pytest.raises(InputError, match="unknown variant 'vil_tinny'; did you mean"):
        load_classifier(path, "vil_tinny")
    with pytest.raises(InputError, match="has no averaged weights"):
        load_classifier(path, averaged=True)
