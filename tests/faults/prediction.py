"""Images, videos and exported files."""

import hashlib
import json
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.spoiling import cut_off, emptied, every, flipped, made_a_folder, made_a_pipe, removed, written


def copied_to_openvino(folder: Path) -> None:
    """What a file of OpenVINO is without its ``.bin``: that is looked for before the file is read."""
    metadata = json.loads((folder / "export/model.ts.metadata.json").read_text())
    contents = b"<net/>"
    digests = {"sha256": hashlib.sha256(contents).hexdigest(), "beside": {"model.bin": "0" * 64}}
    (folder / "export/model.xml").write_bytes(contents)
    (folder / "export/model.xml.metadata.json").write_text(json.dumps(metadata | digests))


_RUN = "predict.py --config-file run/config.yaml --weights run/model_final.pth --output out"
_EXPORTED = "predict.py --config-file run/config.yaml --weights export/model.ts --output out --input photos"
_EXPORT = "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out"
_OUT = ("out", "out/*")


def _of_run(name: str, options: str, spoil=None, **others) -> Fault:
    return Fault(name, f"{_RUN} {options}", spoil, parts=("run",), **others)


def _skipped(name: str, spoil) -> Fault:
    return _of_run(name, "--input photos", spoil, status=2, line="^skipped b.jpg", makes=_OUT)


def _exported(name: str, spoil=None, options: str = "", **others) -> Fault:
    return Fault(name, f"{_EXPORTED}{options}", spoil, parts=("run", "export"), **others)


FAULTS = (
    _skipped("an image that is text", written("photos/b.jpg", "no image")),
    _skipped("an image of no bytes", emptied("photos/b.jpg")),
    _skipped("an image that breaks off", cut_off("photos/b.jpg")),
    _skipped("an image that is a pipe", made_a_pipe("photos/b.jpg")),
    _of_run("input that is missing", "--input absent"),
    _of_run("input without an image", "--input empty", made_a_folder("empty")),
    _of_run(
        "one image that is text",
        "--input text.jpg",
        written("text.jpg", "no image"),
        status=2,
        line="^skipped text",
        makes=_OUT,
    ),
    _of_run(
        "a video that is text",
        "--input text.avi",
        written("text.avi", "no video"),
        status=2,
        line="^skipped text",
        makes=_OUT,
    ),
    _of_run("output in the input", "--input photos --output photos"),
    _of_run("annotations that are missing", "--input photos --annotations absent.json"),
    _of_run("annotations of other images", "--input photos --annotations own/annotations.json"),
    _of_run("annotations for one image", "--input photos/a.jpg --annotations own/annotations.json"),
    _of_run("a batch of no images", "--input photos --batch-size 0"),
    _of_run("a score above 1", "--input photos --score-threshold 1.5"),
    _of_run("a GPU that is not here, for prediction", "--input photos --device cuda"),
    _of_run("a device that is none", "--input photos --device tpu"),
    _exported("an export that breaks off", cut_off("export/model.ts")),
    _exported("an export of no bytes", emptied("export/model.ts")),
    _exported("an export that is text", written("export/model.ts", "no model")),
    _exported("an export with a flipped bit", flipped("export/model.ts")),
    _exported("an export without its metadata", removed("export/model.ts.metadata.json")),
    _exported("an export whose metadata breaks off", written("export/model.ts.metadata.json", '{"input": {"name":')),
    _exported("an export whose metadata is another's", written("export/model.ts.metadata.json", "{}")),
    _exported("an export with another threshold", options=" MODEL.RETINANET.SCORE_THRESH_TEST 0.9"),
    _exported("an export on a GPU", options=" --device cuda"),
    _exported("an export with test-time augmentation", options=" --tta"),
    Fault(
        "an export to compare on text",
        "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out --images small.yaml",
        parts=("run",),
    ),
    Fault(
        "an export of bfloat16 to ONNX",
        f"{_EXPORT} --format onnx --precision bf16",
        parts=("run",),
    ),
    Fault("an export to int8 in a format without it", f"{_EXPORT} --precision int8", parts=("run",)),
    Fault("an export for images that are too small", f"{_EXPORT} --format torch_export --size 16 128", parts=("run",)),
    Fault(
        "an export whose weights, beside it, are missing",
        "predict.py --config-file run/config.yaml --weights export/model.xml --output out --input photos",
        copied_to_openvino,
        parts=("run", "export"),
    ),
    Fault(
        "an export to TensorRT without a GPU",
        f"{_EXPORT} --format tensorrt",
        parts=("run",),
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Fault(
        "an export to TensorRT in int8 without a GPU",
        f"{_EXPORT} --format tensorrt --precision int8",
        parts=("run",),
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Fault(
        "an export to int8 with an image of training that is text",
        f"{_EXPORT} --format onnx --precision int8",
        every("datasets/shapes/train/*.jpg", lambda name: written(name, "no image")),
        parts=("run",),
    ),
    Fault(
        "a table of exports for a size of images by another option's name",
        "export_table.py --output out --size 64 96",
        status=2,
    ),
    Fault(
        "an export of a fixed number of no detections",
        f"{_EXPORT} --fixed-detections TEST.DETECTIONS_PER_IMAGE 0",
        parts=("run",),
    ),
    Fault(
        "an export of a segmentor",
        "export_model.py --config-file configs/demo/semantic_fpn_vil_shapes.yaml --weights absent.pth --output out",
    ),
)
