"""Classifiers on ImageNet's other sets: known predictions, the published arithmetic, and the files of a classifier."""

import argparse
import importlib.resources
import json
import statistics

import pytest
import timm
import torch
from PIL import Image
from timm.data import RealLabelsImagenet, create_transform

from backbones import ConfigError, create_classifier, list_variants
from research.robustness.classifier import load_classifier
from research.robustness.evaluate import evaluate_robustness, format_results
from research.robustness.published import paper_figures
from research.robustness.sets import (
    ALEXNET_ERRORS,
    CORRUPTIONS,
    ROBUSTNESS_SETS,
    Accuracy,
    LabelledImages,
    accuracy,
    correct_classes,
    corruption_error,
    mean_corruption_error,
    top_classes,
    wordnet_classes,
)
from tests import wrapping
from tests.backbones.helpers import random_images, randomise
from tests.backbones.official import official_forward, official_state_dict
from tests.projects_vil.helpers import error_line, run_tool
from tests.research import robustness_sets

TOOL = "../research/robustness/__main__.py"
VARIANT = "vil_tiny_1_1_3_1_rpb"
# The predictions of the classifier ``known``, the best first; neither ImageNet-A nor -R has class 0.
ORDER = [0, 6, 1, 11, 2, 13]
TOP = {
    "val": (100 / 3, 100.0),
    "real": (50.0, 50.0),
    "v2": (100 / 3, 100.0),
    "v2-threshold": (100 / 3, 100.0),
    "v2-top": (100 / 3, 100.0),
    "a": (50.0, 100.0),
    "r": (50.0, 100.0),
    "sketch": (50.0, 50.0),
    # The first prediction is the fish, the fourth the dog.
    "in9": (50.0, 100.0),
    "in9-same": (50.0, 100.0),
    "in9-rand": (50.0, 100.0),
}
# AlexNet's errors by severity, whose means are ALEXNET_ERR of google-research/augmix, imagenet.py.
ALEXNET = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.9487, 0.9872, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.5843, 0.70048, 0.82108, 0.8975, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.9187, 0.94952),
    "frost": (0.6139, 0.79734, 0.8879, 0.89942, 0.9343),
    "fog": (0.67474, 0.7605, 0.84378, 0.8726, 0.945),
    "brightness": (0.4514, 0.48502, 0.54048, 0.62166, 0.7244),
    "contrast": (0.64548, 0.7615, 0.88874, 0.9776, 0.9927),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.5462, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}
# LS table 9 as printed, from "Gauss." to "JPEG".
TABLE_9 = {
    "cvt_ls_13": (
        *(25.64, 36.89, 37.06, 38.06, 43.78, 43.78, 44.62, 45.92, 47.77, 47.91, 49.60, 49.66, 54.92, 57.24),
        68.72,
    ),
    "cvt_ls_21": (
        *(24.28, 34.95, 35.03, 35.93, 39.86, 40.71, 41.27, 41.78, 44.72, 45.24, 45.50, 47.19, 51.84, 53.78),
        67.05,
    ),
}


def test_accuracy_by_hand():
    logits = torch.tensor([[0.1, 0.7, 0.3, 0.6, 0.2, 0.5, 0.4]])
    assert top_classes(logits).tolist() == [[1, 3, 5, 6, 2]]
    assert top_classes(logits, (0, 2, 3, 4, 6)).tolist() == [[3, 6, 2, 4, 0]]
    predictions = torch.tensor([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [9, 8, 7, 6, 5]])
    assert accuracy(predictions, [{7, 1}, set(), {6, 5}]) == Accuracy(3, 2, 50.0, 100.0)
    with pytest.raises(ConfigError):
        accuracy(predictions, [set()] * 3)


def test_mean_corruption_error_of_alexnet_is_100():
    assert mean_corruption_error(ALEXNET) == pytest.approx(100, abs=1e-4)
    assert all(corruption_error(name, errors) == pytest.approx(100, abs=1e-3) for name, errors in ALEXNET.items())
    with pytest.raises(ValueError):
        corruption_error("fog", [0.5] * 4)
    with pytest.raises(ValueError):
        mean_corruption_error({"fog": [0.5] * 5})


