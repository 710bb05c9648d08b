"""Convert official checkpoints into state dicts of this project, with a strict report of what became of every name."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from backbones.attention.dense import DenseAttention
from backbones.attention.efficient import sample_features
from backbones.build import create_backbone, create_classifier
from backbones.checkpoint_files import state_dict_of
from backbones.errors import ConfigError, explain_unknown_keywords
from backbones.layers.position import GridRelativeBias, fit_table
from backbones.lit import LIT
from backbones.sequence.char_lm import CharLM
from backbones.sequence.encoder import SequenceEncoder
from backbones.vil import ViL

# Why a tensor is dropped
_HEAD = "the classification head and its norm are not part of a backbone"
_COMPUTED = "not a weight: the model or its trainer computes it"
_UNUSED = "never used: the global tokens are dropped after the stage"
_GLOBAL_TOKEN = "only a classifier has a global token"

_HEAD_NAMES = ("norm.weight", "norm.bias", "head.weight", "head.bias")
_DETECTRON2, _MMDETECTION = "backbone.bottom_up.", "backbone."
_VIL_NAME = re.compile(
    r"layer[1-4]\.(0\.(proj|norm_embed|cls_token|cls_pos_embed|[xy]_pos_embed)|\d+\.(attn|mlp|norm)\.)"
)
_LIT_NAME = re.compile(r"(block[1-4]|layers\.[0-3]\.blocks)\.\d+\.|layers\.[0-3]\.downsample\.|pos_embed[1-4]$")
_LONG_SHORT = ("to_dynamic_projection", "dual_ln_full", "dual_ln_dp")
_SEGMENTATION_HEADS = ("decode_head.", "auxiliary_head.")
# Tensors that are not weights, and may be integers
_COUNTERS = ("num_batches_tracked", "relative_position_index", "calls_since_last_redraw")

_COMMON_PARTS = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "attn": "attention",
    "ff": "mlp",
}


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


def detect_format(contents: Mapping[str, object]) -> OfficialCheckpoint | None:
    """Return the official checkpoint that the names are of, or None if they are of another.

    Args:
        contents: result of :func:`backbones.checkpoint_files.read_checkpoint`, or a bare state dict.
    """
    # detectron2 may save numbers among the tensors.
    state_dict = {k: t for k, t in (state_dict_of(contents) or contents).items() if isinstance(t, Tensor)}
    tensors = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
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
    model_options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the state dict of ``create_backbone(name, **model_options)`` from that of an official model.

    Args:
        official: names and tensors of vision-longformer, VisionLongformerForObjectDetection or LIT (both formats:
            that of LIT-Ti and that of the others); the prefixes ``module.`` and ``backbone.bottom_up.`` are removed.
        name: a variant.
        classifier: whether the state dict is for ``create_classifier`` instead.
        model_options: the keywords that the model is created with, which determine the sizes of tables.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        ConfigError: for a variant without official weights, an official name that the model has no parameter for, a
            parameter without values, or a shape that does not fit; both sides are listed.
    """
    create: Callable[..., nn.Module] = create_classifier if classifier else create_backbone
    with torch.device("meta"):
        model = create(name, **(model_options or {}))
    converter = _NAME_CONVERTERS.get(type(getattr(model, "backbone", model)))
    if converter is None:
        raise ConfigError(f"there are no official weights of {name}")
    return converter(model, "backbone." if classifier else "").convert(name, official)


