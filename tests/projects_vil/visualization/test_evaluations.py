"""Drawings of an evaluation."""

import shutil

import cv2
import pytest

from projects_vil.config import load_config
from projects_vil.visualization import draw_evaluation


@pytest.fixture
def run(trained_run, shapes, tmp_path):
    """(folder, config with so many images) of a run that was evaluated."""
    shutil.copytree(trained_run / "inference", tmp_path / "inference")

    def configure(number: int):
        return load_config(trained_run / "config.yaml", ["OUTPUT_DIR", str(tmp_path), "TEST.DRAW_IMAGES", str(number)])

    return tmp_path, configure


def test_the_same_images_each_time(run):
    folder, configure = run
    first, second = draw_evaluation(configure(2), name="0000010") + draw_evaluation(configure(2), name="0000020")
    assert first == folder / "drawings/shapes_val_0000010.jpg"
    assert first.read_bytes() == second.read_bytes()
    rows = [cv2.imread(str(path)).shape[0] for path in (first, *draw_evaluation(configure(4), name="more"))]
    assert rows[1] > 1.5 * rows[0]


def test_none_is_asked_for(run):
    folder, configure = run
    assert draw_evaluation(configure(0), name="0000010") == []
    assert not (folder / "drawings").exists()


def test_what_cannot_be_drawn_is_a_warning(run, caplog):
    folder, configure = run
    (folder / "inference/coco_instances_results.json").write_text("[")
    assert draw_evaluation(configure(2), name="0000010") == []
    assert "no drawing of shapes_val" in caplog.text and "is not JSON" in caplog.text
