"""An export writes a file, its metadata, and a report of the comparison with the detector."""

import json
import shutil

import pytest
import torch
from detectron2.data import transforms as T

from backbones import ConfigError
from projects_vil import Detector, load_config
from projects_vil.export import ExportedModel, describe_report, example_image, export_detector, pad_image, to_instances
from projects_vil.export.exporter import EXAMPLE_SIZE
from tests.projects_vil.export.exporting import FEW_LEVELS, shallow_variants, skip_without
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
