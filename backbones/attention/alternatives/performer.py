"""Performer (ViL section 3.3 and appendix D): softmax attention approximated with positive random features."""

import torch
from torch import Tensor, nn

from backbones.attention import reference
from backbones.attention.dense import join_tokens, merge_heads, part_tokens, recorded_keys, split_heads
from backbones.execution.precision import at_least_float32, autocast_off
from backbones.execution.tracing import in_order, is_tracing, static_size
from backbones.utils.errors import check_choice

_EPS = 1e-4


def performer_attention(query: Tensor, key: Tensor, value: Tensor, *, features: Tensor) -> Tensor:
    """Attention by random features, linear in the tokens, and computed in float32 at least.

    Args:
        query: (B, M, L, D). key, value: (B, M, S, D).
        features: (K, D), random and orthogonal in groups of D.

    Returns:
        (B, M, L, D), in the type of ``value``.

    The largest product of the keys is taken off for each image, where the official code takes it over the whole batch:
    one image gets the same result in any company, and on its own the official one.

    Source: ViL appendix D, and "Rethinking Attention with Performers", section 2.3 (FAVOR+).
    """
    dtype = value.dtype
    with autocast_off(value.device):
        query, key, value, features = map(at_least_float32, (query, key, value, features))
        query, key = _features(query, features, (-1,)), _features(key, features, (-3, -2, -1))
        # (B, M, K, D) and (B, M, K, 1)
        context, total = key.transpose(-2, -1) @ value, key.sum(dim=-2)[..., None]
        return ((query @ context) / (query @ total)).to(dtype)


def _features(x: Tensor, features: Tensor, largest_of: tuple[int, ...]) -> Tensor:
    """(B, M, L, D) -> positive features (B, M, L, K); the axes are those whose largest product is taken off."""
    x = x * static_size(x.shape[-1]) ** -0.25
    products = x @ features.T
    products = products - products.amax(dim=largest_of, keepdim=True)
    return (products - x.square().sum(dim=-1, keepdim=True) / 2).exp() + _EPS


def draw_features(num_features: int, dim: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Random features (K, D): rows orthogonal in groups of D, as long as Gaussian vectors are."""
    groups = []
    for _ in range(-(-num_features // dim)):
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        # Without the signs the matrices would not be drawn evenly from all orthogonal ones.
        groups.append(q * r.diagonal().sign())
    lengths = torch.randn(num_features, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(groups)[:num_features] * lengths


BACKENDS = {"sdpa": performer_attention, "reference": reference.performer_attention}


class PerformerAttention(nn.Module):
    """Multi-head attention by random features, over the tokens of a map and the global tokens together.

    The features are a buffer, so that they travel with a checkpoint; :func:`redraw_features` draws them anew.

    Args:
        dim: channels of a token.
        num_heads: divides ``dim``.
        num_features: K; 256 in the paper (Table 15).
        num_global_tokens: G.
        update_globals: whether the global tokens are queries too; the last block of a stage drops them.
        backend: a key of ``BACKENDS``; ``"reference"`` is quadratic and for debugging.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_features: int = 256,
        num_global_tokens: int = 1,
        update_globals: bool = True,
        backend: str = "sdpa",
    ) -> None:
        super().__init__()
        check_choice("attention backend", backend, BACKENDS)
        self.num_heads = num_heads
        self.backend = backend
        self.update_globals = update_globals and num_global_tokens > 0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.projection = nn.Linear(dim, dim)
        self.register_buffer("features", draw_features(num_features, dim // num_heads))

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that are not updated."""
        height, width = tokens.shape[1:3]
        qkv = self.qkv(join_tokens(tokens, global_tokens))
        query, key, value = split_heads(qkv, 3 * self.num_heads).chunk(3, dim=1)
        num_global = 0 if global_tokens is None else static_size(global_tokens.shape[1])
        if not self.update_globals:
            query = query[:, :, num_global:]
        if is_tracing():
            key, value, _ = recorded_keys(key, value, height, width, num_global)
        output = BACKENDS[self.backend](in_order(query), key, value, features=self.features)
        output = self.projection(merge_heads(output))
        return part_tokens(output, height, width, num_global if self.update_globals else 0)


def redraw_features(model: nn.Module, *, seed: int) -> int:
    """Draw the random features of every :class:`PerformerAttention` in ``model`` anew.

    The paper does so every ``1 + 5 * epoch`` iterations in classification (:func:`redraw_interval`) and every 1000 in
    detection (appendix D). The same seed gives the same features in every process.

    Returns:
        How many modules were redrawn.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = [module for module in model.modules() if isinstance(module, PerformerAttention)]
    for module in modules:
        module.features.copy_(draw_features(*module.features.shape, generator=generator))
    return len(modules)


def redraw_interval(epoch: int) -> int:
    """Iterations between two redraws in an epoch of the paper's ImageNet training (ViL appendix D)."""
    return 1 + 5 * epoch
