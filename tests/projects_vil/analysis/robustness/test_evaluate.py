"""A classifier on small sets: real weights, real JPEGs, and the tool."""

import argparse
import dataclasses
import json

import pytest
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from backbones import InputError, create_classifier
from backbones.utils.files import read_checkpoint
from projects_vil.analysis import evaluate_robustness, format_robustness, robustness_as_json
from projects_vil.analysis.robustness.predicting import Predictor
from projects_vil.analysis.robustness.published import paper_figures
from projects_vil.analysis.robustness.sets import labelled_folder
from projects_vil.checkpoint import load_classifier
from tests.projects_vil.analysis.robustness import folders
from tests.projects_vil.helpers import error_line, run_tool

VARIANT = "vil_tiny_1_1_3_1_rpb"
# What the classifier of ``known`` predicts, the best first; neither ImageNet-A nor -R has class 0.
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
    # The fish is right at once, the dog with the fourth prediction.
    "in9": (50.0, 100.0),
    "in9-same": (50.0, 100.0),
    "in9-rand": (50.0, 100.0),
}


@pytest.fixture(scope="session")
def data(made_once):
    return made_once("robustness_sets", folders.write_all)


@pytest.fixture(scope="session")
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


@pytest.fixture
def small(tmp_path):
    """A folder with val and ImageNet-Real alone, to be spoiled."""
    folders.write_val(tmp_path)
    folders.write_real(tmp_path, {1: [6]})
    return tmp_path


@pytest.fixture(scope="session")
def known(data, weights):
    sets = [*TOP, "c"]
    return evaluate_robustness(weights / "known.pth", data, sets, variant=VARIANT, img_size=64, batch_size=2)


def test_scores_are_those_of_known_predictions(known):
    assert known.sets.keys() == {*TOP, "c"}
    for name, expected in TOP.items():
        found = known.sets[name].score
        assert (found.top1, found.top5) == pytest.approx(expected), name
    assert known.sets["real"].score.num_images == 2 and known.sets["real"].score.num_files == 3


def test_a_known_prediction_has_no_corruption_error(known):
    result = known.sets["c"]
    assert result.error == 0 and all(found.error == 0 for found in result.corruptions.values())
    assert [list(found.scores) for found in result.corruptions.values()] == [[1, 2, 3, 4, 5]] * 15


def test_the_table_and_the_json_have_all(known):
    lines = format_robustness(known).splitlines()
    assert lines[0] == "| set | images | top-1 % | top-5 % | CE % | paper % |" and len(lines) == 2 + 11 + 15 + 1
    assert "| ImageNet-Real | 2 (3 of 50000 files) | 50.00 | 50.00 | - | - |" in lines
    assert lines[-1] == "| ImageNet-C mCE | 75 (75 of 3750000 files) | 100.00 | 100.00 | 0.00 | - |"
    said = json.loads(json.dumps(robustness_as_json(known)))
    assert said["variant"] == VARIANT and said["img_size"] == [64, 64] and said["data_config"]["crop_pct"] == 0.875
    assert said["sets"]["a"]["score"]["top1"] == 50 and said["sets"]["c"]["corruptions"]["fog"]["error"] == 0


def test_predictions_are_those_of_the_model_image_by_image(data, weights):
    classifier = load_classifier(weights / "random.pth", VARIANT, img_size=64)
    model = create_classifier(VARIANT, num_classes=1000, img_size=64).eval()
    model.load_state_dict(read_checkpoint(weights / "random.pth")["model"])
    predictor = Predictor(classifier, batch_size=2, num_workers=1)
    for name, inside, cropped in (("val", (), True), ("a", (), True), ("c", ("snow", "2"), False)):
        folder = labelled_folder(data, name, *inside)
        found, paths, _ = predictor(folder, name, cropped=cropped)
        transform = create_transform(
            input_size=(3, 64, 64),
            crop_pct=0.875 if cropped else 1.0,
            interpolation="bicubic",
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        )
        for row, path in zip(found.tolist(), paths, strict=True):
            with Image.open(path) as image, torch.inference_mode():
                logits = model(transform(image.convert("RGB"))[None])[0]
            if folder.subset is not None:
                logits = logits.where(torch.isin(torch.arange(1000), torch.tensor(folder.subset)), -torch.inf)
            assert row == logits.topk(5).indices.tolist()


def test_images_are_prepared_as_the_run_did(weights, tmp_path):
    said = {"mean": [0.5, 0.4, 0.3], "std": [0.2], "interpolation": "bilinear", "crop_pct": 0.9, "img_size": 64}
    contents = {"state_dict": read_checkpoint(weights / "random.pth")["model"]}
    contents["args"] = argparse.Namespace(model=VARIANT, **said)
    torch.save(contents, tmp_path / "run.pth.tar")
    classifier = load_classifier(tmp_path / "run.pth.tar")
    own = Predictor(classifier).data_config
    assert own == resolve_data_config(said, model=classifier.model)
    assert (own["std"], own["interpolation"], own["crop_pct"]) == ((0.2, 0.2, 0.2), "bilinear", 0.9)
    assert Predictor(classifier, crop_pct=1.0).data_config == own | {"crop_pct": 1.0}


