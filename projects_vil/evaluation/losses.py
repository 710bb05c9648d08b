"""Compute the losses on a validation dataset."""

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

from projects_vil.config import with_overrides
from projects_vil.data import Mapper, SharedRecords, class_order, derived_seed, in_order, load_dataset, seed_all
from projects_vil.data.build import make_test_loader
from projects_vil.modeling import MicroBatches

LOSS_TASK = "validation_loss"
TOTAL_LOSS = "total_loss"
# The key for the position of an image in the dataset. It seeds the sampling of proposals.
_POSITION = "position"


@torch.no_grad()
def validation_loss(cfg: CfgNode, model: nn.Module, dataset_name: str) -> dict[str, float]:
    """Return the mean of each loss on a dataset, and their sum as ``total_loss``. All ranks must call this.

    Images are resized to the test size and processed one by one. Norms, dropout and stochastic depth are in eval mode.
    Sampled proposals depend on the position of the image in the dataset. RetinaNet's losses are divided by the number
    of positive anchors in the dataset, and other losses by the number of images.

    Args:
        cfg: The config of the model.
        model: The model, without DistributedDataParallel. Its state does not change.
        dataset_name: A name in detectron2's catalog.

    Raises:
        ConfigError: See :func:`projects_vil.data.load_dataset`.
    """
    records = load_dataset(cfg, [dataset_name], train=False)
    order = class_order(cfg, dataset_name)
    records = records if order is None else in_order(records, order)
    records = SharedRecords(record | {_POSITION: position} for position, record in enumerate(records))
    mapper = Mapper(_as_for_testing(cfg), is_train=True)
    loader = make_test_loader(records, mapper, num_workers=cfg.DATALOADER.NUM_WORKERS)
    sums: dict[str, float] = defaultdict(float)
    batches = MicroBatches(model)
    # In iteration 0 detectron2 would draw images (VIS_PERIOD).
    with EventStorage(start_iter=1), _with_losses(model):
        for images in loader:
            seed_all(derived_seed("image", images[0][_POSITION]))
            try:
                losses = model(images)
            except FloatingPointError:  # detectron2 found non-finite proposals
                sums[TOTAL_LOSS] = math.nan
                break
            weight = batches.weight(len(images))
            for name, value in losses.items():
                sums[name] += float(value) * weight
    batches.restore()
    everywhere = comm.all_gather((dict(sums), batches.total))
    divisor = max(sum(total for _, total in everywhere), 1)
    names = sorted({name for own, _ in everywhere for name in own})
    terms = {name: sum(own.get(name, 0.0) for own, _ in everywhere) / divisor for name in names}
    losses = {TOTAL_LOSS: sum(terms.values())} | terms
    text = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
    logging.getLogger(__name__).info("losses on %s: %s", dataset_name, text)
    return losses


def _as_for_testing(cfg: CfgNode) -> CfgNode:
    """Return a config that resizes training images to the test size, without augmentation."""
    values = {"MIN_SIZE_TRAIN": (cfg.INPUT.MIN_SIZE_TEST,), "MAX_SIZE_TRAIN": cfg.INPUT.MAX_SIZE_TEST}
    values |= {"MIN_SIZE_TRAIN_SAMPLING": "choice", "RANDOM_FLIP": "none", "CROP.ENABLED": False}
    values |= {"AUGMENTATION": "default", "PHOTOMETRIC_DISTORTION": False, "ALBUMENTATIONS": ""}
    return with_overrides(cfg, {f"INPUT.{key}": value for key, value in values.items()})


@contextlib.contextmanager
def _with_losses(model: nn.Module) -> Iterator[None]:
    """Make the model return its losses, with norms, dropout and the backbone in eval mode."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    model.backbone.eval()
    for module in model.modules():
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
            module.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
