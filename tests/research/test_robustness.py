"""Classifiers on ImageNet's other sets: known predictions, the published formulas, and checkpoints."""

import argparse
import importlib.resources
import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import RealLabelsImagenet, create_transform, resolve_model_data_config

from backbones import create_classifier
from backbones.convert import convert_state_dict
from research.robustness import sets
from research.robustness.classifier import load_classifier
from research.robustness.evaluate import evaluate_robustness, format_results
from research.robustness.published import paper_figures
from research.robustness.sets import ALEXNET_ERRORS, LabeledImages, accuracy, correct_classes, top_classes
from tests import layouts
from tests.backbones.helpers import randomize
from tests.backbones.official import official_state_dict
from tests.projects_vil.helpers import message
from tests.tolerances import FLOAT32

VARIANT = "vil_tiny_1_1_3_1_rpb"
# Images of the classes 0, 1, 6, 11 and 13. ImageNet-A has the last three, ImageNet-R the last four.
TENCH, GOLDFISH, STINGRAY, GOLDFINCH, JUNCO = "n01440764", "n01443537", "n01498041", "n01531178", "n01534433"
# Predictions of the classifier ``known``, best first. Neither ImageNet-A nor -R has class 0.
ORDER = [0, 6, 1, 11, 2, 13]
# Folder of images -> the folders of its classes.
FOLDERS = {
    **{
        f"imagenetv2-{name}-format-val": "0 6 11".split()
        for name in ("matched-frequency", "threshold0.7", "top-images")
    },
    **{"imagenet-a": [STINGRAY, GOLDFINCH], "imagenet-r": [GOLDFISH, STINGRAY], "sketch": [TENCH, JUNCO]},
    **{f"bg_challenge/{name}/val": ["00_dog", "08_fish"] for name in ("original", "mixed_same", "mixed_rand")},
    **{f"imagenet-c/{name}/{level}": [TENCH] for name, level in itertools.product(ALEXNET_ERRORS, range(1, 6))},
}
# Set -> top-1 and top-5 of ``known``. In ImageNet-9 its first prediction is the fish, the fourth the dog.
TOP = {
    **{"val": (100 / 3, 100), "real": (50, 50), "a": (50, 100), "r": (50, 100), "sketch": (50, 50)},
    **{name: (100 / 3, 100) for name in ("v2", "v2-threshold", "v2-top")},
    **{name: (50, 100) for name in ("in9", "in9-same", "in9-rand")},
}


def write_images(root, classes):
    for seed, name in enumerate(classes):
        noise = np.random.default_rng(seed).integers(0, 256, (56, 72, 3), dtype=np.uint8)
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).save(root / name / f"{seed}.jpg")


def write_val(data):
    """Write images 1 and 3 of one class and image 2 of another, so that sorting by folder changes their order."""
    for wordnet_id, number in ((TENCH, 2), (STINGRAY, 1), (STINGRAY, 3)):
        write_images(data / "new", [wordnet_id])
        path = data / "val" / wordnet_id / f"ILSVRC2012_val_{number:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        (data / "new" / wordnet_id / "0.jpg").rename(path)


def write_real(data, labels):
    """Write the labels of some images by number. The others have none."""
    (data / "real.json").write_text(json.dumps([labels.get(number, []) for number in range(1, 50_001)]))


@pytest.fixture(scope="module")
def data(made_once):
    """Return a folder with all twelve sets in the published layout."""

    def write(data):
        write_val(data)
        write_real(data, {1: [13, 900], 2: [0, 1], 3: []})
        labels = {str(number): {0: 8, 1: 8, 11: 0}.get(number, -1) for number in range(1000)}
        for folder, classes in FOLDERS.items():
            write_images(data / folder, classes)
        (data / "in_to_in9.json").write_text(json.dumps(labels))
        (data / "imagenet-a" / "README.txt").touch()

    return made_once("robustness_sets", write)


