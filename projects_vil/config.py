"""Config keys of this project, reading of config files and overrides, and properties of a config."""

import ast
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.projects.point_rend import add_pointrend_config
from yacs.config import _check_and_coerce_cfg_value_type

from backbones.attention.triton_chunks import unmet_requirement
from backbones.errors import ConfigError, check_file, closest, one_line
from vil.choices import CONFIGS, DEVICES

# The resolved config of a run, in OUTPUT_DIR.
CONFIG_FILE = "config.yaml"
# Meta-architectures that can be exported and can predict, also in tiles.
DETECTOR_ARCHITECTURES = ("RetinaNet", "GeneralizedRCNN")
SCORE_THRESHOLDS = ("MODEL.RETINANET.SCORE_THRESH_TEST", "MODEL.ROI_HEADS.SCORE_THRESH_TEST")
_EVAL = "tag:yaml.org,2002:python/object/apply:eval"
_ARITHMETIC = (
    *(ast.Expression, ast.List, ast.Tuple, ast.ListComp, ast.comprehension, ast.Name, ast.Load, ast.Store),
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
)
_logger = logging.getLogger(__name__)
# Config keys and values: a dict, or a list of alternating keys and values as in detectron2.
Overrides = Sequence[object] | Mapping[str, object]


# Keys ----------------------------------------------------------------------------------------------------------------


