"""The configuration keys of this project, how config files and overrides are read, and the task of a config."""

import ast
import contextlib
import functools
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.projects.point_rend import add_pointrend_config

from backbones.attention.triton_chunks import unmet_requirement
from backbones.errors import ConfigError, check_file, closest

# What detectron2 writes the whole config of a run into, in OUTPUT_DIR.
CONFIG_FILE = "config.yaml"
DEVICES = ("cpu", "cuda")
# The meta-architectures that are exported and predict.
DETECTORS = ("RetinaNet", "GeneralizedRCNN")
# Configs as files: in an installed package, and in a clone.
_CONFIGS = (Path(__file__).parent / "configs", Path(__file__).parents[1] / "configs")
_EVAL = "tag:yaml.org,2002:python/object/apply:eval"
_ARITHMETIC = (
    *(ast.Expression, ast.List, ast.Tuple, ast.ListComp, ast.comprehension, ast.Name, ast.Load, ast.Store),
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
)
# The beginning of a key, a key that it depends on, and the values of the latter for which the former has an effect.
_EFFECTIVE_WITH = (
    ("INPUT.MIN_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MAX_SIZE_TRAIN", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.MASK_FORMAT", "INPUT.AUGMENTATION", ("default",)),
    ("INPUT.PHOTOMETRIC_DISTORTION", "INPUT.AUGMENTATION", ("default", "lsj")),
    ("INPUT.LSJ.", "INPUT.AUGMENTATION", ("lsj", "lsj_copy_paste")),
    ("INPUT.COPY_PASTE.", "INPUT.AUGMENTATION", ("lsj_copy_paste",)),
    ("MODEL.EMA.DECAY", "MODEL.EMA.ENABLED", (True,)),
)
_logger = logging.getLogger(__name__)


# Keys ----------------------------------------------------------------------------------------------------------------


def add_vil_config(cfg: CfgNode) -> None:
    """Add ``MODEL.TRANSFORMER`` and the solver's and datasets' keys of this project to a detectron2 config.

    A config that names none of them means what it means in detectron2.
    """
    cfg.MODEL.TRANSFORMER = CfgNode()
    # A name of backbones.list_variants(): vil_tiny_rpb has relative bias, vil_tiny absolute positions. Or timm:MODEL or
    # timm:MODEL.TAG for timm's pretrained weights where MODEL.WEIGHTS is empty (docs/training.md).
    cfg.MODEL.TRANSFORMER.VARIANT = "vil_tiny_rpb"
    # Stages that feed FPN; empty for those in MODEL.FPN.IN_FEATURES.
    cfg.MODEL.TRANSFORMER.OUT_FEATURES = []
    # Rate of stochastic depth of the last block, growing linearly from 0 at the first.
    cfg.MODEL.TRANSFORMER.DROP_PATH = 0.1
    # Largest image side in pixels, for tables of positions that are not resized to each map.
    cfg.MODEL.TRANSFORMER.MAX_IMG_SIZE = 1333
    # Compute activations again in the backward pass: less memory, about a third more time.
    cfg.MODEL.TRANSFORMER.ACTIVATION_CHECKPOINTING = False
    # Whether torch.compile compiles the backbone, for images of any size: minutes before the first iteration. Exports
    # and evaluations of averaged weights are not compiled.
    cfg.MODEL.TRANSFORMER.COMPILE = False
    # "auto" (PyTorch's, with a hint in the log if "triton" may be faster), "sdpa" (PyTorch's), "triton" (kernels of
    # sliding chunks and long-short attention, on CUDA) or "reference" (quadratic, for debugging).
    cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND = "auto"
    # An empty value of the following keys means that of the variant; a key that its family does not have is an error.
    # ViL and LS: the attention of each stage, "sliding_chunk", "long_short" or "dense".
    cfg.MODEL.TRANSFORMER.ATTENTION = []
    # ViL: "zero_pad", "exact" or "cyclic" (appendix C).
    cfg.MODEL.TRANSFORMER.ATTENTION_MODE = ""
    # ViL and LS: global tokens of each stage.
    cfg.MODEL.TRANSFORMER.GLOBAL_TOKENS = []
    # ViL, LS and CvT: sides of the chunks or segments in tokens (7 is ViL's window of 15), of each stage.
    cfg.MODEL.TRANSFORMER.CHUNK_SIZE = []
    # LS and CvT: rank of the dynamic projection of each stage.
    cfg.MODEL.TRANSFORMER.PROJECTION_RANK = []
    # ViL: whether local and global tokens share their projections, as in the released models.
    cfg.MODEL.TRANSFORMER.SHARED_PROJECTIONS = None
    # LIT: "deformable" or "uniform" (which has no offsets: empty SOLVER.LR_MULTIPLIERS too).
    cfg.MODEL.TRANSFORMER.TOKEN_MERGING = ""
    # LIT's deformable merging, CvT's projections and models of timm: "BN", "FrozenBN" or "SyncBN".
    cfg.MODEL.TRANSFORMER.NORM = ""
    # ViL, LS and LIT: "once" for tables of positions that are resized once, when weights are loaded, to MAX_IMG_SIZE;
    # "per_feature_map" for tables that are resized to each map; empty as in each paper (docs/checkpoints.md).
    cfg.MODEL.TRANSFORMER.POSITION_INTERPOLATION = ""
    # Performer: iterations between two samplings of its random features (ViL, appendix D: 1000 in detection).
    cfg.MODEL.TRANSFORMER.FEATURE_REDRAW_PERIOD = 1000
    # ViL: the first part of the iterations, 0 to 1, in which a token attends to one of the eight neighbours of its own
    # chunk, sampled for each layer and iteration, which takes less time. 0.875 in the official configs.
    cfg.MODEL.TRANSFORMER.RANDOM_SHIFT_FRACTION = 0.0

    # RetinaNet: whether a ReLU is between P6 and P7, as in detectron2; mmdetection, and so the official LIT, has none.
    cfg.MODEL.FPN.P7_RELU = True

    # Exponential moving average of the weights, which is evaluated and saved as the "model" of checkpoints. After step
    # n it becomes d average + (1 - d) weights, with d = min(DECAY, (1 + n) / (10 + n)).
    cfg.MODEL.EMA = CfgNode()
    cfg.MODEL.EMA.ENABLED = False
    cfg.MODEL.EMA.DECAY = 0.9998

    # Whether training may start from the beginning in an OUTPUT_DIR that has checkpoints.
    cfg.OVERWRITE_OUTPUT_DIR = False
    # How many numbered checkpoints are kept, the newest; 0 for all.
    cfg.SOLVER.CHECKPOINT_MAX_TO_KEEP = 0
    # The metric by which the best checkpoint is saved as model_best.pth, such as "bbox/AP"; empty saves none. The best
    # value is the highest, and that of a "validation_loss/..." the lowest.
    cfg.TEST.BEST_METRIC = ""
    # Whether evaluations compute the losses on DATASETS.TEST too: validation_loss/... in metrics.json.
    cfg.TEST.VALIDATION_LOSS = False
    # Whether evaluations compute by autocast in bfloat16, as predictions with INFERENCE.DTYPE.
    cfg.TEST.AMP = CfgNode()
    cfg.TEST.AMP.ENABLED = False
    # "bfloat16" or "float16" for predictions that compute backbone, FPN and the heads' layers but the last by autocast;
    # scores, boxes and masks are in float32. "float32" computes all in it.
    cfg.INFERENCE = CfgNode()
    cfg.INFERENCE.DTYPE = "float32"
    # The library that computes AP: "pycocotools", or "faster_coco_eval", which is faster and has the same results.
    cfg.TEST.COCO_API = "pycocotools"
    # Number of validation images drawn into OUTPUT_DIR/drawings at each evaluation, 0 to 32.
    cfg.TEST.NUM_VISUALIZED_IMAGES = 4

    cfg.LOGGING = CfgNode()
    # The project of Weights & Biases and the experiment of MLflow to which metrics are logged; empty for none.
    cfg.LOGGING.WANDB_PROJECT = ""
    cfg.LOGGING.MLFLOW_EXPERIMENT = ""

    # "SGD", as detectron2 trains, or "ADAMW", as all configs of this project do.
    cfg.SOLVER.OPTIMIZER = "SGD"
    # Pairs of a shell-style pattern on full parameter names and a factor of the learning rate of those that match.
    cfg.SOLVER.LR_MULTIPLIERS = []
    # Layer-wise decay of the learning rate, above 0 and at most 1 (no decay): block l of L learns at LAYER_DECAY to the
    # power of L + 1 - l, the patch embedding is l = 0, and FPN and heads learn at the full rate.
    cfg.SOLVER.LAYER_DECAY = 1.0
    # Number of epochs, or 0. SOLVER.MAX_ITER, STEPS, WARMUP_ITERS and CHECKPOINT_PERIOD and TEST.EVAL_PERIOD then
    # follow from the number of images and IMS_PER_BATCH (projects_vil/solver.py).
    cfg.SOLVER.EPOCHS = 0
    # With SOLVER.AMP.ENABLED: "float16", which needs a GPU and scales the loss, "bfloat16", also on the CPU, or "auto":
    # float16 on GPUs of compute capability below 8.0, otherwise bfloat16.
    cfg.SOLVER.AMP.DTYPE = "auto"
    # Gradient accumulation: the number of micro-batches into which IMS_PER_BATCH images are split, or "auto". "auto"
    # chooses the number by the free memory of a GPU, or by the number of pixels on the CPU.
    cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS = 1
    # The batch size for which BASE_LR and BASE_LR_END are given: they are multiplied by IMS_PER_BATCH divided by it. 0
    # leaves them as they are.
    cfg.SOLVER.REFERENCE_BATCH_SIZE = 0
    # How many batches with a loss or gradient that is not finite are skipped before the run stops (nonfinite.json).
    cfg.SOLVER.MAX_NONFINITE_STEPS = 0
    # The run ends after this many evaluations without a better TEST.BEST_METRIC; 0 disables early stopping.
    cfg.SOLVER.EARLY_STOPPING_PATIENCE = 0
    # The exponent of SOLVER.LR_SCHEDULER_NAME WarmupPolyLR, which falls from BASE_LR to BASE_LR_END.
    cfg.SOLVER.POLY_LR_POWER = 0.9

    # Semantic segmentation: a crop is sampled again, up to ten times, where one class has more than this share of it.
    cfg.INPUT.CROP.SINGLE_CATEGORY_MAX_AREA = 1.0
    # The same: whether an image smaller than an absolute crop is padded to its size, with MODEL.PIXEL_MEAN and ignored
    # labels. Else only batches are padded, to their largest image.
    cfg.INPUT.CROP.PAD = False
    # The augmentation of training images: "default" resizes to MIN_SIZE_TRAIN and flips, "lsj" is large-scale jitter
    # (below) and a flip, and "lsj_copy_paste" adds PHOTOMETRIC_DISTORTION and COPY_PASTE, which need an R-CNN with
    # masks.
    cfg.INPUT.AUGMENTATION = "default"
    # "lsj" and "lsj_copy_paste": an image is scaled to fit into a square of SIZE pixels times a random factor from
    # SCALE, then cropped or padded to the square, as in the new baselines of detectron2.
    cfg.INPUT.LSJ = CfgNode()
    cfg.INPUT.LSJ.SIZE = 1024
    cfg.INPUT.LSJ.SCALE = (0.1, 2.0)
    # "lsj_copy_paste": the share of images that get objects of another training image pasted, 0.0 for none.
    cfg.INPUT.COPY_PASTE = CfgNode()
    cfg.INPUT.COPY_PASTE.PROBABILITY = 0.5
    # In training: random brightness, contrast, saturation and hue, as in SSD.
    cfg.INPUT.PHOTOMETRIC_DISTORTION = False

    # The check of COCO files before training and evaluation (docs/datasets.md): "error" stops at errors in a file,
    # "warn" logs them and continues without those annotations and images, "off" does not check.
    cfg.DATASETS.CHECK = "error"
    # COCO-format datasets to register: [name, annotation file, image folder], each.
    cfg.DATASETS.COCO = []
    # Those in the layout of ADE20K, whose label images have 0 for ignored, classes from 1: [name, image folder, label
    # folder], each, for its 150 classes, or [name, image folder, label folder, file with one class name per line].
    cfg.DATASETS.ADE20K = []


# Reading -------------------------------------------------------------------------------------------------------------


def config_path(name: str) -> Path:
    """Return the file of a config of this project, in an installed package or in a clone.

    Args:
        name: for example ``"retinanet/lit_ti_1x"``, with or without ``.yaml``.

    Raises:
        ConfigError: for an unknown name, with the closest names.
    """
    path = find_config(name)
    if path is None:
        root = _config_root()
        known = [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]
        raise ConfigError(f"there is no config {name} in {root}{closest(name.removesuffix('.yaml'), known, most=3)}")
    return path


def find_config(name: str) -> Path | None:
    """Return the file of a config, or None if there is no config with this name."""
    path = _config_root() / f"{name.removesuffix('.yaml')}.yaml"
    return path if path.is_file() and path.resolve().is_relative_to(_config_root().resolve()) else None


def _config_root() -> Path:
    return next((folder for folder in _CONFIGS if folder.is_dir()), _CONFIGS[0])


def default_config() -> CfgNode:
    """Return detectron2's default config with the keys of its PointRend and of this project."""
    cfg = get_cfg()
    add_pointrend_config(cfg)
    add_vil_config(cfg)
    return cfg


def load_config(path: str | Path, overrides: Sequence[Any] = ()) -> CfgNode:
    """Load a config file with its ``_BASE_`` chain and overrides on top of :func:`default_config`, and freeze it.

    A leading ``~`` in ``OUTPUT_DIR`` and ``MODEL.WEIGHTS`` becomes the home directory. No code in a file is executed:
    of YAML's Python tags only the arithmetic of detectron2's model zoo is evaluated. Nothing is downloaded.

    Args:
        path: a YAML config of detectron2's version 2.
        overrides: alternating keys and values, as on detectron2's command line.

    Raises:
        ConfigError: if the file is missing or not valid YAML, if a key is unknown or given twice, or if a value has the
            wrong type.

    Example:
        >>> cfg = load_config("configs/retinanet/vil_tiny_rpb_1x.yaml", ["SOLVER.BASE_LR", 5e-5])
    """
    cfg = default_config()
    check_file(path, "config file")
    try:
        loaded = load_yaml_with_base(Path(path))
        version = loaded.get("VERSION", cfg.VERSION)
        if version != cfg.VERSION:
            raise ConfigError(f"VERSION is {version}. It must be {cfg.VERSION}: rename the keys of old files.")
        with _any_accumulation_steps(cfg):
            cfg.merge_from_other_cfg(CfgNode(loaded))
    except Exception as error:
        reason = _explain(error, cfg)
        raise ConfigError(reason if reason.startswith(str(path)) else f"{path}: {reason}") from error
    return merge_overrides(cfg, overrides)


def merge_overrides(cfg: CfgNode, overrides: Sequence[Any]) -> CfgNode:
    """Return a frozen copy of a config with a user's overrides. Strings are parsed, as on the command line.

    Raises:
        ConfigError: for an unknown key or a value of the wrong type.
    """
    cfg = _thawed(cfg)
    _set_photometric_distortion(cfg)
    try:
        with _any_accumulation_steps(cfg):
            cfg.merge_from_list(list(overrides))
    except Exception as error:
        words = one_line(" ".join(map(str, overrides)))
        raise ConfigError(f"{_explain(error, cfg)} (in the overrides {words})") from error
    _set_photometric_distortion(cfg)
    cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS = map(os.path.expanduser, (cfg.OUTPUT_DIR, cfg.MODEL.WEIGHTS))
    cfg.freeze()
    return cfg


def with_overrides(cfg: CfgNode, values: Mapping[str, object]) -> CfgNode:
    """Return a frozen copy of a config with exactly these values. Strings are not parsed, and types are not checked."""
    cfg = _thawed(cfg)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (value_of(cfg, section) if section else cfg)[name] = value
    cfg.freeze()
    return cfg


def _thawed(cfg: CfgNode) -> CfgNode:
    cfg = cfg.clone()
    cfg.defrost()
    return cfg


class _Loader(yaml.SafeLoader):
    """Load YAML without repeated keys, and with the arithmetic of detectron2's model zoo."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(f"{self.name} has the key {twice} twice in one section. Remove one.")
        return super().construct_mapping(node, deep)

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
    """Return the content of a config file, merged into the content of the files in its ``_BASE_`` chain."""
    with open(path, encoding="utf-8") as file:
        content = yaml.load(file, _Loader)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} {'is empty' if content is None else 'has no config keys'}")
    merged: dict[str, Any] = {}
    bases = content.pop("_BASE_", [])
    for base in [bases] if isinstance(bases, str) else bases:
        if "://" in base:
            raise ConfigError(f"_BASE_ is {base}. Configs are not downloaded: name a file.")
        base = path.parent / os.path.expanduser(base)
        check_file(base, "file", key="_BASE_")
        _merge_into(merged, load_yaml_with_base(base))
    _merge_into(merged, content)
    return merged


def _merge_into(target: dict[str, Any], content: dict[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge_into(target[key], value)
        else:
            target[key] = value


@contextlib.contextmanager
def _any_accumulation_steps(cfg: CfgNode) -> Iterator[None]:
    """Let a merge replace a number by "auto" and "auto" by a number, which are of different types."""
    before, cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS = cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS, None
    yield
    if cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS is None:
        cfg.SOLVER.GRADIENT_ACCUMULATION_STEPS = before


def _set_photometric_distortion(cfg: CfgNode) -> None:
    """PointRend's key means the same as this project's."""
    if cfg.INPUT.COLOR_AUG_SSD:
        cfg.INPUT.PHOTOMETRIC_DISTORTION, cfg.INPUT.COLOR_AUG_SSD = True, False


def _explain(error: Exception, cfg: CfgNode) -> str:
    message = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
    if isinstance(error, (AttributeError, TypeError)):
        return "it is not a mapping of config keys"
    mismatch = re.search(
        r"Type mismatch \(<class '[\w.]*?(\w+)'> vs\. <class '[\w.]*?(\w+)'>\).* vs\. (.*)\) for config key: (\S+)",
        message,
    )
    if mismatch is not None:
        words = {
            "int": "a whole number (int)",
            "float": "a number (float)",
            "CfgNode": "a section with keys of its own",
        }
        expected = words.get(mismatch[1], f"a {mismatch[1]}")
        value = (
            repr(mismatch[3])
            if mismatch[2] == "str"
            else f"{{{mismatch[3]}}}"
            if mismatch[2] == "CfgNode"
            else mismatch[3]
        )
        is_broken = mismatch[1] in ("list", "tuple") and mismatch[3].startswith(("[", "("))
        hint = "; a comma, a quote or a bracket is missing" if is_broken else ""
        return f"{mismatch[4]} is {value}: it must be {expected}{hint}"
    unknown = re.search(r"Non-existent (?:config )?key: ([\w.]+)", message)
    if unknown is None:
        return one_line(message)
    known = [key for key, _ in config_items(cfg)]
    if unknown[1] in known:
        return f"{unknown[1]} is one word in it: in a file, the parts of a key are indented below each other"
    return f"unknown config key {unknown[1]}{closest(unknown[1], known) or closest(unknown[1].upper(), known)}"


def config_items(node: object, prefix: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of nested dicts, ``SOLVER`` and ``SOLVER.STEPS``; with ``lists`` ``SOLVER.STEPS.0``."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if lists and isinstance(node, list) else ()
    for key, value in items:
        yield f"{prefix}{key}", value
        yield from config_items(value, f"{prefix}{key}.", lists=lists)


def first_of(names: Sequence[str], number: int) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return f"{', '.join(names[:number])}{more}"


def one_line(message: object) -> str:
    """Return a library's message without line breaks, and without the middle where it is long."""
    line = " ".join(str(message).split())
    return line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}"


