"""The metadata describe the exported file."""

import json

import detectron2
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from projects_vil.data import read_for_testing, size_for_testing
from projects_vil.export import describe_model, eager_detections, example_image, make_exportable, read_metadata
from tests.projects_vil.export.exporting import demo_detector
from tests.projects_vil.helpers import small_config, untrained_detector


@pytest.mark.slow
def test_metadata(exported):
    path, _ = exported("mask_rcnn")
    metadata, cfg = read_metadata(path), small_config("mask_rcnn")
    assert metadata["detector"] == "Mask R-CNN" and metadata["backbone"] == cfg.MODEL.TRANSFORMER.NAME
    assert metadata["input"] == {
        "name": "image",
        "shape": [3, "height", "width"],
        "size": None,
        "batched": False,
        "dtype": "uint8",
        "range": [0, 255],
        "sides": [1, 8192],
        "batch": None,
        "color_order": cfg.INPUT.FORMAT,
    }
    assert metadata["normalization"] == {
        "inside_the_model": True,
        "mean": cfg.MODEL.PIXEL_MEAN,
        "std": cfg.MODEL.PIXEL_STD,
    }
    outputs = {output["name"]: output for output in metadata["outputs"]}
    found = eager_detections(demo_detector("mask_rcnn"), example_image(70, 90))
    assert list(outputs) == ["boxes", "scores", "classes", "masks"]
    for name, value in found.items():
        assert outputs[name]["shape"] == ["detections", *value.shape[1:]] and outputs[name]["meaning"]
        assert f"torch.{outputs[name]['dtype']}" == str(value.dtype)
    assert metadata["thresholds"] == {"score": 0.001, "nms": 0.5, "detections_per_image": 100, "mask": 0.5}
    assert metadata["weights"] == "mask_rcnn.pth"
    assert metadata["versions"]["torch"] == torch.__version__
    assert metadata["versions"]["torchvision"] == torchvision.__version__
    assert metadata["versions"]["detectron2"] == detectron2.__version__


def described(name: str, *overrides: str, file_format: str = "torchscript", **options) -> dict:
    cfg = small_config(name, *overrides)
    facts = {"classes": ("a", "b", "c"), "precision": "fp32", "input_dtype": "uint8", "weights": "x.pth"}
    exportable = make_exportable(untrained_detector(cfg) if overrides else demo_detector(name))
    return describe_model(cfg, exportable, file_format=file_format, **(facts | options))


def test_metadata_of_other_detectors():
    metadata = described("retinanet", file_format="onnx", input_dtype="float32")
    assert metadata["detector"] == "RetinaNet" and "mask" not in metadata["thresholds"]
    assert metadata["input"]["dtype"] == "float32" and metadata["opset"] == 20
    assert metadata["input"]["sides"] == [32, 8192]
    assert {"onnx", "onnxscript", "onnxruntime"} <= metadata["versions"].keys()
    # RetinaNet has no masks, whatever the value of the key.
    metadata = described("retinanet", "MODEL.MASK_ON", "True")
    assert metadata["detector"] == "RetinaNet" and "mask" not in metadata["thresholds"]
    metadata = described("mask_rcnn", "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION", "7")
    assert metadata["outputs"][3]["shape"] == ["detections", 1, 14, 14]
    assert json.loads(json.dumps(metadata)) == metadata
    metadata = described("cascade_mask_rcnn")
    assert metadata["detector"] == "Cascade Mask R-CNN" and metadata["thresholds"]["mask"] == 0.5
    metadata = described("cascade_mask_rcnn", "MODEL.MASK_ON", "False", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.2")
    assert metadata["detector"] == "Cascade R-CNN"
    assert metadata["thresholds"] == {"score": 0.2, "nms": 0.5, "detections_per_image": 100}


def resized(rule: dict, height: int, width: int) -> tuple[int, int]:
    """Return height and width by the resizing rule as the metadata describe it."""
    if rule["short_side"] is None:
        return height, width
    scale = rule["short_side"] / min(height, width)
    sides = [float(rule["short_side"]), scale * max(height, width)]
    if sides[1] > rule["longest_side"]:
        scale = rule["longest_side"] / sides[1]
        sides = [side * scale for side in sides]
    shorter, longer = (int(side + 0.5) for side in sides)
    return (shorter, longer) if height <= width else (longer, shorter)


@pytest.mark.parametrize("short, longest", [(800, 1333), (64, 100), (128, 1333), (480, 480), (0, 1333)])
def test_the_resizing_rule_is_that_of_testing(short, longest):
    overrides = ("INPUT.MIN_SIZE_TEST", str(short), "INPUT.MAX_SIZE_TEST", str(longest))
    rule, cfg = described("retinanet", *overrides)["resizing"], small_config("retinanet", *overrides)
    assert (rule["short_side"], rule["longest_side"]) == ((short, longest) if short else (None, None))
    generator = np.random.default_rng(0)
    sizes = [(1, 1), (480, 640), (640, 480), (800, 1333), (1333, 800), (427, 640), (100, 1000), (2000, 30)]
    sizes += generator.integers(1, 3000, size=(3000, 2)).tolist()
    for height, width in sizes:
        assert resized(rule, height, width) == tuple(size_for_testing(cfg, height, width)), (height, width)


def test_the_resizing_is_that_of_the_metadata(shapes):
    """Pillow's BILINEAR, without any of this project's code, gives the pixels of the test loader."""
    cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48")
    rule = described("retinanet", "INPUT.MIN_SIZE_TEST", "48")["resizing"]
    assert "Pillow's BILINEAR" in rule["interpolation"]
    for file in sorted((shapes / "val").iterdir())[:3]:
        image = Image.open(file).convert("RGB")
        height, width = resized(rule, image.height, image.width)
        ours = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        assert np.array_equal(ours, read_for_testing(cfg, file, image_format="RGB")[0])