def test_what_is_missing_is_named_and_left_out(small, weights):
    folders.write_corruptions(small, ("fog", "snow"), (1, 2, 3, 4, 5))
    (small / "imagenet-c/snow/4/n01440764").rename(small / "moved")
    (small / "imagenet-c/snow/4").rmdir()
    found = evaluate_robustness(
        weights / "known.pth", small, ["val", "r", "c", "v2"], variant=VARIANT, img_size=64, batch_size=2
    )
    assert found.sets["r"].missing == ("imagenet-r",) and found.sets["r"].score is None
    assert found.sets["c"].error is None and len(found.sets["c"].missing) == 1 + 13 * 5
    lines = format_robustness(found).splitlines()
    assert "| ImageNet-R | missing: imagenet-r | - | - | - | - |" in lines
    assert "| ImageNet-C snow | 4 (4 of 200000 files), 4 of 5 severities | 100.00 | 100.00 | - | - |" in lines
    assert "| ImageNet-C frost | missing: all severities | - | - | - | - |" in lines
    assert "| ImageNet-C mCE | missing: 66 of 75 folders | - | - | - | - |" in lines
    assert "| ImageNet-C fog | 5 (5 of 250000 files) | 100.00 | 100.00 | 0.00 | - |" in lines


def test_a_paper_figure_stands_beside_the_own(known):
    papers = paper_figures("cvt_ls_13", (224, 224))
    sets = {name: dataclasses.replace(known.sets[name], paper=papers[name]) for name in ("val", "c")}
    rows = [line.split(" | ") for line in format_robustness(known._replace(sets=sets)).splitlines()]
    assert [rows[2][-1], rows[-1][-1]] == ["81.9 (LS Table 3) |", "58.7 (LS Table 4) |"]
    assert robustness_as_json(known._replace(sets=sets))["sets"]["c"]["paper"] == {
        "value": 58.7,
        "source": "LS Table 4",
    }


@pytest.mark.slow
def test_a_variant_of_the_paper(small, tmp_path):
    torch.save(create_classifier("cvt_ls_13").state_dict(), tmp_path / "cvt.pth")
    found = evaluate_robustness(tmp_path / "cvt.pth", small, ["val", "a"], variant="cvt_ls_13", batch_size=3)
    rows = [line.split(" | ") for line in format_robustness(found).splitlines()[2:]]
    assert [row[-1] for row in rows] == ["81.9 (LS Table 3) |", "27.0 (LS Table 4) |"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_image_is_named(small, weights, num_workers):
    broken = small / "val" / folders.STINGRAY / "ILSVRC2012_val_00000003.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(InputError, match=f"cannot read the image {broken}: "):
        evaluate_robustness(
            weights / "known.pth", small, ["val"], variant=VARIANT, img_size=64, num_workers=num_workers
        )


def test_outputs_that_are_not_finite(small, weights, tmp_path):
    state_dict = read_checkpoint(weights / "known.pth")["model"]
    torch.save(state_dict | {"head.bias": torch.full((1000,), torch.nan)}, tmp_path / "nan.pth")
    with pytest.raises(InputError, match="ImageNet val: the classifier's outputs are not finite"):
        evaluate_robustness(tmp_path / "nan.pth", small, ["val"], variant=VARIANT, img_size=64)


def test_no_set_is_there(tmp_path):
    with pytest.raises(
        InputError, match=r"has none of the sets v2, a \(--sets\): there is no imagenetv2-.*, imagenet-a$"
    ):
        evaluate_robustness("absent.pth", tmp_path, ["v2", "a"])
    with pytest.raises(InputError, match="there is no folder"):
        evaluate_robustness("absent.pth", tmp_path / "absent", ["v2"])
    with pytest.raises(InputError, match=r"no set is named \(--sets\): there are val, real, v2"):
        evaluate_robustness("absent.pth", tmp_path, [])


def test_a_flat_val_says_how_it_is_sorted(small):
    (small / "val" / folders.TENCH / "ILSVRC2012_val_00000002.JPEG").rename(small / "val/ILSVRC2012_val_00000002.JPEG")
    message = "ILSVRC2012_val_00000002.JPEG is in no folder of a class: ImageNet's val archive unpacks flat; sort"
    with pytest.raises(InputError, match=message):
        labelled_folder(small, "val").images()


def test_no_image_of_val_has_a_real_label(small, weights):
    folders.write_real(small, {})
    with pytest.raises(InputError, match="real.json has no labels for the images of"):
        evaluate_robustness(weights / "known.pth", small, ["real"])


def test_another_number_of_classes(small, tmp_path):
    torch.save(create_classifier(VARIANT, num_classes=10, img_size=64).state_dict(), tmp_path / "ten.pth")
    with pytest.raises(InputError, match="ten.pth has a head of 10 classes: these sets are for ImageNet's 1000"):
        evaluate_robustness(tmp_path / "ten.pth", small, ["val"], variant=VARIANT, img_size=64)


def test_the_tool(data, weights, tmp_path):
    arguments = ["--weights", weights / "known.pth", "--model", VARIANT, "--img-size", "64", "--data", data]
    arguments += ["--batch-size", "2", "--workers", "1", "--device", "cpu"]
    result = run_tool("evaluate_robustness.py", *arguments, "--sets", "v2", "a", "--json", tmp_path / "found.json")
    assert result.returncode == 0, result.stderr
    assert "| ImageNet-A | 2 (2 of 7500 files) | 50.00 | 100.00 | - | - |" in result.stdout.splitlines()
    assert "warning: ImageNet-A: 2 of the 7500 images are here" in result.stderr.splitlines()
    assert list(json.loads((tmp_path / "found.json").read_text())["sets"]) == ["v2", "a"]


def test_the_tool_on_a_broken_image(small, weights):
    broken = small / "val" / folders.STINGRAY / "ILSVRC2012_val_00000001.JPEG"
    broken.write_bytes(b"")
    arguments = ["--weights", weights / "known.pth", "--model", VARIANT, "--img-size", "64", "--data", small]
    result = run_tool("evaluate_robustness.py", *arguments, "--workers", "1", "--device", "cpu")
    assert result.returncode == 1
    assert error_line(result) == f"error: cannot read the image {broken}: it is empty"
