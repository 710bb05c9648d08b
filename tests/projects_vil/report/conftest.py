"""A detector's findings, made up so that their judgement can be told by hand."""

import json

import pytest

BOXES = {"dog": [10, 10, 20, 20], "cat": [50, 10, 20, 20]}


@pytest.fixture
def findings(tmp_path):
    """(annotations, results): two images; in the first a dog and a cat, in the second a dog and a crowd of dogs."""
    objects = [(1, 7, BOXES["dog"], 0), (1, 3, BOXES["cat"], 0), (2, 7, BOXES["dog"], 0), (2, 7, [60, 0, 40, 80], 1)]
    annotations = {
        "images": [{"id": number, "file_name": f"{number}.png", "height": 80, "width": 100} for number in (1, 2)],
        "categories": [{"id": 7, "name": "dog"}, {"id": 3, "name": "<cat> & co"}],
        "annotations": [
            {"id": row, "image_id": image, "category_id": kind, "bbox": box, "area": box[2] * box[3], "iscrowd": crowd}
            for row, (image, kind, box, crowd) in enumerate(objects, start=1)
        ],
    }
    # A hit; a cat taken for a dog; a hit, and one in the crowd; nothing at all.
    found = [
        (1, 7, BOXES["dog"], 0.9),
        (1, 7, BOXES["cat"], 0.8),
        (2, 7, BOXES["dog"], 0.7),
        (2, 7, [62, 5, 20, 20], 0.6),
        (2, 3, [10, 50, 20, 20], 0.5),
    ]
    results = [
        {"image_id": image, "category_id": kind, "bbox": box, "score": score} for image, kind, box, score in found
    ]
    paths = tmp_path / "annotations.json", tmp_path / "results.json"
    for path, content in zip(paths, (annotations, results), strict=True):
        path.write_text(json.dumps(content))
    return paths
