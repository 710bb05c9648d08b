"""Config files and overrides: how they are read, and what a config is for."""

import ast
import functools
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.projects.point_rend import add_pointrend_config

from backbones.attention.triton_chunks import missing_for
from backbones.errors import ConfigError, check_file, closest
from projects_vil.config.defaults import add_vil_config

# What detectron2 writes the whole config of a run into, in OUTPUT_DIR.
CONFIG_FILE = "config.yaml"
DEVICES = ("cpu", "cuda")
# The meta-architectures that are exported and predict.
DETECTORS = ("RetinaNet", "GeneralizedRCNN")
_EVAL = "tag:yaml.org,2002:python/object/apply:eval"
_ARITHMETIC = (
    *(ast.Expression, ast.List, ast.Tuple, ast.ListComp, ast.comprehension, ast.Name, ast.Load, ast.Store),
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
)
# The beginning of a key, the key that it depends on, and the values of that with which it has an effect.
_EFFECTIVE_WITH = (
    ("INPUT.MIN_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MAX_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MASK_FORMAT", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.PHOTOMETRIC_DISTORTION", "INPUT.AUGMENTATION", ("default", "lsj")),
    ("INPUT.LSJ.", "INPUT.AUGMENTATION", ("lsj", "strong")),
    ("INPUT.COPY_PASTE.", "INPUT.AUGMENTATION", ("strong",)),
    ("MODEL.EMA.DECAY", "MODEL.EMA.ENABLED", (True,)),
)
# What yacs, fvcore and PyYAML raise for a file or an override that does not fit.
_MERGE_ERRORS = (
    AssertionError,
    AttributeError,
    KeyError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    yaml.YAMLError,
)
_logger = logging.getLogger(__name__)


# Reading -------------------------------------------------------------------------------------------------------------


def default_config() -> CfgNode:
    """Return detectron2's default config with the keys of its PointRend and of this project."""
    cfg = get_cfg()
    add_pointrend_config(cfg)
    add_vil_config(cfg)
    return cfg


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> CfgNode:
    """Return :func:`default_config` with a file (and its ``_BASE_`` chain) and overrides merged into it, frozen.

    No code in a file is run: of YAML's Python tags only the arithmetic is evaluated that detectron2's model zoo has.

    Args:
        path: a YAML config.
        overrides: keys and values, alternating, as on detectron2's command line.

    Raises:
        ConfigError: for a missing file, bad YAML, an unknown key (naming the closest) or a value of a wrong type.
    """
    cfg = default_config()
    check_file(path, "config file")
    try:
        cfg.merge_from_file(str(path), allow_unsafe=False)
    except _MERGE_ERRORS as error:
        raise ConfigError(f"{path}: {_explain(error, cfg)}") from error
    _set_photometric_distortion(cfg)
    try:
        cfg.merge_from_list(list(overrides))
    except _MERGE_ERRORS as error:
        raise ConfigError(f"{_explain(error, cfg)} (in the overrides {one_line(' '.join(overrides))})") from error
    _set_photometric_distortion(cfg)
    cfg.freeze()
    return cfg


def _evaluate(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return the value of ``!!python/object/apply:eval ["[x * 2 ** (1.0 / 3) for x in [32, 64]]"]``."""
    (text,) = loader.construct_sequence(node)
    tree = ast.parse(text.strip(), mode="eval")
    unsafe = next((found for found in ast.walk(tree) if not isinstance(found, _ARITHMETIC)), None)
    if unsafe is not None:
        raise yaml.constructor.ConstructorError(None, None, f"{text} is more than arithmetic", node.start_mark)
    return eval(compile(tree, "config", "eval"), {"__builtins__": {}})


# detectron2 reads configs with this loader; other Python tags raise as before.
yaml.SafeLoader.add_constructor(_EVAL, _evaluate)


def _set_photometric_distortion(cfg: CfgNode) -> None:
    """PointRend's key means the same as this project's."""
    if cfg.INPUT.COLOR_AUG_SSD:
        cfg.INPUT.PHOTOMETRIC_DISTORTION, cfg.INPUT.COLOR_AUG_SSD = True, False


def _explain(error: Exception, cfg: CfgNode) -> str:
    message = one_line(error.args[0] if isinstance(error, KeyError) else error)
    unknown = re.search(r"Non-existent (?:config )?key: ([\w.]+)", message)
    if unknown is None:
        return message
    known = list(_keys(cfg))
    return f"unknown config key {unknown[1]}{closest(unknown[1], known) or closest(unknown[1].upper(), known)}"


def _keys(node: CfgNode, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield prefix + key
        if isinstance(value, CfgNode):
            yield from _keys(value, f"{prefix}{key}.")


def one_line(message: object) -> str:
    """Return a library's message without line breaks, and without the middle where it is long."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}"


def check_override_effects(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Check that overrides have an effect on training; keys in files may be for other values of the key they need.

    Raises:
        ConfigError: for the first that has none.
    """
    for key in overrides[::2]:
        for beginning, other, values in _EFFECTIVE_WITH:
            value = functools.reduce(getattr, other.split("."), cfg)
            if key.startswith(beginning) and value not in values:
                instead = " or ".join(map(str, values))
                raise ConfigError(f"{key} has no effect with {other} {value}: leave it out, or add {other} {instead}")


# Devices -------------------------------------------------------------------------------------------------------------


def check_device(cfg: CfgNode, *, devices: Sequence[str] = DEVICES) -> bool:
    """Return whether ``MODEL.DEVICE`` is a GPU.

    Args:
        cfg: of a model.
        devices: types of device that are allowed.

    Raises:
        ConfigError: where the device is not available or of another type, or the attention backend does not run on it.
    """
    name, backend = cfg.MODEL.DEVICE, cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name)
    if match is None or match[1] not in devices:
        raise ConfigError(f"MODEL.DEVICE is {name}: it can be {' or '.join(devices)}")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if match[1] == "cuda" and int(match[2] or 0) >= available:
        raise ConfigError(f"MODEL.DEVICE is {name}, and {available} CUDA devices are available: cpu takes the CPU")
    missing = missing_for(torch.device(name))
    if missing is not None and backend == "triton":
        raise ConfigError(f"MODEL.TRANSFORMER.ATTENTION_BACKEND triton needs {missing} (MODEL.DEVICE): take auto")
    return match[1] == "cuda"


def choose_device(cfg: CfgNode, *, devices: Sequence[str] = DEVICES, requested: bool = False) -> CfgNode:
    """Return ``cfg`` on an available device: its own, or the CPU in place of a GPU; the log reports which.

    Args:
        cfg: is not changed.
        devices: types of device that are allowed.
        requested: whether the user named the device, which then is used or refused.

    Raises:
        ConfigError: as :func:`check_device`.
    """
    has_gpu = "cuda" in devices and torch.cuda.is_available()
    if not requested and cfg.MODEL.DEVICE.startswith("cuda") and not has_gpu:
        cfg = cfg.clone()
        cfg.defrost()
        cfg.MODEL.DEVICE = "cpu"
        if cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND == "triton":
            cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND = "auto"
            _logger.info("MODEL.TRANSFORMER.ATTENTION_BACKEND is auto: triton does not run on the CPU")
        cfg.freeze()
    if check_device(cfg, devices=devices):
        _logger.info("on %s: %s", cfg.MODEL.DEVICE, torch.cuda.get_device_name(cfg.MODEL.DEVICE))
    elif "cuda" in devices:
        _logger.info("on the CPU%s", "; MODEL.DEVICE cuda takes the GPU" if has_gpu and not requested else "")
    return cfg


# What a config is for ------------------------------------------------------------------------------------------------


def number_of_classes(cfg: CfgNode) -> tuple[str, int]:
    """Return the key of the number of classes, and the number."""
    if is_segmentor(cfg):
        return "MODEL.SEM_SEG_HEAD.NUM_CLASSES", cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return "MODEL.RETINANET.NUM_CLASSES", cfg.MODEL.RETINANET.NUM_CLASSES
    return "MODEL.ROI_HEADS.NUM_CLASSES", cfg.MODEL.ROI_HEADS.NUM_CLASSES


def detector_name(cfg: CfgNode) -> str:
    """Return the papers' name, "Cascade Mask R-CNN" for one, or else the meta-architecture."""
    if cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN":
        return cfg.MODEL.META_ARCHITECTURE
    is_cascade, has_masks = cfg.MODEL.ROI_HEADS.NAME == "CascadeROIHeads", cfg.MODEL.MASK_ON
    if is_point_rend(cfg):
        return "PointRend"
    if not (is_cascade or has_masks):
        return "Faster R-CNN"
    return f"{'Cascade ' if is_cascade else ''}{'Mask ' if has_masks else ''}R-CNN"


def is_segmentor(cfg: CfgNode) -> bool:
    """Return whether a config is for semantic segmentation."""
    return cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"


def is_panoptic(cfg: CfgNode) -> bool:
    """Return whether a config is for boxes and masks of things, and labels of stuff."""
    return cfg.MODEL.META_ARCHITECTURE == "PanopticFPN"


def is_point_rend(cfg: CfgNode) -> bool:
    """Return whether masks are those of PointRend's head: detectron2's, or this project's."""
    return cfg.MODEL.MASK_ON and cfg.MODEL.ROI_MASK_HEAD.NAME in ("PointRendMaskHead", "AnyBatchPointRendMaskHead")
