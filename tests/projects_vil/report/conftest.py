"""Synthetic detections with a known evaluation."""

import json

import pytest

BOXES = {"dog": [10, 10, 20, 20], "cat": [50, 10, 20, 20]}


@pytest.fixture
def synthetic_results(tmp_path):
    """Return annotations and a results file. Image 1 has a dog and a cat, image 2 a dog and a crowd of dogs."""
    objects = [(1, 7, BOXES["dog"], 0), (1, 3, BOXES["cat"], 0), (2, 7, BOXES["dog"], 0), (2, 7, [60, 0, 40, 80], 1)]
    annotations = {
        "images": [{"id": number, "file_name": f"{number}.png", "height": 80, "width": 100} for number in (1, 2)],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "<cat> & co"}],
        "annotations": [
            {"id": row, "image_id": image, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": crowd}
            for row, (image, label, box, crowd) in enumerate(objects, start=1)
        ],
    }
    # A true positive, a cat detected as a dog, a true positive, a detection in the crowd, and a false positive.
    detections = [
        (1, 7, BOXES["dog"], 0.9),
        (1, 7, BOXES["cat"], 0.8),
        (2, 7, BOXES["dog"], 0.7),
        (2, 7, [62, 5, 20, 20], 0.6),
        (2, 3, [10, 50, 20, 20], 0.5),
    ]
    keys = ("image_id", "category_id", "bbox", "score")
    results = [dict(zip(keys, detection, strict=True)) for detection in detections]
    (tmp_path / "results.json").write_text(json.dumps(results))
    return annotations, tmp_path / "results.json"
