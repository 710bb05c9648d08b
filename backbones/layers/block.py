"""The parts of a stage: patch embedding, and the transformer block of all families with its MLP."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from backbones.layers import tracing


def pad_to_multiple(features: Tensor, multiple: int) -> Tensor:
    """Pad (B, C, H, W) with zeros at the bottom and on the right, so that ``multiple`` divides both sides."""
    pad_height = tracing.padding_to_multiple(features.shape[2], multiple)
    pad_width = tracing.padding_to_multiple(features.shape[3], multiple)
    if not tracing.is_tracing() and not pad_height and not pad_width:
        return features
    return F.pad(features, (0, pad_width, 0, pad_height))


class PatchEmbed(nn.Module):
    """Embed the patches of a feature map (ViL section 3.1): a convolution with stride ``patch_size`` and a LayerNorm.

    If the height or width is not a multiple of ``patch_size``, the feature map is padded with zeros at the bottom and
    on the right.

    Args:
        in_channels: Channels of the feature map.
        dim: Channels of a token.
        patch_size: Side of a patch.
        norm_eps: Epsilon of the norm.
        kernel_size: Side of overlapping patches (CvT section 3.1). None for ``patch_size``.
    """

    def __init__(
        self, in_channels: int, dim: int, *, patch_size: int, norm_eps: float = 1e-6, kernel_size: int | None = None
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        kernel_size = kernel_size or patch_size
        # 2 for 7 x 7 with stride 4, 1 for 3 x 3 with stride 2
        padding = -(-(kernel_size - patch_size) // 2)
        self.proj = nn.Conv2d(in_channels, dim, kernel_size, patch_size, padding)
        self.norm = nn.LayerNorm(dim, eps=norm_eps)

    def forward(self, features: Tensor) -> Tensor:
        """Return tokens (B, ceil(H / patch), ceil(W / patch), dim) from (B, C, H, W)."""
        features = self.proj(pad_to_multiple(features, self.patch_size))
        return self.norm(features.permute(0, 2, 3, 1))


class AutocastLayerNorm(nn.LayerNorm):
    """A LayerNorm that computes in the dtype of autocast, as attention does, without copies in float32."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = tracing.autocast_dtype(x.device)
        if dtype is None or x.dtype == torch.float64:
            return super().forward(x)
        with tracing.autocast_off(x.device):
            weight, bias = self.weight.to(dtype), self.bias.to(dtype)
            return F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, applied to each token: (..., C) -> (..., C).

    Args:
        dim: Channels C of a token.
        hidden_dim: Channels between the layers.
        depthwise: Whether a depth-wise 3 x 3 convolution comes before the GELU, as in LITv2. The tokens are then
            (B, H * W, C), without global tokens.
    """

    def __init__(self, dim: int, *, hidden_dim: int, depthwise: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.depthwise = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim) if depthwise else None
        self.fc2 = nn.Linear(hidden_dim, dim)
        if depthwise:
            nn.init.normal_(self.depthwise.weight, std=math.sqrt(2 / 9))
            nn.init.zeros_(self.depthwise.bias)

    def forward(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Return the updated tokens. ``size``, H and W, is for the convolution."""
        hidden = self.fc1(tokens)
        if self.depthwise is not None:
            features = tracing.contiguous_for_export(hidden.unflatten(1, size).permute(0, 3, 1, 2))
            hidden = tracing.contiguous_for_export(self.depthwise(features).permute(0, 2, 3, 1)).flatten(1, 2)
        if tokens.device.type == "cpu" or tracing.is_captured():
            return self.fc2(F.gelu(hidden))
        # Adapters such as LoRA replace the layer, and hooks run only if the layer is called.
        hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        if type(self.fc2) is not nn.Linear or any(getattr(self.fc2, name) for name in hooks):
            return self.fc2(F.gelu(hidden))
        # Autocast does not cast the arguments of a function.
        return GeluLinear.apply(hidden, self.fc2.weight.to(hidden.dtype), self.fc2.bias.to(hidden.dtype))


