"""Convert official checkpoints into state dicts of this project, with a strict report of what became of every name."""

import dataclasses
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from backbones.attention.dense import DenseAttention
from backbones.attention.efficient import sample_features
from backbones.backbone import Backbone
from backbones.build import create_backbone, create_classifier
from backbones.checkpoint_files import state_dict_of
from backbones.errors import ConfigError, explain_unknown_keywords
from backbones.layers.position import GridRelativeBias, SegmentRelativeBias, resize_table
from backbones.lit import LIT
from backbones.sequence.char_lm import CharLM
from backbones.sequence.encoder import SequenceEncoder
from backbones.vil import ViL

# Why a tensor is dropped, or a parameter has its initial value
_HEAD = "the classification head and its norm are not part of a backbone"
_COMPUTED = "computed by the model"
_UNUSED = "never used: the global tokens are dropped after the stage"
_FEATURES = "full attention has no random features: they are sampled"
_COUNTER = "the trainer's iteration determines when random features are redrawn"
_EMPTY = "an empty tensor: the model has no such module"
_GLOBAL_TOKEN = "only a classifier has a global token"
_NO_OUTPUT_NORMS = "a classifier has no norms of feature maps: they start as ones and zeros"
_FROZEN_NORM = "a frozen norm counts no batches"
_UNUSED_NORM = "never used: there are no projected keys and no class token to norm"
_SEQUENCE_HEAD = "the classification head is not part of the encoder"

_HEAD_NAMES = ("norm.weight", "norm.bias", "head.weight", "head.bias")
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
_ENCODER = {
    "cls_embed": "class_token",
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions",
    "norm.weight": "norm.weight",
    "norm.bias": "norm.bias",
}
_ENCODER_LAYER = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "mlpblock.0": "mlp.expand",
    "mlpblock.3": "mlp.contract",
    "mha.W_q": "attention.query",
    "mha.W_k": "attention.key",
    "mha.W_v": "attention.value",
    "mha.W_o": "attention.projection",
    "mha.dual_ln_l": "attention.local_norm",
    "mha.dual_ln_s": "attention.projected_norm",
    "mha.dconv_fc": "attention.dynamic_projection",
}
_CHAR_LM = {"in_emb.weight": "embedding.weight", "out_emb.weight": "embedding.weight", "out_emb.bias": "bias"}
_CHAR_LM_LAYER = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "ff.fc1": "mlp.expand",
    "ff.fc2": "mlp.contract",
    "attn.proj_query": "attention.query",
    "attn.proj_key": "attention.key",
    "attn.proj_val": "attention.value",
    "attn.proj_out": "attention.projection",
    "attn.dual_ln_win": "attention.local_norm",
    "attn.dual_ln_dproj": "attention.projected_norm",
    "attn.dconv_1": "attention.dynamic_projection",
    "attn.r_net": "attention.window_position",
    "attn.r_net_chunk": "attention.segment_position",
}
_CHAR_LM_BIASES = {"r_w_bias": "key_bias", "r_r_bias": "query_bias"}

_DETECTRON2, _MMDETECTION = "backbone.bottom_up.", "backbone."
_VIL_NAME = re.compile(
    r"layer[1-4]\.(0\.(proj|norm_embed|cls_token|cls_pos_embed|[xy]_pos_embed)|\d+\.(attn|mlp|norm)\.)"
)
_LIT_NAME = re.compile(r"(block[1-4]|layers\.[0-3]\.blocks)\.\d+\.|layers\.[0-3]\.downsample\.|pos_embed[1-4]$")
_LONG_SHORT = ("to_dynamic_projection", "dual_ln_full", "dual_ln_dp")
_SEGMENTATION_HEADS = ("decode_head.", "auxiliary_head.")
# Tensors that are not weights, and may be integers
_COUNTERS = ("num_batches_tracked", "relative_position_index", "calls_since_last_redraw")

# Our names and tensors, with the reason instead of the tensor for a part that is dropped; or the reason why all of the
# tensor is dropped; or None if no rule applies
_Pieces = dict[str, Tensor | str] | str | None


@dataclasses.dataclass
class ConversionReport:
    """The result of a conversion, by the names of an official checkpoint; official names first, ours second.

    Attributes:
        mapped: official name -> our name.
        resized: our name -> (official shape, our shape).
        split: official name -> our names, for tensors that became several.
        tied: official name -> our name of the parameter that has the same values.
        dropped: official name -> reason.
        initialised: our name -> why it has its initial value: the output norms of a LIT detector, which a classifier
            does not have, and the random features of a Performer's stages that have full attention in the file.
    """

    mapped: dict[str, str] = dataclasses.field(default_factory=dict)
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    split: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    initialised: dict[str, str] = dataclasses.field(default_factory=dict)

    def summary(self) -> str:
        """Return one line with the number of names in each category."""
        return ", ".join(f"{len(getattr(self, f.name))} {f.name}" for f in dataclasses.fields(self))


