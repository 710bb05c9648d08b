"""The device that a config names, and whether it is here."""

import torch
from detectron2.config import CfgNode

from backbones import InputError


def check_device(cfg: CfgNode) -> bool:
    """Whether ``MODEL.DEVICE`` is a GPU.

    Raises:
        InputError: where it is not here, or is of another kind than cpu and cuda.
    """
    on_gpu = cfg.MODEL.DEVICE.startswith("cuda")
    if not on_gpu and cfg.MODEL.DEVICE != "cpu":
        raise InputError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}: it is cpu or cuda")
    if on_gpu and not torch.cuda.is_available():
        raise InputError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE}, and there is no CUDA device here: add MODEL.DEVICE cpu")
    return on_gpu
