"""Official checkpoints in, state dicts of this project out, with a strict report of what became of every name."""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from backbones.attention.alternatives.performer import draw_features
from backbones.attention.dense import DenseAttention
from backbones.backbone import Backbone
from backbones.build import create_backbone, create_classifier
from backbones.layers.position import GridRelativeBias, SegmentRelativeBias, resize_table
from backbones.lit import LIT
from backbones.sequence.convert import convert_sequence_state_dict
from backbones.utils.conversion_report import ConversionReport, check_weight, describe_mismatch
from backbones.utils.errors import InputError, explain_unknown_keywords
from backbones.utils.files import state_dict_of
from backbones.vil import ViL

__all__ = [
    "ConversionReport",
    "OfficialCheckpoint",
    "convert_sequence_state_dict",
    "convert_state_dict",
    "describe_mismatch",
    "recognise",
]

_HEAD = "the classification head and its norm are not part of a backbone"
_COMPUTED = "computed by the model"
_UNUSED = "never used: the global tokens are dropped after the stage"
_FEATURES = "full attention has no random features: they are drawn"
_COUNTER = "the trainer's iteration says when random features are drawn anew"
_EMPTY = "an empty tensor: the stage has no global token"
_GLOBAL_TOKEN = "only a classifier has a global token"
_NO_OUTPUT_NORMS = "a classifier has no norms of output maps: they start as ones and zeros"
_FROZEN_NORM = "a frozen norm counts no batches"

_WRAPPERS = ("module.", "backbone.bottom_up.")
_PATCH_EMBED = {
    "cls_token": "global_tokens",
    "cls_pos_embed": "positions.global_tokens",
    "x_pos_embed": "positions.rows",
    "y_pos_embed": "positions.cols",
    "proj": "patch_embed.projection",
    "norm_embed": "patch_embed.norm",
}
_ATTENTION = {
    "qkv": "qkv",
    "query": "query",
    "kv": "key_value",
    "proj": "projection",
    "query_global": "global_query",
    "kv_global": "global_key_value",
    "proj_global": "global_projection",
    "local_relative_position_bias_table": "relative_bias.table",
    "proj_k": "project_length",
    "proj_v": "project_length",
    "proj_sr": "reduce",
    "dual_ln_full": "local_norm",
    "dual_ln_dp": "projected_norm",
    "to_dynamic_projection": "dynamic_projection",
}
_MLP = {"fc1": "expand", "fc2": "contract"}
_LIT_EMBED = {
    "proj": "projection",
    "norm": "norm",
    "dconv": "",
    "dconv.conv_offset": "offset",
    "norm_layer": "norm",
}
_LIT_NORMS = {"norm1": "attention_norm", "norm2": "mlp_norm"}
_LIT_ATTENTION = {"qkv": "qkv", "proj": "projection", "relative_position_bias_table": "relative_bias.table"}
_TABLES = ("relative_bias.table", "positions.rows", "positions.cols", "positions.table")
_TIED = {"global_query": "query", "global_key_value": "key_value", "global_projection": "projection"}

_DETECTRON2, _MMDETECTION = "backbone.bottom_up.", "backbone."
_VIL_NAME = re.compile(
    r"layer[1-4]\.(0\.(proj|norm_embed|cls_token|cls_pos_embed|[xy]_pos_embed)|\d+\.(attn|mlp|norm)\.)"
)
_LIT_NAME = re.compile(r"(block[1-4]|layers\.[0-3]\.blocks)\.\d+\.|layers\.[0-3]\.downsample\.|pos_embed[1-4]$")
_LONG_SHORT = ("to_dynamic_projection", "dual_ln_full", "dual_ln_dp")
_SEGMENTATION_HEADS = ("decode_head.", "auxiliary_head.")

# Integers, and the axes of tensors that are taken apart.
_COUNTERS = ("num_batches_tracked", "relative_position_index", "calls_since_last_redraw")
_AXES = {"x_pos_embed": 3, "y_pos_embed": 3, "g2l_relative_position_bias": 3}