def add_vil_config(cfg: CfgNode) -> None:
    """Add the keys of this project to a detectron2 config. With their defaults, a config has the same effect as before.

    Example:
        >>> cfg = detectron2.config.get_cfg()
        >>> add_vil_config(cfg)
        >>> cfg.merge_from_file("configs/retinanet/vil_tiny_rpb_1x.yaml")
    """
    cfg.MODEL.TRANSFORMER = CfgNode()
    # Name of a variant (see backbones.list_variants), for example "vil_tiny_rpb". "timm:MODEL" and "timm:MODEL.TAG" are
    # models of timm; with a tag and an empty MODEL.WEIGHTS, timm's pretrained weights are loaded.
    cfg.MODEL.TRANSFORMER.VARIANT = "vil_tiny_rpb"
    # Input stages of the FPN. Empty for the stages in MODEL.FPN.IN_FEATURES.
    cfg.MODEL.TRANSFORMER.OUT_FEATURES = []
    # Stochastic depth rate of the last block. The rate grows linearly from 0 at the first block. None sets
    # the rate of the variant, or 0.1 for models of timm with stochastic depth.
    cfg.MODEL.TRANSFORMER.DROP_PATH = None
    # Largest image side in pixels. It sizes the position tables that are resized once, when weights are loaded.
    cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE = 1333
    # Recompute activations in the backward pass. This needs less memory and about a third more time.
    cfg.MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING = False
    # Compile the backbone with torch.compile for images of any size. This takes minutes before the first iteration.
    # Exports and evaluations of averaged weights are not compiled.
    cfg.MODEL.TRANSFORMER.COMPILE = False
    # Attention backend. "sdpa" is PyTorch's attention. "triton" uses this project's CUDA kernels for sliding-chunk
    # attention, long-short attention and full attention with a relative bias. "auto" is "triton" on GPUs where it was
    # measured to be faster (H100 and H200, in 16 bits), and otherwise "sdpa". "reference" is for debugging and needs
    # quadratic memory.
    cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND = "auto"
    # ViL and LS: attention of each stage, "sliding_chunk", "long_short" or "dense". If this key or one of the following
    # keys is empty, the variant sets it. A key that the family does not have is an error.
    cfg.MODEL.TRANSFORMER.ATTENTION = []
    # ViL: border handling of sliding chunks, "zero_pad", "exact" or "cyclic" (ViL appendix C).
    cfg.MODEL.TRANSFORMER.ATTENTION_MODE = ""
    # ViL and LS: number of global tokens of each stage.
    cfg.MODEL.TRANSFORMER.GLOBAL_TOKENS = []
    # ViL, LS and CvT: side of a chunk or segment in tokens, per stage. 7 corresponds to ViL's window of 15.
    cfg.MODEL.TRANSFORMER.CHUNK_SIZE = []
    # LS and CvT: rank of the dynamic projection of each stage.
    cfg.MODEL.TRANSFORMER.PROJECTION_RANK = []
    # ViL: whether local and global tokens share their projections, as in the released models.
    cfg.MODEL.TRANSFORMER.SHARED_PROJECTIONS = None
    # LIT: "deformable" or "uniform" token merging. Uniform merging needs SOLVER.LR_MULTIPLIERS [].
    cfg.MODEL.TRANSFORMER.TOKEN_MERGING = ""
    # Batch norm of LIT's and LITv2's token merging, CvT's projections and models of timm: "BN", "FrozenBN" or "SyncBN".
    cfg.MODEL.TRANSFORMER.NORM = ""
    # ViL, LS and LIT: "once" resizes position tables to MAX_IMG_SIZE when weights are loaded, and "per_feature_map"
    # resizes them to each feature map. Empty for the method of the family's paper.
    cfg.MODEL.TRANSFORMER.POSITION_INTERPOLATION = ""
    # Performer: iterations between two samplings of the random features (ViL appendix D: 1000 in detection).
    cfg.MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD = 1000
    # ViL: fraction of the iterations, 0 to 1, with random-shift training. A token then attends to its own chunk and to
    # one random neighboring chunk, which is faster. The official configs use 0.875.
    cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION = 0.0

    # RetinaNet: whether to apply a ReLU before P7, as in detectron2. mmdetection and the official LIT have none.
    cfg.MODEL.FPN.P7_RELU = True

    cfg.MODEL.EMA = CfgNode()
    # Whether to keep an exponential moving average of the weights. It is evaluated and saved as "model" in checkpoints.
    cfg.MODEL.EMA.ENABLED = False
    # Decay d of the average: after step n, average = d * average + (1 - d) * weights, with d = min(DECAY, (1 + n) /
    # (10 + n)).
    cfg.MODEL.EMA.DECAY = 0.9998

    # Whether training may start from the beginning in an output directory that has checkpoints.
    cfg.OVERWRITE_OUTPUT_DIR = False
    # Number of checkpoints such as model_0000099.pth to keep, newest first. 0 keeps all.
    cfg.SOLVER.CHECKPOINT_MAX_TO_KEEP = 0
    # Metric that selects model_best.pth, for example "bbox/AP". Empty for none. The highest value is the best, except
    # for "validation_loss/...", where it is the lowest.
    cfg.TEST.BEST_METRIC = ""
    # Whether an evaluation also computes the losses on DATASETS.TEST, as validation_loss/... in metrics.json.
    cfg.TEST.VALIDATION_LOSS = False
    cfg.INFERENCE = CfgNode()
    # Data type of predictions and evaluations: "float32", "bfloat16", "float16" or "auto". "auto" is the data type of
    # training with SOLVER.AMP.ENABLED on a GPU, and otherwise float32. In 16 bits, autocast covers the backbone, the
    # FPN and all but the last layers of the heads. Scores, boxes and masks stay in float32.
    cfg.INFERENCE.DTYPE = "auto"
    # Precision of float32 matrix products and convolutions on a GPU: "high" or "medium" for TensorFloat-32, "highest"
    # for float32, or empty for PyTorch's default. The precision on a CPU does not change.
    cfg.FLOAT32_PRECISION = "high"
    # Side in pixels of the overlapping tiles in which images are evaluated and predicted. Tiles are cut from images in
    # their original size. 0 uses whole images, resized to INPUT.MIN_SIZE_TEST.
    cfg.TEST.TILE_SIZE = 0
    # Overlap of neighboring tiles, as a fraction of TILE_SIZE.
    cfg.TEST.TILE_OVERLAP = 0.25
    # Number of validation images, 0 to 32, that each evaluation draws into OUTPUT_DIR/drawings.
    cfg.TEST.NUM_VISUALIZED_IMAGES = 4

    cfg.LOGGING = CfgNode()
    # Weights & Biases project to log metrics to. Empty for none.
    cfg.LOGGING.WANDB_PROJECT = ""
    # MLflow experiment to log metrics to. Empty for none.
    cfg.LOGGING.MLFLOW_EXPERIMENT = ""

    # Optimizer: "SGD" as in detectron2, or "ADAMW" as in all configs of this project.
    cfg.SOLVER.OPTIMIZER = "SGD"
    # Pairs of a shell-style pattern of parameter names and a factor for the learning rate of the matching parameters.
    cfg.SOLVER.LR_MULTIPLIERS = []
    # Layer-wise learning-rate decay, above 0 and at most 1 (no decay). The learning rate of block l of L has the
    # factor LAYER_DECAY ** (L + 1 - l). The patch embedding is l = 0. FPN and heads have the full learning rate.
    cfg.SOLVER.LAYER_DECAY = 1.0
    # Number of epochs. It sets SOLVER.MAX_ITER, STEPS, WARMUP_ITERS and CHECKPOINT_PERIOD, and TEST.EVAL_PERIOD, from
    # the number of images and IMS_PER_BATCH. 0 keeps the values of these keys.
    cfg.SOLVER.EPOCHS = 0
    # Data type with SOLVER.AMP.ENABLED: "float16" (GPU only, with loss scaling), "bfloat16", or "auto". "auto" is
    # bfloat16, except for GPUs with a compute capability below 8.0.
    cfg.SOLVER.AMP.DTYPE = "auto"
    # Gradient accumulation: number of micro-batches into which IMS_PER_BATCH images are split, or "auto". "auto"
    # chooses the number by the free memory of a GPU, or by the number of pixels on the CPU. merge_from_file
    # does not accept "auto": use load_config.
    cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS = 1
    # Batch size for the values of BASE_LR and BASE_LR_END. They are multiplied by IMS_PER_BATCH / REFERENCE_BATCH_SIZE.
    # 0 disables the scaling.
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0
    # Number of batches with a non-finite loss or gradient that are skipped before training stops. They are listed in
    # nonfinite.json.
    cfg.SOLVER.MAX_NONFINITE_STEPS = 0
    # Stop after this number of evaluations without a better TEST.BEST_METRIC. 0 disables early stopping.
    cfg.SOLVER.EARLY_STOPPING_PATIENCE = 0
    # Exponent of the schedule "WarmupPolyLR", which decays from BASE_LR to BASE_LR_END.
    cfg.SOLVER.POLY_LR_POWER = 0.9

    # Semantic segmentation: largest fraction of a crop that one class may cover. Other crops are sampled again, up to
    # ten times.
    cfg.INPUT.CROP.SINGLE_CATEGORY_MAX_AREA = 1.0
    # Semantic segmentation: pad images that are smaller than an absolute crop to the crop size, with MODEL.PIXEL_MEAN
    # and ignored labels. Otherwise images are only padded to the largest image of the batch.
    cfg.INPUT.CROP.PAD = False
    # Augmentation of training images. "default" resizes to MIN_SIZE_TRAIN and flips. "lsj" is large-scale jitter and a
    # flip. "lsj_copy_paste" adds PHOTOMETRIC_DISTORTION and COPY_PASTE, and needs an R-CNN with masks.
    cfg.INPUT.AUGMENTATION = "default"
    cfg.INPUT.LSJ = CfgNode()
    # Large-scale jitter: side in pixels of the square to which images are cropped or padded.
    cfg.INPUT.LSJ.SIZE = 1024
    # Large-scale jitter: range of the random scale, relative to an image that fits into the square.
    cfg.INPUT.LSJ.SCALE = (0.1, 2.0)
    cfg.INPUT.COPY_PASTE = CfgNode()
    # Copy-paste: probability that an image receives objects of another training image.
    cfg.INPUT.COPY_PASTE.PROBABILITY = 0.5
    # Whether to change the brightness, contrast, saturation and hue of training images at random, as in SSD.
    cfg.INPUT.PHOTOMETRIC_DISTORTION = False
    # File with a pipeline of Albumentations, written by albumentations.save(pipeline, file, data_format="yaml"). It is
    # applied to training images before all other transforms.
    cfg.INPUT.ALBUMENTATIONS = ""

    # Check of COCO files before training and evaluation: "error" stops at errors, "warn" logs them and fixes or
    # removes the affected entries for this run, "off" does not check.
    cfg.DATASETS.CHECK = "error"
    # COCO-format datasets to register, each as [name, annotation file, image folder].
    cfg.DATASETS.COCO = []
    # ADE20K-format datasets to register, each as [name, image folder, label folder] for the 150 classes of ADE20K, or
    # [name, image folder, label folder, file with one class name per line]. In label images, 0 is ignored.
    cfg.DATASETS.ADE20K = []