def test_figures_of_the_paper():
    figures = {name: str(figure) for name, figure in paper_figures("cvt_ls_21", (224, 224)).items()}
    table_3 = {"val": "82.7 (LS Table 3)", "real": "87.5 (LS Table 3)", "v2": "71.9 (LS Table 3)"}
    table_4 = {"c": "55.2", "a": "29.3", "r": "45.0", "in9-same": "91.5", "in9-rand": "85.8"}
    expected = table_3 | {name: f"{value} (LS Table 4)" for name, value in table_4.items()}
    assert figures == expected | {"in9": "97.2 (LS Table 10)"}
    smaller = {name: figure.value for name, figure in paper_figures("cvt_ls_13", (224, 224)).items() if "in9" in name}
    assert smaller == {"in9": 97.0, "in9-same": 90.7, "in9-rand": 85.6}
    larger = {name: figure.value for name, figure in paper_figures("cvt_ls_21", (448, 448)).items()}
    assert larger == {"val": 83.6, "real": 88.2, "v2": 72.9}
    assert paper_figures("ls_medium_384", (384, 384))["val"].value == 84.4
    assert paper_figures("cvt_ls_21", (224, 192)) == {} == paper_figures("ls_base", (64, 64))
    printed = {name for name in list_variants() if paper_figures(name, (224, 224))}
    assert printed == {"cvt_ls_13", "cvt_ls_17", "cvt_ls_21", "cvt_ls_21s", "ls_medium", "ls_base"}


@pytest.mark.parametrize("variant", TABLE_9)
def test_table_9_is_sorted_and_so_not_by_corruption(variant):
    errors = TABLE_9[variant]
    assert list(errors) == sorted(errors)
    near = statistics.fmean(errors) / statistics.fmean(ALEXNET_ERRORS.values())
    assert near == pytest.approx(paper_figures(variant, (224, 224))["c"].value, abs=0.5)


@pytest.fixture(scope="module")
def data(made_once):
    return made_once("robustness_sets", robustness_sets.write_all)


@pytest.fixture(scope="module")
def weights(made_once):
    """Files of one classifier at 64 pixels: random, and with a head that always predicts ``ORDER``."""

    def write(folder):
        torch.manual_seed(0)
        state_dict = create_classifier(VARIANT, num_classes=1000, img_size=64).state_dict()
        torch.save(state_dict, folder / "random.pth")
        bias = torch.zeros(1000)
        bias[ORDER] = torch.arange(len(ORDER), 0, -1.0)
        known = state_dict | {"head.weight": torch.zeros_like(state_dict["head.weight"]), "head.bias": bias}
        torch.save(known, folder / "known.pth")

    return made_once("robustness_weights", write)


def evaluate(path, data, *sets, **options):
    return evaluate_robustness(path, data, sets, **{"variant": VARIANT, "img_size": 64, "batch_size": 2} | options)


def test_known_predictions_on_all_sets(data, weights):
    results = evaluate(weights / "known.pth", data, *TOP, "c")
    for name, expected in TOP.items():
        (found,) = results.sets[name].accuracies[""]
        assert (found.top1, found.top5) == pytest.approx(expected), name
    assert (found.num_files, results.sets["real"].accuracies[""][0].num_images) == (2, 2)
    assert results.sets["c"].mean_error == 0 and len(results.sets["c"].accuracies) == 15
    lines = format_results(results).splitlines()
    assert len(lines) == 2 + 11 + 15 + 1
    assert "| ImageNet-Real | 2 (3 of 50000 files) | 50.00 | 50.00 | - | - |" in lines
    assert lines[-1] == "| ImageNet-C mCE | 75 (75 of 3750000 files) | 100.00 | 100.00 | 0.00 | - |"
    figures = json.loads(json.dumps(results.as_json()))
    assert figures["variant"] == VARIANT and figures["sets"]["c"]["errors"]["fog"] == 0