@dataclasses.dataclass
class OfficialCheckpoint:
    """A checkpoint of an official project.

    Attributes:
        project: ``"vision-longformer"``, ``"VisionLongformerForObjectDetection"``, ``"transformer-ls"``, ``"LIT"``,
            ``"LIT mmdetection"`` or ``"LIT mmsegmentation"``.
        backbone: the argument of :func:`convert_state_dict`, without the prefixes of wrappers.
        detector: all that is not backbone, FPN and heads, in official names; empty for a classifier.
        classifier: whether it is one.
    """

    project: str
    backbone: dict[str, Tensor]
    detector: dict[str, Tensor]
    classifier: bool


def recognise(contents: Mapping[str, object]) -> OfficialCheckpoint | None:
    """Return the official checkpoint that the names are of, or None if they are of another.

    Args:
        contents: of :func:`backbones.checkpoint_files.read_checkpoint`, or a bare state dict.
    """
    # detectron2 may save numbers among the tensors.
    state_dict = {k: t for k, t in (state_dict_of(contents) or contents).items() if isinstance(t, Tensor)}
    tensors = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    if len(tensors) < len(state_dict):
        twice = next(name for name in state_dict if f"module.{name}" in state_dict)
        raise ConfigError(f"the checkpoint has {twice} twice, with and without module.")
    for prefix in (_DETECTRON2, _MMDETECTION, ""):
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