# Reading -------------------------------------------------------------------------------------------------------------


def config_path(*names: str) -> Path:
    """Return the file of a config of this project, in an installed package or in a clone.

    Args:
        names: For example ``"retinanet/lit_ti_1x"``, with or without ``.yaml``. The first existing config is returned.

    Raises:
        ConfigError: If no config exists, with the closest names.
    """
    for name in names:
        path = CONFIGS / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file() and path.resolve().is_relative_to(CONFIGS.resolve()):
            return path
    known = [path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")]
    hint = closest(name.removesuffix(".yaml"), known, most=3) or ". Choose a file in configs/."
    raise ConfigError(f"There is no config '{name}'{hint}")


def default_config() -> CfgNode:
    """Return detectron2's default config with the keys of its PointRend and of this project."""
    cfg = get_cfg()
    add_pointrend_config(cfg)
    add_vil_config(cfg)
    return cfg


def load_config(path: str | Path, overrides: Overrides = ()) -> CfgNode:
    """Load a config file with its ``_BASE_`` chain and overrides on top of :func:`default_config`, and freeze it.

    A leading ``~`` in ``OUTPUT_DIR`` and ``MODEL.WEIGHTS`` becomes the home directory. No code in a file is executed:
    of YAML's Python tags only the arithmetic of detectron2's model zoo is evaluated. Nothing is downloaded.

    Args:
        path: A YAML config of detectron2's version 2, or a name for :func:`config_path`.
        overrides: Config keys and values: a dict, or a list of alternating keys and values as in detectron2.

    Raises:
        ConfigError: If the file is missing or not valid YAML, if a key is unknown or given twice, or if a value has the
            wrong type.

    Example:
        >>> cfg = load_config("configs/retinanet/vil_tiny_rpb_1x.yaml", {"SOLVER.BASE_LR": 5e-5})
    """
    cfg = default_config()
    path = path if os.path.exists(path) else config_path(str(path))
    check_file(path, "config file")
    try:
        loaded = load_yaml_with_base(Path(path))
        version = loaded.get("VERSION", cfg.VERSION)
        if version != cfg.VERSION:
            raise ConfigError(f"VERSION is {version}. It must be {cfg.VERSION}. Rename the keys of old files.")
        for key, value in loaded.items():
            if key in ("OUTPUT_DIR", "MODEL.WEIGHTS") and isinstance(value, str):
                # A name such as "2024" would be parsed as a number.
                value = repr(value)
            _set_value(cfg, key, value)
    except Exception as error:
        reason = str(error)
        if isinstance(error, (AttributeError, TypeError)):
            reason = "The content is not a config. Write config keys, and set _BASE_ to a file or a list of files."
        elif not isinstance(error, ConfigError):
            reason = f"{one_line(error)}. Correct it."
        raise ConfigError(reason if reason.startswith(f"'{path}'") else f"'{path}': {reason}") from error
    return merge_overrides(cfg, overrides)


def combine_overrides(overrides: Overrides, values: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return overrides as a dict, with further values. Further values of None are left out.

    Raises:
        ConfigError: If the last key of a list has no value, or if a key has two different values.
    """
    if not isinstance(overrides, Mapping):
        if len(overrides) % 2:
            raise ConfigError(f"The override {overrides[-1]} has no value. Write KEY VALUE.")
        overrides = dict(zip(map(str, overrides[::2]), overrides[1::2], strict=True))
    given: dict[Any, Any] = dict(overrides)
    for key, value in (values or {}).items():
        # In lists, nan is equal to itself.
        if value is not None and [given.setdefault(key, value)] != [value]:
            raise ConfigError(f"{key} is given twice, as {value} and as {given[key]}. Remove one.")
    return given


def merge_overrides(cfg: CfgNode, overrides: Overrides) -> CfgNode:
    """Return a frozen copy of a config with a user's overrides. Strings are parsed, as on the command line.

    Raises:
        ConfigError: For an unknown key or a value of the wrong type.
    """
    cfg = cfg.clone()
    cfg.defrost()
    if cfg.INPUT.COLOR_AUG_SSD:
        # PointRend's key means the same as this project's.
        cfg.INPUT.PHOTOMETRIC_DISTORTION, cfg.INPUT.COLOR_AUG_SSD = True, False
    for key, value in combine_overrides(overrides).items():
        if key == "MODEL.DEVICE":
            # A number is a GPU, as in torch.device(0).
            value = repr(f"cuda:{value}" if str(value).isdecimal() else str(value))
        if key == "INPUT.COLOR_AUG_SSD":
            key = "INPUT.PHOTOMETRIC_DISTORTION"
        _set_value(cfg, key, value)
    cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS = map(os.path.expanduser, (cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS))
    cfg.freeze()
    return cfg


def _set_value(cfg: CfgNode, key: str, value: Any) -> None:
    """Set a key to a value of its type. A string is parsed. None, other sequences and an empty section are accepted.

    Raises:
        ConfigError: For an unknown key or a value of the wrong type.
    """
    section, _, name = str(key).rpartition(".")
    try:
        node = attrgetter(section)(cfg) if section else cfg
        old = node[name]
    except (AttributeError, KeyError, TypeError) as error:
        key, known = str(key), [known for known, _ in config_items(cfg)]
        hint = closest(key, known) or closest(key.upper(), known) or ". Check its spelling."
        raise ConfigError(f"Config key '{key}' does not exist{hint}") from error
    if value == {} and isinstance(old, CfgNode):
        return
    if isinstance(old, float) and re.fullmatch(r"[+-]?\d+", str(value)):
        # yacs takes no whole number for a float.
        value = float(value)
    # yacs replaces None by a value of any type. The number of steps may also be "auto".
    old = None if key == "SOLVER.GRADIENT_ACCUMULATION_STEPS" else old
    value = CfgNode._decode_cfg_value(value)
    try:
        node[name] = _check_and_coerce_cfg_value_type(value, old, name, key)
    except ValueError as error:
        hint, text = "", repr(value) if isinstance(value, str) else str(value)
        expected = "a section with keys of its own" if isinstance(old, CfgNode) else f"of type {type(old).__name__}"
        if isinstance(old, (list, tuple)):
            is_cut = str(value).startswith(("[", "("))
            hint = " A comma, a quote or a bracket is missing." if is_cut else f' Write "({text},)".'
        raise ConfigError(f"{key} is {text}. It must be {expected}.{hint}") from error
    if name in ("SCORE_THRESH_TEST", "NMS_THRESH_TEST") and not 0 <= node[name] <= 1:
        raise ConfigError(f"{key} is {node[name]}. It must be 0 to 1.")


def with_overrides(cfg: CfgNode, values: Mapping[str, object], *, keep: Collection[str] = ()) -> CfgNode:
    """Return a frozen copy of a config with exactly these values. Strings are not parsed, and types are not checked.

    Args:
        cfg: A config.
        values: Values by key, such as ``SOLVER.BASE_LR``.
        keep: Keys that keep their value in ``cfg``.
    """
    cfg = cfg.clone()
    cfg.defrost()
    for key, value in values.items():
        if key not in keep:
            section, _, name = key.rpartition(".")
            (attrgetter(section)(cfg) if section else cfg)[name] = value
    cfg.freeze()
    return cfg


class _Loader(yaml.SafeLoader):
    """Load YAML without repeated keys, and with the arithmetic of detectron2's model zoo."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, keys = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if key.value in keys:
                raise ConfigError(f"'{self.name}' has the key {key.value} twice in one section. Remove one.")
            if "." in key.value:
                advice = "In a file, write each part as a section of its own."
                raise ConfigError(f"The key {key.value} is written with dots. {advice}")
            keys.add(key.value)
        return node

    def construct_arithmetic(self, node: yaml.SequenceNode) -> Any:
        """Return the value of ``!!python/object/apply:eval ["[x * 2 ** (1.0 / 3) for x in [32, 64]]"]``."""
        (text,) = self.construct_sequence(node)
        tree = ast.parse(text.strip(), mode="eval")
        unsafe = next((found for found in ast.walk(tree) if not isinstance(found, _ARITHMETIC)), None)
        if unsafe is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{text} is more than arithmetic", node.start_mark)
        return eval(compile(tree, "config", "eval"), {"__builtins__": {}})


_Loader.add_constructor(_EVAL, _Loader.construct_arithmetic)


def load_yaml_with_base(path: Path) -> dict[str, Any]:
    """Return the values of a config file and its ``_BASE_`` files by key, such as ``SOLVER.STEPS``."""
    with open(path, encoding="utf-8") as file:
        content = yaml.load(file, _Loader)
    if not isinstance(content, dict):
        raise ConfigError(f"'{path}' has no config keys. Write config keys in it.")
    values: dict[str, Any] = {}
    bases = content.pop("_BASE_", [])
    for base in [bases] if isinstance(bases, str) else bases:
        if "://" in base:
            raise ConfigError(f"_BASE_ is '{base}'. Configs are not downloaded. Give a local file.")
        base = path.parent / os.path.expanduser(base)
        check_file(base, "file", key="_BASE_")
        values |= load_yaml_with_base(base)
    # An empty section has no keys. An empty dict of another name is an error.
    return values | {key: value for key, value in config_items(content) if not isinstance(value, dict) or not value}


def config_items(node: object, prefix: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield keys such as ``SOLVER.STEPS`` and values of nested dicts, and with ``lists`` also ``SOLVER.STEPS.0``."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if lists and isinstance(node, list) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from config_items(value, f"{prefix}{key}.", lists=lists)


# Devices -------------------------------------------------------------------------------------------------------------


def set_precision(cfg: CfgNode) -> None:
    """Apply ``FLOAT32_PRECISION`` if ``MODEL.DEVICE`` is a GPU."""
    if cfg.MODEL.DEVICE.startswith("cuda") and cfg.FLOAT32_PRECISION:
        # torch.set_float32_matmul_precision would also change the products on a CPU.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = cfg.FLOAT32_PRECISION != "highest"


def choose_device(cfg: CfgNode, *, devices: Sequence[str] = DEVICES, requested: bool = False) -> CfgNode:
    """Return the config for an available device: its own, or the CPU if there is no GPU. The choice is logged.

    Args:
        cfg: Config of a model.
        devices: Allowed types of device.
        requested: Whether the user set the device. It is then used, or an error.

    Raises:
        ConfigError: If the device is not available or not allowed, or if the attention backend does not run on it.
    """
    has_gpu = "cuda" in devices and torch.cuda.is_available()
    if not requested and cfg.MODEL.DEVICE.startswith("cuda") and not has_gpu:
        cfg = with_overrides(cfg, {"MODEL.DEVICE": "cpu"})
        if cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND == "triton":
            cfg = with_overrides(cfg, {"MODEL.TRANSFORMER.ATTENTION_BACKEND": "auto"})
            _logger.info("MODEL.TRANSFORMER.ATTENTION_BACKEND is auto: triton does not run on the CPU")
    name = cfg.MODEL.DEVICE
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name)
    if match is None or match[1] not in devices:
        raise ConfigError(f"MODEL.DEVICE is {name}. Use {' or '.join(devices)}.")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if match[1] == "cuda" and int(match[2] or 0) >= available:
        raise ConfigError(f"MODEL.DEVICE is {name}, but the number of CUDA devices is {available}. Use cpu.")
    backend = cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND
    missing = unmet_requirement(torch.device(name)) if backend == "triton" else None
    if missing is not None:
        raise ConfigError(f"MODEL.TRANSFORMER.ATTENTION_BACKEND {backend} {missing}. Use auto.")
    if match[1] == "cuda":
        _logger.info("the model runs on %s: %s", name, torch.cuda.get_device_name(name))
    elif "cuda" in devices:
        hint = "; MODEL.DEVICE cuda would use the GPU" if has_gpu and not requested else ""
        _logger.info("the model runs on the CPU%s", hint)
    return cfg


# Properties of a config -----------------------------------------------------------------------------------------------


def head_of(cfg: CfgNode) -> str:
    """Return the section of ``MODEL`` with the number of classes and the thresholds, such as ``RETINANET``."""
    heads = {"SemanticSegmentor": "SEM_SEG_HEAD", "RetinaNet": "RETINANET"}
    return heads.get(cfg.MODEL.META_ARCHITECTURE, "ROI_HEADS")


def detector_name(cfg: CfgNode) -> str:
    """Return the name of the detector in the papers, such as "Cascade Mask R-CNN", or the meta-architecture."""
    if cfg.MODEL.META_ARCHITECTURE != "GeneralizedRCNN":
        return cfg.MODEL.META_ARCHITECTURE
    is_cascade, has_masks = cfg.MODEL.ROI_HEADS.NAME == "CascadeROIHeads", cfg.MODEL.MASK_ON
    if has_masks and cfg.MODEL.ROI_MASK_HEAD.NAME in ("PointRendMaskHead", "AnyBatchPointRendMaskHead"):
        return "PointRend"
    if not (is_cascade or has_masks):
        return "Faster R-CNN"
    return f"{'Cascade ' if is_cascade else ''}{'Mask ' if has_masks else ''}R-CNN"


def is_segmentor(cfg: CfgNode) -> bool:
    """Return whether a config is for semantic segmentation."""
    return cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor"


def is_panoptic(cfg: CfgNode) -> bool:
    """Return whether a config is for panoptic segmentation."""
    return cfg.MODEL.META_ARCHITECTURE == "PanopticFPN"
