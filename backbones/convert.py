"""Convert official checkpoints into state dicts of this project.

The module of each model family has the table of its official names (``OFFICIAL_NAMES``) and a function for the tensors
that are split or dropped (``convert_tensor``). :func:`convert_tensors` applies them and accounts for every name.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from backbones import lit, litv2, vil
from backbones.build import create_backbone, create_classifier
from backbones.checkpoint_files import state_dict_of
from backbones.errors import ConfigError, first_of
from backbones.layers.position import GridRelativeBias, fit_table

# A regular expression for whole parts of a dotted name, and its replacement
NameTable = Sequence[tuple[str, str | Callable[[re.Match], str]]]
# Our names and tensors. For a part that is dropped: its index ("[0]", or "" for the whole tensor) and the reason.
Pieces = Mapping[str, Tensor | str]
# Parameters without a value, and the checkpoint -> initial values and reasons
InitialValues = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, tuple[Tensor, str]]]

HEAD_NAMES = ("norm.weight", "norm.bias", "head.weight", "head.bias")
HEAD = "the classification head and its norm are not part of a backbone"

_FAMILIES: dict[type[nn.Module], ModuleType] = {vil.ViL: vil, lit.LIT: lit, litv2.LITv2: litv2}
_WRAPPERS = ("module.", "backbone.bottom_up.")
_VIL_NAME = re.compile(r"layer[1-4]\.(0\.(proj|norm_embed|cls_token|(cls|[xy])_pos_embed)|\d+\.(attn|mlp|norm)\.)")
_LIT_NAME = re.compile(r"(block[1-4]|layers\.[0-3]\.blocks)\.\d+\.|layers\.[0-3]\.downsample\.|pos_embed[1-4]$")
_LONG_SHORT = ("to_dynamic_projection", "dual_ln_full", "dual_ln_dp")
_SEGMENTATION_HEADS = ("decode_head.", "auxiliary_head.")
# Buffers that are not weights and may have integer values
_COUNTERS = ("num_batches_tracked", "relative_position_index", "calls_since_last_redraw")


@dataclasses.dataclass
class ConversionReport:
    """What happened to each name of a checkpoint.

    Attributes:
        mapped: Official name -> our name.
        resized: Our name -> (official shape, our shape).
        split: Official name -> our names, for a tensor that became several parameters.
        tied: Official name -> our name of the parameter that already has the same values.
        dropped: Official name -> reason.
        initialized: Our name -> reason why it has its initial value: the checkpoint cannot have a value for it.
    """

    mapped: dict[str, str] = dataclasses.field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    split: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    initialized: dict[str, str] = dataclasses.field(default_factory=dict)

    def summary(self) -> str:
        """Return one line with the number of names in each category."""
        return ", ".join(f"{len(getattr(self, f.name))} {f.name}" for f in dataclasses.fields(self))


@dataclasses.dataclass
class OfficialCheckpoint:
    """A checkpoint of an official project.

    Attributes:
        project: ``"vision-longformer"``, ``"VisionLongformerForObjectDetection"``, ``"transformer-ls"``, ``"LIT"``,
            ``"LIT mmdetection"`` or ``"LIT mmsegmentation"``. LITv2 is called LIT too.
        backbone: The input of :func:`convert_state_dict`, without prefixes.
        detector: FPN, heads and buffers under their official names; empty for a classifier.
        classifier: Whether the checkpoint has a classification head.
    """

    project: str
    backbone: dict[str, Tensor]
    detector: dict[str, Tensor]
    classifier: bool


def detect_format(contents: Mapping[str, object]) -> OfficialCheckpoint | None:
    """Return the official checkpoint that a file contains, or None if it has no official format.

    Args:
        contents: Result of :func:`backbones.checkpoint_files.read_checkpoint`, or a bare state dict.
    """
    # detectron2 may save numbers next to the tensors.
    state_dict = state_dict_of(contents) or contents
    tensors = {name.removeprefix("module."): t for name, t in state_dict.items() if isinstance(t, Tensor)}
    # detectron2, mmdetection, a classifier
    for prefix in ("backbone.bottom_up.", "backbone.", ""):
        backbone = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        is_vil = any(_VIL_NAME.match(name) for name in backbone)
        if not is_vil and not any(_LIT_NAME.match(name) for name in backbone):
            continue
        detector = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
        if is_vil and any(part in name for name in backbone for part in _LONG_SHORT):
            project = "transformer-ls"
        elif is_vil:
            project = "VisionLongformerForObjectDetection" if prefix else "vision-longformer"
        elif not prefix:
            project = "LIT"
        else:
            is_segmentor = any(name.startswith(_SEGMENTATION_HEADS) for name in detector)
            project = "LIT mmsegmentation" if is_segmentor else "LIT mmdetection"
        return OfficialCheckpoint(project, backbone, detector, classifier=not prefix and "head.weight" in backbone)
    return None


def convert_state_dict(
    official: Mapping[str, Tensor],
    name: str,
    *,
    classifier: bool = False,
    model_options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Convert an official state dict for ``create_backbone(name, **model_options)``.

    Args:
        official: State dict of vision-longformer, VisionLongformerForObjectDetection, transformer-ls, LIT or LITv2. The
            prefixes ``module.`` and ``backbone.bottom_up.`` are removed.
        name: Name of a variant.
        classifier: Convert for ``create_classifier`` instead.
        model_options: Keywords that the model is created with. They determine the sizes of its tables.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        ConfigError: If the variant has no official weights, or if a name or a shape does not match.

    Example:
        >>> state_dict, report = convert_state_dict(torch.load("model_best.pth")["net"], "vil_tiny_rpb")
        >>> create_backbone("vil_tiny_rpb").load_state_dict(state_dict)
    """
    create: Callable[..., nn.Module] = create_classifier if classifier else create_backbone
    with torch.device("meta"):
        model = create(name, **(model_options or {}))
    backbone, prefix = (model.get_submodule("backbone"), "backbone.") if classifier else (model, "")
    family = _FAMILIES.get(type(backbone))
    if family is None:
        raise ConfigError(f"{name!r} has no official weights. Choose a variant of ViL, Transformer-LS, LIT or LITv2.")
    modules = dict(backbone.named_modules())

    def convert(official_name: str, tensor: Tensor) -> Pieces:
        if official_name in HEAD_NAMES:
            return {official_name: tensor} if classifier else {"": HEAD}
        key = rename(official_name, family.OFFICIAL_NAMES)
        pieces = family.convert_tensor(official_name, key, tensor, modules)
        return {f"{prefix}{key}" if isinstance(piece, Tensor) else key: piece for key, piece in pieces.items()}

    return convert_tensors(model, official, convert, name=f"'{name}'", initial_values=family.initial_values)


