"""An export proves itself: model, metadata and a report that compares it with the detector on other images."""

import copy
import dataclasses
import json
import runpy

import numpy as np
import pytest
import torch
from detectron2.data import transforms as T

from backbones import InputError
from backbones.variants import VARIANTS
from projects_vil import Detector, load_config
from projects_vil.checkpoint import PROVENANCE_KEY, Provenance
from projects_vil.export import ExportedModel, describe_report, export_detector, padded, read_metadata, to_instances
from projects_vil.export import api as export
from projects_vil.export.api import in_precision
from projects_vil.export.images import example_image
from projects_vil.export.metadata import metadata_path
from projects_vil.export.proof.parity import TOLERANCES
from projects_vil.export.proof.report import report_path
from projects_vil.export.request import EXAMPLE_SIZE
from tests.projects_vil.export.exporting import BOTH, demo_detector, skip_without
from tests.projects_vil.helpers import CONFIGS, ROOT, SMALL, lively_detector, run_tool, small_config
from tests.selection import slow_except


@pytest.mark.parametrize("name", slow_except(BOTH, ["retinanet"]))
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
    assert "evaluation" not in report and len(report["fingerprint"]) == 64
    sizes = [(row["height"], row["width"]) for row in report["images"]]
    assert len(set(sizes)) == 4 and EXAMPLE_SIZE not in sizes
    assert {(height > width) - (height < width) for height, width in sizes} == {-1, 0, 1}
    for row in report["images"]:
        assert row["ok"] and row["unmatched"] == 0 and row["detections"] == row["detections_exported"] > 0
        assert ("masks" in row) == (name == "mask_rcnn")


@pytest.mark.slow
def test_a_batched_export(exported):
    path, report = exported("mask_rcnn", batched=True)
    # Each image first and second in a batch
    assert report["ok"] and len(report["images"]) == 8 and read_metadata(path)["input"]["batched"] is True
    assert path.name == "model_batched.ts"
    assert read_metadata(path)["input"]["shape"] == ["images", 3, "height", "width"]
    found = ExportedModel(path)(torch.stack([example_image(70, 90, seed=seed) for seed in range(3)]))
    assert set(found["image_index"].tolist()) == {0, 1, 2}


@pytest.mark.slow
def test_an_export_of_a_fixed_number_of_detections(exported):
    path, report = exported("mask_rcnn", fixed_detections=True, batched=True)
    metadata = read_metadata(path)
    assert report["ok"] and path.name == "model_batched_fixed.ts" and metadata["fixed_detections"] == 100
    shapes = {output["name"]: output["shape"] for output in metadata["outputs"]}
    assert shapes["masks"] == ["images", 100, 1, 28, 28] and shapes["count"] == ["images"]


@pytest.mark.slow
def test_another_format_or_precision_beside_it_overwrites_nothing(weights, tmp_path):
    first, _ = export_detector(small_config(), weights(), tmp_path / "new" / "export", runs=1)
    before = {file.name: file.read_bytes() for file in first.parent.iterdir()}
    second, _ = export_detector(small_config(), weights(), first.parent, precision="bf16", runs=1)
    assert second.name == "model_bf16.ts"
    after = {file.name: file.read_bytes() for file in first.parent.iterdir()}
    assert len(after) == 2 * len(before) == 6 and all(after[name] == before[name] for name in before)
    paths = [first.parent / f"model{suffix}" for suffix in (".ts", ".onnx", ".pt2", ".aoti.pt2")]
    assert len({*map(metadata_path, paths), *map(report_path, paths), *paths}) == 12


