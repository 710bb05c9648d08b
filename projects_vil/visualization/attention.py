"""Compute the exact attention weights of one query token, for every attention mechanism.

The output of a head is a linear function of the values, and the attention weights are its coefficients. With constant
queries and keys, the gradient of an output channel with respect to the same channel of the values equals the weights.
One backward pass through the kernel of the module gives the weights of all heads.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import ConfigError
from backbones.attention.dense import TokenAttention, split_heads
from backbones.attention.efficient import GlobalMemoryAttention, LinformerAttention, SpatialReductionAttention
from backbones.attention.long_short import DualNormAttention
from backbones.attention.sliding_chunk import SlidingChunkAttention

_VALUE_LAYERS = ("qkv", "key_value", "local_norm", "projected_norm")
_SCORE_LAYER = "dynamic_projection"


@dataclasses.dataclass(frozen=True)
class AttentionWeights:
    """The attention weights of one query in each of M heads.

    ``direct``, ``projected`` and ``to_globals`` together sum to 1 in each head.

    Attributes:
        direct: (M, H, W), weights on the tokens of the feature map.
        projected: (M, K), weights on the keys of a dynamic projection or of a reduced feature map.
        spread: (M, H, W), the weights of ``projected`` distributed over the tokens of each key: by the dynamic
            projection, or evenly over R x R tokens. The norm or convolution after the projection is ignored.
        to_globals: (M, G), weights on the global tokens.
    """

    direct: Tensor
    projected: Tensor
    spread: Tensor
    to_globals: Tensor


def attention_weights(module: nn.Module, tokens: Tensor, size: tuple[int, int], row: int, col: int) -> AttentionWeights:
    """Return the attention weights of the token at a row and a column.

    Args:
        module: An attention module of :mod:`backbones`, in eval mode.
        tokens, size: The input of the module, (1, G + H * W, C) and (H, W).
        row, col: The position of the query in the feature map.

    Raises:
        ConfigError: If the module has no attention, or is a Linformer, whose weights do not sum to 1.
    """
    if isinstance(module, LinformerAttention) or not isinstance(module, TokenAttention | DualNormAttention):
        raise ConfigError(f"{type(module).__name__} has no attention weights. Choose another block.")
    (height, width), num_global = size, module.num_global_tokens
    with torch.enable_grad(), _values_as_leaves(module) as (leaves, outputs):
        module(tokens.detach(), size)
        local = outputs[0].flatten(0, -2)[-height * width :]
        head_channel = local[row * width + col].unflatten(0, (module.num_heads, -1))[:, 0].sum()
        used = [(name, leaf) for name in _VALUE_LAYERS for leaf in leaves[name]]
        gradients = torch.autograd.grad(head_channel, [leaf for _, leaf in used], materialize_grads=True)
    weights = defaultdict(list)  # layer -> (M, L) for each call
    for (name, _), gradient in zip(used, gradients, strict=True):
        values = gradient.flatten(0, -2)[:, -module.proj.in_features :]
        weights[name].append(values.unflatten(1, (module.num_heads, -1))[:, :, 0].T)

    direct = spread = tokens.new_zeros(module.num_heads, height * width)
    projected = to_globals = tokens.new_zeros(module.num_heads, 0)
    if isinstance(module, DualNormAttention):
        # The norms are applied to keys and values together.
        local, projected = (weights[name][0].chunk(2, dim=1)[1] for name in ("local_norm", "projected_norm"))
        to_globals, direct = local.tensor_split([num_global], dim=1)
        # (M, H * W, r)
        scores = leaves[_SCORE_LAYER][0].detach().flatten(0, -2)[-height * width :]
        shares = split_heads(scores[None], module.num_heads)[0].softmax(dim=1)
        spread = (shares @ projected[..., None])[..., 0]
    elif isinstance(module, GlobalMemoryAttention):
        to_globals = weights["key_value"][0][:, :num_global]
    elif isinstance(module, SpatialReductionAttention):
        to_globals, projected = weights["key_value"][0].tensor_split([num_global], dim=1)
        spread = _spread_evenly(projected, module.reduction, height, width).flatten(1)
        if module.reduction == 1:
            direct, spread, projected = spread, direct, projected[:, :0]
    else:
        layer = "key_value" if isinstance(module, SlidingChunkAttention) else "qkv"
        to_globals, direct = weights[layer][0].tensor_split([num_global], dim=1)
    direct, spread = (x.unflatten(1, (height, width)) for x in (direct, spread))
    return AttentionWeights(direct=direct, projected=projected, spread=spread, to_globals=to_globals)


@contextlib.contextmanager
def _values_as_leaves(module: nn.Module) -> Iterator[tuple[dict[str, list[Tensor]], list[Tensor]]]:
    """Yield the outputs of the value layers as leaf tensors by name, and the inputs of the output projection."""
    leaves, outputs = defaultdict(list), []

    def detach(name: str):
        def hook(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            leaves[name].append(output.detach().requires_grad_())
            return leaves[name][-1]

        return hook

    with contextlib.ExitStack() as hooks:
        for name, layer in module.named_children():
            if name in (*_VALUE_LAYERS, _SCORE_LAYER):
                hooks.enter_context(layer.register_forward_hook(detach(name)))
        keep = module.proj.register_forward_pre_hook(lambda layer, inputs: outputs.append(inputs[0]))
        hooks.enter_context(keep)
        yield leaves, outputs


def _spread_evenly(weights: Tensor, reduction: int, height: int, width: int) -> Tensor:
    """Spread (M, K) weights on a reduced feature map to (M, height, width). Tokens outside of its cells get 0."""
    rows, cols = max(1, height // reduction), max(1, width // reduction)
    each = weights / (min(reduction, height) * min(reduction, width))
    spread = each.unflatten(1, (rows, cols)).repeat_interleave(reduction, 1).repeat_interleave(reduction, 2)
    spread = spread[:, :height, :width]
    return F.pad(spread, (0, width - spread.shape[2], 0, height - spread.shape[1]))