def convert_sequence_state_dict(
    official: Mapping[str, Tensor], model: SequenceEncoder | CharLM
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Return the state dict of ``model`` from that of the official model.

    Args:
        official: names and tensors of transformer-ls, ``lra/model.py`` or ``autoregressive/model_lib/model.py``; the
            prefixes of their wrappers are removed.
        model: result of :func:`backbones.sequence.create_sequence_encoder` or
            :func:`backbones.sequence.create_char_lm`, on any device; its own values are not read.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        ConfigError: for an official name that the model has no parameter for, a parameter without values, a shape that
            does not fit, or a tensor that is not a weight.
    """
    return _NAME_CONVERTERS[type(model)](model).convert("the model", official)


def describe_mismatch(name: str, unexplained: list[str], missing: list[str]) -> str:
    """Return the line about a checkpoint that does not fit a model.

    Args:
        name: name of the variant.
        unexplained: official names that the model has no parameter for.
        missing: our names that the checkpoint has no values for.
    """
    parts = [f"the checkpoint does not fit {name}: it is of another variant, or has other sizes or global tokens"]
    for label, names in (
        ("the model has no parameter for", unexplained),
        ("the checkpoint has no values for", missing),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            parts.append(f"{label} {', '.join(names[:5])}{more}")
    return "; ".join(parts)


class _NameConverter:
    """A conversion: the model to fill, its values so far, and the report. A subclass has the names of a family.

    Attributes:
        wrappers: prefixes that are removed.
        starts: regular expressions of how official names start, with our start, of which the first one that matches
            counts; a function gets the match.
        parts: parts of official names between dots -> ours.
    """

    wrappers: tuple[str, ...] = ("module.", "backbone.bottom_up.")
    starts: tuple[tuple[str, str | Callable[[re.Match], str]], ...]
    parts: Mapping[str, str]

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.modules = dict(model.named_modules())
        self.prefix = prefix
        self.target = model.state_dict()
        self.converted: dict[str, Tensor] = {}
        self.report = ConversionReport()

    def convert(self, name: str, official: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], ConversionReport]:
        """Return the state dict and the report; ``name`` is that of the model in errors."""
        unexplained = []
        for official_name, tensor in official.items():
            plain_name = official_name
            for wrapper in self.wrappers:
                plain_name = plain_name.removeprefix(wrapper)
            if not plain_name.endswith(_COUNTERS):
                _check_weight(official_name, tensor)
            pieces = self._pieces(plain_name, self._rename(plain_name), tensor)
            kept = {key: piece for key, piece in pieces.items() if isinstance(piece, Tensor)}
            reasons = {f"{official_name}{part}": piece for part, piece in pieces.items() if isinstance(piece, str)}
            self.report.dropped |= reasons
            if not kept.keys() <= self.target.keys():
                unexplained.append(official_name)
            elif kept:
                self._fill(official_name, kept)
        self._initialise()
        missing = [key for key in self.target if key not in self.converted]
        if unexplained or missing:
            raise ConfigError(describe_mismatch(name, unexplained, missing))
        return {key: self.converted[key] for key in self.target}, self.report

    def _rename(self, name: str) -> str:
        for pattern, start in self.starts:
            name, is_renamed = re.subn(f"^{pattern}", start, name)
            if is_renamed:
                break
        parts = "|".join(map(re.escape, self.parts))
        name = re.sub(rf"(?<![^.])({parts})(?![^.])", lambda match: self.parts[match[1]], name)
        return name if name in _HEAD_NAMES else self.prefix + name

    def _pieces(self, name: str, key: str, tensor: Tensor) -> dict[str, Tensor | str]:
        """Return what an official tensor becomes.

        Args:
            name: its official name, without wrappers.
            key: our name for it.
            tensor: its values, of any shape.

        Returns:
            Our names and tensors. For a part that is dropped, its index (``"[0]"``, or ``""`` for the whole tensor) and
            the reason.
        """
        if key not in self.target and not tensor.numel():
            return {"": "an empty tensor: the model has no such module"}
        return {key: tensor}

    def _initialise(self) -> None:
        """Set parameters that no checkpoint can fill to their initial values."""

    def _fill(self, official_name: str, pieces: Mapping[str, Tensor]) -> None:
        """Put tensors into the state dict, resized if that is allowed, and add them to the report."""
        for key, tensor in pieces.items():
            path, _, leaf = key.rpartition(".")
            owner, old, new = self.modules[path], tuple(tensor.shape), tuple(self.target[key].shape)
            # The official tables are of square maps.
            side = (math.isqrt(len(tensor)) + 1) // 2 if tensor.ndim and isinstance(owner, GridRelativeBias) else 0
            fitted = fit_table(tensor, owner, leaf, made_for=(side, side) if side else None)
            if fitted is not tensor:
                self.report.resized[key] = (old, new)
            elif old != new:
                raise ConfigError(
                    f"{official_name} has shape {old}, and {key} of this model {new}: the checkpoint is of another"
                    " variant, or has other sizes, global tokens, attention or merging"
                )
            if key not in self.converted:
                self.converted[key] = fitted
            elif torch.equal(self.converted[key], fitted):
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


def _check_weight(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not tensor.ndim:
        raise ConfigError(f"{name} is not a weight: its type is {tensor.dtype}, its shape {tuple(tensor.shape)}")
    if not tensor.isfinite().all():
        raise ConfigError(f"{name} has values that are not finite")


class _ViLNameConverter(_NameConverter):
    """Module 0 of ``layer1`` is the embedding, the odd ones are attention, the even ones MLPs; so in all layers."""

    starts = (
        (r"layer(\d)\.0\.(proj|norm_embed)\.", lambda m: f"stages.{int(m[1]) - 1}.patch_embed.{m[2]}."),
        (r"layer(\d)\.0\.", lambda m: f"stages.{int(m[1]) - 1}."),
        (
            r"layer(\d)\.(\d+)\.(norm|attn|mlp)\.",
            lambda m: (
                f"stages.{int(m[1]) - 1}.blocks.{(int(m[2]) - 1) // 2}."
                f"{'attention' if int(m[2]) % 2 else 'mlp'}{'_norm' if m[3] == 'norm' else ''}."
            ),
        ),
    )
    parts = _COMMON_PARTS | {
        "cls_token": "global_tokens",
        "cls_pos_embed": "positions.global_tokens",
        "x_pos_embed": "positions.rows",
        "y_pos_embed": "positions.cols",
        "norm_embed": "norm",
        "kv": "key_value",
        "query_global": "global_query",
        "kv_global": "global_key_value",
        "proj_global": "global_proj",
        "local_relative_position_bias_table": "relative_bias.table",
        "fast_attention.projection_matrix": "features",
        "proj_k": "project_length",
        "proj_v": "project_length",
        "proj_sr": "reduce",
        "dual_ln_full": "local_norm",
        "dual_ln_dp": "projected_norm",
        "to_dynamic_projection": "dynamic_projection",
    }

    def _pieces(self, name: str, key: str, tensor: Tensor) -> dict[str, Tensor | str]:
        if name in _HEAD_NAMES and not self.prefix:
            return {"": _HEAD}
        if name.endswith(("relative_position_index", "calls_since_last_redraw")):
            return {"": _COMPUTED}
        if key.endswith(("positions.rows", "positions.cols")):
            return {key: tensor[0]}
        path, attention, leaf = key.partition(".attention.")
        path += ".attention"
        if attention and path in self.modules:
            return self._attention(path, leaf, tensor)
        return super()._pieces(name, key, tensor)

    def _attention(self, path: str, leaf: str, tensor: Tensor) -> dict[str, Tensor | str]:
        module = self.modules[path]
        if leaf.startswith("qkv.") and not hasattr(module, "qkv"):
            dim, leaf = len(tensor) // 3, leaf.removeprefix("qkv.")
            return {f"{path}.query.{leaf}": tensor[:dim], f"{path}.key_value.{leaf}": tensor[dim:]}
        bias = f"{path}.relative_bias" if isinstance(module, DenseAttention) else path
        if leaf == "g2l_relative_position_bias":
            # A tensor of another shape does not fit as a whole.
            to_local, to_global = tensor.unbind() if len(tensor) == 2 else (tensor, tensor)
            used: dict[str, Tensor | str] = {f"{bias}.local_to_global": to_global}
            return {f"{bias}.global_to_local": to_local, **used} if module.update_globals else used | {"[0]": _UNUSED}
        if leaf == "g2g_relative_position_bias":
            return {f"{bias}.global_to_global": tensor} if module.update_globals else {"": _UNUSED}
        if leaf.startswith("global_"):
            if not module.update_globals:
                return {"": _UNUSED}
            if module.shared_projections:
                leaf = leaf.removeprefix("global_")
        return {f"{path}.{leaf}": tensor}

    def _initialise(self) -> None:
        """A Performer from a partial one, whose full stages have no random features (ViL Table 8)."""
        for key, tensor in self.target.items():
            if key.endswith("attention.features") and key not in self.converted:
                self.converted[key] = sample_features(*tensor.shape)
                self.report.initialised[key] = "full attention has no random features: they are sampled"


class _LITNameConverter(_NameConverter):
    """LIT-Ti writes ``block3.0`` and ``patch_embed3``, the others ``layers.2.blocks.0`` and ``layers.1.downsample``."""

    starts = (
        (r"block([1-4])\.(\d+)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks.{m[2]}."),
        (r"layers\.([0-3])\.blocks\.(\d+)\.", r"stages.\1.blocks.\2."),
        (r"patch_embed\.", "stages.0.patch_embed."),
        (r"patch_embed([1-4])\.", lambda m: f"stages.{int(m[1]) - 1}.patch_embed."),
        # The official stages end with what ours begin with.
        (r"layers\.([0-2])\.downsample\.", lambda m: f"stages.{int(m[1]) + 1}.patch_embed."),
        (r"norm([0-3])\.", lambda m: f"output_norms.stage{int(m[1]) + 1}."),
        (r"pos_embed([1-4])$", lambda m: f"stages.{int(m[1]) - 1}.positions.table"),
        (r"cls_token$", "stages.3.global_tokens"),
    )
    parts = _COMMON_PARTS | {
        "relative_position_bias_table": "relative_bias.table",
        "norm_layer": "norm",
        "dconv.conv_offset": "offset",
        "dconv.weight": "weight",
        "dconv.bias": "bias",
    }

    def _pieces(self, name: str, key: str, tensor: Tensor) -> dict[str, Tensor | str]:
        if not self.prefix and (name in _HEAD_NAMES or name == "cls_token"):
            return {"": _GLOBAL_TOKEN if name == "cls_token" else _HEAD}
        if name.endswith("attn.relative_position_index"):
            return {"": _COMPUTED}
        if key not in self.target and key.endswith("num_batches_tracked"):
            return {"": "a frozen norm counts no batches"}
        if not key.endswith("positions.table"):
            return super()._pieces(name, key, tensor)
        # (1, H * W, C), in the last stage with the position of the global token in front
        number_global = int(name == "pos_embed4")
        number = tensor.shape[1] - number_global if tensor.ndim == 3 and len(tensor) == 1 else 0
        side = math.isqrt(max(number, 0))
        if not side or side**2 != number:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, which is not a square table of positions")
        pieces = {key: tensor[0, number_global:].unflatten(0, (side, side))}
        if number_global and self.prefix:
            return pieces | {f"{self.prefix}stages.3.positions.global_tokens": tensor[:, :1]}
        return pieces | ({"[:, 0]": _GLOBAL_TOKEN} if number_global else {})

    def _initialise(self) -> None:
        norms = [key for key in self.target if key.startswith("output_norms.")]
        if _HEAD in self.report.dropped.values() and not any(key in self.converted for key in norms):
            for key in norms:
                self.converted[key] = torch.full_like(self.target[key], key.endswith("weight"), device="cpu")
                self.report.initialised[key] = "a classifier has no norms of feature maps: they start as ones and zeros"


class _EncoderNameConverter(_NameConverter):
    # DataParallel, fairseq, and both wrappers of the official models
    wrappers = ("module.", "decoder.", "model.")
    starts = ((r"transformer_(\d+)\.", r"layers.\1."),)
    parts = _COMMON_PARTS | {
        "cls_embed": "class_token",
        "embeddings.word_embeddings": "embedding",
        "embeddings.position_embeddings.weight": "positions",
        "mlpblock.0": "mlp.fc1",
        "mlpblock.3": "mlp.fc2",
        "mha": "attention",
        "W_q": "query",
        "W_k": "key",
        "W_v": "value",
        "W_o": "proj",
        "dual_ln_l": "local_norm",
        "dual_ln_s": "projected_norm",
        "dconv_fc": "dynamic_projection",
    }

    def _pieces(self, name: str, key: str, tensor: Tensor) -> dict[str, Tensor | str]:
        if name.startswith("seq_classifer."):
            return {"": "the classification head is not part of the encoder"}
        layer, is_norm, _ = key.partition(".attention.projected_norm.")
        if is_norm and layer in self.modules and key not in self.target:
            return {"": "never used: there are no projected keys and no class token to norm"}
        return super()._pieces(name, key, tensor)


class _CharLMNameConverter(_NameConverter):
    wrappers = _EncoderNameConverter.wrappers
    starts = ()
    parts = _COMMON_PARTS | {
        "in_emb": "embedding",
        "out_emb.weight": "embedding.weight",
        "out_emb.bias": "bias",
        "proj_query": "query",
        "proj_key": "key",
        "proj_val": "value",
        "proj_out": "proj",
        "dual_ln_win": "local_norm",
        "dual_ln_dproj": "projected_norm",
        "dconv_1": "dynamic_projection",
        "r_net": "window_position",
        "r_net_chunk": "segment_position",
        "r_w_bias": "key_bias",
        "r_r_bias": "query_bias",
    }

    def _pieces(self, name: str, key: str, tensor: Tensor) -> dict[str, Tensor | str]:
        if name == "pos_emb.inv_freq":
            dim = self.target["embedding.weight"].shape[1]
            expected = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
            if tensor.shape != expected.shape or not torch.allclose(tensor.float().cpu(), expected, rtol=1e-2):
                raise ConfigError(f"{name} has other frequencies than 10000^(-2 i / {dim}), which the model computes")
            return {"": _COMPUTED}
        if key.endswith(("key_bias", "query_bias")):
            # The official biases (1, M, 1, D) are broadcast.
            tensor = tensor.reshape(-1, tensor.shape[-1])
        return super()._pieces(name, key, tensor)


_NAME_CONVERTERS: dict[type[nn.Module], type[_NameConverter]] = {
    LIT: _LITNameConverter,
    ViL: _ViLNameConverter,
    SequenceEncoder: _EncoderNameConverter,
    CharLM: _CharLMNameConverter,
}