def test_predictions_are_those_of_the_model_image_by_image(data, weights):
    """With timm's own preparation."""
    model = load_classifier(weights / "random.pth", VARIANT, img_size=64).model
    results = evaluate(weights / "random.pth", data, "val", "a")
    options = {"interpolation": "bicubic", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    transform = create_transform(input_size=(3, 64, 64), crop_pct=0.875, **options)
    for name in ("val", "a"):
        images, rows = LabelledImages(data, name), []
        for path, _ in images.samples:
            with Image.open(path) as image, torch.inference_mode():
                rows.append(top_classes(model(transform(image.convert("RGB"))[None]), images.subset))
        expected = accuracy(torch.cat(rows), [{number} for _, number in images.samples])
        assert results.sets[name].accuracies[""] == [expected]


@pytest.mark.slow
def test_imagenet_real_is_scored_as_by_timm(tmp_path):
    """On the published labels, which timm ships, and random logits; in half of them a correct class is raised."""
    labels = importlib.resources.files("timm.data") / "_info/imagenet_real_labels.json"
    (tmp_path / "real.json").write_bytes(labels.read_bytes())
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    correct = correct_classes(tmp_path, "real", [(name, 0) for name in names])
    by_timm, generator, predictions = RealLabelsImagenet(names), torch.Generator().manual_seed(0), []
    for start in range(0, len(names), 1000):
        logits = torch.randn(1000, 1000, generator=generator)
        for row in range(0, 1000, 2):
            logits[row, list(correct[start + row])[:1]] += 3
        by_timm.add_result(logits)
        predictions.append(top_classes(logits))
    found = accuracy(torch.cat(predictions), correct)
    assert (found.num_files, found.num_images) == (50_000, 46_837)
    assert (found.top1, found.top5) == pytest.approx((by_timm.get_accuracy(1), by_timm.get_accuracy(5)))


def test_incomplete_sets_are_evaluated_or_left_out(weights, tmp_path):
    robustness_sets.write_val(tmp_path)
    robustness_sets.write_corruptions(tmp_path, ("fog",))
    robustness_sets.write_corruptions(tmp_path, ("snow",), (1, 2, 3, 5))
    results = evaluate(weights / "known.pth", tmp_path, "val", "r", "c")
    assert results.sets["r"].missing == ["imagenet-r"] and not results.sets["r"].accuracies
    assert results.sets["c"].mean_error is None and len(results.sets["c"].missing) == 1 + 13 * 5
    assert results.sets["c"].errors == {"fog": 0.0}
    with pytest.raises(ConfigError, match="imagenet-a"):
        evaluate(weights / "known.pth", tmp_path, "a")
    with pytest.raises(ConfigError, match="v3"):
        evaluate(weights / "known.pth", tmp_path, "v3")


def test_folders_that_are_not_as_published(weights, tmp_path):
    robustness_sets.write_val(tmp_path)
    (tmp_path / "val" / "tench").mkdir()
    with pytest.raises(ConfigError, match="tench"):
        evaluate(weights / "known.pth", tmp_path, "val")
    (tmp_path / "val/tench").rename(tmp_path / "val/n01531178")
    with pytest.raises(FileNotFoundError, match="n01531178"):
        evaluate(weights / "known.pth", tmp_path, "val")
    (tmp_path / "val/n01531178/a.JPEG").write_text("not an image")
    result = run_tool(TOOL, "--weights", weights / "known.pth", "--model", VARIANT, "--data", tmp_path, "--sets", "val")
    assert "a.JPEG" in error_line(result)
    (tmp_path / "real.json").write_text("[[1]]")
    with pytest.raises(ConfigError, match="real.json"):
        correct_classes(tmp_path, "real", [("a.JPEG", 0)])
    robustness_sets.write_real(tmp_path, {1: [6]})
    with pytest.raises(ConfigError, match="a.JPEG"):
        correct_classes(tmp_path, "real", [("a.JPEG", 0)])
    # ImageNet-A has no tench.
    robustness_sets.write_wordnet(tmp_path, "imagenet-a", robustness_sets.TENCH)
    with pytest.raises(ConfigError, match=robustness_sets.TENCH):
        LabelledImages(tmp_path, "a")


def test_classes_are_numbered_as_by_timm(data):
    assert wordnet_classes()["n01440764"] == 0 and len(wordnet_classes()) == 1000
    assert LabelledImages(data, "a").subset[0] == 6 and len(LabelledImages(data, "r").subset) == 200
    assert [number for _, number in LabelledImages(data, "v2").samples] == [0, 11, 6]
    assert set(CORRUPTIONS) == set(ALEXNET) and ROBUSTNESS_SETS["sketch"].num_images == 50_889


@pytest.fixture(scope="module")
def classifier():
    """A classifier of 7 classes at 64 pixels."""
    return randomise(create_classifier(VARIANT, num_classes=7, img_size=64)).eval()


@torch.inference_mode()
def logits_of(model):
    return model.float()(torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64))


