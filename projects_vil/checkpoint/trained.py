"""Models with the weights of a file: every tool that needs one loads it here, but for training."""

from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from projects_vil.checkpoint.categories import Categories, known_categories
from projects_vil.checkpoint.class_rows import match_classes
from projects_vil.checkpoint.detection_checkpoint import Checkpointer
from projects_vil.checkpoint.provenance import PROVENANCE_KEY, Provenance
from projects_vil.config import number_of_classes


def build_detector(cfg: CfgNode, weights: str | Path) -> nn.Module:
    """The model of ``cfg`` with the weights of a file, on the CPU and in eval mode.

    Raises:
        InputError: where the file is missing or does not fit.
    """
    return load_detector(cfg, weights)[0]


def load_detector(
    cfg: CfgNode,
    weights: str | Path,
    *,
    device: str | torch.device = "cpu",
    complete: bool = True,
    as_datasets: bool = True,
) -> tuple[nn.Module, Categories]:
    """As :func:`build_detector`, and the model's classes.

    They are what the file says; of older files, which do not say all, what the config's datasets say.

    Args:
        cfg: the model's config; ``MODEL.DEVICE`` does not count.
        weights: a checkpoint; an empty name leaves the model random where it need not be complete.
        device: for the model.
        complete: whether the file must fill the whole model.
        as_datasets: whether the config's datasets count: where they have the file's classes in another order, so does
            the model, and where they have others, the file does not fit. Otherwise the file's classes are the model's.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = str(device)
    datasets = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)
    if not as_datasets:
        cfg.DATASETS.TEST = cfg.DATASETS.TRAIN = ()
    model = build_model(cfg)
    checkpointer = Checkpointer(model, cfg=cfg, complete=complete)
    said = Provenance.of({PROVENANCE_KEY: checkpointer.load(str(weights)).get(PROVENANCE_KEY)})
    names, ids = said.classes, said.category_ids
    ours = checkpointer.provenance.classes
    if names and ours and len(match_classes(ours, names)) == len(ours) == len(names):
        # The checkpointer has put the rows into our order.
        ids = ids and tuple(ids[names.index(name)] for name in ours)
        names = ours
    _, number = number_of_classes(cfg)
    return model.eval(), known_categories(names, ids, number=number, datasets=datasets)