# Our names and tensors, or why a tensor is dropped, or None where no rule applies.
_Pieces = dict[str, Tensor] | str | None


@dataclasses.dataclass
class OfficialCheckpoint:
    """A checkpoint of an official project.

    Attributes:
        kind: ``"vision-longformer"``, ``"VisionLongformerForObjectDetection"``, ``"transformer-ls"``, ``"LIT"``,
            ``"LIT mmdetection"`` or ``"LIT mmsegmentation"``.
        backbone: as :func:`convert_state_dict` takes it, with the wrappers of names taken off.
        detector: all that is not backbone, FPN and heads, in official names; empty for a classifier.
        classifier: whether it is one.
    """

    kind: str
    backbone: dict[str, Tensor]
    detector: dict[str, Tensor]
    classifier: bool


def recognise(contents: Mapping[str, object]) -> OfficialCheckpoint | None:
    """Which official checkpoint it is, from its names; None where it is none.

    Args:
        contents: of :func:`backbones.utils.files.read_checkpoint`, or a bare state dict.
    """
    state_dict = state_dict_of(contents) or contents
    # What is no tensor is no weight: detectron2 may save numbers beside them.
    tensors: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        bare = name.removeprefix("module.")
        if isinstance(tensor, Tensor):
            if bare in tensors:
                raise InputError(f"the checkpoint has {bare} twice, with and without module.")
            tensors[bare] = tensor
    for prefix in (_DETECTRON2, _MMDETECTION, ""):
        backbone = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        vil = any(_VIL_NAME.match(name) for name in backbone)
        if not vil and not any(_LIT_NAME.match(name) for name in backbone):
            continue
        detector = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
        if vil and any(part in name for name in backbone for part in _LONG_SHORT):
            kind = "transformer-ls"
        elif vil:
            kind = "VisionLongformerForObjectDetection" if prefix else "vision-longformer"
        elif not prefix:
            kind = "LIT"
        else:
            segmentor = any(name.startswith(_SEGMENTATION_HEADS) for name in detector)
            kind = "LIT mmsegmentation" if segmentor else "LIT mmdetection"
        return OfficialCheckpoint(kind, backbone, detector, classifier=not prefix and "head.weight" in backbone)
    return None