@pytest.fixture(scope="module")
def weights(made_once):
    """Return checkpoints of a classifier at 64 pixels: random, and with a head that always predicts ``ORDER``."""

    def write(folder):
        torch.manual_seed(0)
        state_dict = create_classifier(VARIANT, num_classes=1000, img_size=64).state_dict()
        torch.save(state_dict, folder / "random.pth")
        bias = torch.zeros(1000)
        bias[ORDER] = torch.arange(len(ORDER), 0, -1.0)
        known = state_dict | {"head.weight": torch.zeros_like(state_dict["head.weight"]), "head.bias": bias}
        torch.save(known, folder / "known.pth")

    return made_once("robustness_weights", write)


def evaluate(path, data, *sets):
    return evaluate_robustness(path, data, sets, variant=VARIANT, img_size=64, batch_size=2)


def test_the_corruption_error_of_alexnet_is_100():
    # Its errors by severity (hendrycks/robustness).
    assert sets.corruption_error("fog", (0.67474, 0.7605, 0.84378, 0.8726, 0.945)) == pytest.approx(100, abs=1e-3)


def test_figures_of_the_paper():
    figures = paper_figures("cvt_ls_21", (224, 224))
    assert {name: figures[name][0] for name in ("real", "c", "in9")} == {"real": 87.5, "c": 55.2, "in9": 97.2}
    assert paper_figures("cvt_ls_21_448", (448, 448))["v2"] == (72.9, "LS Table 3")
    assert paper_figures("ls_medium_384", (384, 384)) == {"val": (84.4, "LS Table 3")}
    assert paper_figures("cvt_ls_21", (224, 192)) == {} == paper_figures("ls_base", (64, 64))


@pytest.mark.slow
def test_known_predictions_on_all_sets(data, weights):
    results = evaluate(weights / "known.pth", data, *TOP, "c")
    sets = json.loads(json.dumps(results))["sets"]
    for name, expected in TOP.items():
        (found,) = sets[name]["accuracies"][""]
        assert (found["top1"], found["top5"]) == pytest.approx(expected), name
    assert sets["c"]["mean_error"] == 0 and sets["c"]["errors"] == dict.fromkeys(ALEXNET_ERRORS, 0)
    lines = format_results(results).splitlines()
    assert len(lines) == 2 + 11 + 15 + 1
    assert "| ImageNet-Real | 2 (3 of 50000 files) | 50.00 | 50.00 | - | - |" in lines
    assert lines[-1] == "| ImageNet-C mCE | 75 (75 of 3750000 files) | 100.00 | 100.00 | 0.00 | - |"


def test_predictions_equal_the_model_image_by_image(data, weights):
    """The images are prepared by timm."""
    model = load_classifier(weights / "random.pth", VARIANT, img_size=64).model
    results = evaluate(weights / "random.pth", data, "val", "a")
    options = {"interpolation": "bicubic", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    transform = create_transform(input_size=(3, 64, 64), crop_pct=0.875, **options)
    for name in ("val", "a"):
        images, rows = LabeledImages(data, name), []
        for path, _ in images.samples:
            with Image.open(path) as image, torch.inference_mode():
                rows.append(top_classes(model(transform(image.convert("RGB"))[None]), images.subset))
        expected = accuracy(torch.cat(rows), [{number} for _, number in images.samples])
        assert results["sets"][name]["accuracies"][""] == [expected]


def test_imagenet_real_is_scored_as_by_timm(tmp_path):
    """Use the published labels, which timm contains, and random logits. In half of them, a correct class is raised."""
    labels = importlib.resources.files("timm.data") / "_info/imagenet_real_labels.json"
    (tmp_path / "real.json").write_bytes(labels.read_bytes())
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    correct = correct_classes(tmp_path, "real", [(name, 0) for name in names[:2000]])
    by_timm, logits = RealLabelsImagenet(names), torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0))
    for row in range(0, 2000, 2):
        logits[row, list(correct[row])[:1]] += 3
    by_timm.add_result(logits)
    found = accuracy(top_classes(logits), correct)
    assert found["num_images"] < found["num_files"] == 2000
    assert (found["top1"], found["top5"]) == pytest.approx((by_timm.get_accuracy(1), by_timm.get_accuracy(5)))


