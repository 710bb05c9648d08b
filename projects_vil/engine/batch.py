"""The largest micro-batch of a training step that fits into memory, measured: ``SOLVER.ACCUMULATE 0``."""

import copy
import dataclasses
import functools
import gc
import logging
import math
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from backbones import ConfigError
from projects_vil.checkpoint import checkpoints_of
from projects_vil.config import CONFIG_FILE, is_segmentor, load_config, updated
from projects_vil.engine.trainer import amp_dtype
from projects_vil.solver import build_optimizer
from projects_vil.utils import available_memory, peak_in_new_process

# Of the free memory; the rest is for fragments, and for what differs between images.
_SHARE = 0.8
# Objects of an image. A Mask R-CNN trains masks of a quarter of its 512 samples, which have these among them.
_OBJECTS = 128


def choose_micro_batches(
    cfg: CfgNode, *, resume: bool = False, limit: float | None = None
) -> tuple[CfgNode, list[str]]:
    """Return a config with a number in place of ``SOLVER.ACCUMULATE 0``, and lines for the log; in all processes.

    A micro-batch is a divisor of the images of a process: the largest whose training step takes at most ``limit``.
    Steps with the two smallest ones are measured, then the largest that may fit by a straight line through both, and
    where it does not, the next smaller ones. A run that is resumed keeps the number of its ``config.yaml``.

    Args:
        limit: bytes for a process; by default 80 % of those that are free.

    Raises:
        ConfigError: if a step with one image takes more, or memory cannot be measured.
    """
    solver, saved = cfg.SOLVER, Path(cfg.OUTPUT_DIR) / CONFIG_FILE
    if solver.ACCUMULATE:
        return cfg, []
    images = solver.IMS_PER_BATCH // (solver.REFERENCE_WORLD_SIZE or comm.get_world_size())
    number = load_config(saved).SOLVER.ACCUMULATE if resume and checkpoints_of(cfg.OUTPUT_DIR) and saved.exists() else 0
    if number and images % number == 0:
        return updated(cfg, {"SOLVER.ACCUMULATE": number}), [f"SOLVER.ACCUMULATE {number}, as in the resumed run"]
    logging.getLogger(__name__).info(
        "SOLVER.ACCUMULATE 0: measuring how many images of a step fit into memory; another number leaves this out"
    )
    limit = min(comm.all_gather(_SHARE * _free_memory(cfg) if limit is None else limit))
    sizes = [size for size in range(1, images + 1) if images % size == 0]
    peaks: dict[int, float] = {}

    def fits(size: int) -> bool:
        if size not in peaks:
            peaks[size] = max(comm.all_gather(peak_of_step(cfg, size)))
        return peaks[size] <= limit

    height, width = largest_training_size(cfg)
    what, allowed = f"images of {height} x {width} pixels", f"{limit / 1e9:.2f} GB"
    if not fits(1):
        raise ConfigError(
            f"a training step with one of the {what} takes {peaks[1] / 1e9:.2f} GB of memory, and {allowed} may be "
            "used: lower INPUT.MIN_SIZE_TRAIN and MAX_SIZE_TRAIN (or INPUT.LSJ.SIZE), or set "
            "MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING True"
        )
    chosen = 1
    if images > 1 and fits(sizes[1]):
        slope = (peaks[sizes[1]] - peaks[1]) / (sizes[1] - 1)
        likely = [size for size in sizes[1:] if size == sizes[1] or peaks[1] + slope * (size - 1) <= limit]
        chosen = next(size for size in reversed(likely) if fits(size))
    measured = ", ".join(f"{size}: {peak / 1e9:.2f} GB" for size, peak in sorted(peaks.items()))
    line = (
        f"SOLVER.ACCUMULATE 0 is SOLVER.ACCUMULATE {images // chosen}: {chosen} of {images} {what} fit into {allowed} "
        f"(measured: {measured})"
    )
    return updated(cfg, {"SOLVER.ACCUMULATE": images // chosen}), [line]


def largest_training_size(cfg: CfgNode) -> tuple[int, int]:
    """Return height and width of the largest training images, whose sides are taken to be at most 1 to 2."""
    if is_segmentor(cfg) and cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE == "absolute":
        return tuple(cfg.INPUT.CROP.SIZE)
    if cfg.INPUT.AUGMENTATION != "default":
        return cfg.INPUT.LSJ.SIZE, cfg.INPUT.LSJ.SIZE
    longest = min(2 * max(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN)
    # Without groups a batch is padded to the sides of portrait and of landscape images.
    return min(max(cfg.INPUT.MIN_SIZE_TRAIN), longest) if cfg.DATALOADER.ASPECT_RATIO_GROUPING else longest, longest


def peak_of_step(cfg: CfgNode, num_images: int) -> float:
    """Return the bytes that model, optimizer and a training step with random images take; inf where there are too few.

    Raises:
        ConfigError: where they cannot be measured.
    """
    # Compiling takes minutes, and processes of which one runs out of memory must not wait for each other.
    values: dict[str, object] = {"MODEL.TRANSFORMER.COMPILE": False}
    if cfg.MODEL.TRANSFORMER.BATCH_NORM == "sync":
        values["MODEL.TRANSFORMER.BATCH_NORM"] = "batch"
    build, give = functools.partial(_Step, updated(cfg, values), num_images), "give SOLVER.ACCUMULATE a number"
    device = cfg.MODEL.DEVICE
    if not device.startswith("cuda"):
        try:
            peak = peak_in_new_process(build, what="SOLVER.ACCUMULATE 0", instead=give)
        except ConfigError as error:
            if not isinstance(error.__cause__, BrokenProcessPool):
                raise
            # Killed: more than there is.
            return math.inf
        if peak is None:
            raise ConfigError(f"SOLVER.ACCUMULATE 0 cannot measure memory without /proc: {give}")
        return peak
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        build()()
        peak = torch.cuda.max_memory_allocated(device) - before
    except torch.OutOfMemoryError:
        peak = math.inf
    # The exception, which refers to the tensors, is gone.
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _free_memory(cfg: CfgNode) -> float:
    if cfg.MODEL.DEVICE.startswith("cuda"):
        return torch.cuda.mem_get_info(cfg.MODEL.DEVICE)[0]
    return (available_memory() or math.inf) / comm.get_local_size()


@dataclasses.dataclass(frozen=True)
class _Step:
    """Two steps of training on random images, without a loss: the second has gradients and the optimizer's state."""

    cfg: CfgNode
    num_images: int

    def __call__(self) -> None:
        cfg, amp = self.cfg, self.cfg.SOLVER.AMP
        model = build_model(cfg)
        optimizer = build_optimizer(cfg, model)
        # Of which only the memory counts.
        _average = copy.deepcopy(model) if cfg.MODEL.EMA.ENABLED else None
        device = torch.device(cfg.MODEL.DEVICE).type
        dtype = amp_dtype(amp.DTYPE, on_gpu=device == "cuda") if amp.ENABLED else None
        with EventStorage(), torch.jit.optimized_execution(False):
            for _ in range(2):
                with torch.autocast(device, dtype, enabled=amp.ENABLED):
                    losses = model([_random_image(cfg) for _ in range(self.num_images)])
                (0 * sum(losses.values())).backward()
                optimizer.step()


def _random_image(cfg: CfgNode) -> dict[str, object]:
    height, width = largest_training_size(cfg)
    boxes = (torch.rand(_OBJECTS, 2, 2) * torch.tensor([width, height])).sort(1).values.flatten(1)
    found = Instances((height, width), gt_boxes=Boxes(boxes), gt_classes=torch.zeros(_OBJECTS, dtype=torch.int64))
    if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask":
        found.gt_masks = BitMasks(torch.ones(_OBJECTS, height, width, dtype=torch.bool))
    elif cfg.MODEL.MASK_ON:
        found.gt_masks = PolygonMasks([[corners] for corners in boxes[:, [0, 1, 2, 1, 2, 3]].double().numpy()])
    labels = torch.zeros(height, width, dtype=torch.int64)
    return {"image": torch.randint(256, (3, height, width), dtype=torch.uint8), "instances": found, "sem_seg": labels}
