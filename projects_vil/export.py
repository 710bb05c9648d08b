"""Trained detectors outside training: export, and the proof that the export gives the same answers.

An exported detector takes one image, (3, H, W) float in ``INPUT.FORMAT`` (RGB here), 0..255, and returns boxes (N, 4)
XYXY in pixels of that image, scores (N,), classes (N,) and, for Mask R-CNN, masks (N, 1, 28, 28). Resizing to
``INPUT.MIN_SIZE_TEST`` is the caller's; normalisation, score threshold and NMS are inside.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.export import TracingAdapter
from detectron2.modeling import GeneralizedRCNN, build_model
from torch import Tensor, nn

from backbones import InputError
from projects_vil.checkpoint import Checkpointer
from projects_vil.data import read_for_testing

FORMATS = ("torchscript",)
DETECTORS = ("RetinaNet", "GeneralizedRCNN")
REPORT_FILE = "report.json"

# The largest differences that count as the same answer.
TOLERANCES = {"boxes": 1e-2, "scores": 1e-4, "masks": 1e-3}  # pixels, probability, probability


class ExportableDetector(nn.Module):
    """A detector as a function of one image tensor to plain tensors.

    Args:
        detector: a RetinaNet or a GeneralizedRCNN with or without masks, put into eval mode here.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector.eval()
        self.output_names = ("boxes", "scores", "classes")
        if getattr(getattr(detector, "roi_heads", None), "mask_on", False):
            self.output_names += ("masks",)

    @torch.no_grad()
    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """(3, H, W), float, 0..255 -> boxes (N, 4), scores (N,), classes (N,) and, with masks, (N, 1, 28, 28)."""
        batch = [{"image": image}]
        if isinstance(self.detector, GeneralizedRCNN):
            # Without its postprocessing a GeneralizedRCNN leaves the masks 28 x 28, in the frame of their boxes.
            instances = self.detector.inference(batch, do_postprocess=False)[0]
        else:
            instances = self.detector(batch)[0]["instances"]
        outputs = (instances.pred_boxes.tensor, instances.scores, instances.pred_classes)
        return (*outputs, instances.pred_masks) if "masks" in self.output_names else outputs