@pytest.mark.slow
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
    model = in_precision(copy.deepcopy(demo_detector("mask_rcnn")), "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    kept = {name: value for name, value in model.named_buffers() if "anchor" in name or "pixel" in name}
    assert len(kept) > 3 and {value.dtype for value in kept.values()} == {torch.float32}
    for name, value in demo_detector("mask_rcnn").named_buffers():
        assert name not in kept or torch.equal(kept[name], value)
    assert in_precision(copy.deepcopy(demo_detector("retinanet")), "fp32").pixel_mean.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_average_precision_of_both(shapes, weights, tmp_path, name):
    path, report = export_detector(small_config(name), weights(name), tmp_path, evaluate=True, runs=1)
    tasks = ["bbox", "segm"] if name == "mask_rcnn" else ["bbox"]
    assert [(row["dataset"], row["task"]) for row in report["evaluation"]] == [("shapes_val", task) for task in tasks]
    for row in report["evaluation"]:
        assert row["ok"] and row["AP"] == row["AP_exported"] is not None
    assert report["ok"] and "shapes_val, bbox: AP " in describe_report(report)
    assert json.loads(report_path(path).read_text()) == report


@pytest.mark.slow
def test_classes_of_the_checkpoint(shapes, tmp_path):
    cfg = small_config("retinanet", "DATASETS.TEST", "('coco_2017_val',)", "DATASETS.TRAIN", "()")
    facts = {"classes": ("cat", "dog", "cow"), "category_ids": (17, 18, 4)}
    said = Provenance(variant=cfg.MODEL.TRANSFORMER.NAME, **facts).to_dict()
    torch.save({"model": demo_detector("retinanet").state_dict(), PROVENANCE_KEY: said}, tmp_path / "said.pth")
    path, _ = export_detector(cfg, tmp_path / "said.pth", tmp_path / "export", runs=1)
    metadata = read_metadata(path)
    assert (metadata["classes"], metadata["category_ids"]) == (["cat", "dog", "cow"], [17, 18, 4])


@pytest.mark.slow
def test_images_of_the_user(shapes, weights, tmp_path):
    files = sorted((shapes / "val").iterdir())[:3]
    _, report = export_detector(small_config(), weights(), tmp_path, images=files, runs=1)
    assert len(report["images"]) == 3 and report["ok"]
    assert all(min(row["height"], row["width"]) == 64 for row in report["images"])


@pytest.mark.slow
def test_a_fixed_size(shapes, exported, tmp_path):
    skip_without("openvino")
    path, report = exported("retinanet", file_format="openvino", size=(96, 130))
    assert path.name == "model_96x130.xml" and report["ok"]
    assert "aten::index_select" in path.read_text() and "aten::unfold" not in path.read_text()
    assert {(row["height"], row["width"]) for row in report["images"]} == {(96, 130)}
    metadata, model = read_metadata(path), ExportedModel(path)
    assert metadata["input"]["shape"] == [3, 96, 130] and metadata["input"]["size"] == [96, 130]
    with pytest.raises(InputError, match="96 x 128 pixels, and the model takes 96 x 130 alone: scale and pad to that$"):
        model(example_image(96, 128))
    detector = Detector.load(path)
    upright = example_image(130, 60).permute(1, 2, 0).numpy()
    found = detector(upright)
    # 96 x 44, and the mean on its right
    image = torch.as_tensor(T.ResizeTransform(130, 60, 96, 44).apply_image(upright)).permute(2, 0, 1)
    expected = to_instances(model(padded(image, (96, 130), [123.675, 116.28, 103.53])), (96, 44), (130, 60))
    assert len(found.boxes) == len(expected) > 0 and found.boxes[:, 2].max() <= 60
    torch.testing.assert_close(torch.as_tensor(found.boxes), expected.pred_boxes.tensor)


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, overrides, expected",
    [
        ({"file_format": "onnx", "precision": "bf16"}, (), "--precision bf16: ONNX has no bfloat16 convolutions"),
        ({"file_format": "onnxx"}, (), "unknown format 'onnxx': it is one of torchscript, onnx, "),
        ({"precision": "fp8"}, (), "unknown precision 'fp8'"),
        ({"input_dtype": "uint16"}, (), "unknown type of the input 'uint16'"),
        ({"fixed_detections": True}, ("TEST.DETECTIONS_PER_IMAGE", "-1"), "TEST.DETECTIONS_PER_IMAGE is -1: a fixed"),
        ({"size": (96, 128)}, (), "--size: a trace takes any size all the same"),
        ({"precision": "int8"}, (), "--precision int8: torchscript has none; take --format onnx or openvino or"),
        (
            {"file_format": "onnx", "precision": "int8", "calibration_images": 0},
            (),
            "--calibration-images 0: it is 1 or",
        ),
        ({"file_format": "onnx", "precision": "int8"}, ("DATASETS.TRAIN", "()"), "DATASETS.TRAIN is empty"),
        ({"file_format": "onnx", "size": (16, 128)}, (), "--size 16 128: sides are 32 to 8192 pixels"),
        ({"file_format": "onnx", "size": (9000, 128)}, (), "--size 9000 128: sides are 32 to 8192 pixels"),
        ({"accept_drop": True}, (), "--accept-drop has no effect with --precision fp32: leave it out, or take int8"),
        ({"calibration_images": 8}, (), "--calibration-images has no effect with --precision fp32"),
        (
            {"file_format": "onnx", "size": (96, 128), "evaluate": True},
            (),
            "--evaluate: images of DATASETS.TEST have sizes",
        ),
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
@pytest.mark.parametrize("file_format", ["torchscript", "onnx", "torch_export"])
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


def test_unwritable_output(weights, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=f"^cannot write into {tmp_path}/file/export: "):
        export_detector(small_config(), weights(), tmp_path / "file/export")


@pytest.mark.slow
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
def test_an_export_that_fails_leaves_the_older_one(weights, tmp_path, monkeypatch):
    path, _ = export_detector(small_config(), weights(), tmp_path, runs=1)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(*args, **options):
        raise InputError("the comparison fails")

    monkeypatch.setattr(export, "check_export", fail)
    with pytest.raises(InputError, match="the comparison fails"):
        export_detector(small_config(), weights(), tmp_path, runs=1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and path.name in before


def test_an_output_that_is_a_file(tmp_path):
    (tmp_path / "export").write_text("mine")
    with pytest.raises(InputError, match="^--output .*export: it is a file, and a folder is needed$"):
        export_detector(small_config(), tmp_path / "absent.pth", tmp_path / "export")
    assert (tmp_path / "export").read_text() == "mine"


def test_images_that_a_model_does_not_take(weights, tmp_path):
    keys = ("MODEL.TRANSFORMER.NAME", "vil_tiny_1_1_3_1", "MODEL.TRANSFORMER.MAX_IMG_SIZE", "80")
    cfg = small_config("retinanet", *keys)
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "absolute.pth")
    with pytest.raises(InputError, match="^MIN_SIZE_TEST .*: 64 x 96 pixels, and the model takes sides of 1 to 80$"):
        export_detector(cfg, tmp_path / "absolute.pth", tmp_path / "export")
    assert not (tmp_path / "export").exists()


# -- slowly ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["torch_export", "onnx", "openvino"])
@pytest.mark.parametrize("family", ["vil", "ls", "lit", "cvt"])
@pytest.mark.parametrize("name", BOTH)
def test_every_family_in_its_own_runtime(tmp_path, monkeypatch, name, family, file_format):
    """With stages of at most two blocks: deeper ones have no other operators, and take minutes more."""
    skip_without(file_format)
    for key, variant in list(VARIANTS.items()):
        stages = tuple(dataclasses.replace(stage, depth=min(stage.depth, 2)) for stage in variant.stages)
        monkeypatch.setitem(VARIANTS, key, dataclasses.replace(variant, stages=stages))
    cfg = load_config(ROOT / f"configs/demo/{name}_{family}_shapes.yaml", SMALL[name])
    torch.save({"model": lively_detector(cfg).state_dict()}, tmp_path / "lively.pth")
    _, report = export_detector(cfg, tmp_path / "lively.pth", tmp_path / "export", file_format=file_format, runs=1)
    assert report["ok"], describe_report(report)
    if file_format == "onnx":
        assert report["onnx"]["tensorrt"]["undocumented"] == []


@pytest.mark.slow
def test_a_cascade_from_training_to_its_answers(datasets_root, tmp_path):
    """Trained in parts of a batch and with validation losses, exported, and both asked about a photo."""
    run = tmp_path / "run"
    overrides = [*SMALL["cascade_mask_rcnn"], "OUTPUT_DIR", run, "SOLVER.MAX_ITER", 3, "TEST.LOSS", True]
    overrides += ["SOLVER.ACCUMULATE", 2, "MODEL.EMA.ENABLED", True, "SOLVER.LAYER_DECAY", 0.8]
    config = ["--config-file", CONFIGS["cascade_mask_rcnn"]]
    result = run_tool("train_net.py", *config, *overrides, datasets_root=datasets_root)
    assert result.returncode == 0, result.stderr
    losses = json.loads((run / "evaluation.json").read_text())["shapes_val"]["validation_loss"]
    assert {f"loss_{part}_stage{stage}" for part in ("cls", "box_reg") for stage in range(3)} < losses.keys()
    _, report = export_detector(load_config(run / "config.yaml"), run / "model_final.pth", run / "export", runs=1)
    assert report["ok"] and all(row["detections"] > 0 for row in report["images"])
    photo = next((datasets_root / "shapes/val").iterdir())
    trained, exported = (Detector.load(path)(photo) for path in (run, run / "export/model.ts"))
    assert len(trained) == len(exported) > 0 and trained.masks.shape == exported.masks.shape
    np.testing.assert_allclose(trained.boxes, exported.boxes, atol=0.1)