def timm_checkpoint(path, state_dict, **arguments):
    """Write the parts of a checkpoint of timm's train.py that concern the classifier."""
    args = argparse.Namespace(**{"model": VARIANT, "img_size": 64, "input_size": None, "model_kwargs": {}} | arguments)
    torch.save({"epoch": 3, "state_dict": state_dict, "args": args, "state_dict_ema": _halved(state_dict)}, path)
    return path


def _halved(state_dict):
    return {name: tensor * 0.5 for name, tensor in state_dict.items()}


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"input_size": [3, 96, 64]}, (96, 64)),
        # DeiT's arguments, which LIT-Ti's official files have too.
        ({"input_size": 96}, (96, 96)),
        ({"model_kwargs": {"img_size": 96}}, (64, 64)),
        ({"img_size": None}, (224, 224)),
    ],
    ids=str,
)
def test_a_run_of_timm(tmp_path, classifier, arguments, size):
    values = {"mean": [0.5], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "crop_pct": 0.9}
    path = timm_checkpoint(tmp_path / "run.pth.tar", classifier.state_dict(), **arguments, **values)
    loaded = load_classifier(path)
    assert (loaded.variant, loaded.img_size, loaded.num_classes) == (VARIANT, size, 7)
    assert loaded.preparation == values | {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.3, 0.4)}
    torch.testing.assert_close(logits_of(loaded.model), logits_of(classifier))
    averaged = load_classifier(path, averaged=True).model
    assert torch.equal(averaged.head.bias, classifier.head.bias * 0.5)
    with pytest.raises(ConfigError, match="vil_small"):
        load_classifier(path, "vil_small")


@pytest.mark.parametrize("options", [{}, {"img_size": 96}, {"img_size": 96, "position_resizing": "map"}], ids=str)
def test_tables_larger_than_the_images_stay_as_trained(tmp_path, options):
    name = VARIANT.removesuffix("_rpb")
    trained = randomise(timm.create_model(name, num_classes=7, **options)).eval()
    path = timm_checkpoint(tmp_path / "run.pth.tar", trained.state_dict(), model=name, model_kwargs=options)
    loaded = load_classifier(path)
    side = options.get("img_size", 224)
    assert (loaded.img_size, loaded.table_img_size) == ((64, 64), (side, side))
    assert torch.equal(logits_of(loaded.model), logits_of(trained))
    assert load_classifier(path, img_size=64).table_img_size == (64, 64)


def test_plain_and_official_state_dicts(tmp_path, classifier):
    torch.save(classifier.state_dict(), tmp_path / "plain.pth")
    with pytest.raises(ConfigError, match="--model"):
        load_classifier(tmp_path / "plain.pth")
    assert torch.equal(logits_of(load_classifier(tmp_path / "plain.pth", VARIANT).model), logits_of(classifier))
    weights, images = official_state_dict(relative_bias=True, num_classes=7), random_images(2, 3, 50, 43)
    torch.save(wrapping.vision_longformer(weights), tmp_path / "official.pth")
    loaded = load_classifier(tmp_path / "official.pth", VARIANT, img_size=64)
    _, expected = official_forward(weights, images)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model.double()(images), expected, atol=1e-6, rtol=1e-6)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ConfigError, match="other.pth"):
        load_classifier(tmp_path / "other.pth", VARIANT)