@explain_unknown_keywords
def convert_state_dict(
    official: Mapping[str, Tensor],
    name: str,
    *,
    classifier: bool = False,
    model_options: Mapping[str, object] | None = None,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """The state dict of ``create_backbone(name, **model_options)`` from that of an official model.

    Args:
        official: names and tensors of vision-longformer, VisionLongformerForObjectDetection or LIT (both formats:
            that of LIT-Ti and that of the others); the prefixes ``module.`` and ``backbone.bottom_up.`` are taken off.
        name: a variant.
        classifier: for ``create_classifier`` instead.
        model_options: the keywords that the model is created with, so that tables get their size.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        InputError: for a variant without official weights, a name that no rule explains, a parameter of ours that
            stays unfilled, or a shape that does not fit; both sides are listed.
    """
    create = create_classifier if classifier else create_backbone
    with torch.device("meta"):
        model = create(name, **(model_options or {}))
    rules = _RULES.get(type(model.backbone if classifier else model))
    if rules is None:
        raise InputError(f"no official weights of {name} were ever published: there is nothing to convert")
    conversion = rules(model, "backbone." if classifier else "")
    unexplained = [key for key, tensor in official.items() if not conversion.take(key, tensor)]
    conversion.initialise()
    unfilled = [key for key in conversion.target if key not in conversion.converted]
    if unexplained or unfilled or conversion.misplaced:
        raise InputError(describe_mismatch(name, unexplained, unfilled, conversion.misplaced))
    return {key: conversion.converted[key] for key in conversion.target}, conversion.report


class _Conversion(abc.ABC):
    """The state of one conversion: the model to fill, what is filled, and the report. A family adds its rules."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self.model = model
        self.prefix = prefix
        self.target = model.state_dict()
        self.converted: dict[str, Tensor] = {}
        self.misplaced: dict[str, str] = {}
        self.report = ConversionReport()

    def take(self, official_name: str, tensor: Tensor) -> bool:
        """Place one official tensor; False where no rule explains its name."""
        name = official_name
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper)
        self._check(official_name, name, tensor)
        is_head = name in ("norm.weight", "norm.bias", "head.weight", "head.bias")
        pieces = self._head(name, tensor) if is_head else self._stage(name, tensor)
        if isinstance(pieces, str):
            self.report.dropped[official_name] = pieces
        elif pieces:
            self._place(official_name, pieces)
            for part, reason in self._left_over(name, pieces).items():
                self.report.dropped[f"{official_name}{part}"] = reason
        return bool(pieces)

    @abc.abstractmethod
    def initialise(self) -> None:
        """Give parameters that no checkpoint can fill their initial value."""

    @staticmethod
    def _check(official_name: str, name: str, tensor: Tensor) -> None:
        """Refuse tensors that are no weights."""
        if name.endswith(_COUNTERS):
            return
        check_weight(official_name, tensor)
        for part, ndim in _AXES.items():
            if name.endswith(part) and tensor.ndim != ndim:
                raise InputError(f"{official_name} has shape {tuple(tensor.shape)}: {ndim} axes are expected")

    def _head(self, name: str, tensor: Tensor) -> _Pieces:
        return {name: tensor} if self.prefix else _HEAD

    @abc.abstractmethod
    def _stage(self, name: str, tensor: Tensor) -> _Pieces:
        """Our names and tensors, or why there are none, or None where no rule applies."""

    def _left_over(self, name: str, pieces: Mapping[str, Tensor]) -> dict[str, str]:
        """Which part of a tensor ``pieces`` leave out, and why."""
        return {}

    def _place(self, official_name: str, pieces: Mapping[str, Tensor]) -> None:
        """Put ``pieces`` into the state dict, resized where that is allowed, and write it into the report."""
        for key, tensor in pieces.items():
            if key not in self.target:
                self.misplaced[official_name] = key
                return
            tensor = self._fitted(official_name, key, tensor)
            if key not in self.converted:
                self.converted[key] = tensor
            elif torch.equal(self.converted[key], tensor):
                self.report.tied[official_name] = key
                return
            else:
                raise InputError(
                    f"{official_name} differs from what {key} already holds: the checkpoint has separate projections"
                    + ("" if key.endswith("project_length") else ": create the model with shared_projections=False")
                )
        if len(pieces) > 1:
            self.report.split[official_name] = tuple(pieces)
        else:
            self.report.mapped[official_name] = next(iter(pieces))

    def _fitted(self, official_name: str, key: str, tensor: Tensor) -> Tensor:
        old, new = tuple(tensor.shape), tuple(self.target[key].shape)
        grid, mode = self._bias_grid(key)
        if old == new and (grid is None or grid[0] == grid[1]):
            return tensor
        side = math.isqrt(old[0]) if old else 0
        fits = self._is_resizable(key) and old[-1:] == new[-1:] and len(old) == len(new) and 0 not in old
        if not fits or grid and side**2 != old[0]:
            raise InputError(
                f"{official_name} has shape {old}, and {key} of this variant {new}: the checkpoint is of another "
                "variant, or has other global tokens, attention or merging: the options of create_backbone say which"
            )
        self.report.resized[key] = (old, new)
        if grid is None:
            return resize_table(tensor, new[:-1])
        return resize_table(tensor.unflatten(0, (side, side)), grid, mode=mode).flatten(0, 1)

    def _is_resizable(self, key: str) -> bool:
        # Offsets share rows of a segment's table, so that it is no grid.
        owner = self.model.get_submodule(key.rpartition(".")[0])
        return key.endswith(_TABLES) and not isinstance(owner, SegmentRelativeBias)

    def _bias_grid(self, key: str) -> tuple[tuple[int, int] | None, str]:
        """Height and width of the grid of offsets in a table of relative bias, and how it is resized."""
        if not key.endswith("relative_bias.table"):
            return None, ""
        bias = self.model.get_submodule(key.removesuffix(".table"))
        if isinstance(bias, GridRelativeBias):
            return (2 * bias.size[0] - 1, 2 * bias.size[1] - 1), bias.resize_mode
        side = math.isqrt(len(bias.table))
        return (side, side), "linear"


class _ViLConversion(_Conversion):
    def initialise(self) -> None:
        """A Performer from a partial one, whose full stages have no random features (ViL Table 8)."""
        for key, tensor in self.target.items():
            if key.endswith("attention.features") and key not in self.converted:
                self.converted[key] = draw_features(*tensor.shape)
                self.report.initialised[key] = _FEATURES

    # Each of the next methods gives our names and tensors, or why there are none, or None where no rule applies.

    def _stage(self, name: str, tensor: Tensor) -> _Pieces:
        if name == "calls_since_last_redraw":
            return _COUNTER
        match = re.fullmatch(r"layer(\d)\.(\d+)\.(\w+)(?:\.(.+))?", name)
        if match is None:
            return None
        stage, module = f"{self.prefix}stages.{int(match[1]) - 1}", int(match[2])
        part, rest = match[3], match[4] or ""
        if module == 0:
            return self._patch_embed(stage, part, rest, tensor)
        block = f"{stage}.blocks.{(module - 1) // 2}"
        if part == "norm":
            return {f"{block}.{'attention' if module % 2 else 'mlp'}_norm.{rest}": tensor}
        layer, _, leaf = rest.partition(".")
        if part == "mlp" and layer in _MLP:
            return {f"{block}.mlp.{_MLP[layer]}.{leaf}": tensor}
        if part == "attn":
            return self._attention(f"{block}.attention", layer, leaf, tensor)
        return None

    def _patch_embed(self, stage: str, part: str, rest: str, tensor: Tensor) -> _Pieces:
        if part not in _PATCH_EMBED:
            return None
        if tensor.numel() == 0:
            return _EMPTY
        if part in ("x_pos_embed", "y_pos_embed"):
            tensor = tensor[0]
        return {".".join(filter(None, (stage, _PATCH_EMBED[part], rest))): tensor}

    def _attention(self, attention: str, layer: str, leaf: str, tensor: Tensor) -> _Pieces:
        if layer == "relative_position_index":
            return _COMPUTED
        try:
            module = self.model.get_submodule(attention)
        except AttributeError:
            return None
        dense = isinstance(module, DenseAttention)
        bias = f"{attention}.relative_bias" if dense else attention
        if layer == "fast_attention" and leaf == "projection_matrix":
            return {f"{attention}.features": tensor}
        if layer == "qkv" and not hasattr(module, "qkv"):
            dim = len(tensor) // 3
            return {f"{attention}.query.{leaf}": tensor[:dim], f"{attention}.key_value.{leaf}": tensor[dim:]}
        if layer == "g2l_relative_position_bias":
            pieces = {f"{bias}.global_to_local": tensor[0], f"{bias}.local_to_global": tensor[1]}
            return pieces if module.update_globals else {f"{bias}.local_to_global": tensor[1]}
        if layer == "g2g_relative_position_bias":
            return {f"{bias}.global_to_global": tensor} if module.update_globals else _UNUSED
        if layer not in _ATTENTION:
            return None
        ours = _ATTENTION[layer]
        if ours in _TIED:
            if not module.update_globals:
                return _UNUSED
            if module.shared_projections:
                ours = _TIED[ours]
        return {".".join(filter(None, (attention, ours, leaf))): tensor}

    def _left_over(self, name: str, pieces: Mapping[str, Tensor]) -> dict[str, str]:
        return {"[0]": _UNUSED} if name.endswith("g2l_relative_position_bias") and len(pieces) == 1 else {}


class _LITConversion(_Conversion):
    """LIT-Ti writes ``block3.0`` and ``patch_embed3``, the others ``layers.2.blocks.0`` and ``layers.1.downsample``."""

    def initialise(self) -> None:
        norms = [key for key in self.target if key.startswith("output_norms.")]
        if _HEAD in self.report.dropped.values() and not any(key in self.converted for key in norms):
            for key in norms:
                fill = torch.ones if key.endswith("weight") else torch.zeros
                self.converted[key] = fill(self.target[key].shape, dtype=self.target[key].dtype)
                self.report.initialised[key] = _NO_OUTPUT_NORMS

    def _stage(self, name: str, tensor: Tensor) -> _Pieces:
        if match := re.fullmatch(r"(?:block([1-4])|layers\.([0-3])\.blocks)\.(\d+)\.(\w+)\.(.+)", name):
            stage = int(match[1]) - 1 if match[1] else int(match[2])
            return self._block(f"{self.prefix}stages.{stage}.blocks.{match[3]}", match[4], match[5], tensor)
        if match := re.fullmatch(r"(?:patch_embed([1-4]?)|layers\.([0-2])\.downsample)\.(.+)", name):
            # The official stages end with what ours begin with.
            stage = int(match[2]) + 1 if match[2] else int(match[1] or 1) - 1
            return self._patch_embed(f"{self.prefix}stages.{stage}.patch_embed", match[3], tensor)
        if match := re.fullmatch(r"norm([0-3])\.(weight|bias)", name):
            return {f"{self.prefix}output_norms.stage{int(match[1]) + 1}.{match[2]}": tensor}
        if match := re.fullmatch(r"pos_embed([1-4])", name):
            return self._positions(f"{self.prefix}stages.{int(match[1]) - 1}.positions", name, tensor)
        if name == "cls_token":
            return {f"{self.prefix}stages.3.global_tokens": tensor} if self.prefix else _GLOBAL_TOKEN
        return None

    def _block(self, block: str, part: str, rest: str, tensor: Tensor) -> _Pieces:
        if part in _LIT_NORMS:
            return {f"{block}.{_LIT_NORMS[part]}.{rest}": tensor}
        layer, _, leaf = rest.partition(".")
        if part == "mlp" and layer in _MLP:
            return {f"{block}.mlp.{_MLP[layer]}.{leaf}": tensor}
        if part == "attn" and rest == "relative_position_index":
            return _COMPUTED
        if part == "attn" and layer in _LIT_ATTENTION:
            return {".".join(filter(None, (f"{block}.attention.{_LIT_ATTENTION[layer]}", leaf))): tensor}
        return None

    def _patch_embed(self, embed: str, rest: str, tensor: Tensor) -> _Pieces:
        module, _, leaf = rest.rpartition(".")
        if module not in _LIT_EMBED:
            return None
        key = ".".join(filter(None, (embed, _LIT_EMBED[module], leaf)))
        if leaf == "num_batches_tracked" and f"{embed}.norm.running_mean" in self.target and key not in self.target:
            return _FROZEN_NORM
        return {key: tensor}

    def _positions(self, positions: str, name: str, tensor: Tensor) -> _Pieces:
        """(1, H * W, C), in the last stage behind the position of the global token."""
        number_global = int(name == "pos_embed4")
        places = tensor.shape[1] - number_global if tensor.ndim == 3 and len(tensor) == 1 else 0
        side = math.isqrt(max(places, 0))
        if not side or side**2 != places:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, which is no square map of positions")
        pieces = {f"{positions}.table": tensor[0, number_global:].unflatten(0, (side, side))}
        if number_global and self.prefix:
            pieces[f"{positions}.global_tokens"] = tensor[:, :1]
        return pieces

    def _left_over(self, name: str, pieces: Mapping[str, Tensor]) -> dict[str, str]:
        return {"[:, 0]": _GLOBAL_TOKEN} if name == "pos_embed4" and len(pieces) == 1 else {}


_RULES: dict[type[Backbone], type[_Conversion]] = {LIT: _LITConversion, ViL: _ViLConversion}
