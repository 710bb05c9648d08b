"""The losses of training on a dataset that is not trained on."""

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from projects_vil import data
from projects_vil.modeling import BatchParts

LOSS_TASK = "validation_loss"
TOTAL_LOSS = "total_loss"
_PLACE = "place"


@torch.no_grad()
def validation_loss(cfg: CfgNode, model: nn.Module, dataset_name: str) -> dict[str, float]:
    """Each term of the loss on a dataset, and their sum as ``total_loss``; all processes call this, and share it.

    Images are resized as for testing and come one by one. Norms, dropout and stochastic depth are as for testing; what
    a model samples (proposals) follows from the image's place in the dataset. RetinaNet's losses are divided by the
    positive anchors of the whole dataset, others are the mean over images.

    Args:
        model: without DistributedDataParallel around it; its state stays as it is.

    Raises:
        InputError: as :func:`projects_vil.data.load_dataset`.
    """
    records = data.load_dataset(cfg, [dataset_name], train=False)
    loader = data.EvaluationLoader(
        [record | {_PLACE: place} for place, record in enumerate(records)],
        data.build_mapper(_as_for_testing(cfg), is_train=True),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    sums: dict[str, float] = defaultdict(float)
    parts = BatchParts(model)
    with EventStorage(), _with_losses(model):
        for images in loader:
            data.seed_all(data.derived_seed("image", images[0][_PLACE]))
            parts.restore()
            try:
                losses = model(images)
            except FloatingPointError:  # detectron2's, of proposals.
                sums[TOTAL_LOSS] = math.nan
                break
            weight = parts.weight(len(images))
            for name, value in losses.items():
                sums[name] += float(value) * weight
    parts.restore()
    everywhere = comm.all_gather((dict(sums), parts.total))
    divisor = max(sum(total for _, total in everywhere), 1)
    names = sorted({name for own, _ in everywhere for name in own})
    terms = {name: sum(own.get(name, 0.0) for own, _ in everywhere) / divisor for name in names}
    losses = {TOTAL_LOSS: sum(terms.values())} | terms
    logging.getLogger(__name__).info(
        "losses on %s: %s", dataset_name, ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
    )
    return losses


def _as_for_testing(cfg: CfgNode) -> CfgNode:
    """A config whose training images are resized as those for testing, and not augmented."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (cfg.INPUT.MIN_SIZE_TEST,), cfg.INPUT.MAX_SIZE_TEST
    cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING = "choice"
    cfg.INPUT.RANDOM_FLIP = "none"
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.AUGMENTATION = False, "default"
    cfg.INPUT.PHOTOMETRIC_DISTORTION = False
    return cfg


@contextlib.contextmanager
def _with_losses(model: nn.Module) -> Iterator[None]:
    """The model returns its losses, while what differs in training but for them is as for testing."""
    modes = {module: module.training for module in model.modules()}
    vis_period = getattr(model, "vis_period", 0)
    model.train()
    model.backbone.eval()
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
            module.eval()
    if vis_period:
        model.vis_period = 0
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        if vis_period:
            model.vis_period = vis_period