class GeluLinear(torch.autograd.Function):
    """A linear layer after a GELU. The backward pass computes the GELU again.

    Only the input of the GELU is kept for the backward pass. It is the widest tensor of a block. Arguments: hidden
    (..., C), weight (D, C) and bias (D,), of one dtype. Result: (..., D).
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(F.gelu(hidden), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), grads = ctx.saved_tensors, [None] * 3
        if ctx.needs_input_grad[1]:
            grads[1] = grad.flatten(0, -2).T @ F.gelu(hidden).flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grads[0] = grad @ weight
            torch.ops.aten.gelu_backward.grad_input(grads[0], hidden, grad_input=grads[0])
        if ctx.needs_input_grad[2]:
            grads[2] = grad.flatten(0, -2).sum(0)
        return tuple(grads)


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a skip connection (ViL section 3.1, equations 2 and 3).

    Args:
        dim: Channels of a token.
        attention: A module as :class:`.TokenAttention`. None for a block with only an MLP (LIT section 3.2).
        expansion: Ratio of the MLP's inner channels to ``dim``.
        depthwise_mlp: See :class:`Mlp`.
        norm_eps: Epsilon of the norms.
        drop_path_rate: Rate of stochastic depth.

    Attributes:
        drops_globals: Whether the output has no global tokens, as in the last block of a stage of a detector.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module | None,
        *,
        expansion: int = 4,
        depthwise_mlp: bool = False,
        norm_eps: float = 1e-6,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=norm_eps) if attention is not None else None
        self.attention = attention
        self.drops_globals = attention is not None and attention.num_global_tokens > 0 and not attention.update_globals
        self.mlp_norm = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, hidden_dim=expansion * dim, depthwise=depthwise_mlp)
        self.drop_path_rate = drop_path_rate

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the updated tokens.

        Args:
            tokens: (B, G + H * W, C), global tokens first.
            size: H and W.

        Returns:
            (B, G + H * W, C), or (B, H * W, C) if :attr:`drops_globals`.
        """
        if self.attention is not None:
            # Under autocast, the layers of an attention share one cast.
            update = self.attention(tracing.in_autocast_dtype(self.attention_norm(tokens))[0], size)
            if self.drops_globals:
                tokens = tokens[:, self.attention.num_global_tokens :]
            tokens = tokens + self._drop_path(update, tokens.dtype)
        return tokens + self._drop_path(self.mlp(self.mlp_norm(tokens), size), tokens.dtype)

    def _drop_path(self, update: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply stochastic depth with one sample per image. The factor is ``dtype``, because float16 would round it."""
        if not self.training or self.drop_path_rate == 0:
            return update
        keep = update.new_empty((update.shape[0], 1, 1), dtype=dtype).bernoulli_(1 - self.drop_path_rate)
        return update * keep.div_(1 - self.drop_path_rate)


# Layers whose weights autocast would cast one by one. Subclasses are excluded, because they may use weights otherwise.
_CAST_LAYERS = (nn.Linear, nn.Conv2d, AutocastLayerNorm)


def call_block(block: Block, tokens: Tensor, size: tuple[int, int]) -> Tensor:
    """Return ``block(tokens, size)``. In training with autocast, cast all weights of the block together.

    This takes one kernel instead of one kernel per weight, in the forward and in the backward pass. ``torch.compile``
    already fuses these casts.
    """
    dtype = tracing.autocast_dtype(tokens.device)
    if dtype is None or not torch.is_grad_enabled() or tracing.is_captured():
        return block(tokens, size)
    weights = {
        f"{path}.{leaf}": weight
        for path, layer in block.named_modules()
        if type(layer) in _CAST_LAYERS
        for leaf, weight in layer.named_parameters(recurse=False)
        if weight.requires_grad and weight.dtype == torch.float32
    }
    if not weights:
        return block(tokens, size)
    cast = dict(zip(weights, _Cast.apply(dtype, *weights.values()), strict=True))
    return torch.func.functional_call(block, cast, (tokens, size), tie_weights=False)


class _Cast(torch.autograd.Function):
    """Cast a list of tensors with few kernels."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        return tuple(_cast(tensors, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(cast) for grad in grads)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies
