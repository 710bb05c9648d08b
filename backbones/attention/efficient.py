"""The efficient attention mechanisms that ViL is compared with (ViL section 3.3 and appendix D).

Global memory, Linformer, spatial reduction and Performer, modules with the inputs of :class:`.TokenAttention`.
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
    """Multi-head attention of local tokens to only the global tokens, and of these to all.

    There is one global token or more; the paper has 256, 256, 64 and 16 in its four stages (Table 15). Arguments are
    those of :class:`.TokenAttention`.
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
    """Multi-head attention to ``num_features`` learned combinations of the tokens of feature maps of one size.

    Keys and values share the combinations, as in the paper's models (the counts of Table 14). The global tokens are
    combined with the others.

    Args:
        map_size: height and width, in tokens, of the only feature maps that it takes.
        num_features: K, the projected length; 256 in the paper.
        common: see :class:`.TokenAttention`.
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
        # A traced size is a tensor, and its comparison would be frozen into the graph.
        if not tracing.is_tracing() and (height, width) != self.map_size:
            raise ConfigError(
                f"Linformer takes feature maps of {self.map_size[0]} x {self.map_size[1]} tokens, and this one has "
                f"{height} x {width}: create the model for this image size (create_classifier's img_size)"
            )
        # (B, K, C) each
        key, value = (self.project_length.T @ self.key_value(tokens)).chunk(2, dim=2)
        query = self.query(self._queries(tokens))
        return self.backends[self.backend](*(split_heads(x, self.num_heads) for x in (query, key, value)))


class SpatialReductionAttention(TokenAttention):
    """Multi-head attention to a reduced feature map, a convolution over R x R tokens, and to the global tokens.

    As in the official models, the last rows and columns that do not fill a position of the reduced map are not seen.
    Only a feature map below R tokens is padded, with zeros below and on the right. The global tokens are not reduced.

    Args:
        reduction: R; 16, 8, 4, 2 in the four stages of SRA/64 and 8, 4, 2, 1 of SRA/32 (Table 15). With 1 there is no
            convolution, as the counts of Table 14 have it, and attention is full.
        common: see :class:`.TokenAttention`.
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
            # PyTorch's instance norm refuses a single position: (B, C, max(1, H // R), max(1, W // R))
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
    """Attention by random features, linear in the tokens, and computed in float32 at least.

    Args:
        query: (B, M, L, D). key, value: (B, M, S, D).
        features: (K, D), random and orthogonal in groups of D.

    Returns:
        (B, M, L, D), in the type of ``value``.

    The largest product of the keys of each image is subtracted, in the official code that of the whole batch: here the
    result of an image does not depend on the rest of its batch, and equals the official one of the image by itself.

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
    """(B, M, L, D) -> positive features (B, M, L, K); the axes are those whose largest product is subtracted."""
    x = x * tracing.static_size(x.shape[-1]) ** -0.25
    products = x @ features.T
    products = products - products.amax(dim=largest_of, keepdim=True)
    return (products - x.square().sum(dim=-1, keepdim=True) / 2).exp() + _EPS


def sample_features(num_features: int, dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Random features (K, D): rows orthogonal in groups of D, as long as Gaussian vectors are."""
    number = -(-num_features // dim)
    groups = [nn.init.orthogonal_(torch.empty(dim, dim), generator=generator) for _ in range(number)]
    lengths = torch.randn(num_features, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(groups)[:num_features] * lengths


class PerformerAttention(TokenAttention):
    """Multi-head attention by random features, over the tokens of a feature map and the global tokens together.

    The features are a buffer, so that they travel with a checkpoint; :func:`redraw_features` samples new ones.

    Args:
        num_features: K; 256 in the paper (Table 15).
        common: see :class:`.TokenAttention`.
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


def redraw_features(model: nn.Module, *, seed: int) -> int:
    """Sample new random features for every :class:`PerformerAttention` in ``model``.

    The paper does so every ``1 + 5 * epoch`` iterations in classification and every 1000 in detection (appendix D).
    The same seed gives the same features in every process.

    Returns:
        How many modules were sampled again.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = [module for module in model.modules() if isinstance(module, PerformerAttention)]
    for module in modules:
        module.features.copy_(sample_features(*module.features.shape, generator=generator))
    return len(modules)
