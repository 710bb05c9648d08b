"""Our code synchronizes with the GPU only to copy the results of a batch."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("detector", "most_own", "most_detectron2"), [("retinanet", 1, 60), ("mask_rcnn", 3, 90)])
def test_waits_of_batches(run_on_mock, detector, most_own, most_detectron2):
    """The number does not depend on the number of images. detectron2 synchronizes for boolean indexing."""
    for number in (1, 3):
        waits = json.loads(run_on_mock("count_predict.py", detector, number).splitlines()[-1])
        of_detectron2 = sum(count for place, count in waits.items() if place.startswith("detectron2/"))
        assert 0 < sum(waits.values()) - of_detectron2 <= most_own and of_detectron2 <= most_detectron2
