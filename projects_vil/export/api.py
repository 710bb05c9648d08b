"""Trained detectors outside training: export, and the proof that the export gives the same answers.

What an exported detector takes and gives is said in
:class:`projects_vil.export.exportable.rcnn.ExportableDetector`, and, for someone without this repository, in the
metadata beside the file. Resizing is the caller's; normalisation, score
threshold, non-maximum suppression and the choice of the best are inside.
"""

import contextlib
import copy
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torchvision
from detectron2.config import CfgNode
from detectron2.evaluation import inference_on_dataset
from detectron2.layers import paste_masks_in_image
from detectron2.modeling import GeneralizedRCNN, build_model
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from backbones import InputError
from backbones.errors import check_choice
from projects_vil.checkpoint.detection_checkpoint import Checkpointer
from projects_vil.checkpoint.provenance import PROVENANCE_KEY, Provenance, class_names, versions
from projects_vil.data.build import (
    build_test_loader,
    load_dataset,
    number_of_classes,
    read_for_testing,
    register_datasets,
    size_for_testing,
)
from projects_vil.evaluation.build import build_evaluator
from projects_vil.export.exportable.rcnn import ExportableDetector, make_exportable
from projects_vil.export.formats import (
    OPSET,
    SMALLEST_SIDE,
    SUFFIXES,
    ExportedModel,
    check_format,
    check_sides,
    metadata_path,
    sides_of,
    write_model,
)
from projects_vil.export.parity import CHANGED_SHARE, TOLERANCES, compare, describe, measure_latency

FORMATS = tuple(SUFFIXES)
DETECTORS = ("RetinaNet", "GeneralizedRCNN")
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INPUT_DTYPES = ("uint8", "float32")
# Of the image that a model is recorded with; comparisons take others.
EXAMPLE_SIZE = (160, 224)
# The largest difference of average precision, in points, that counts as the same.
AP_TOLERANCE = 0.1


def build_detector(cfg: CfgNode, weights: str | Path) -> nn.Module:
    """The detector of ``cfg`` with the weights of a file, on the CPU and in eval mode.

    Raises:
        InputError: where the file is missing or does not fit.
    """
    return load_detector(cfg, weights)[0]


