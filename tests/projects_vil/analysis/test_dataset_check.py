"""The check of drawn annotations, timed in a process of its own."""

import numpy as np
import pytest

from projects_vil.analysis import time_dataset_check
from projects_vil.analysis.drawn_coco import NUM_OBJECTS, draw_objects, write_annotations, write_images
from projects_vil.data import check_coco
from tests.projects_vil.helpers import ROOT


def test_nothing_is_found_in_what_is_drawn(tmp_path):
    generator = np.random.default_rng(0)
    write_annotations(tmp_path / "annotations.json", *draw_objects(generator, 20), masks=True)
    write_images(tmp_path / "images", generator, 20)
    findings = check_coco(tmp_path / "annotations.json", tmp_path / "images", pixels=True).findings
    assert findings.numbers["images"] == 20 and findings.numbers["annotations"] == 20 * NUM_OBJECTS
    assert not findings.count("error") and not findings.count("mended")


@pytest.mark.slow
def test_what_a_check_costs():
    cost = time_dataset_check(ROOT / "tools/check_dataset.py", num_images=20)
    assert cost.file_size > 20 * NUM_OBJECTS * 100 and cost.seconds > 0 and cost.memory > 1e8
