"""The efficient attention mechanisms that the ViL paper compares (ViL section 3.3 and appendix D).

They are global memory, Linformer, spatial reduction and Performer.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.attention import reference
from backbones.attention.dense import TokenAttention, split_globals, split_heads, traced_keys
from backbones.errors import ConfigError
from backbones.layers import tracing


class GlobalMemoryAttention(TokenAttention):
    """Multi-head attention in which local tokens attend only to the global tokens, and global tokens to all.

    At least one global token is needed. The paper has 256, 256, 64 and 16 in its four stages (Table 15). See
    :class:`.TokenAttention` for the arguments.
    """

    has_qkv = False

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        attend, num_global = self.backends[self.backend], self.num_global_tokens
        query = split_heads(self.query(self._queries(tokens)), self.num_heads)
        seen = tokens if self.update_globals else split_globals(tokens, num_global)[0]
        key, value = split_heads(self.key_value(seen), 2 * self.num_heads).chunk(2, dim=1)
        if not self.update_globals:
            return attend(query, key, value)
        global_query, local_query = split_globals(query, num_global, dim=2)
        seen = (tracing.contiguous_for_export(x[:, :, :num_global]) for x in (key, value))
        output = attend(local_query, *seen)
        return torch.cat([attend(global_query, key, value), output], dim=2)


class LinformerAttention(TokenAttention):
    """Multi-head attention to ``num_features`` learned combinations of all tokens, for feature maps of one size.

    Keys and values share the combinations, as in the paper's models (the parameter counts of Table 14). The global
    tokens are combined with the others.

    Args:
        dim: Channels of a token.
        map_size: Height and width, in tokens, of all feature maps.
        num_features: Projected length K, 256 in the paper.
        common: See :class:`.TokenAttention`.
    """

    has_qkv = False

    def __init__(
        self, dim: int, *, map_size: tuple[int, int], num_features: int = 256, **common: int | bool | str
    ) -> None:
        super().__init__(dim, **common)
        self.map_size = map_size
        length, bound = self.num_global_tokens + math.prod(map_size), num_features**-0.5
        self.project_length = nn.Parameter(torch.empty(length, num_features).uniform_(-bound, bound))

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        # A traced size is a tensor. The graph would keep the result of its comparison.
        if not tracing.is_tracing() and (height, width) != self.map_size:
            raise ConfigError(
                f"Linformer needs feature maps of {self.map_size[0]} x {self.map_size[1]} tokens, but this one has "
                f"{height} x {width}. Set img_size of create_classifier to this image size."
            )
        # (B, K, C) each
        key, value = (self.project_length.T @ self.key_value(tokens)).chunk(2, dim=2)
        query = self.query(self._queries(tokens))
        return self.backends[self.backend](*(split_heads(x, self.num_heads) for x in (query, key, value)))


class SpatialReductionAttention(TokenAttention):
    """Multi-head attention to a reduced feature map, a convolution over R x R tokens, and to the global tokens.

    As in the official models, the convolution drops the last rows and columns if R does not divide the height or width.
    Only a feature map smaller than R tokens is padded, with zeros at the bottom and on the right. The global tokens are
    not reduced.

    Args:
        dim: Channels of a token.
        reduction: R. SRA/64 has 16, 8, 4 and 2 in the four stages, SRA/32 has 8, 4, 2 and 1 (Table 15). With 1 there is
            no convolution and attention is full, as the parameter counts of Table 14 imply.
        common: See :class:`.TokenAttention`.
    """

    has_qkv = False

    def __init__(self, dim: int, *, reduction: int, **common: int | bool | str) -> None:
        super().__init__(dim, **common)
        self.reduction = reduction
        self.reduce = None
        if reduction > 1:
            self.reduce = nn.Conv2d(dim, dim, kernel_size=reduction, stride=reduction, bias=False)

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        seen, num_global = tokens, self.num_global_tokens
        if self.reduce is not None:
            (height, width), (global_tokens, local) = size, split_globals(tokens, num_global)
            padding = (0, tracing.padding_to(width, self.reduction), 0, tracing.padding_to(height, self.reduction))
            padded = F.pad(local.unflatten(1, size).permute(0, 3, 1, 2), padding)
            reduced = tracing.contiguous_for_export(self.reduce(tracing.contiguous_for_export(padded)))
            size = reduced.shape[2:]
            # (B, C, max(1, H // R), max(1, W // R)). PyTorch's instance norm does not accept a single position.
            seen = F.layer_norm(reduced, size).flatten(2).transpose(1, 2)
            seen = seen if global_tokens is None else torch.cat([global_tokens, seen], dim=1)
        key, value = split_heads(self.key_value(seen), 2 * self.num_heads).chunk(2, dim=1)
        if tracing.is_tracing():
            key, value, _ = traced_keys(key, value, *size, num_global)
        query = self.query(self._queries(tokens))
        query = tracing.contiguous_for_export(split_heads(query, self.num_heads))
        return self.backends[self.backend](query, key, value)


_EPS = 1e-4


def performer_attention(query: Tensor, key: Tensor, value: Tensor, *, features: Tensor) -> Tensor:
    """Return attention by random features, which is linear in the number of tokens.

    It is computed in float32 or better. For stability, the largest product of all keys of an image is subtracted. The
    official code subtracts the largest product of the whole batch. Here the result of an image does not depend on the
    other images in its batch.

    Args:
        query: (B, M, L, D).
        key: (B, M, S, D).
        value: (B, M, S, D).
        features: (K, D), random and orthogonal in groups of D.

    Returns:
        (B, M, L, D), in the dtype of ``value``.

    Source: ViL appendix D, and "Rethinking Attention with Performers", section 2.3 (FAVOR+).
    """
    dtype = value.dtype
    with tracing.autocast_off(value.device):
        query, key, value, features = map(tracing.at_least_float32, (query, key, value, features))
        query, key = _features(query, features, (-1,)), _features(key, features, (-3, -2, -1))
        # (B, M, K, D) and (B, M, K, 1)
        context, total = key.transpose(-2, -1) @ value, key.sum(dim=-2)[..., None]
        return ((query @ context) / (query @ total)).to(dtype)


def _features(x: Tensor, features: Tensor, largest_of: tuple[int, ...]) -> Tensor:
    """Return positive features (B, M, L, K) of tokens (B, M, L, D), without the largest product over some axes."""
    x = x * tracing.static_size(x.shape[-1]) ** -0.25
    products = x @ features.T
    products = products - products.amax(dim=largest_of, keepdim=True)
    return (products - x.square().sum(dim=-1, keepdim=True) / 2).exp() + _EPS


def sample_features(num_features: int, dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Sample random features (K, D): orthogonal rows in groups of D, with the lengths of Gaussian vectors."""
    number = -(-num_features // dim)
    groups = [nn.init.orthogonal_(torch.empty(dim, dim), generator=generator) for _ in range(number)]
    lengths = torch.randn(num_features, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(groups)[:num_features] * lengths


class PerformerAttention(TokenAttention):
    """Multi-head attention by random features, over the tokens of a feature map and the global tokens together.

    The features are a buffer, so checkpoints contain them. :func:`redraw_features` samples new ones.

    Args:
        dim: Channels of a token.
        num_features: Number K of random features, 256 in the paper (Table 15).
        common: See :class:`.TokenAttention`.
    """

    backends = {"sdpa": performer_attention, "reference": reference.performer_attention}

    def __init__(self, dim: int, *, num_features: int = 256, **common: int | bool | str) -> None:
        super().__init__(dim, **common)
        self.register_buffer("features", sample_features(num_features, dim // self.num_heads))

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        query, key, value = self._project(tokens)
        if tracing.is_tracing():
            key, value, _ = traced_keys(key, value, *size, self.num_global_tokens)
        return self.backends[self.backend](tracing.contiguous_for_export(query), key, value, features=self.features)


def redraw_features(model: nn.Module, *, seed: int) -> None:
    """Sample new random features for every :class:`PerformerAttention` in ``model``.

    The paper does this every ``1 + 5 * epoch`` iterations in classification, and every 1000 iterations in detection
    (appendix D). The same seed gives the same features in every process.

    Args:
        model: A model with any number of such modules.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, PerformerAttention):
            module.features.copy_(sample_features(*module.features.shape, generator=generator))
