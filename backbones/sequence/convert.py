"""Official Transformer-LS weights of sequences in, state dicts of this project out, with a strict report."""

import re
from collections.abc import Mapping

from torch import Tensor

from backbones.conversion_report import ConversionReport, check_weight, describe_mismatch
from backbones.errors import InputError
from backbones.sequence.encoder import SequenceEncoder

_EMPTY = "an empty tensor: there is no dynamic projection"
_UNUSED = "never used: there are no projected keys and no class token to norm"
_HEAD = "the classification head is not part of the encoder"

_WRAPPERS = ("module.", "model.", "decoder.")
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


def convert_sequence_state_dict(
    official: Mapping[str, Tensor], model: SequenceEncoder
) -> tuple[dict[str, Tensor], ConversionReport]:
    """The state dict of ``model`` from that of the official model of its kind.

    Args:
        official: names and tensors of transformer-ls, ``lra/model.py`` or ``autoregressive/model_lib/model.py``; the
            prefixes of what they are wrapped in are taken off.
        model: of :func:`backbones.sequence.create_sequence_encoder`, on any device; its own values are not read.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        InputError: for a name that no rule explains, a parameter of ours that stays unfilled, a shape that does not
            fit, or what is no weight.
    """
    conversion = _Conversion(model)
    unexplained = [name for name, tensor in official.items() if not conversion.take(name, tensor)]
    unfilled = [key for key in conversion.target if key not in conversion.converted]
    if unexplained or unfilled or conversion.misplaced:
        raise InputError(describe_mismatch("the model", unexplained, unfilled, conversion.misplaced))
    return {key: conversion.converted[key] for key in conversion.target}, conversion.report


class _Conversion:
    def __init__(self, model: SequenceEncoder) -> None:
        self.target = model.state_dict()
        self.converted: dict[str, Tensor] = {}
        self.misplaced: dict[str, str] = {}
        self.report = ConversionReport()

    def take(self, official_name: str, tensor: Tensor) -> bool:
        """Place one official tensor; False where no rule explains its name."""
        name = official_name
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper)
        if name.startswith("seq_classifer."):
            self.report.dropped[official_name] = _HEAD
            return True
        key = self._key(name)
        if key is None:
            return False
        check_weight(official_name, tensor)
        if key not in self.target:
            self._leave_out(official_name, key, tensor)
        else:
            self._place(official_name, key, tensor)
        return True

    def _key(self, name: str) -> str | None:
        """Our name, or None where no rule applies."""
        if name in _ENCODER:
            return _ENCODER[name]
        match = re.fullmatch(r"transformer_(\d+)\.(.+)\.(weight|bias)", name)
        if match is None or match[2] not in _ENCODER_LAYER:
            return None
        return f"layers.{match[1]}.{_ENCODER_LAYER[match[2]]}.{match[3]}"

    def _leave_out(self, official_name: str, key: str, tensor: Tensor) -> None:
        layer, _, part = key.partition(".attention.")
        if not tensor.numel():
            self.report.dropped[official_name] = _EMPTY
        elif part.startswith("projected_norm.") and f"{layer}.attention.query.weight" in self.target:
            self.report.dropped[official_name] = _UNUSED
        else:
            self.misplaced[official_name] = key

    def _place(self, official_name: str, key: str, tensor: Tensor) -> None:
        old, new = tuple(tensor.shape), tuple(self.target[key].shape)
        if old != new:
            raise InputError(
                f"{official_name} has shape {old}, and {key} of the model {new}: create it with other sizes"
            )
        if key in self.converted:
            raise InputError(f"the checkpoint has {key} twice, once as {official_name}")
        self.converted[key] = tensor
        self.report.mapped[official_name] = key
