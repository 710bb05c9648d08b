"""An export proves itself: model, metadata and a report that compares it with the detector on other images."""

import copy
import functools
import json
import runpy

import cv2
import detectron2
import numpy as np
import pytest
import torch
import torchvision
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from PIL import Image

from backbones import InputError
from projects_vil import load_config
from projects_vil.checkpoint import PROVENANCE_KEY, Provenance, load_detector
from projects_vil.data import read_for_testing, size_for_testing
from projects_vil.export import (
    FORMATS,
    ExportedDetector,
    ExportedModel,
    describe_report,
    export_detector,
    make_exportable,
    paste_masks,
    read_metadata,
    to_instances,
)
from projects_vil.export import api as export
from projects_vil.export.api import EXAMPLE_SIZE, in_precision
from projects_vil.export.metadata import describe_model, metadata_path
from projects_vil.export.parity import TOLERANCES
from projects_vil.export.report import check_export, comparison_images, eager_detections, example_image, report_path
from tests.projects_vil.helpers import CONFIGS, ROOT, SMALL, lively_detector, small_config

BOTH = ("retinanet", "mask_rcnn")


@functools.cache
def detector(name: str) -> torch.nn.Module:
    return lively_detector(small_config(name))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A checkpoint of each detector."""
    folder = tmp_path_factory.mktemp("weights")

    @functools.cache
    def save(name: str = "retinanet"):
        torch.save({"model": detector(name).state_dict()}, folder / f"{name}.pth")
        return folder / f"{name}.pth"

    return save


@pytest.fixture(scope="module")
def exported(weights, tmp_path_factory):
    """Exports once, by default to TorchScript: detector, options -> path and report."""

    @functools.cache
    def export(name: str, **options):
        return export_detector(small_config(name), weights(name), tmp_path_factory.mktemp("export"), runs=1, **options)

    return export


# -- the report ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_an_export_and_its_report(exported, name):
    path, report = exported(name)
    names = ["model.ts", "model.ts.metadata.json", "model.ts.report.json"]
    assert sorted(file.name for file in path.parent.iterdir()) == names
    assert path.name == "model.ts" and json.loads(report_path(path).read_text()) == report
    assert report["ok"] is True
    assert (report["file"], report["format"], report["opset"], report["precision"]) == (
        *("model.ts", "torchscript", None, "fp32"),
    )
    assert report["bytes"] == path.stat().st_size and report["tolerances"] == TOLERANCES["fp32"]
    assert report["versions"] == read_metadata(path)["versions"]
    assert report["latency"]["eager_ms"] > 0 and report["latency"]["exported_ms"] > 0
    assert "evaluation" not in report
    sizes = [(row["height"], row["width"]) for row in report["images"]]
    assert len(set(sizes)) == 4 and EXAMPLE_SIZE not in sizes
    assert {(height > width) - (height < width) for height, width in sizes} == {-1, 0, 1}
    for row in report["images"]:
        assert row["ok"] and row["unmatched"] == 0 and row["detections"] == row["detections_exported"] > 0
        assert ("masks" in row) == (name == "mask_rcnn")


def test_a_report_as_text(exported):
    path, report = exported("retinanet")
    *rows, last = describe_report(report).splitlines()
    assert len(rows) == 4 and all(row.endswith("; equal") for row in rows)
    assert last.startswith(f"model.ts: {path.stat().st_size / 1e6:.1f} MB, fp32; 64 x 96: ")
    assert last.endswith(" threads)") and "times as fast" in last
    row = {"dataset": "mine", "task": "bbox", "AP": 31.2, "AP_exported": 30.9, "ok": False}
    text = describe_report(report | {"evaluation": [row, row | {"ok": True}], "opset": 20})
    assert "mine, bbox: AP 31.2, exported 30.9; NOT EQUAL to 0.1" in text.splitlines()
    assert "mine, bbox: AP 31.2, exported 30.9; equal to 0.1" in text.splitlines()
    assert ", opset 20, fp32" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "name, layer, change",
    [
        ("retinanet", "head.bbox_pred.bias", 0.01),
        ("retinanet", "head.cls_score.bias", 0.003),
        ("mask_rcnn", "mask_head.predictor.bias", 0.05),
        ("mask_rcnn", "box_predictor.bbox_pred.bias", 0.02),
    ],
)
def test_an_export_of_slightly_other_weights_is_not_ok(exported, name, layer, change):
    path, _ = exported(name)
    other = copy.deepcopy(detector(name))
    with torch.no_grad():
        (parameter,) = (parameter for key, parameter in other.named_parameters() if key.endswith(layer))
        parameter += change
    images = comparison_images(small_config(name))[:2]
    report = check_export(small_config(name), other, ExportedModel(path), images, runs=1)
    assert report["ok"] is False and "NOT EQUAL" in describe_report(report)


def test_a_batched_export(exported):
    path, report = exported("mask_rcnn", batched=True)
    # Each image first and second in a batch
    assert report["ok"] and len(report["images"]) == 8 and read_metadata(path)["input"]["batched"] is True
    assert path.name == "model_batched.ts"
    assert read_metadata(path)["input"]["shape"] == ["images", 3, "height", "width"]
    found = ExportedModel(path)(torch.stack([example_image(70, 90, seed=seed) for seed in range(3)]))
    assert set(found["image_index"].tolist()) == {0, 1, 2}


def test_another_format_or_precision_beside_it_overwrites_nothing(weights, tmp_path):
    first, _ = export_detector(small_config(), weights(), tmp_path / "new" / "export", runs=1)
    before = {file.name: file.read_bytes() for file in first.parent.iterdir()}
    second, _ = export_detector(small_config(), weights(), first.parent, precision="bf16", runs=1)
    assert second.name == "model_bf16.ts"
    after = {file.name: file.read_bytes() for file in first.parent.iterdir()}
    assert len(after) == 2 * len(before) == 6 and all(after[name] == before[name] for name in before)
    paths = [first.parent / f"model{suffix}" for suffix in (".ts", ".onnx", ".pt2", ".aoti.pt2")]
    assert len({*map(metadata_path, paths), *map(report_path, paths), *paths}) == 12


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", BOTH)
def test_a_lower_precision(exported, name, precision):
    """Of random weights as large as here the answers may differ; the report says it, and what runs is that type."""
    path, report = exported(name, precision=precision)
    assert report["precision"] == precision and report["tolerances"] == TOLERANCES[precision]
    assert report["ok"] is all(row["ok"] for row in report["images"])
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    model = torch.jit.load(path)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    boxes, scores, classes, *masks = model(example_image(70, 90))
    assert {value.dtype for value in (boxes, scores, *masks)} == {torch.float32} and len(boxes) > 0
    assert boxes.isfinite().all() and scores.isfinite().all()


def test_precision_of_the_network_only():
    model = in_precision(copy.deepcopy(detector("mask_rcnn")), "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    kept = {name: value for name, value in model.named_buffers() if "anchor" in name or "pixel" in name}
    assert len(kept) > 3 and {value.dtype for value in kept.values()} == {torch.float32}
    for name, value in detector("mask_rcnn").named_buffers():
        assert name not in kept or torch.equal(kept[name], value)
    assert in_precision(copy.deepcopy(detector("retinanet")), "fp32").pixel_mean.dtype == torch.float32


# -- average precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_average_precision_of_both(shapes, weights, tmp_path, name):
    path, report = export_detector(small_config(name), weights(name), tmp_path, evaluate=True, runs=1)
    tasks = ["bbox", "segm"] if name == "mask_rcnn" else ["bbox"]
    assert [(row["dataset"], row["task"]) for row in report["evaluation"]] == [("shapes_val", task) for task in tasks]
    for row in report["evaluation"]:
        assert row["ok"] and row["AP"] == row["AP_exported"] is not None
    assert report["ok"] and "shapes_val, bbox: AP " in describe_report(report)
    assert json.loads(report_path(path).read_text()) == report


def test_another_average_precision_is_not_ok(shapes, exported, monkeypatch):
    cfg, model = small_config(), ExportedModel(exported("retinanet")[0])
    monkeypatch.setattr("projects_vil.export.report.AP_TOLERANCE", -1.0)
    report = check_export(cfg, detector("retinanet"), model, comparison_images(cfg)[:1], runs=1, evaluate=True)
    assert all(row["ok"] for row in report["images"]) and not report["evaluation"][0]["ok"]
    assert report["ok"] is False and "; NOT EQUAL to" in describe_report(report)


@pytest.mark.parametrize("name", BOTH)
def test_an_exported_model_behind_detectron2s_interface(exported, name):
    """Boxes are scaled to the size of the file, and masks pasted, as detectron2 does it."""
    model = ExportedDetector(ExportedModel(exported(name)[0])).eval()
    inputs = {"image": example_image(64, 90), "height": 200, "width": 281}
    (ours,) = model([inputs])
    with torch.no_grad():
        (theirs,) = detector(name)([inputs])
    ours, theirs = ours["instances"], theirs["instances"]
    assert ours.image_size == theirs.image_size == (200, 281) and len(ours) == len(theirs) > 0
    torch.testing.assert_close(ours.pred_boxes.tensor, theirs.pred_boxes.tensor, rtol=0, atol=1e-2)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=1e-4)
    assert ours.pred_classes.tolist() == theirs.pred_classes.tolist()
    if name == "mask_rcnn":
        assert ours.pred_masks.shape == (len(ours), 200, 281) and ours.pred_masks.any()
        assert (ours.pred_masks != theirs.pred_masks).float().mean() < 1e-4


def test_pasted_masks():
    found = eager_detections(detector("mask_rcnn"), example_image(64, 90))
    instances = Instances((64, 90), pred_boxes=Boxes(found["boxes"].clone()), pred_masks=found["masks"])
    expected = detector_postprocess(instances, 64, 90).pred_masks
    pasted = paste_masks(found["masks"], found["boxes"], (64, 90))
    assert pasted.shape == (len(found["boxes"]), 64, 90) and pasted.dtype == torch.bool and pasted.any()
    assert torch.equal(pasted, expected)
    none = paste_masks(found["masks"][:0], found["boxes"][:0], (64, 90))
    assert none.shape == (0, 64, 90)
    assert paste_masks(found["masks"], found["boxes"], (64, 90), threshold=0.9).sum() < pasted.sum()


def test_instances_do_not_change_what_was_found():
    found = eager_detections(detector("retinanet"), example_image(64, 90))
    before = found["boxes"].clone()
    to_instances(found, (64, 90), (640, 900))
    assert torch.equal(found["boxes"], before)


# -- metadata --------------------------------------------------------------------------------------


def test_metadata(exported):
    path, _ = exported("mask_rcnn")
    metadata, cfg = read_metadata(path), small_config("mask_rcnn")
    assert metadata["detector"] == "Mask R-CNN" and metadata["backbone"] == cfg.MODEL.TRANSFORMER.NAME
    assert metadata["input"] == {
        "name": "image",
        "shape": [3, "height", "width"],
        "batched": False,
        "dtype": "uint8",
        "range": [0, 255],
        "sides": [1, 8192],
        "color_order": cfg.INPUT.FORMAT,
    }
    assert metadata["normalization"] == {
        "inside_the_model": True,
        "mean": cfg.MODEL.PIXEL_MEAN,
        "std": cfg.MODEL.PIXEL_STD,
    }
    outputs = {output["name"]: output for output in metadata["outputs"]}
    found = eager_detections(detector("mask_rcnn"), example_image(70, 90))
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
    exportable = make_exportable(lively_detector(cfg) if overrides else detector(name))
    return describe_model(cfg, exportable, file_format=file_format, **(facts | options))


def test_metadata_of_other_detectors():
    metadata = described("retinanet", file_format="onnx", input_dtype="float32")
    assert metadata["detector"] == "RetinaNet" and "mask" not in metadata["thresholds"]
    assert metadata["input"]["dtype"] == "float32" and metadata["opset"] == 20
    assert {"onnx", "onnxscript", "onnxruntime"} <= metadata["versions"].keys()
    # RetinaNet has no masks, whatever the key says.
    metadata = described("retinanet", "MODEL.MASK_ON", "True")
    assert metadata["detector"] == "RetinaNet" and "mask" not in metadata["thresholds"]
    metadata = described("mask_rcnn", "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION", "7")
    assert metadata["outputs"][3]["shape"] == ["detections", 1, 14, 14]
    assert json.loads(json.dumps(metadata)) == metadata


def resized(rule: dict, height: int, width: int) -> tuple[int, int]:
    """The rule of the metadata, by its words."""
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


def test_class_names(shapes, weights, tmp_path):
    """Of the checkpoint, else of the dataset, else numbers."""
    cfg = small_config()
    assert load_detector(cfg, weights())[1] == ("circle", "square", "triangle")
    elsewhere = small_config("retinanet", "DATASETS.TEST", "('coco_2017_val',)", "DATASETS.TRAIN", "()")
    assert load_detector(elsewhere, weights())[1] == ("0", "1", "2")
    said = Provenance(variant=cfg.MODEL.TRANSFORMER.NAME, classes=("cat", "dog", "cow")).to_dict()
    torch.save({"model": detector("retinanet").state_dict(), PROVENANCE_KEY: said}, tmp_path / "said.pth")
    assert load_detector(elsewhere, tmp_path / "said.pth")[1] == ("cat", "dog", "cow")
    path, _ = export_detector(elsewhere, tmp_path / "said.pth", tmp_path / "export", runs=1)
    assert read_metadata(path)["classes"] == ["cat", "dog", "cow"]


# -- images ----------------------------------------------------------------------------------------


def test_example_images_differ_and_have_something_on_them():
    image = example_image(40, 70, seed=1)
    assert image.shape == (3, 40, 70) and image.dtype == torch.uint8 and 100 < image.max() <= 255
    assert torch.equal(image, example_image(40, 70, seed=1))
    assert not torch.equal(image, example_image(40, 70, seed=2))


def test_images_to_compare_on(shapes):
    drawn = comparison_images(small_config())
    assert [tuple(image.shape[1:]) for image in drawn] == [(64, 96), (85, 64), (64, 107), (35, 35)]
    files = sorted((shapes / "val").iterdir())[:2]
    for channels in ("RGB", "BGR"):
        cfg = small_config("retinanet", "INPUT.MIN_SIZE_TEST", "48", "INPUT.FORMAT", channels)
        images = comparison_images(cfg, files)
        assert [(len(image), min(image.shape[1:]), image.dtype) for image in images] == [(3, 48, torch.uint8)] * 2
        means = cv2.imread(str(files[0])).mean(axis=(0, 1))
        expected = torch.from_numpy(means if channels == "BGR" else means[::-1].copy()).float()
        torch.testing.assert_close(images[0].float().mean(dim=(1, 2)), expected, atol=2, rtol=0)


def test_images_of_the_user(shapes, weights, tmp_path):
    files = sorted((shapes / "val").iterdir())[:3]
    _, report = export_detector(small_config(), weights(), tmp_path, images=files, runs=1)
    assert len(report["images"]) == 3 and report["ok"]
    assert all(min(row["height"], row["width"]) == 64 for row in report["images"])


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, overrides, expected",
    [
        ({"file_format": "onnx", "precision": "bf16"}, (), "--precision bf16: ONNX has no bfloat16 convolutions"),
        ({"file_format": "onnxx"}, (), "unknown format 'onnxx': it is one of torchscript, onnx, "),
        ({"precision": "fp8"}, (), "unknown precision 'fp8'"),
        ({"input_dtype": "uint16"}, (), "unknown type of the input 'uint16'"),
        ({"images": ["absent.jpg"]}, (), "cannot read the image absent.jpg"),
        ({"evaluate": True}, ("DATASETS.TEST", "('shapes_vall',)"), "unknown dataset 'shapes_vall'; did you mean"),
        ({"evaluate": True}, ("DATASETS.TEST", "()"), "DATASETS.TEST is empty"),
    ],
)
def test_mistakes(shapes, weights, tmp_path, options, overrides, expected):
    with pytest.raises(InputError) as caught:
        export_detector(small_config("retinanet", *overrides), weights(), tmp_path / "export", **options)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("path", ["absent.pth", ""])
@pytest.mark.parametrize("file_format", FORMATS[:3])
def test_missing_weights(tmp_path, path, file_format):
    with pytest.raises(InputError, match="MODEL.WEIGHTS"):
        export_detector(small_config(), path, tmp_path / "export", file_format=file_format)
    assert not (tmp_path / "export").exists()


def test_weights_of_another_detector(weights, tmp_path):
    with pytest.raises(InputError, match="of another model"):
        export_detector(small_config("mask_rcnn"), weights(), tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_segmentor(tmp_path):
    with pytest.raises(InputError, match="^a SemanticSegmentor cannot be exported yet: only RetinaNet and General"):
        export_detector(small_config("semantic_fpn"), "absent.pth", tmp_path / "export")


@pytest.mark.parametrize("where", ["file", "file/export"])
def test_unwritable_output(weights, tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"^cannot write into {tmp_path / where}: "):
        export_detector(small_config(), weights(), tmp_path / where)


def test_the_tool_fails_where_the_answers_differ(weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TOLERANCES, "fp32", TOLERANCES["fp32"] | {"scores": -1.0})
    arguments = ["--config-file", CONFIGS["retinanet"], "--weights", weights(), "--output", tmp_path]
    monkeypatch.setattr("sys.argv", ["export_model.py", *map(str, arguments), "--opts", *SMALL["retinanet"]])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "tools/export_model.py"), run_name="__main__")
    assert caught.value.code == 1
    assert capsys.readouterr().out.count("NOT EQUAL") == 4
    report = json.loads((tmp_path / "model.ts.report.json").read_text())
    assert report["ok"] is False and not any(row["ok"] for row in report["images"])


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch_export", "onnx"])
@pytest.mark.parametrize("family", ["vil", "ls", "lit", "cvt"])
@pytest.mark.parametrize("name", BOTH)
def test_every_family_in_its_own_runtime(tmp_path, name, family, file_format):
    cfg = load_config(ROOT / f"configs/demo/{name}_{family}_shapes.yaml", SMALL[name])
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "lively.pth")
    _, report = export_detector(cfg, tmp_path / "lively.pth", tmp_path / "export", file_format=file_format, runs=1)
    assert report["ok"], describe_report(report)


def test_an_export_that_fails_leaves_the_older_one(weights, tmp_path, monkeypatch):
    path, _ = export_detector(small_config(), weights(), tmp_path, runs=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(*args, **options):
        raise InputError("the comparison fails")

    monkeypatch.setattr(export, "check_export", fail)
    with pytest.raises(InputError, match="the comparison fails"):
        export_detector(small_config(), weights(), tmp_path, runs=1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and path.name in before


def test_images_that_a_model_does_not_take(weights, tmp_path):
    keys = ("MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1", "MODEL.TRANSFORMER.MAX_IMG_SIZE", "80")
    cfg = small_config("retinanet", *keys)
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "absolute.pth")
    with pytest.raises(InputError, match="^MIN_SIZE_TEST .*: 64 x 96 pixels, and the model takes sides of 1 to 80$"):
        export_detector(cfg, tmp_path / "absolute.pth", tmp_path / "export")
    assert not (tmp_path / "export").exists()
