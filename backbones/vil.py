"""ViL, the Multi-Scale Vision Longformer: stages of efficient attention, each at half the resolution of the last."""

import dataclasses
from collections.abc import Sequence

import torch
from timm.layers import drop_path, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.attention.dense import DenseAttention
from backbones.attention.sliding_chunk import BACKENDS, MODES, SlidingChunkAttention
from backbones.errors import InputError, check_choice
from backbones.layers.mlp import Mlp
from backbones.layers.patch_embed import PatchEmbed
from backbones.layers.position import AbsolutePositions, position_parameter
from backbones.variants import ViLStage, ViLVariant

NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class FeatureInfo:
    """What a detector needs to know of a map: its channels, and how many image pixels a side of a place covers."""

    channels: int
    stride: int


class ViLBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a skip connection (ViL section 3.1, equations 2 and 3)."""

    def __init__(self, dim: int, attention: nn.Module, *, drop_path_rate: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = Mlp(dim)
        self.drop_path_rate = drop_path_rate

    def forward(self, tokens: Tensor, global_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, H, W, C) and (B, G, C) or None -> the same; None for global tokens that this block does not update."""
        normed_globals = None if global_tokens is None else self.attention_norm(global_tokens)
        update, global_update = self.attention(self.attention_norm(tokens), normed_globals)
        # One draw an image and path, for local and global tokens together.
        keep_attention, keep_mlp = self._draw(tokens), self._draw(tokens)
        tokens = tokens + _scaled(update, keep_attention)
        tokens = tokens + _scaled(self.mlp(self.mlp_norm(tokens)), keep_mlp)
        if global_update is None:
            return tokens, None
        global_tokens = global_tokens + _scaled(global_update, keep_attention)
        return tokens, global_tokens + _scaled(self.mlp(self.mlp_norm(global_tokens)), keep_mlp)

    def _draw(self, tokens: Tensor) -> Tensor | None:
        """The factor of each image's residual path, (B,), or None for all ones."""
        if not self.training or self.drop_path_rate == 0:
            return None
        return drop_path(tokens.new_ones(tokens.shape[0]), self.drop_path_rate, training=True)


def _scaled(update: Tensor, factor: Tensor | None) -> Tensor:
    """``update`` (B, ...) times ``factor`` (B,)."""
    return update if factor is None else update * factor.view(-1, *[1] * (update.ndim - 1))


