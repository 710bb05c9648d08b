"""Convert official weights of Transformer-LS for the models on sequences."""

from collections.abc import Mapping

import torch
from torch import Tensor

from backbones.convert import ConversionReport, NameTable, Pieces, convert_tensors, rename
from backbones.errors import ConfigError
from research.sequence.char_lm import CharLM
from research.sequence.encoder import SequenceEncoder

# DataParallel, fairseq, and both wrappers of the official models
_WRAPPERS = ("module.", "decoder.", "model.")
_BLOCK_NAMES: NameTable = (("norm1", "attention_norm"), ("norm2", "mlp_norm"), ("attn|mha", "attention"), ("ff", "mlp"))
# lra/model.py
_ENCODER_NAMES: NameTable = (
    *_BLOCK_NAMES,
    (r"^transformer_(\d+)", r"layers.\1"),
    ("cls_embed", "class_token"),
    (r"embeddings\.word_embeddings", "embedding"),
    (r"embeddings\.position_embeddings\.weight", "positions"),
    (r"mlpblock\.0", "mlp.fc1"),
    (r"mlpblock\.3", "mlp.fc2"),
    ("W_q", "query"),
    ("W_k", "key"),
    ("W_v", "value"),
    ("W_o", "proj"),
    ("dual_ln_l", "local_norm"),
    ("dual_ln_s", "projected_norm"),
    ("dconv_fc", "dynamic_projection"),
)
# autoregressive/model_lib/model.py
_CHAR_LM_NAMES: NameTable = (
    *_BLOCK_NAMES,
    ("in_emb", "embedding"),
    (r"out_emb\.weight", "embedding.weight"),
    (r"out_emb\.bias", "bias"),
    ("proj_query", "query"),
    ("proj_key", "key"),
    ("proj_val", "value"),
    ("proj_out", "proj"),
    ("dual_ln_win", "local_norm"),
    ("dual_ln_dproj", "projected_norm"),
    ("dconv_1", "dynamic_projection"),
    ("r_net", "window_position"),
    ("r_net_chunk", "segment_position"),
    ("r_w_bias", "key_bias"),
    ("r_r_bias", "query_bias"),
)


def convert_sequence_state_dict(
    official: Mapping[str, Tensor], model: SequenceEncoder | CharLM
) -> tuple[dict[str, Tensor], ConversionReport]:
    """Convert an official state dict for a model.

    Args:
        official: State dict of transformer-ls, ``lra/model.py`` or ``autoregressive/model_lib/model.py``. The prefixes
            of its wrappers are removed.
        model: Result of :func:`research.sequence.create_sequence_encoder` or :func:`research.sequence.create_char_lm`,
            on any device. Its values are not read.

    Returns:
        The state dict, which loads with ``strict=True``, and the report.

    Raises:
        ConfigError: If a name or a shape does not match, or if a tensor is not a weight.
    """
    convert = _convert_char_lm if isinstance(model, CharLM) else _convert_encoder
    parameters = model.state_dict()

    def pieces(name: str, tensor: Tensor) -> Pieces:
        return convert(name, tensor, parameters)

    return convert_tensors(model, official, pieces, name="the model", wrappers=_WRAPPERS)


def _convert_encoder(name: str, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Pieces:
    if name.startswith("seq_classifer."):
        return {"": "the classification head is not part of the encoder"}
    key = rename(name, _ENCODER_NAMES)
    layer, is_norm, _ = key.partition(".attention.projected_norm.")
    if is_norm and f"{layer}.attention.proj.weight" in parameters and key not in parameters:
        return {"": "never used: there are no projected keys and no class token to normalize"}
    return {key: tensor}


def _convert_char_lm(name: str, tensor: Tensor, parameters: Mapping[str, Tensor]) -> Pieces:
    if name == "pos_emb.inv_freq":
        dim = parameters["embedding.weight"].shape[1]
        expected = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
        if tensor.shape != expected.shape or not torch.allclose(tensor.float().cpu(), expected, rtol=1e-2):
            raise ConfigError(f"'{name}' differs from the frequencies that the model computes, 10000^(-2 i / {dim}).")
        return {"": "not a weight: the model computes it"}
    key = rename(name, _CHAR_LM_NAMES)
    if key.endswith(("key_bias", "query_bias")):
        # The official biases (1, M, 1, D) are broadcast.
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return {key: tensor}
