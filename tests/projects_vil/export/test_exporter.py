"""An export writes a file, its metadata, and a report of the comparison with the detector."""

import json
import shutil

import numpy as np
import pytest
import torch
from detectron2.data import transforms as T
from PIL import Image

from backbones import ConfigError
from projects_vil import Detector, load_config
from projects_vil.data import size_for_testing, to_input
from projects_vil.export import ExportedModel, describe_report, example_image, export_detector, pad_image, to_instances
from projects_vil.export.exporter import EXAMPLE_SIZE, describe_model
from projects_vil.export.parity import eager_detections
from projects_vil.export.traceable import make_exportable
from tests.projects_vil.export.exporting import FEW_LEVELS, SHAPES, demo_detector, shallow_variants, skip_without
from tests.projects_vil.helpers import (
    ROOT,
    SMALL,
    assert_same_detections,
    contents_of,
    message,
    small_config,
    untrained_detector,
)


def test_an_export_and_its_report(exported):
    path, report = exported("retinanet")
    names = ["model.ts", "model.ts.metadata.json", "model.ts.report.json"]
    assert sorted(file.name for file in path.parent.iterdir()) == names
    assert json.loads((path.parent / names[2]).read_text()) == report and report["ok"] is True
    assert (report["file"], report["bytes"]) == ("model.ts", path.stat().st_size)
    assert report["versions"] == ExportedModel(path).metadata["versions"]
    assert report["latency"]["eager_ms"] > 0 and report["latency"]["exported_ms"] > 0
    sizes = [(row["height"], row["width"]) for row in report["images"]]
    assert len(set(sizes)) == 4 and EXAMPLE_SIZE not in sizes
    assert {(height > width) - (height < width) for height, width in sizes} == {-1, 0, 1}
    for row in report["images"]:
        assert row["ok"] and row["unmatched"] == 0 and row["detections"] == row["detections_exported"] > 0


def test_without_detections_the_candidates_are_compared(tmp_path):
    few = ["MODEL.TRANSFORMER.VARIANT", "timm:test_resnet", "MODEL.FPN.IN_FEATURES", "['stage2', 'stage3']"]
    few += [*FEW_LEVELS["retinanet"].split(), "MODEL.RETINANET.SCORE_THRESH_TEST", "0.99"]
    cfg, weights = small_config("retinanet", *few), tmp_path / "random.pth"
    torch.save({"model": untrained_detector(cfg).state_dict()}, weights)
    path, report = export_detector(cfg, weights, tmp_path / "out")
    assert report["ok"] is True and all(row["pairs"] for row in report["images"])
    assert "compared without a score threshold" in describe_report(report)
    assert ExportedModel(path).metadata["thresholds"]["score"] == 0.99
    assert sorted(tmp_path.iterdir()) == [tmp_path / "out", weights]


@pytest.mark.slow
def test_a_fixed_size(exported):
    skip_without("openvino")
    path, report = exported("retinanet", file_format="openvino", size=(96, 130))
    assert path.name == "model_96x130.xml" and report["ok"]
    assert {(row["height"], row["width"]) for row in report["images"]} == {(96, 130)}
    model = ExportedModel(path)
    assert model.metadata["input"]["shape"] == [3, 96, 130] and model.metadata["input"]["size"] == [96, 130]
    upright = example_image(130, 60).permute(1, 2, 0).numpy()
    found = Detector.load(path)(upright)
    # 96 x 44, padded with the mean on the right
    image = torch.as_tensor(T.ResizeTransform(130, 60, 96, 44).apply_image(upright)).permute(2, 0, 1)
    expected = to_instances(model(pad_image(image, (96, 130), [123.675, 116.28, 103.53])), (96, 44), (130, 60))
    assert len(found.boxes) == len(expected) > 0 and found.boxes[:, 2].max() <= 60
    assert_same_detections(found.instances, expected)


# -- metadata --------------------------------------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "overrides", "named"),
    [
        ({"file_format": "onnx", "precision": "bf16"}, (), "bf16"),
        ({"input_dtype": "uint16"}, (), "uint16"),
        ({"file_format": "openvino", "precision": "int8"}, ("DATASETS.TRAIN", "()"), "DATASETS.TRAIN"),
        ({"file_format": "onnx", "size": (16, 128)}, (), "16 x 128"),
        ({"file_format": "onnx", "size": (96, 128), "evaluate": True}, (), "size"),
        ({"images": ["absent.jpg"]}, (), "absent.jpg"),
        ({"opset": 18}, (), "opset"),
        ({"opset": 11}, (), "opset=11"),
        ({"evaluate": True}, ("DATASETS.TEST", "('shapes_vall',)"), "shapes_vall"),
    ],
)
def test_mistakes(shapes, weights, tmp_path, options, overrides, named):
    if options.get("file_format"):
        skip_without(options["file_format"])
    with pytest.raises(ConfigError, match=named) as caught:
        export_detector(small_config("retinanet", *overrides), weights(), tmp_path / "export", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "export").exists()


@pytest.mark.slow
def test_a_failed_export_leaves_the_older_one(exported, weights, tmp_path, monkeypatch):
    older = exported("retinanet")[0].parent
    shutil.copytree(older, tmp_path, dirs_exist_ok=True)

    def fail(*args, **options):
        raise ConfigError("the comparison fails")

    monkeypatch.setattr("projects_vil.export.exporter.check_export", fail)
    assert "the comparison fails" in message(export_detector, small_config(), weights(), tmp_path)
    assert contents_of(tmp_path) == contents_of(older)
    assert "is a file" in message(export_detector, small_config(), weights(), tmp_path / "model.ts")


# -- whole models ----------------------------------------------------------------------------------


FAMILIES = [
    # tests/backbones exports the backbones of all families to ONNX.
    *("vil-mask_rcnn-onnx", "lit-retinanet-onnx", "litv2-retinanet-onnx"),
    *("ls-mask_rcnn-openvino", "lit-retinanet-openvino", "cvt-retinanet-openvino"),
    # ONNX files come from the same program.
    "vil-retinanet-torch_export",
]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_in_its_own_runtime(tmp_path, case):
    family, name, file_format = case.split("-")
    skip_without(file_format)
    # ONNX takes the longest.
    with shallow_variants(depth=1 if file_format == "onnx" else 2):
        cfg = load_config(ROOT / f"configs/demo/{name}_{family}_shapes.yaml", SMALL[name])
        torch.save({"model": untrained_detector(cfg).state_dict()}, tmp_path / "random.pth")
        _, report = export_detector(cfg, tmp_path / "random.pth", tmp_path / "export", file_format=file_format)
    assert report["ok"], describe_report(report)