class EViTStage(nn.Module):
    """An E-ViT stage: patch embedding, positions, global tokens and blocks (ViL section 3.1, equation 1).

    Args:
        in_channels: of the map that comes in.
        spec: the stage's sizes.
        variant: what all stages share.
        max_size: largest map, height and width in tokens, for the tables of absolute positions and dense bias.
        drop_path_rates: of stochastic depth, one a block.
        keep_global_tokens: whether the last block updates them, which a next stage would not use.
        activation_checkpointing: compute the activations of a block again in the backward pass.
        attention_backend: see :class:`SlidingChunkAttention`.
    """

    undecayed = ("global_tokens",)

    def __init__(
        self,
        in_channels: int,
        spec: ViLStage,
        variant: ViLVariant,
        *,
        max_size: tuple[int, int],
        drop_path_rates: Sequence[float],
        keep_global_tokens: bool,
        activation_checkpointing: bool,
        attention_backend: str,
    ) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.patch_embed = PatchEmbed(in_channels, spec.dim, patch_size=spec.patch_size, norm_eps=NORM_EPS)
        self.global_tokens = self.positions = None
        if spec.global_tokens:
            self.global_tokens = position_parameter(1, spec.global_tokens, spec.dim)
        if not variant.relative_bias:
            self.positions = AbsolutePositions(
                spec.dim, max_height=max_size[0], max_width=max_size[1], num_global_tokens=spec.global_tokens
            )
        self.blocks = nn.ModuleList()
        for index, rate in enumerate(drop_path_rates):
            update_globals = keep_global_tokens or index + 1 < spec.depth
            if spec.attention == "dense":
                attention = DenseAttention(
                    spec.dim,
                    num_heads=spec.heads,
                    num_global_tokens=spec.global_tokens,
                    bias_size=max_size if variant.relative_bias else None,
                    update_globals=update_globals,
                )
            else:
                attention = SlidingChunkAttention(
                    spec.dim,
                    num_heads=spec.heads,
                    window_size=spec.window_size,
                    num_global_tokens=spec.global_tokens,
                    mode=variant.attention_mode,
                    relative_bias=variant.relative_bias,
                    shared_projections=variant.shared_projections,
                    update_globals=update_globals,
                    backend=attention_backend,
                )
            self.blocks.append(ViLBlock(spec.dim, attention, drop_path_rate=rate))

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, C_in, H, W) -> (B, H / patch, W / patch, C) and (B, G, C), or None where they are not kept."""
        tokens, global_tokens = self.patch_embed(maps), self.global_tokens
        if self.positions is not None:
            tokens = tokens + self.positions(tokens.shape[1], tokens.shape[2])
            if global_tokens is not None:
                global_tokens = global_tokens + self.positions.global_tokens
        if global_tokens is not None:
            global_tokens = global_tokens.expand(tokens.shape[0], -1, -1)
        for block in self.blocks:
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                tokens, global_tokens = checkpoint(block, tokens, global_tokens, use_reentrant=False)
            else:
                tokens, global_tokens = block(tokens, global_tokens)
        return tokens, global_tokens


class ViL(nn.Module):
    """A multi-scale ViL: images in, a map for each asked stage out.

    Args:
        variant: the sizes.
        out_features: names of the stages to return, ``"stage1"`` to ``"stage4"``; None for all. Stages after the last
            one are not built.
        max_img_size: height and width of the largest image in pixels, for tables of absolute positions.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        keep_global_tokens: whether the last stage returns its global tokens too (:meth:`forward_tokens`).
        activation_checkpointing: compute the activations of a block again in the backward pass.
        attention_backend: see :class:`backbones.attention.sliding_chunk.SlidingChunkAttention`.

    Raises:
        InputError: for an unknown stage.
    """

    def __init__(
        self,
        variant: ViLVariant,
        *,
        out_features: Sequence[str] | None = None,
        max_img_size: tuple[int, int] = (1333, 1333),
        drop_path_rate: float = 0.0,
        keep_global_tokens: bool = False,
        activation_checkpointing: bool = False,
        attention_backend: str = "sdpa",
    ) -> None:
        super().__init__()
        names = [f"stage{i + 1}" for i in range(len(variant.stages))]
        out_features = tuple(names if out_features is None else out_features)
        for name in out_features:
            check_choice("feature", name, names)
        if not out_features:
            raise InputError(f"out_features is empty: name at least one of {', '.join(names)}")
        if not 0 <= drop_path_rate < 1:
            raise InputError(f"drop_path_rate={drop_path_rate!r}: it is at least 0 and below 1")
        check_choice("attention mode", variant.attention_mode, MODES)
        check_choice("attention backend", attention_backend, BACKENDS)
        self.out_features = out_features
        num_stages = 1 + max(names.index(name) for name in out_features)

        total_depth = sum(stage.depth for stage in variant.stages)
        rates = iter([drop_path_rate * index / max(1, total_depth - 1) for index in range(total_depth)])
        strides = [1]
        for spec in variant.stages:
            strides.append(strides[-1] * spec.patch_size)
        # Whole places at the largest stride: 1333 pixels are 42 places of 32 and 336 of 4.
        largest = [-(-side // strides[-1]) * strides[-1] for side in max_img_size]

        self.stages = nn.ModuleList()
        self.feature_info: dict[str, FeatureInfo] = {}
        in_channels = 3
        for index, spec in enumerate(variant.stages[:num_stages]):
            stride = strides[index + 1]
            self.stages.append(
                EViTStage(
                    in_channels,
                    spec,
                    variant,
                    max_size=(largest[0] // stride, largest[1] // stride),
                    drop_path_rates=[next(rates) for _ in range(spec.depth)],
                    keep_global_tokens=keep_global_tokens and index + 1 == num_stages,
                    activation_checkpointing=activation_checkpointing,
                    attention_backend=attention_backend,
                )
            )
            if names[index] in out_features:
                self.feature_info[names[index]] = FeatureInfo(channels=spec.dim, stride=stride)
            in_channels = spec.dim
        self.apply(_init_linear)

    def forward_tokens(self, images: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """The maps of :meth:`forward`, and the last stage's global tokens (B, G, C) where they are kept."""
        maps, outputs, global_tokens = images, {}, None
        for index, stage in enumerate(self.stages):
            tokens, global_tokens = stage(maps)
            maps = tokens.permute(0, 3, 1, 2)
            name = f"stage{index + 1}"
            if name in self.out_features:
                outputs[name] = maps
        return outputs, global_tokens

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) of any height and width -> {name: (B, C, ceil(H / stride), ceil(W / stride))}."""
        return self.forward_tokens(images)[0]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay: biases, norms, positions, global tokens, bias tables."""
        names = set()
        for prefix, module in self.named_modules():
            listed = getattr(module, "undecayed", ())
            for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
                if parameter.ndim <= 1 or name.rpartition(".")[2] in listed:
                    names.add(name)
        return names

    def freeze_stages(self, number: int) -> None:
        """Stop the gradients of the first ``number`` stages, and their stochastic depth."""
        for stage in self.stages[:number]:
            stage.requires_grad_(False)
            for block in stage.blocks:
                block.drop_path_rate = 0.0


class ViLClassifier(nn.Module):
    """ViL with the paper's head (section 3.1): LayerNorm, mean over all tokens of the last stage, linear layer."""

    def __init__(self, backbone: ViL, *, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        dim = backbone.feature_info[backbone.out_features[-1]].channels
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, num_classes)
        self.head.apply(_init_linear)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, num_classes)."""
        maps, global_tokens = self.backbone.forward_tokens(images)
        tokens = maps[self.backbone.out_features[-1]].flatten(2).transpose(1, 2)
        if global_tokens is not None:
            tokens = torch.cat([global_tokens, tokens], dim=1)
        return self.head(self.norm(tokens).mean(dim=1))

    def no_weight_decay(self) -> set[str]:
        """As :meth:`ViL.no_weight_decay`, with the names of this model."""
        own = {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}
        return own | {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