def build_detector(cfg: CfgNode, weights: str | Path) -> nn.Module:
    """The detector of ``cfg`` with the weights of a file, on the CPU and in eval mode.

    Raises:
        InputError: where the file is missing or does not fit.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    detector = build_model(cfg)
    Checkpointer(detector, cfg=cfg, complete=True).load(str(weights))
    return detector.eval()


def example_image(height: int, width: int, *, seed: int = 0) -> Tensor:
    """A (3, height, width) image of bright rectangles on dim noise, so that a detector has something to find."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(3, height, width, generator=generator) * 60
    for _ in range(6):
        top, left = (int(torch.randint(0, side * 3 // 4, (), generator=generator)) for side in (height, width))
        color = 100 + 155 * torch.rand(3, 1, 1, generator=generator)
        image[:, top : top + height // 5, left : left + width // 5] = color
    return image


def trace_detector(detector: nn.Module, *, size: tuple[int, int]) -> torch.jit.ScriptModule:
    """TorchScript of a detector, traced on an image of ``size`` (height, width) and right for any other."""
    exportable = ExportableDetector(detector)
    adapter = TracingAdapter(exportable, (example_image(*size),))
    with warnings.catch_warnings():
        # detectron2's own code compares and converts traced sizes, where that is meant to be constant.
        warnings.simplefilter("ignore")
        return torch.jit.trace(adapter, adapter.flattened_inputs, check_trace=False)


def comparison_images(cfg: CfgNode, files: Sequence[str | Path] = ()) -> list[Tensor]:
    """Images (3, H, W) to compare on: the files, in the format and size of testing, or two drawn ones.

    Raises:
        InputError: for a file that cannot be read.
    """
    short = cfg.INPUT.MIN_SIZE_TEST
    if not files:
        return [example_image(short, short * 3 // 2, seed=1), example_image(short * 4 // 3, short, seed=2)]
    images = (read_for_testing(cfg, file, image_format=cfg.INPUT.FORMAT)[0] for file in files)
    return [torch.as_tensor(image.transpose(2, 0, 1).astype("float32")) for image in images]


def compare(detector: nn.Module, exported: nn.Module, images: Sequence[Tensor]) -> list[dict]:
    """Run both on each image (3, H, W) and measure how far their answers are apart.

    Returns:
        For each image the number of detections of both, the largest difference of boxes (pixels), scores and masks,
        whether all classes are equal, and ``ok``: whether all is within ``TOLERANCES``.
    """
    reference = ExportableDetector(detector)
    rows = []
    for image in images:
        ours = dict(zip(reference.output_names, reference(image), strict=True))
        theirs = dict(zip(reference.output_names, exported(image), strict=True))
        row: dict = {
            "height": image.shape[1],
            "width": image.shape[2],
            "detections": len(ours["scores"]),
            "detections_exported": len(theirs["scores"]),
        }
        row["ok"] = row["detections"] == row["detections_exported"]
        if row["ok"]:
            row["classes_equal"] = bool((ours["classes"] == theirs["classes"]).all())
            row["ok"] = row["classes_equal"]
            for name in TOLERANCES.keys() & ours.keys():
                difference = (ours[name] - theirs[name]).abs()
                row[name] = difference.max().item() if difference.numel() else 0.0
                row["ok"] = row["ok"] and row[name] <= TOLERANCES[name]
        rows.append(row)
    return rows


def describe(rows: Sequence[dict]) -> tuple[str, bool]:
    """The rows of :func:`compare` as text, and whether they prove that the answers are the same."""
    lines = []
    for row in rows:
        differences = ", ".join(f"{name} {row[name]:.1e}" for name in TOLERANCES if name in row)
        lines.append(
            f"{row['height']} x {row['width']}: {row['detections']} detections, {row['detections_exported']} exported; "
            f"largest difference: {differences or 'not comparable'}; {'equal' if row['ok'] else 'NOT EQUAL'}"
        )
    compared = any(row["detections"] for row in rows)
    if not compared:
        lines.append("NOT PROVEN: there is no detection on these images; name some of your own with --images")
    return "\n".join(lines), compared and all(row["ok"] for row in rows)


def export_detector(
    cfg: CfgNode,
    weights: str | Path,
    output: str | Path,
    *,
    file_format: str = "torchscript",
    images: Sequence[str | Path] = (),
) -> tuple[Path, list[dict]]:
    """Export, load the file again, and compare it with the detector on images that it was not traced with.

    Args:
        cfg: the detector's config.
        weights: its checkpoint.
        output: folder for the model and ``report.json``.
        file_format: ``"torchscript"``.
        images: files to compare on; two drawn images of other sizes than the traced one where there are none.

    Returns:
        The model's path and the rows of :func:`compare`.

    Raises:
        InputError: for an unknown format, a model that is no detector, or weights that do not fit.
    """
    if cfg.MODEL.META_ARCHITECTURE not in DETECTORS:
        raise InputError(f"a {cfg.MODEL.META_ARCHITECTURE} cannot be exported yet: only {' and '.join(DETECTORS)} can")
    if file_format not in FORMATS:
        raise InputError(f"unknown format {file_format!r}: it is one of {', '.join(FORMATS)}")
    detector = build_detector(cfg, weights)
    inputs = comparison_images(cfg, images)
    short = cfg.INPUT.MIN_SIZE_TEST
    traced = trace_detector(detector, size=(short, short * 5 // 4))
    output = Path(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write into {output}: {error.strerror}") from error
    path = output / "model.ts"
    traced.save(str(path))
    rows = compare(detector, torch.jit.load(str(path)), inputs)
    report = {"format": file_format, "file": path.name, "tolerances": TOLERANCES, "images": rows}
    (output / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    return path, rows
