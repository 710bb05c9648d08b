"""Official Transformer-LS weights of sequences in, state dicts of this project out, with a strict report."""

import abc
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from backbones.sequence.char_lm import CharLM
from backbones.sequence.encoder import SequenceEncoder
from backbones.utils.conversion_report import ConversionReport, check_weight, describe_mismatch
from backbones.utils.errors import InputError

_EMPTY = "an empty tensor: there is no dynamic projection"
_UNUSED = "never used: there are no projected keys and no class token to norm"
_HEAD = "the classification head is not part of the encoder"
_COMPUTED = "computed by the model"
_OTHER_SIZES = "create it with the sizes of the checkpoint: depth, rank and class token"

# Of DataParallel, of fairseq, and of both wrappers of the official models.
_WRAPPERS = ("module.", "decoder.", "model.")
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


def convert_sequence_state_dict(
    official: Mapping[str, Tensor], model: SequenceEncoder | CharLM
) -> tuple[dict[str, Tensor], ConversionReport]:
    """The state dict of ``model`` from that of the official model of its kind.

    Args:
        official: names and tensors of transformer-ls, ``lra/model.py`` or ``autoregressive/model_lib/model.py``; the
            prefixes of what they are wrapped in are taken off.
        model: of :func:`backbones.sequence.create_sequence_encoder` or :func:`backbones.sequence.create_char_lm`, on
            any device; its own values are not read.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        InputError: for a name that no rule explains, a parameter of ours that stays unfilled, a shape that does not
            fit, what is no weight, or a model of another kind.
    """
    rules = next((rules for kind, rules in _RULES.items() if isinstance(model, kind)), None)
    if rules is None:
        raise InputError(f"{type(model).__name__} is no model on sequences: convert_state_dict is for backbones")
    conversion = rules(model)
    unexplained = [name for name, tensor in official.items() if not conversion.take(name, tensor)]
    unfilled = [key for key in conversion.target if key not in conversion.converted]
    if unexplained or unfilled or conversion.misplaced:
        line = describe_mismatch(
            "the model", unexplained, unfilled, conversion.misplaced, what="model", reason=_OTHER_SIZES
        )
        raise InputError(line)
    return {key: conversion.converted[key] for key in conversion.target}, conversion.report


class _Conversion(abc.ABC):
    """The state of one conversion: what is to be filled, what is, and the report. A kind of model adds its rules."""

    def __init__(self, model: SequenceEncoder | CharLM) -> None:
        self.target = model.state_dict()
        self.converted: dict[str, Tensor] = {}
        self.misplaced: dict[str, str] = {}
        self.report = ConversionReport()

    def take(self, official_name: str, tensor: Tensor) -> bool:
        """Place one official tensor; False where no rule explains its name."""
        name = official_name
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper)
        reason = self._left_out(name, tensor)
        if reason is not None:
            self.report.dropped[official_name] = reason
            return True
        key = self._key(name)
        if key is None:
            return False
        check_weight(official_name, tensor)
        if key in self.target:
            self._place(official_name, key, tensor)
        else:
            self.misplaced[official_name] = key
        return True

    @abc.abstractmethod
    def _key(self, name: str) -> str | None:
        """Our name, or None where no rule applies."""

    @abc.abstractmethod
    def _left_out(self, name: str, tensor: Tensor) -> str | None:
        """Why a tensor has no place in the model, or None where it has one."""

    def _place(self, official_name: str, key: str, tensor: Tensor) -> None:
        old, new = tuple(tensor.shape), tuple(self.target[key].shape)
        # The official biases of the attention have axes of one place to be added by.
        is_bias = key.rpartition(".")[2] in _CHAR_LM_BIASES.values()
        if old != new and not (is_bias and _without_ones(old) == _without_ones(new)):
            raise InputError(
                f"{official_name} has shape {old}, and {key} of the model {new}: create it with other sizes"
            )
        if key not in self.converted:
            self.converted[key] = tensor.reshape(new)
            self.report.mapped[official_name] = key
        elif torch.equal(self.converted[key], tensor.reshape(new)):
            self.report.tied[official_name] = key
        else:
            raise InputError(f"{official_name} differs from what {key} already holds: the model has one for both")


class _EncoderConversion(_Conversion):
    def _key(self, name: str) -> str | None:
        if name in _ENCODER:
            return _ENCODER[name]
        match = re.fullmatch(r"transformer_(\d+)\.(.+)\.(weight|bias)", name)
        if match is None or match[2] not in _ENCODER_LAYER:
            return None
        return f"layers.{match[1]}.{_ENCODER_LAYER[match[2]]}.{match[3]}"

    def _left_out(self, name: str, tensor: Tensor) -> str | None:
        if name.startswith("seq_classifer."):
            return _HEAD
        key = self._key(name)
        if key is None or key in self.target:
            return None
        layer, _, part = key.partition(".attention.")
        if part.startswith("dynamic_projection.") and not tensor.numel():
            return _EMPTY
        unused = part.startswith("projected_norm.") and f"{layer}.attention.query.weight" in self.target
        return _UNUSED if unused else None


class _CharLMConversion(_Conversion):
    def _key(self, name: str) -> str | None:
        if name in _CHAR_LM:
            return _CHAR_LM[name]
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
        if match is None:
            return None
        if match[2] == "attn" and match[3] in _CHAR_LM_BIASES:
            return f"layers.{match[1]}.attention.{_CHAR_LM_BIASES[match[3]]}"
        if match[2] not in _CHAR_LM_LAYER or match[3] not in ("weight", "bias"):
            return None
        return f"layers.{match[1]}.{_CHAR_LM_LAYER[match[2]]}.{match[3]}"

    def _left_out(self, name: str, tensor: Tensor) -> str | None:
        if name != "pos_emb.inv_freq":
            return None
        dim = self.target["embedding.weight"].shape[1]
        expected = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
        if tensor.shape != expected.shape or not torch.allclose(tensor.float().cpu(), expected, rtol=1e-2):
            raise InputError(f"{name} holds other frequencies than 10000^(-2 i / {dim}), which the model computes")
        return _COMPUTED


_RULES: dict[type, type[_Conversion]] = {CharLM: _CharLMConversion, SequenceEncoder: _EncoderConversion}


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