def load_detector(cfg: CfgNode, weights: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """As :func:`build_detector`, and the names of its classes.

    They are those that the checkpoint has, or else those of the config's datasets, or else numbers.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    detector = build_model(cfg)
    contents = Checkpointer(detector, cfg=cfg, complete=True).load(str(weights))
    classes = Provenance.of({PROVENANCE_KEY: contents.get(PROVENANCE_KEY)}).classes
    classes = classes or class_names(cfg, (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN))
    return detector.eval(), classes or tuple(map(str, range(number_of_classes(cfg)[1])))


def in_precision(detector: nn.Module, precision: str) -> nn.Module:
    """Cast what computes; boxes, anchors and the normalisation of images stay float32.

    Args:
        precision: a key of ``PRECISIONS``.
    """
    check_choice("precision", precision, PRECISIONS)
    kept = {name: buffer for name, buffer in detector.named_buffers() if name.startswith("pixel_") or "anchor" in name}
    detector.to(PRECISIONS[precision])
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(detector.get_submodule(owner), leaf, buffer)
    return detector


def eager_detections(detector: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What detectron2's own code finds in an image (3, H, W), by the names of an exported model.

    Masks are (N, 1, S, S), in the frame of their boxes; boxes without an area are left out, as in its last step.
    """
    batch = [{"image": image}]
    with torch.no_grad():
        if isinstance(detector, GeneralizedRCNN):
            instances = detector.inference(batch, do_postprocess=False)[0]
        else:
            instances = detector(batch)[0]["instances"]
    instances = instances[instances.pred_boxes.nonempty()]
    found = {
        "boxes": instances.pred_boxes.tensor,
        "scores": instances.scores,
        "classes": instances.pred_classes,
    }
    return found | {"masks": instances.pred_masks} if instances.has("pred_masks") else found


def example_image(height: int, width: int, *, seed: int = 0) -> Tensor:
    """A (3, height, width) uint8 image of bright rectangles on dim noise: a detector has something to find."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(3, height, width, generator=generator) * 60
    for _ in range(6):
        top, left = (int(torch.randint(0, side * 3 // 4, (), generator=generator)) for side in (height, width))
        color = 100 + 155 * torch.rand(3, 1, 1, generator=generator)
        image[:, top : top + height // 5, left : left + width // 5] = color
    return image.to(torch.uint8)


def comparison_images(cfg: CfgNode, files: Sequence[str | Path] = ()) -> list[Tensor]:
    """Images (3, H, W) uint8 to compare on: the files, in the format and size of testing, or four drawn ones.

    Raises:
        InputError: for a file that cannot be read.
    """
    if files:
        images = (read_for_testing(cfg, file, image_format=cfg.INPUT.FORMAT)[0] for file in files)
        return [torch.as_tensor(image.transpose(2, 0, 1).copy()) for image in images]
    sizes = [size_for_testing(cfg, *size) for size in ((400, 600), (600, 450), (360, 600), (500, 500))]
    # The last one is smaller than testing has it, and no model takes less than the least side.
    sizes[-1] = tuple(side // 2 + 3 for side in sizes[-1])
    sizes = [tuple(max(side, SMALLEST_SIDE) for side in size) for size in sizes]
    return [example_image(*size, seed=seed) for seed, size in enumerate(sizes, start=1)]


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int], *, threshold: float = 0.5) -> Tensor:
    """Put masks where their boxes are: (N, 1, S, S) probabilities, (N, 4) XYXY -> (N, height, width) bool.

    Args:
        size: height and width of the image, in whose pixels the boxes are.
    """
    # Of no mask detectron2 makes uint8.
    return paste_masks_in_image(masks[:, 0].float(), boxes.float(), size, threshold=threshold).bool()


class ExportedDetector(nn.Module):
    """An exported model behind detectron2's interface, so that its evaluators and drawings take it."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Sequence[dict]) -> list[dict[str, Instances]]:
        """[{"image": (3, H, W), "height", "width"}] -> [{"instances"}], in pixels of that height and width."""
        return [{"instances": self._instances(inputs)} for inputs in batch]

    def _instances(self, inputs: dict) -> Instances:
        image = inputs["image"]
        height, width = image.shape[-2:]
        found = self.model(image[None] if self.model.batched else image)
        return to_instances(found, (height, width), (inputs.get("height", height), inputs.get("width", width)))


def to_instances(found: dict[str, Tensor], size: tuple[int, int], file_size: tuple[int, int]) -> Instances:
    """Detections of an exported model as detectron2's Instances.

    Args:
        found: by name, in an image of ``size`` (height, width).
        file_size: of the image before it was resized: what boxes are scaled to, and masks pasted into.
    """
    instances = Instances(tuple(size), pred_boxes=Boxes(found["boxes"].clone()), scores=found["scores"])
    instances.pred_classes = found["classes"]
    if "masks" in found:
        instances.pred_masks = found["masks"]
    return detector_postprocess(instances, *file_size)


# -- metadata --------------------------------------------------------------------------------------


def describe_model(
    cfg: CfgNode,
    exportable: ExportableDetector,
    *,
    classes: Sequence[str],
    file_format: str,
    precision: str,
    input_dtype: str,
    weights: str | Path,
) -> dict:
    """All that someone without this repository must know to feed an exported model, for JSON."""
    batch = ["images"] if exportable.batched else []
    short, longest = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    outputs = [{"name": name} | _OUTPUTS[name] for name in exportable.output_names]
    for output in outputs:
        if output["name"] == "masks":
            # The head doubles what is pooled.
            output["shape"] = ["detections", 1, *[2 * cfg.MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION] * 2]
    return {
        "metadata_version": 1,
        "format": file_format,
        "opset": OPSET if file_format == "onnx" else None,
        "precision": precision,
        "detector": "Mask R-CNN" if "masks" in exportable.output_names else cfg.MODEL.META_ARCHITECTURE,
        "backbone": getattr(
            getattr(exportable.detector.backbone, "bottom_up", None), "variant", cfg.MODEL.BACKBONE.NAME
        ),
        "input": {
            "name": exportable.input_names[0],
            "shape": [*batch, 3, "height", "width"],
            "batched": exportable.batched,
            "dtype": input_dtype,
            "range": [0, 255],
            "sides": sides_of(exportable.detector, file_format),
            "color_order": cfg.INPUT.FORMAT,
        },
        "resizing": {
            "short_side": short or None,
            "longest_side": longest if short else None,
            "interpolation": "bilinear, antialiased (Pillow's BILINEAR)",
            "rule": "the shorter side becomes short_side, the longer is multiplied by short_side / shorter; if it is "
            "more than longest_side then, both are multiplied by longest_side / longer; each is int(side + 0.5); "
            "null: images are taken as they are",
        },
        "normalization": {
            "inside_the_model": True,
            "mean": list(cfg.MODEL.PIXEL_MEAN),
            "std": list(cfg.MODEL.PIXEL_STD),
        },
        "outputs": outputs,
        "classes": list(classes),
        "thresholds": _thresholds(cfg) | ({"mask": 0.5} if "masks" in exportable.output_names else {}),
        "weights": Path(weights).name,
        "versions": versions() | {"torchvision": torchvision.__version__} | _runtime_versions(file_format),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


_OUTPUTS = {
    "boxes": {
        "shape": ["detections", 4],
        "dtype": "float32",
        "meaning": "left, top, right, bottom in pixels of the input image",
    },
    "scores": {"shape": ["detections"], "dtype": "float32", "meaning": "probability, from the highest"},
    "classes": {"shape": ["detections"], "dtype": "int64", "meaning": "index into the list of classes"},
    "masks": {
        "shape": ["detections", 1, 28, 28],
        "dtype": "float32",
        "meaning": "probability that a place of the box is of the object: resize it to the box, then compare",
    },
    "image_index": {"shape": ["detections"], "dtype": "int64", "meaning": "which image of the batch it is in"},
}


def _thresholds(cfg: CfgNode) -> dict[str, float | int]:
    node = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.ROI_HEADS
    return {
        "score": node.SCORE_THRESH_TEST,
        "nms": node.NMS_THRESH_TEST,
        "detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
    }


def _runtime_versions(file_format: str) -> dict[str, str]:
    names = ("onnx", "onnxscript", "onnxruntime") if file_format == "onnx" else ()
    return {name: importlib.metadata.version(name) for name in names}


# -- exporting -------------------------------------------------------------------------------------


def export_detector(
    cfg: CfgNode,
    weights: str | Path,
    output: str | Path,
    *,
    file_format: str = "torchscript",
    precision: str = "fp32",
    input_dtype: str = "uint8",
    batched: bool = False,
    images: Sequence[str | Path] = (),
    evaluate: bool = False,
    runs: int = 5,
) -> tuple[Path, dict]:
    """Export, load the file again in its own runtime, and compare it with detectron2's detector in float32.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        output: folder for the model, its metadata and its report.
        file_format: of ``FORMATS``.
        precision: of ``PRECISIONS``.
        input_dtype: of ``INPUT_DTYPES``; TorchScript takes both.
        batched: whether the model takes (B, 3, H, W).
        images: files to compare on; four drawn images where there are none. The model was recorded with another.
        evaluate: whether to evaluate both on ``DATASETS.TEST`` too.
        runs: of the measurement of latency.

    Returns:
        The model's path and the report, see :func:`describe_report`.

    Raises:
        InputError: for a format, precision or detector that cannot be exported or run here, or weights that do not fit.
    """
    if cfg.MODEL.META_ARCHITECTURE not in DETECTORS:
        raise InputError(f"a {cfg.MODEL.META_ARCHITECTURE} cannot be exported yet: only {' and '.join(DETECTORS)} can")
    for what, value, known in (
        ("format", file_format, FORMATS),
        ("precision", precision, PRECISIONS),
        ("type of the input", input_dtype, INPUT_DTYPES),
    ):
        check_choice(what, value, known)
    check_format(file_format)
    if (file_format, precision) == ("onnx", "bf16"):
        raise InputError(f"--precision bf16: ONNX has no bfloat16 convolutions in opset {OPSET}; take fp16, or a .pt2")
    if evaluate:
        register_datasets(cfg)
        load_dataset(cfg, cfg.DATASETS.TEST, train=False)
    special = [name for name, is_so in (("batched", batched), (precision, precision != "fp32")) if is_so]
    special += ["float32"] if input_dtype != "uint8" else []
    path = Path(output) / ("_".join(["model", *special]) + SUFFIXES[file_format])
    compared = comparison_images(cfg, images)
    reference, classes = load_detector(cfg, weights)
    exportable = make_exportable(in_precision(copy.deepcopy(reference), precision), batched=batched)
    metadata = describe_model(
        cfg,
        exportable,
        classes=classes,
        file_format=file_format,
        precision=precision,
        input_dtype=input_dtype,
        weights=weights,
    )
    for image, file in itertools.zip_longest(compared, images):
        check_sides(metadata["input"]["sides"], image.shape[-2:], what=str(file or "MIN_SIZE_TEST makes images that"))
    example = example_image(*EXAMPLE_SIZE).to(getattr(torch, input_dtype))
    with _folder_in(path.parent) as unfinished:
        new = unfinished / path.name
        write_model(exportable, torch.stack([example] * 2) if batched else example, new, file_format)
        metadata_path(new).write_text(json.dumps(metadata, indent=2) + "\n")
        report = check_export(cfg, reference, ExportedModel(new), compared, runs=runs, evaluate=evaluate)
        report_path(new).write_text(json.dumps(report, indent=2) + "\n")
        for name in (lambda model: model, metadata_path, report_path):
            try:
                os.replace(name(new), name(path))
            except OSError as error:
                raise InputError(f"cannot write {name(path)}: {error.strerror}") from error
    return path, report


@contextlib.contextmanager
def _folder_in(folder: Path) -> Iterator[Path]:
    """A folder for what is not finished, beside what is: an export that fails leaves an older one as it was."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder)
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror}") from error
    with temporary as name:
        yield Path(name)


def report_path(path: str | Path) -> Path:
    """Where the report of an exported file stands."""
    return Path(f"{path}.report.json")


def check_export(
    cfg: CfgNode,
    reference: nn.Module,
    model: ExportedModel,
    images: Sequence[Tensor],
    *,
    runs: int = 5,
    evaluate: bool = False,
) -> dict:
    """Compare an exported model with the detector that it was made of; see :func:`describe_report`."""
    precision, thresholds = model.metadata["precision"], model.metadata["thresholds"]
    eager = functools.partial(eager_detections, reference)
    ways: list[Callable[[Tensor], dict[str, Tensor]]] = [model]
    if model.batched:
        ways = [functools.partial(_one_of_two, model, index) for index in (0, 1)]
    rows = []
    for exported in ways:
        rows += compare(
            eager,
            exported,
            images,
            tolerances=TOLERANCES[precision],
            score_threshold=thresholds["score"],
            max_detections=thresholds["detections_per_image"],
            changed_share=CHANGED_SHARE[precision],
        )
    report = {
        "file": model.path.name,
        "format": model.file_format,
        "opset": model.metadata["opset"],
        "precision": precision,
        "bytes": model.path.stat().st_size,
        "tolerances": TOLERANCES[precision],
        "changed_share": CHANGED_SHARE[precision],
        "images": rows,
        "latency": measure_latency(eager, _one_image(model), images[0], runs=runs),
        "versions": model.metadata["versions"],
    }
    if evaluate:
        report["evaluation"] = _evaluate(cfg, reference, model)
    report["ok"] = describe(rows, TOLERANCES[precision])[1] and all(row["ok"] for row in report.get("evaluation", ()))
    return report


def _one_image(model: ExportedModel) -> Callable[[Tensor], dict[str, Tensor]]:
    return (lambda image: model(image[None])) if model.batched else model


def _one_of_two(model: ExportedModel, index: int, image: Tensor) -> dict[str, Tensor]:
    """What a batched model finds in the image at ``index`` of two; the other one is its mirror image."""
    images = [image.flip(2), image.flip(2)]
    images[index] = image
    found = model(torch.stack(images))
    return {name: value[found["image_index"] == index] for name, value in found.items()}


def _evaluate(cfg: CfgNode, reference: nn.Module, model: ExportedModel) -> list[dict]:
    """Average precision of both, for each test set and task, by detectron2's evaluator."""
    rows = []
    for name in cfg.DATASETS.TEST:
        results = []
        for detector in (reference, ExportedDetector(model).eval()):
            evaluator = build_evaluator(cfg, name, None)
            results.append(inference_on_dataset(detector, build_test_loader(cfg, name), evaluator))
        for task in results[0]:
            eager, exported = (float(result[task]["AP"]) for result in results)
            same = abs(eager - exported) <= AP_TOLERANCE or (math.isnan(eager) and math.isnan(exported))
            rows.append(
                {"dataset": name, "task": task, "AP": _number(eager), "AP_exported": _number(exported), "ok": same}
            )
    return rows


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def describe_report(report: dict) -> str:
    """A report of :func:`check_export` as a few lines."""
    latency = report["latency"]
    lines = [describe(report["images"], report["tolerances"])[0]]
    for row in report.get("evaluation", ()):
        lines.append(
            f"{row['dataset']}, {row['task']}: AP {row['AP']}, exported {row['AP_exported']}; "
            f"{'equal' if row['ok'] else 'NOT EQUAL'} to {AP_TOLERANCE}"
        )
    opset = f", opset {report['opset']}" if report["opset"] else ""
    lines.append(
        f"{report['file']}: {report['bytes'] / 1e6:.1f} MB{opset}, {report['precision']}; "
        f"{latency['height']} x {latency['width']}: {latency['exported_ms']:.0f} ms, eager "
        f"{latency['eager_ms']:.0f} ms, {latency['ratio']:.2f} times as fast ({latency['threads']} threads)"
    )
    return "\n".join(lines)
