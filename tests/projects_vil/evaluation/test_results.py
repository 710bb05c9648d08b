"""The file of a run's results."""

import json

import pytest
from detectron2.data import MetadataCatalog

from backbones import InputError
from projects_vil.checkpoint import build_detector, fingerprint
from projects_vil.config import load_config
from projects_vil.evaluation import read_results, write_results
from tests.projects_vil.helpers import small_config


def test_results_of_two_datasets(tmp_path):
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "('a', 'b')")
    write_results(cfg, {"a": {"bbox": {"AP": 1.5}}, "b": {"bbox": {"AP": float("nan"), "AP50": 2}}})
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content == {"a": {"bbox": {"AP": 1.5}}, "b": {"bbox": {"AP": None, "AP50": 2}}}


def test_figures_of_each_class_have_a_place_of_their_own(tmp_path):
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "('drawn',)")
    metrics = {"AP": 1.5, "AP-big dog": 3.0, "AP-cat": float("nan")}
    labels = {"mIoU": 2.0, "IoU-road": 2.0, "ACC-road": 7.0}
    write_results(cfg, {"bbox": metrics, "sem_seg": labels})
    content = json.loads((tmp_path / "evaluation.json").read_text())["drawn"]
    assert content["bbox"].pop("per_class") == {"big dog": {"AP": 3.0}, "cat": {"AP": None}}
    assert content["bbox"] == {"AP": 1.5, "AP-big dog": 3.0, "AP-cat": None}
    assert content["sem_seg"]["per_class"] == {"road": {"IoU": 2.0, "ACC": 7.0}}


@pytest.mark.parametrize(("classes", "ap", "expected"), [(["dog"], 4.5, 4.5), (["dog", "cat"], float("nan"), None)])
def test_classes_that_detectron2_leaves_out(tmp_path, classes, ap, expected):
    name = f"left_out_{len(classes)}"
    MetadataCatalog.get(name).thing_classes = classes
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", f"('{name}',)")
    write_results(cfg, {"bbox": {"AP": ap}})
    per_class = json.loads((tmp_path / "evaluation.json").read_text())[name]["bbox"]["per_class"]
    assert per_class == {each: {"AP": expected} for each in classes}


def test_results_are_read_for_the_model_that_they_are_of(tmp_path):
    cfg = small_config("retinanet", "OUTPUT_DIR", str(tmp_path), "DATASETS.TEST", "('drawn',)")
    assert read_results(tmp_path, model="ours") is None
    write_results(cfg, {"bbox": {"AP": 1.5}}, model="ours")
    assert read_results(tmp_path, model="ours") == {"drawn": {"bbox": {"AP": 1.5}}}
    with pytest.raises(InputError, match="is of other weights, or of other settings"):
        read_results(tmp_path, model="theirs")
    # Another evaluation, which does not say of what it is, has come since.
    write_results(cfg, {"bbox": {"AP": 2.5}})
    with pytest.raises(InputError, match="does not say which model it is of"):
        read_results(tmp_path, model="ours")
    for name in ("evaluation.model.json", "evaluation.json"):
        (tmp_path / name).write_text("{")
        with pytest.raises(InputError, match="is damaged: evaluate again"):
            read_results(tmp_path, model="ours")


def test_the_evaluation_of_a_run_is_of_its_last_checkpoint(trained_run):
    def model(weights: str) -> str:
        cfg = load_config(trained_run / "config.yaml")
        return fingerprint(cfg, build_detector(cfg, trained_run / weights))

    assert "shapes_val" in read_results(trained_run, model=model("model_final.pth"))
    with pytest.raises(InputError, match="other weights"):
        read_results(trained_run, model=model("model_0000001.pth"))