def test_incomplete_sets_are_evaluated_or_left_out(weights, tmp_path):
    write_val(tmp_path)
    for level in range(1, 6):
        write_images(tmp_path / "imagenet-c/fog" / str(level), [TENCH])
    write_images(tmp_path / "imagenet-c/snow/5", [TENCH])
    sets = evaluate(weights / "known.pth", tmp_path, "val", "r", "c")["sets"]
    assert sets["r"]["missing"] == ["imagenet-r"] and not sets["r"]["accuracies"]
    assert sets["c"]["mean_error"] is None and len(sets["c"]["missing"]) == 4 + 13 * 5
    assert sets["c"]["errors"] == {"fog": 0}
    for name in ("imagenet-a", "v3"):
        assert name in message(evaluate, weights / "known.pth", tmp_path, name.removeprefix("imagenet-"))


@pytest.fixture(scope="module")
def classifier():
    """Return a classifier with 7 classes at 64 pixels."""
    return randomize(create_classifier(VARIANT, num_classes=7, img_size=64)).eval()


@torch.inference_mode()
def logits_of(model):
    return model.float()(torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64))


def timm_checkpoint(path, state_dict, **arguments):
    """Write the relevant parts of a checkpoint of timm's train.py."""
    args = argparse.Namespace(**{"model": VARIANT, "img_size": 64, "input_size": None, "model_kwargs": {}} | arguments)
    averaged = {name: tensor * 0.5 for name, tensor in state_dict.items()}
    torch.save({"epoch": 3, "state_dict": state_dict, "args": args, "state_dict_ema": averaged}, path)
    return path


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"input_size": [3, 96, 64]}, (96, 64)),
        # DeiT's arguments, as in LIT-Ti's official files.
        pytest.param({"input_size": 96}, (96, 96), marks=pytest.mark.slow),
        ({"model_kwargs": {"img_size": 96}}, (64, 64)),
        pytest.param({"img_size": None}, (224, 224), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_of_timm(tmp_path, classifier, arguments, size):
    values = {"mean": [0.5], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "crop_pct": 0.9}
    path = timm_checkpoint(tmp_path / "run.pth.tar", classifier.state_dict(), **arguments, **values)
    loaded = load_classifier(path)
    assert (loaded.variant, loaded.img_size, loaded.num_classes) == (VARIANT, size, 7)
    config = resolve_model_data_config(loaded.model, args=loaded.preparation)
    assert config.items() >= (values | {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.3, 0.4)}).items()
    torch.testing.assert_close(logits_of(loaded.model), logits_of(classifier), **FLOAT32)
    averaged = load_classifier(path, averaged=True).model
    assert torch.equal(averaged.head.bias, classifier.head.bias * 0.5)
    assert "vil_small" in message(load_classifier, path, "vil_small")


def test_plain_and_official_state_dicts(tmp_path, classifier):
    torch.save(classifier.state_dict(), tmp_path / "plain.pth")
    assert "--model" in message(load_classifier, tmp_path / "plain.pth")
    plain = load_classifier(tmp_path / "plain.pth", VARIANT).model
    torch.testing.assert_close(logits_of(plain), logits_of(classifier), **FLOAT32)
    weights = official_state_dict(relative_bias=True, num_classes=7)
    torch.save(layouts.vision_longformer(weights), tmp_path / "official.pth")
    loaded = load_classifier(tmp_path / "official.pth", VARIANT, img_size=64)
    expected, _ = convert_state_dict(weights, VARIANT, classifier=True, model_options={"num_classes": 7})
    for name, tensor in loaded.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), atol=0, rtol=0)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    assert "other.pth" in message(load_classifier, tmp_path / "other.pth", VARIANT)
