"""How long a detector takes beside another one, measured so that a busy machine disturbs both alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from detectron2 import model_zoo
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import nn

from backbones.errors import check_choice

# detectron2's own detectors with a ResNet-50: the baselines where no other is named.
RESNET50 = {
    "RetinaNet": "COCO-Detection/retinanet_R_50_FPN_1x.yaml",
    "GeneralizedRCNN": "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
}
BENCHMARK_TASKS = ("backbone", "inference", "training")


@dataclasses.dataclass
class Comparison:
    """Median seconds of both, and their ratio: above 1 the baseline is slower.

    ``ratio`` is the median of the ratios of runs that stood side by side; ``low`` and ``high`` are its quartiles.
    """

    task: str
    size: tuple[int, int]
    batch_size: int
    device: str
    seconds: float
    baseline_seconds: float
    ratio: float
    low: float
    high: float


def resnet50_config(cfg: CfgNode) -> CfgNode:
    """detectron2's config with a ResNet-50 for the same kind of detector, with as many stages frozen.

    Raises:
        InputError: for another kind than RetinaNet and Mask R-CNN.
    """
    check_choice("kind of detector", cfg.MODEL.META_ARCHITECTURE, RESNET50)
    baseline = model_zoo.get_config(RESNET50[cfg.MODEL.META_ARCHITECTURE])
    baseline.MODEL.BACKBONE.FREEZE_AT = cfg.MODEL.BACKBONE.FREEZE_AT
    return baseline


def compare_detectors(
    cfg: CfgNode,
    baseline: CfgNode,
    *,
    task: str,
    size: tuple[int, int],
    batch_size: int = 1,
    runs: int = 7,
    device: str = "cpu",
) -> Comparison:
    """Time two detectors by turns in one process, after one run of each that does not count.

    Args:
        task: ``"backbone"``, the maps of the bottom-up part; ``"inference"``, images in, detections out;
            ``"training"``, losses, backward pass and gradients.
        size: height and width of the images in pixels.
        runs: how often each is timed.
    """
    steps = [_step(config, task, size, batch_size, device) for config in (cfg, baseline)]
    for step in steps:
        step()
    times: list[list[float]] = [[], []]
    for _ in range(runs):
        for step, own in zip(steps, times, strict=True):
            own.append(_seconds(step, device))
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4) if runs > 1 else ratios * 3
    return Comparison(
        task=task,
        size=size,
        batch_size=batch_size,
        device=device,
        seconds=statistics.median(times[0]),
        baseline_seconds=statistics.median(times[1]),
        ratio=ratio,
        low=low,
        high=high,
    )


def _step(cfg: CfgNode, task: str, size: tuple[int, int], batch_size: int, device: str) -> Callable[[], None]:
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = device
    model = build_model(cfg)
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, *size, generator=generator) * 255 for _ in range(batch_size)]
    if task == "training":
        return _training_step(model.train(), [{"image": image, "instances": _objects(size)} for image in images])
    model.eval()
    if task == "backbone":
        batch = torch.stack(images).to(device)
        divisor = model.backbone.size_divisibility
        batch = nn.functional.pad(batch, (0, -size[1] % divisor, 0, -size[0] % divisor))
        return torch.no_grad()(lambda: model.backbone.bottom_up(batch))
    return torch.no_grad()(lambda: model([{"image": image} for image in images]))


def _training_step(model: nn.Module, batch: list[dict]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        with EventStorage():
            sum(model(batch).values()).backward()

    return step


def _objects(size: tuple[int, int]) -> Instances:
    """Four objects, each a quarter of the image."""
    height, width = size
    boxes = torch.tensor([[x, y, x + width / 2, y + height / 2] for x in (0, width / 2) for y in (0, height / 2)])
    objects = Instances(size, gt_boxes=Boxes(boxes), gt_classes=torch.zeros(4, dtype=torch.int64))
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].double().numpy()
    objects.gt_masks = PolygonMasks([[polygon] for polygon in corners])
    return objects


def _seconds(step: Callable[[], None], device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