def rename(name: str, table: NameTable) -> str:
    """Return a name after all replacements of a table, in its order."""
    for pattern, replacement in table:
        name = re.sub(rf"(?<![^.])(?:{pattern})(?![^.])", replacement, name)
    return name


def convert_tensors(
    model: nn.Module,
    official: Mapping[str, Tensor],
    convert: Callable[[str, Tensor], Pieces],
    *,
    name: str,
    initial_values: InitialValues | None = None,
    wrappers: Sequence[str] = _WRAPPERS,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Fill the state dict of a model with the tensors of a checkpoint. Names without a match or a reason are errors.

    Position tables of another size are resized.

    Args:
        model: The model, on any device. Its values are not read.
        official: The checkpoint's names and tensors.
        convert: Maps a name without ``wrappers``, and its tensor, to our names and tensors.
        name: Name of the model in errors.
        initial_values: Maps the parameters without a value, and ``official``, to initial values and reasons, for
            parameters that the checkpoint cannot have.
        wrappers: Prefixes to remove from names.

    Returns:
        The state dict, in the model's order, and the report.

    Raises:
        ConfigError: For an unexpected name, a parameter without a value, a shape that does not match, or a tensor that
            is not a weight.
    """
    target, modules = model.state_dict(), dict(model.named_modules())
    converted: dict[str, Tensor] = {}
    report, unexpected = ConversionReport(), []
    for official_name, tensor in official.items():
        plain_name = official_name
        for wrapper in wrappers:
            plain_name = plain_name.removeprefix(wrapper)
        if not plain_name.endswith(_COUNTERS):
            _check_weight(official_name, tensor)
        pieces = convert(plain_name, tensor)
        report.dropped |= {f"{official_name}{part}": text for part, text in pieces.items() if isinstance(text, str)}
        fitted = {key: piece for key, piece in pieces.items() if isinstance(piece, Tensor)}
        if not fitted.keys() <= target.keys():
            if tensor.numel():
                unexpected.append(official_name)
            else:
                report.dropped[official_name] = "an empty tensor: the model has no such module"
            continue
        for key, piece in fitted.items():
            path, _, leaf = key.rpartition(".")
            owner, old, new = modules[path], tuple(piece.shape), tuple(target[key].shape)
            fitted[key] = fit_table(piece, owner, leaf, is_square=isinstance(owner, GridRelativeBias))
            if fitted[key] is not piece:
                report.resized[key] = (old, new)
            elif old != new:
                advice = "Check the variant, its chunk sizes, global tokens, attention and token merging."
                raise ConfigError(f"'{official_name}' has shape {old}, but '{key}' of {name} has shape {new}. {advice}")
            if key in converted and not torch.equal(converted[key], fitted[key]):
                advice = "For separate projections of global tokens set shared_projections=False."
                raise ConfigError(f"'{official_name}' and another tensor have different values for '{key}'. {advice}")
        tied = [key for key in fitted if key in converted]
        if tied:
            report.tied[official_name] = tied[0]
        elif len(fitted) > 1:
            report.split[official_name] = tuple(fitted)
        elif fitted:
            report.mapped[official_name] = next(iter(fitted))
        converted |= fitted
    missing = {key: tensor for key, tensor in target.items() if key not in converted}
    for key, (tensor, reason) in (initial_values(missing, official) if initial_values else {}).items():
        converted[key], report.initialized[key] = tensor, reason
        del missing[key]
    check_names(name, unexpected, list(missing))
    return {key: converted[key] for key in target}, report


def check_names(name: str, unexpected: Sequence[str], missing: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if there are names of the checkpoint or parameters of the model without a match.

    Args:
        name: Name of the model.
        unexpected: Names of the checkpoint that the model does not have.
        missing: Parameters of the model that the checkpoint does not have.
    """
    lists = {"unexpected names": unexpected, "missing parameters": missing}
    parts = [f"{description}: {first_of(names, 5)}" for description, names in lists.items() if names]
    if parts:
        advice = "Check the variant, its sizes and its global tokens."
        raise ConfigError(f"The checkpoint does not match {name} ({'; '.join(parts)}). {advice}")


def _check_weight(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not tensor.ndim:
        kind = f"type {tensor.dtype} and shape {tuple(tensor.shape)}"
        raise ConfigError(f"'{name}' is not a weight: it has {kind}. Use another checkpoint.")
    if not tensor.isfinite().all():
        raise ConfigError(f"'{name}' has non-finite values. Use another checkpoint.")
