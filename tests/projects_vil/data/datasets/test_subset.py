"""A few images of an annotation file."""

import json

import pytest
from pycocotools.coco import COCO

from backbones import InputError
from projects_vil.data import write_subset


def test_images_spread_over_the_file_with_their_annotations(shapes, tmp_path):
    source = shapes / "annotations/instances_train.json"
    assert write_subset(source, tmp_path / "four.json", num_images=4) == 4
    whole, subset = json.loads(source.read_text()), json.loads((tmp_path / "four.json").read_text())
    assert [image["id"] for image in subset["images"]] == [1, 5, 9, 13]
    assert subset["annotations"] == [a for a in whole["annotations"] if a["image_id"] in (1, 5, 9, 13)]
    assert subset["categories"] == whole["categories"]
    assert len(COCO(tmp_path / "four.json").imgs) == 4


def test_all_images_that_have_annotations_where_there_are_fewer(shapes, tmp_path):
    content = json.loads((shapes / "annotations/instances_train.json").read_text())
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] > 10]
    (tmp_path / "source.json").write_text(json.dumps(content))
    assert write_subset(tmp_path / "source.json", tmp_path / "subset.json", num_images=100) == 6


@pytest.mark.parametrize(
    "text, hint",
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a COCO"),
        ('{"images": []}', "is not a COCO"),
    ],
)
def test_wrong_source(tmp_path, text, hint):
    if text is not None:
        (tmp_path / "source.json").write_text(text)
    with pytest.raises(InputError, match=hint) as caught:
        write_subset(tmp_path / "source.json", tmp_path / "subset.json", num_images=1)
    assert "source.json" in str(caught.value) and "\n" not in str(caught.value)


def test_annotations_that_are_no_text(tmp_path):
    (tmp_path / "source.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="source.json"):
        write_subset(tmp_path / "source.json", tmp_path / "subset.json", num_images=1)


def test_number_and_output(shapes, tmp_path):
    source = shapes / "annotations/instances_train.json"
    with pytest.raises(InputError, match="0: it is 1 or more"):
        write_subset(source, tmp_path / "subset.json", num_images=0)
    with pytest.raises(InputError, match="cannot be written: No such file"):
        write_subset(source, tmp_path / "absent" / "subset.json", num_images=1)


def test_no_annotation_at_all(tmp_path):
    (tmp_path / "source.json").write_text('{"images": [{"id": 1}], "annotations": [], "categories": []}')
    with pytest.raises(InputError, match="source.json"):
        write_subset(tmp_path / "source.json", tmp_path / "subset.json", num_images=1)
