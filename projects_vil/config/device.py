"""The device that a config names, and whether it is here."""

import logging
import re
from collections.abc import Sequence

import torch
from detectron2.config import CfgNode

from backbones import InputError
from backbones.attention.kernels.triton_chunks import missing_for

DEVICES = ("cpu", "cuda")


def check_device(cfg: CfgNode, *, kinds: Sequence[str] = DEVICES) -> bool:
    """Whether ``MODEL.DEVICE`` is a GPU; as :func:`check_device_name`.

    Raises:
        InputError: also where the attention that the config asks for does not run there.
    """
    on_gpu = check_device_name("MODEL.DEVICE", cfg.MODEL.DEVICE, kinds=kinds, instead="add MODEL.DEVICE cpu")
    missing = missing_for(torch.device(cfg.MODEL.DEVICE))
    if missing is not None and cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND == "triton":
        raise InputError(
            f"MODEL.TRANSFORMER.ATTENTION_BACKEND is triton, which needs {missing} (MODEL.DEVICE): take auto"
        )
    return on_gpu


def check_device_name(what: str, device: str, *, kinds: Sequence[str] = DEVICES, instead: str) -> bool:
    """Whether a device is a GPU.

    Args:
        what: said of it in messages: the key or argument that names it.
        kinds: of device that will do.
        instead: what to type where there is no GPU.

    Raises:
        InputError: where it is not here, or is of another kind.
    """
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device)
    if match is None:
        raise InputError(f"{what} is {device!r}: it is cpu or cuda")
    if match[1] not in kinds:
        raise InputError(f"{what} is {device}: this tool works on the CPU alone")
    if match[1] == "cpu":
        return False
    if not torch.cuda.is_available():
        raise InputError(f"{what} is {device}, and there is no CUDA device here: {instead}")
    if match[2] and int(match[2]) >= torch.cuda.device_count():
        raise InputError(f"{what} is {device}, and there are {torch.cuda.device_count()} CUDA devices here")
    return True


def choose_device(cfg: CfgNode, *, kinds: Sequence[str] = DEVICES, is_asked_for: bool = False) -> CfgNode:
    """``cfg`` on a device that is here: its own, or the CPU where that is a GPU and there is none; the log says which.

    Args:
        cfg: frozen or not; it stays as it is.
        kinds: of device that will do.
        is_asked_for: whether the user named the device, which is not changed then.

    Raises:
        InputError: for a device that is none.
    """
    logger = logging.getLogger(__name__)
    if kinds == ("cpu",):
        return _on_device(cfg, "cpu")
    if not is_asked_for and cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        logger.info("on the CPU: there is no CUDA device here")
        return _on_device(cfg, "cpu")
    if check_device(cfg, kinds=kinds):
        logger.info("on %s: %s", cfg.MODEL.DEVICE, torch.cuda.get_device_name(cfg.MODEL.DEVICE))
    elif is_asked_for or not torch.cuda.is_available():
        logger.info("on the CPU")
    else:
        logger.info("on the CPU, as the config says: MODEL.DEVICE cuda takes the GPU")
    return cfg


def _on_device(cfg: CfgNode, device: str) -> CfgNode:
    """A copy of ``cfg`` with another ``MODEL.DEVICE``, frozen, and with attention that runs there."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = device
    if cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND == "triton" and missing_for(torch.device(device)) is not None:
        cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND = "auto"
        logging.getLogger(__name__).info("attention by auto: triton, as the config has it, does not run on %s", device)
    cfg.freeze()
    return cfg
