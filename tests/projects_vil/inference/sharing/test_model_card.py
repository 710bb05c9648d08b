"""The card of a shared detector."""

import pytest
from huggingface_hub import ModelCard

from backbones import InputError
from projects_vil import Detector
from projects_vil.inference.sharing.model_card import model_card
from projects_vil.inference.sharing.proofs import Proofs
from tests.projects_vil.helpers import lively_detector, small_config
from tests.projects_vil.inference.sharing.helpers import CLASSES


def test_what_it_says(detector):
    card = detector.generate_model_card(license="cc-by-4.0", repo_id="me/shapes")
    data = card.data.to_dict()
    assert (data["license"], data["pipeline_tag"], data["library_name"]) == (
        *("cc-by-4.0", "object-detection", "vil-detectron2"),
    )
    [result] = data["model-index"][0]["results"]
    assert result["dataset"]["name"] == "mine"
    # An AP that is not defined is left out.
    assert result["metrics"] == [{"type": "AP", "value": 12.345}, {"type": "AP50", "value": 20.0}]
    text = card.text
    assert "| 3 | round \\| flat |\n| 7 | square |\n| 9 | triangle |\n" in text
    # Of whichever evaluator the dataset has.
    assert "On `mine`, in percent:" in text and "| bbox | 12.35 | 20.00 |" in text
    assert "model.ts: 1.2 MB, fp32" in text and "3 detections, 3 exported" in text
    assert 'from_pretrained("me/shapes")' in text and "Of the weights: `cc-by-4.0`." in text
    assert "Their shorter side becomes 80 pixels" in text and "from a score of 0.001" in text


def test_no_licence_is_made_up(detector):
    card = detector.generate_model_card()
    assert "license" not in card.data.to_dict()
    assert "None is stated for the weights" in card.text and "is under Apache-2.0" in card.text


def test_nothing_is_known_of_masks():
    cfg = small_config("mask_rcnn", "INPUT.MIN_SIZE_TEST", "0")
    card = model_card(cfg, lively_detector(cfg), CLASSES, Proofs(None, {}, ()))
    assert card.data.pipeline_tag == "image-segmentation" and card.data.eval_results is None
    text = card.text
    assert "# Mask R-CNN, vil_tiny" in text and "found.names, found.masks" in text
    assert text.count("None is stated.") == 2 and "in the size that they have" in text


@pytest.mark.parametrize("name, title", [("cascade_mask_rcnn", "Cascade Mask R-CNN"), ("retinanet", "RetinaNet")])
def test_it_has_the_name_of_the_detector(name, title):
    cfg = small_config(name)
    card = model_card(cfg, lively_detector(cfg), CLASSES, Proofs({"mine": {"bbox": {"AP": 1.0}}}, {}, ()))
    assert f"# {title}, vil_tiny" in card.text and f"\n{title} with the backbone" in card.text
    assert card.data.to_dict()["model-index"][0]["name"].startswith(f"{title}, vil_tiny")


@pytest.mark.parametrize("repo_id", ['bad "name\n# x', "", "a/b/c"])
def test_a_name_that_the_hub_cannot_have(repo_id, detector, tmp_path):
    for call in (detector.generate_model_card, lambda **names: detector.save_pretrained(tmp_path / "saved", **names)):
        with pytest.raises(InputError, match="is no name on the hub: ") as error:
            call(repo_id=repo_id)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "saved").exists()


def test_it_is_what_the_hub_reads(saved):
    assert ModelCard.load(saved / "README.md").data.to_dict()["tags"][0] == "detectron2"
    assert Detector.load(saved).generate_model_card().data.eval_results