def check_override_effects(cfg: CfgNode, overridden: Collection[str]) -> None:
    """Check that the keys that a user set for a run have an effect on training.

    Keys in files are not checked: a base file may set them for other values of the key that they depend on.

    Raises:
        ConfigError: for the first key that has no effect.
    """
    for key in overridden:
        for beginning, other, values in _EFFECTIVE_WITH:
            value = value_of(cfg, other)
            if key.startswith(beginning) and value not in values:
                instead = " or ".join(map(str, values))
                raise ConfigError(f"{key} has no effect with {other} {value}: leave it out, or add {other} {instead}")


def value_of(cfg: CfgNode, key: str) -> Any:
    """Return the value of a key such as ``SOLVER.BASE_LR``."""
    return functools.reduce(getattr, key.split("."), cfg)


# Devices -------------------------------------------------------------------------------------------------------------


def check_device(cfg: CfgNode, *, devices: Sequence[str] = DEVICES) -> bool:
    """Return whether ``MODEL.DEVICE`` is a GPU.

    Args:
        cfg: the config of a model.
        devices: types of device that are allowed.

    Raises:
        ConfigError: where the device is not available or of another type, or the attention backend does not run on it.
    """
    name, backend = cfg.MODEL.DEVICE, cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name)
    if match is None or match[1] not in devices:
        raise ConfigError(f"MODEL.DEVICE is {name}: it must be {' or '.join(devices)}")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if match[1] == "cuda" and int(match[2] or 0) >= available:
        raise ConfigError(f"MODEL.DEVICE is {name}, and {available} CUDA devices are available: use MODEL.DEVICE cpu")
    missing = unmet_requirement(torch.device(name)) if backend == "triton" else None
    if missing is not None:
        raise ConfigError(f"MODEL.TRANSFORMER.ATTENTION_BACKEND {backend} {missing} (MODEL.DEVICE): use auto")
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
        cfg = with_overrides(cfg, {"MODEL.DEVICE": "cpu"})
        backend = cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND
        if backend == "triton":
            cfg = with_overrides(cfg, {"MODEL.TRANSFORMER.ATTENTION_BACKEND": "auto"})
            _logger.info("MODEL.TRANSFORMER.ATTENTION_BACKEND is auto: %s does not run on the CPU", backend)
    if check_device(cfg, devices=devices):
        _logger.info("the model runs on %s: %s", cfg.MODEL.DEVICE, torch.cuda.get_device_name(cfg.MODEL.DEVICE))
    elif "cuda" in devices:
        _logger.info(
            "the model runs on the CPU%s", "; MODEL.DEVICE cuda takes the GPU" if has_gpu and not requested else ""
        )
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
