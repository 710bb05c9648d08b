"""The metadata describes the exported file."""

import numpy as np
import pytest
import torch
from PIL import Image

from projects_vil.data import size_for_testing, to_input
from projects_vil.export import describe_model, eager_detections, example_image, make_exportable
from tests.projects_vil.export.exporting import SHAPES, demo_detector
from tests.projects_vil.helpers import small_config


def described(name: str, *overrides: str, file_format: str = "torchscript") -> dict:
    cfg = small_config(name, *overrides)
    facts = {"precision": "fp32", "input_dtype": "uint8", "weights": "x.pth"}
    return describe_model(cfg, make_exportable(demo_detector(name, *overrides)), SHAPES, file_format, **facts)


def test_metadata():
    metadata, cfg = described("mask_rcnn"), small_config("mask_rcnn")
    assert metadata["detector"] == "Mask R-CNN" and metadata["backbone"] == cfg.MODEL.TRANSFORMER.VARIANT
    expected = {"name": "image", "shape": [3, "height", "width"], "range": [0, 255], "sides": [1, 8192]}
    expected |= {"size": None, "stride": 32, "batched": False, "batch": None, "dtype": "uint8"}
    expected["color_order"] = cfg.INPUT.FORMAT
    assert metadata["input"] == expected
    pixels = {"inside_the_model": True, "mean": cfg.MODEL.PIXEL_MEAN, "std": cfg.MODEL.PIXEL_STD}
    assert metadata["normalization"] == pixels
    outputs = {output["name"]: output for output in metadata["outputs"]}
    found = eager_detections(demo_detector("mask_rcnn"), example_image(70, 90))
    assert list(outputs) == ["boxes", "scores", "classes", "masks"]
    for name, value in found.items():
        assert outputs[name]["shape"] == ["detections", *value.shape[1:]] and outputs[name]["meaning"]
        assert f"torch.{outputs[name]['dtype']}" == str(value.dtype)
    assert metadata["thresholds"] == {"score": 0.001, "nms": 0.5, "detections_per_image": 100, "mask": 0.5}
    assert metadata["weights"] == "x.pth" and metadata["versions"]["torch"] == torch.__version__


def test_metadata_of_other_detectors():
    # RetinaNet ignores MODEL.MASK_ON.
    metadata = described("retinanet", "MODEL.MASK_ON", "True", file_format="onnx")
    assert metadata["detector"] == "RetinaNet" and "mask" not in metadata["thresholds"]
    assert metadata["opset"] == 20 and metadata["input"]["sides"] == [32, 8192]
    assert {"onnx", "onnxscript", "onnxruntime"} <= metadata["versions"].keys()
    metadata = described("cascade_mask_rcnn", "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION", "7")
    assert metadata["detector"] == "Cascade Mask R-CNN"
    assert metadata["outputs"][3]["shape"] == ["detections", 1, 14, 14]


def resized(rule: dict, height: int, width: int) -> tuple[int, int]:
    """Return height and width by the resizing rule of the metadata, as in the examples."""
    scale = min(rule["short_side"] / min(height, width), rule["longest_side"] / max(height, width))
    return int(scale * height + 0.5), int(scale * width + 0.5)


@pytest.mark.parametrize("short, longest", [(800, 1333), (64, 100)])
def test_the_resizing_rule_equals_testing(shapes, short, longest):
    """Pillow's BILINEAR gives the pixels of the test loader."""
    overrides = ("INPUT.MIN_SIZE_TEST", str(short), "INPUT.MAX_SIZE_TEST", str(longest))
    rule, cfg = described("retinanet", *overrides)["resizing"], small_config("retinanet", *overrides)
    assert (rule["short_side"], rule["longest_side"]) == (short, longest)
    sizes = [(1, 1), (640, 480), (800, 1333), (427, 640), (100, 1000), (2000, 30)]
    sizes += np.random.default_rng(0).integers(1, 3000, size=(1000, 2)).tolist()
    for height, width in sizes:
        assert resized(rule, height, width) == tuple(size_for_testing(cfg, height, width)), (height, width)
    file = min((shapes / "val").iterdir())
    image = Image.open(file).convert("RGB")
    height, width = resized(rule, image.height, image.width)
    ours = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    assert np.array_equal(ours, to_input(np.asarray(image), (height, width), "RGB").permute(1, 2, 0))