@explain_unknown_keywords
def convert_state_dict(
    official: Mapping[str, Tensor],
    name: str,
    *,
    classifier: bool = False,
    model_options: Mapping[str, object] | None = None,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the state dict of ``create_backbone(name, **model_options)`` from that of an official model.

    Args:
        official: names and tensors of vision-longformer, VisionLongformerForObjectDetection or LIT (both formats:
            that of LIT-Ti and that of the others); the prefixes ``module.`` and ``backbone.bottom_up.`` are removed.
        name: a variant.
        classifier: for ``create_classifier`` instead.
        model_options: the keywords that the model is created with, which determine the sizes of tables.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        ConfigError: for a variant without official weights, a name that no rule explains, a parameter of ours that
            remains without values, or a shape that does not fit; both sides are listed.
    """
    create = create_classifier if classifier else create_backbone
    with torch.device("meta"):
        model = create(name, **(model_options or {}))
    conversion = _BACKBONES.get(type(model.backbone if classifier else model))
    if conversion is None:
        raise ConfigError(f"no official weights of {name} were ever published")
    return conversion(model, "backbone." if classifier else "").convert(name, official)


def convert_sequence_state_dict(
    official: Mapping[str, Tensor], model: SequenceEncoder | CharLM
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the state dict of ``model`` from that of the official model.

    Args:
        official: names and tensors of transformer-ls, ``lra/model.py`` or ``autoregressive/model_lib/model.py``; the
            prefixes of their wrappers are removed.
        model: of :func:`backbones.sequence.create_sequence_encoder` or :func:`backbones.sequence.create_char_lm`, on
            any device; its own values are not read.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        ConfigError: for a name that no rule explains, a parameter of ours that remains without values, a shape that
            does not fit, or a tensor that is not a weight.
    """
    conversion = _CharLMConversion if isinstance(model, CharLM) else _EncoderConversion
    return conversion(model).convert("the model", official)


def describe_mismatch(
    name: str, unexplained: list[str], unfilled: list[str], misplaced: Mapping[str, str] | None = None
) -> str:
    """Return the line about a checkpoint that does not fit a model.

    Args:
        name: of the variant.
        unexplained: official names to which no rule applies.
        unfilled: our names without values.
        misplaced: official name -> our name for it, which the model does not have.
    """
    parts = [f"the checkpoint does not fit {name}: it is of another variant, or has other sizes or global tokens"]
    would_be = [f"{official} ({ours})" for official, ours in (misplaced or {}).items()]
    for label, names in (("the model lacks", would_be), ("no rule explains", unexplained), ("nothing fills", unfilled)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{label} {', '.join(names[:5])}{more}")
    return "; ".join(parts)


class _Conversion:
    """One conversion: the model to fill, its values, and the report. Subclasses have the rules of a model."""

    wrappers = ("module.", "backbone.bottom_up.")

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model = model
        self.prefix = prefix
        self.target = model.state_dict()
        self.converted: dict[str, Tensor] = {}
        self.misplaced: dict[str, str] = {}
        self.report = ConversionReport()

    def convert(self, name: str, official: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ConversionReport]:
        """Return the state dict and the report; ``name`` is that of the model in errors."""
        unexplained = [key for key, tensor in official.items() if not self._take(key, tensor)]
        self._initialise()
        unfilled = [key for key in self.target if key not in self.converted]
        if unexplained or unfilled or self.misplaced:
            raise ConfigError(describe_mismatch(name, unexplained, unfilled, self.misplaced))
        return {key: self.converted[key] for key in self.target}, self.report

    def _rules(self, name: str, tensor: Tensor) -> _Pieces:
        """Return what an official tensor becomes."""
        raise NotImplementedError

    def _initialise(self) -> None:
        """Set parameters that no checkpoint can fill to their initial values."""

    def _resized(self, key: str, tensor: Tensor) -> Tensor | None:
        """Return the tensor in the shape of ours if it may be resized."""
        return None

    def _take(self, official_name: str, tensor: Tensor) -> bool:
        """Convert one official tensor; return whether a rule explains its name."""
        name = official_name
        for wrapper in self.wrappers:
            name = name.removeprefix(wrapper)
        if not name.endswith(_COUNTERS):
            if not tensor.is_floating_point() or not tensor.ndim:
                shape = tuple(tensor.shape)
                raise ConfigError(f"{official_name} is not a weight: its type is {tensor.dtype}, its shape {shape}")
            if not tensor.isfinite().all():
                raise ConfigError(f"{official_name} has values that are not finite")
        pieces = self._rules(name, tensor)
        if isinstance(pieces, str):
            self.report.dropped[official_name] = pieces
        elif pieces:
            kept = {key: piece for key, piece in pieces.items() if isinstance(piece, Tensor)}
            self._place(official_name, kept)
            self.report.dropped |= {f"{official_name}{key}": pieces[key] for key in pieces.keys() - kept.keys()}
        return bool(pieces)

    def _place(self, official_name: str, pieces: Mapping[str, Tensor]) -> None:
        """Put tensors into the state dict, resized if that is allowed, and add them to the report."""
        for key, tensor in pieces.items():
            if key not in self.target:
                self.misplaced[official_name] = key
                return
            old, new = tuple(tensor.shape), tuple(self.target[key].shape)
            resized = self._resized(key, tensor)
            if resized is not None:
                self.report.resized[key] = (old, new)
                tensor = resized
            elif old != new:
                raise ConfigError(
                    f"{official_name} has shape {old}, and {key} of this model {new}: the checkpoint is of another"
                    " variant, or has other sizes, global tokens, attention or merging"
                )
            if key not in self.converted:
                self.converted[key] = tensor
            elif torch.equal(self.converted[key], tensor):
                self.report.tied[official_name] = key
                return
            else:
                raise ConfigError(
                    f"{official_name} differs from the values of {key}: the checkpoint has separate projections"
                    + ("" if key.endswith(("project_length", "embedding.weight")) else " (shared_projections=False)")
                )
        if len(pieces) > 1:
            self.report.split[official_name] = tuple(pieces)
        else:
            self.report.mapped[official_name] = next(iter(pieces))


class _BackboneConversion(_Conversion):
    def _resized(self, key: str, tensor: Tensor) -> Tensor | None:
        owner, old, new = self.model.get_submodule(key.rpartition(".")[0]), tensor.shape, self.target[key].shape
        # Offsets share rows of a segment's table, so that it is not a grid.
        if not key.endswith(_TABLES) or isinstance(owner, SegmentRelativeBias):
            return None
        if old[-1:] != new[-1:] or len(old) != len(new) or 0 in old:
            return None
        if not key.endswith("relative_bias.table"):
            return None if old == new else resize_table(tensor, tuple(new[:-1]))
        old_side, new_side = math.isqrt(len(tensor)), math.isqrt(new[0])
        size, mode = (new_side, new_side), "linear"
        if isinstance(owner, GridRelativeBias):
            size, mode = (2 * owner.size[0] - 1, 2 * owner.size[1] - 1), owner.resize_mode
        if old_side**2 != len(tensor) or (old == new and size[0] == size[1]):
            return None
        return resize_table(tensor.unflatten(0, (old_side, old_side)), size, mode=mode).flatten(0, 1)


class _ViLConversion(_BackboneConversion):
    def _initialise(self) -> None:
        """A Performer from a partial one, whose full stages have no random features (ViL Table 8)."""
        for key, tensor in self.target.items():
            if key.endswith("attention.features") and key not in self.converted:
                self.converted[key] = sample_features(*tensor.shape)
                self.report.initialised[key] = _FEATURES

    def _rules(self, name: str, tensor: Tensor) -> _Pieces:
        if name in _HEAD_NAMES:
            return {name: tensor} if self.prefix else _HEAD
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
            # A tensor of another shape is refused as a whole.
            to_local, to_global = tensor.unbind() if len(tensor) == 2 else (tensor, tensor)
            used = {f"{bias}.local_to_global": to_global}
            return {f"{bias}.global_to_local": to_local} | used if module.update_globals else used | {"[0]": _UNUSED}
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


class _LITConversion(_BackboneConversion):
    """LIT-Ti writes ``block3.0`` and ``patch_embed3``, the others ``layers.2.blocks.0`` and ``layers.1.downsample``."""

    def _initialise(self) -> None:
        norms = [key for key in self.target if key.startswith("output_norms.")]
        if _HEAD in self.report.dropped.values() and not any(key in self.converted for key in norms):
            for key in norms:
                fill = torch.ones if key.endswith("weight") else torch.zeros
                self.converted[key] = fill(self.target[key].shape, dtype=self.target[key].dtype)
                self.report.initialised[key] = _NO_OUTPUT_NORMS

    def _rules(self, name: str, tensor: Tensor) -> _Pieces:
        if name in _HEAD_NAMES:
            return {name: tensor} if self.prefix else _HEAD
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
        number = tensor.shape[1] - number_global if tensor.ndim == 3 and len(tensor) == 1 else 0
        side = math.isqrt(max(number, 0))
        if not side or side**2 != number:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, which is not a square table of positions")
        pieces = {f"{positions}.table": tensor[0, number_global:].unflatten(0, (side, side))}
        if number_global and self.prefix:
            return pieces | {f"{positions}.global_tokens": tensor[:, :1]}
        return pieces | ({"[:, 0]": _GLOBAL_TOKEN} if number_global else {})


class _SequenceConversion(_Conversion):
    # DataParallel, fairseq, and both wrappers of the official models
    wrappers = ("module.", "decoder.", "model.")


class _EncoderConversion(_SequenceConversion):
    def _rules(self, name: str, tensor: Tensor) -> _Pieces:
        if name.startswith("seq_classifer."):
            return _SEQUENCE_HEAD
        if name in _ENCODER:
            return {_ENCODER[name]: tensor}
        match = re.fullmatch(r"transformer_(\d+)\.(.+)\.(weight|bias)", name)
        if match is None or match[2] not in _ENCODER_LAYER:
            return None
        layer, part = f"layers.{match[1]}", _ENCODER_LAYER[match[2]]
        key = f"{layer}.{part}.{match[3]}"
        if key not in self.target and f"{layer}.mlp_norm.weight" in self.target:
            if part == "attention.dynamic_projection" and not tensor.numel():
                return _EMPTY
            if part == "attention.projected_norm":
                return _UNUSED_NORM
        return {key: tensor}


class _CharLMConversion(_SequenceConversion):
    def _rules(self, name: str, tensor: Tensor) -> _Pieces:
        if name in _CHAR_LM:
            return {_CHAR_LM[name]: tensor}
        if name == "pos_emb.inv_freq":
            dim = self.target["embedding.weight"].shape[1]
            expected = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
            if tensor.shape != expected.shape or not torch.allclose(tensor.float().cpu(), expected, rtol=1e-2):
                raise ConfigError(f"{name} has other frequencies than 10000^(-2 i / {dim}), which the model computes")
            return _COMPUTED
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
        if match is None:
            return None
        if match[2] == "attn" and match[3] in _CHAR_LM_BIASES:
            # The official biases (1, M, 1, D) are broadcast.
            return {f"layers.{match[1]}.attention.{_CHAR_LM_BIASES[match[3]]}": tensor.reshape(-1, tensor.shape[-1])}
        if match[2] not in _CHAR_LM_LAYER or match[3] not in ("weight", "bias"):
            return None
        return {f"layers.{match[1]}.{_CHAR_LM_LAYER[match[2]]}.{match[3]}": tensor}


_BACKBONES: dict[type[Backbone], type[_Conversion]] = {LIT: _LITConversion, ViL: _ViLConversion}
