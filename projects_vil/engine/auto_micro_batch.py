"""Choose the micro-batch size for ``SOLVER.GRADIENT_ACCUMULATION_STEPS "auto"``."""

import copy
import gc
import logging
import math

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from backbones import ConfigError
from backbones.errors import counted
from projects_vil.config import is_segmentor, load_config, with_overrides
from projects_vil.engine.checks import saved_config
from projects_vil.modeling import amp_dtype
from projects_vil.solver import build_optimizer

_logger = logging.getLogger(__name__)
_KEY = "SOLVER.GRADIENT_ACCUMULATION_STEPS"
# Share of the free GPU memory to use. The rest is for fragmentation and for differences between images.
_SHARE = 0.8
# Pixels of a micro-batch on the CPU: one image of COCO's usual training size.
_CPU_PIXELS = 800 * 1333
# Objects per image. Mask R-CNN trains masks for a quarter of its 512 samples, and these are among them.
_OBJECTS = 128


def choose_micro_batches(cfg: CfgNode, *, resume: bool = False, limit: float | None = None) -> CfgNode:
    """Replace ``GRADIENT_ACCUMULATION_STEPS "auto"`` by a number, and log it. All processes call this.

    The micro-batch size divides the number of images per process. On a GPU the probe runs training steps on random
    images of the largest configured size, with more and more images until they do not fit. On the CPU a micro-batch
    has at most 800 x 1333 pixels, or one image. A resumed run keeps the number of its ``config.yaml``.

    Args:
        cfg: The config of the run.
        resume: Whether to continue the run in ``OUTPUT_DIR``.
        limit: Bytes that a process may use on a GPU; 80 % of the free memory by default.

    Raises:
        ConfigError: If a training step with one image exceeds ``limit``.
    """
    solver = cfg.SOLVER
    images = solver.IMS_PER_BATCH // (solver.REFERENCE_WORLD_SIZE or comm.get_world_size())
    if resume and (path := saved_config(cfg.OUTPUT_DIR)) is not None:
        steps = load_config(path).SOLVER.GRADIENT_ACCUMULATION_STEPS
        if steps != "auto" and images % steps == 0:
            _logger.info(f"{_KEY} {steps}, as in the resumed run")
            return with_overrides(cfg, {_KEY: steps})
    sizes = [size for size in range(1, images + 1) if images % size == 0]
    height, width = largest_training_size(cfg)
    if cfg.MODEL.DEVICE.startswith("cuda"):
        limit = min(comm.all_gather(_SHARE * torch.cuda.mem_get_info(cfg.MODEL.DEVICE)[0] if limit is None else limit))
        chosen, reason = _measure(cfg, sizes, limit)
    else:
        chosen = max(size for size in sizes if size == 1 or size * height * width <= _CPU_PIXELS)
        reason = "CPU memory is not measured"
    size = f"{counted(chosen, 'image')} of {height} x {width} pixels"
    _logger.info(f"{_KEY} auto: {counted(images // chosen, 'micro-batch')} of {size} ({reason})")
    return with_overrides(cfg, {_KEY: images // chosen})


def _measure(cfg: CfgNode, sizes: list[int], limit: float) -> tuple[int, str]:
    """Return the largest of ``sizes`` whose step fits into ``limit`` bytes in all processes, and the measurements."""
    _logger.info("%s auto: measuring the memory of training steps. To skip this, set a number.", _KEY)
    peaks: dict[int, float] = {}
    for size in sizes:
        peaks[size] = max(comm.all_gather(peak_of_step(cfg, size)))
        if peaks[size] > limit:
            break
    if peaks[1] > limit:
        needs = f"needs {peaks[1] / 1e9:.2f} GB (inf: out of memory); {limit / 1e9:.2f} GB are free"
        advice = "Lower INPUT.MIN_SIZE_TRAIN, or set MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING True."
        raise ConfigError(f"A training step of one image {needs}. {advice}")
    measured = ", ".join(f"{size}: {peak / 1e9:.2f} GB" for size, peak in peaks.items())
    chosen = max(size for size, peak in peaks.items() if peak <= limit)
    return chosen, f"measured: {measured}; limit {limit / 1e9:.2f} GB"


def largest_training_size(cfg: CfgNode) -> tuple[int, int]:
    """Return height and width of the largest training images, for aspect ratios up to 2."""
    if is_segmentor(cfg) and cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE == "absolute":
        return tuple(cfg.INPUT.CROP.SIZE)
    if cfg.INPUT.AUGMENTATION != "default":
        return cfg.INPUT.LSJ.SIZE, cfg.INPUT.LSJ.SIZE
    longest = min(2 * max(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN)
    # Without grouping, a batch with portrait and landscape images is padded to a square.
    return min(max(cfg.INPUT.MIN_SIZE_TRAIN), longest) if cfg.DATALOADER.ASPECT_RATIO_GROUPING else longest, longest


def peak_of_step(cfg: CfgNode, num_images: int) -> float:
    """Return the peak GPU memory, in bytes, of training steps, including model and optimizer; infinite if none is left.

    It runs the steps of :func:`run_steps`.
    """
    # Compiling takes minutes. SyncBN would wait for the other processes, and one of them may run out of memory.
    device, norm = cfg.MODEL.DEVICE, cfg.MODEL.TRANSFORMER.NORM.removeprefix("Sync")
    values = {"MODEL.TRANSFORMER.COMPILE": False, "MODEL.TRANSFORMER.NORM": norm}
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_steps(with_overrides(cfg, values), num_images)
        peak = torch.cuda.max_memory_allocated(device) - before
    except torch.OutOfMemoryError:
        peak = math.inf
    # Only now is the exception gone, which refers to the tensors.
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def run_steps(cfg: CfgNode, num_images: int) -> None:
    """Build the model, and run two training steps on random images, without an effect on the weights.

    In the second step gradients and optimizer state are in memory.
    """
    amp, size = cfg.SOLVER.AMP, largest_training_size(cfg)
    model = build_model(cfg)
    optimizer = build_optimizer(cfg, model)
    # Kept for its memory.
    _average = copy.deepcopy(model) if cfg.MODEL.EMA.ENABLED else None
    device = torch.device(cfg.MODEL.DEVICE).type
    dtype = amp_dtype(cfg) if amp.ENABLED else None
    with EventStorage(), torch.jit.optimized_execution(False):
        for _ in range(2):
            with torch.autocast(device, dtype, enabled=amp.ENABLED):
                losses = model([random_image(cfg, *size, _OBJECTS) for _ in range(num_images)])
            (0 * sum(losses.values())).backward()
            optimizer.step()


def random_image(cfg: CfgNode, height: int, width: int, num_objects: int) -> dict[str, object]:
    """Return a training sample with random pixels and objects."""
    boxes = (torch.rand(num_objects, 2, 2) * torch.tensor([width, height])).sort(1).values.flatten(1)
    instances = Instances((height, width), gt_boxes=Boxes(boxes))
    instances.gt_classes = torch.zeros(num_objects, dtype=torch.int64)
    if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask":
        instances.gt_masks = BitMasks(torch.ones(num_objects, height, width, dtype=torch.bool))
    elif cfg.MODEL.MASK_ON:
        instances.gt_masks = PolygonMasks([[corners] for corners in boxes[:, [0, 1, 2, 1, 2, 3]].double().numpy()])
    pixels = torch.randint(256, (3, height, width), dtype=torch.uint8)
    return {"image": pixels, "instances": instances, "sem_seg": torch.zeros(height, width, dtype=torch.int64)}
