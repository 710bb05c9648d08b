"""The common parts of all families: variants, stages, the backbone and the classifier."""

import abc
import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.attention.dense import join_tokens, split_globals
from backbones.errors import ConfigError, check_choice
from backbones.layers.block import Block, call_block
from backbones.layers.position import init_trunc_normal_, position_parameter
from backbones.layers.tracing import contiguous_for_export, static_size

ATTENTION_BACKENDS = ("auto", "sdpa", "triton", "reference")


@dataclasses.dataclass(frozen=True)
class FeatureInfo:
    """Channels of a feature map and its stride in pixels."""

    channels: int
    stride: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """The sizes of a model. Each family has a subclass.

    Attributes:
        stages: One dataclass per stage, with at least the fields ``depth`` and ``dim``.
        drop_path_rate: Stochastic depth rate for training a detector, from the official code.
        options: The fields of the variant or of its stages that a user may override.
        pool: How the classifier pools tokens.
        norm_eps: Epsilon of the LayerNorms.
        has_depthwise_mlp: Whether the MLPs have a depth-wise convolution.
        downsample_factors: The factor by which each stage reduces the height and width of its input.
        classifier_img_size: Image side in pixels on which the paper's classifier is trained.
        has_fixed_input_size: Whether a classifier raises an error for images larger than its ``img_size``.
    """

    stages: tuple[Any, ...]
    drop_path_rate: float = dataclasses.field(default=0.1, kw_only=True)

    options: ClassVar[tuple[str, ...]]
    pool: ClassVar[str] = "mean"
    norm_eps: ClassVar[float]
    has_depthwise_mlp: ClassVar[bool] = False
    downsample_factors: ClassVar[tuple[int, ...]]
    classifier_img_size: ClassVar[int] = 224
    has_fixed_input_size: ClassVar[bool] = False

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, from the largest feature map: ``"stage1"``, ..."""
        return tuple(f"stage{number}" for number in range(1, len(self.stages) + 1))

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the stages in pixels."""
        return tuple(itertools.accumulate(self.downsample_factors, operator.mul))

    def with_options(self, **options: object) -> "Variant":
        """Return the variant with other fields. A field of the stages takes one value, or one value per stage."""
        fields = options.keys() & {field.name for field in dataclasses.fields(self)}
        stages = self.stages
        for name in options.keys() - fields:
            stages = with_stage_values(stages, name, options[name])
        return dataclasses.replace(self, stages=stages, **{name: options[name] for name in fields})


def with_stage_values(stages: tuple[Any, ...], name: str, value: object) -> tuple[Any, ...]:
    """Return ``stages`` with the field ``name`` set to ``value``, or to one value per stage from a list or tuple."""
    values = list(value) if isinstance(value, list | tuple) else [value] * len(stages)
    if len(values) != len(stages):
        raise ConfigError(f"{name}={value!r} has {len(values)} values. Give one, or {len(stages)}: one per stage.")
    return tuple(dataclasses.replace(stage, **{name: v}) for stage, v in zip(stages, values, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneSettings:
    """The arguments of a backbone besides its variant.

    Attributes:
        out_features: Names of the stages to return, such as ``"stage1"``. None for all. Later stages are not built.
        max_img_size: Height and width of the largest image in pixels. It sizes the tables that are resized when weights
            are loaded.
        position_img_size: Height and width in pixels for the tables that are resized to each feature map. None for the
            default of the variant.
        drop_path_rate: Stochastic depth of the last block. The rate grows linearly from 0 at the first block.
        keep_global_tokens: Whether the last stage keeps its global tokens and feature maps have no output norms, as in
            a classifier.
        activation_checkpointing: Whether the backward pass recomputes the activations of each block.
        attention_backend: One of ``ATTENTION_BACKENDS``, see :func:`.create_backbone`.
    """

    out_features: Sequence[str] | None = None
    max_img_size: tuple[int, int] = (1333, 1333)
    position_img_size: tuple[int, int] | None = None
    drop_path_rate: float = 0.0
    keep_global_tokens: bool = False
    activation_checkpointing: bool = False
    attention_backend: str = "auto"


class Stage(nn.Module):
    """One resolution: an embedding that reduces the feature map, positions, global tokens and blocks.

    Args:
        patch_embed: Embeds a feature map (B, C_in, H, W) as tokens (B, H', W', dim).
        blocks: The blocks.
        dim: Channels of a token.
        num_global_tokens: Number G of global tokens.
        positions: A module that returns the positions for a height and a width. Its ``global_tokens`` are the positions
            of the global tokens. None for no absolute positions.
        activation_checkpointing: Whether the backward pass recomputes the activations of each block.
    """

    no_weight_decay_names = ("global_tokens",)

    def __init__(
        self,
        patch_embed: nn.Module,
        blocks: Iterable[Block],
        *,
        dim: int,
        num_global_tokens: int = 0,
        positions: nn.Module | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.patch_embed = patch_embed
        self.global_tokens = position_parameter(1, num_global_tokens, dim) if num_global_tokens else None
        self.positions = positions
        self.blocks = nn.ModuleList(blocks)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens (B, H', W', C), and global tokens (B, G, C) or None, of a feature map (B, C_in, H, W)."""
        tokens, global_tokens = self.patch_embed(features), self.global_tokens
        size, num_global = tokens.shape[1:3], 0
        if self.positions is not None:
            tokens = tokens + self.positions(*size)
            if global_tokens is not None:
                global_tokens = global_tokens + self.positions.global_tokens
        tokens = contiguous_for_export(tokens).flatten(1, 2)
        if global_tokens is not None:
            num_global = static_size(global_tokens.shape[1])
            tokens = torch.cat([global_tokens.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        for block in self.blocks:
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                options = {}
                if not torch.compiler.is_compiling():
                    # The second forward pass must not update batch statistics again. torch.compile does not support
                    # contexts, and updates the statistics only once.
                    options["context_fn"] = lambda block=block: (contextlib.nullcontext(), _no_batch_statistics(block))
                tokens = checkpoint(call_block, block, tokens, size, use_reentrant=False, **options)
            else:
                tokens = call_block(block, tokens, size)
            if block.drops_globals:
                num_global = 0
        global_tokens, tokens = split_globals(tokens, num_global)
        return tokens.unflatten(1, size), global_tokens


@contextlib.contextmanager
def _no_batch_statistics(module: nn.Module) -> Iterator[None]:
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)


class Backbone(nn.Module, abc.ABC):
    """Base class of multi-scale backbones, which return a feature map for each requested stage.

    A subclass implements the methods that start with ``_make``, which create the parts of one stage. They are called in
    the order of the stages, and may use ``variant``, ``settings`` and ``strides``.

    Args:
        variant: The sizes of the model.
        settings: The other arguments.

    Raises:
        ConfigError: If a stage or the backend is unknown, no stage is named, or ``drop_path_rate`` is not in [0, 1).
    """

    def __init__(self, variant: Variant, settings: BackboneSettings) -> None:
        super().__init__()
        names = variant.stage_names
        out_features = names if settings.out_features is None else settings.out_features
        if isinstance(out_features, str):
            out_features = (out_features,)
        for name in out_features:
            check_choice("out_features", name, names)
        if not out_features:
            raise ConfigError(f"out_features is empty. Name at least one of {', '.join(names)}.")
        if not 0 <= settings.drop_path_rate < 1:
            raise ConfigError(f"drop_path_rate={settings.drop_path_rate!r} is not in [0, 1). Use for example 0.1.")
        check_choice("attention_backend", settings.attention_backend, ATTENTION_BACKENDS)
        self.variant = variant
        self.settings = settings
        self.strides = variant.strides
        self.num_stages = 1 + max(map(names.index, out_features))
        self.feature_info: dict[str, FeatureInfo] = {
            name: FeatureInfo(spec.dim, stride)
            for name, spec, stride in zip(names, variant.stages, self.strides, strict=True)
            if name in out_features
        }
        self.num_frozen_stages = 0
        # The backend of the attention mechanisms that have no Triton kernel.
        self.common_backend = "reference" if settings.attention_backend == "reference" else "sdpa"
        self.stages = nn.ModuleList()
        self.output_norms = nn.ModuleDict()
        for index in range(self.num_stages):
            self.stages.append(self._make_stage(index))
            norm = self._make_output_norm(index) if names[index] in out_features else None
            if norm is not None:
                self.output_norms[names[index]] = norm
        self.apply(init_linear)
        if settings.attention_backend == "triton" and not any(
            getattr(module, "backend", None) == "triton" for module in self.modules()
        ):
            attention = "sliding-chunk attention, long-short attention or full attention with a relative bias"
            raise ConfigError(f"attention_backend='triton' needs {attention}. This variant has none. Use 'auto'.")

    def _make_stage(self, index: int) -> Stage:
        spec, in_channels = self.variant.stages[index], self.variant.stages[index - 1].dim if index else 3
        positions = self._make_positions(index)
        depths = [stage.depth for stage in self.variant.stages]
        before, last = sum(depths[:index]), max(1, sum(depths) - 1)
        blocks = [
            Block(
                spec.dim,
                self._make_attention(index, number),
                expansion=spec.expansion,
                depthwise_mlp=self.variant.has_depthwise_mlp,
                norm_eps=self.variant.norm_eps,
                drop_path_rate=self.settings.drop_path_rate * (before + number) / last,
            )
            for number in range(spec.depth)
        ]
        return Stage(
            self._make_embedding(index, in_channels),
            blocks,
            dim=spec.dim,
            # All blocks of a stage have the same number, and a block with only an MLP has none.
            num_global_tokens=getattr(blocks[0].attention, "num_global_tokens", 0),
            positions=positions,
            activation_checkpointing=self.settings.activation_checkpointing,
        )

    @abc.abstractmethod
    def _make_embedding(self, index: int, in_channels: int) -> nn.Module:
        """Return the embedding of stage ``index``, from 0: (B, in_channels, H, W) -> tokens (B, H', W', C)."""

    @abc.abstractmethod
    def _make_attention(self, index: int, number: int) -> nn.Module | None:
        """Return the attention of block ``number`` of stage ``index``, both from 0, or None if there is only an MLP."""

    def _make_positions(self, index: int) -> nn.Module | None:
        """Return the absolute positions of a stage."""
        return None

    def _make_output_norm(self, index: int) -> nn.Module | None:
        """Return the norm of a stage's feature map, or None. The next stage gets the input of this norm."""
        return None

    def _table_size(self, index: int, resizing: str, *, unit: int | None = None) -> tuple[int, int]:
        """Return the height and width in tokens of a stage's tables.

        Image sides are rounded up to ``unit`` pixels, by default the largest stride. For ViL, 1333 pixels are 42 tokens
        at stride 32 and 336 at stride 4.
        """
        sides, unit = self.settings.max_img_size, unit or self.strides[-1]
        if resizing == "per_feature_map":
            sides = self.settings.position_img_size or (self.variant.position_img_size,) * 2
        height, width = (-(-side // unit) * unit // self.strides[index] for side in sides)
        return height, width

    def _keeps_global_tokens(self, index: int) -> bool:
        """Return whether a stage returns its global tokens, as the last stage of a classifier does."""
        return self.settings.keep_global_tokens and index + 1 == self.num_stages

    def forward_tokens(self, images: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the feature maps of :meth:`forward`, and the global tokens (B, G, C) of the last stage or None."""
        features, outputs, global_tokens = images, {}, None
        for index, stage in enumerate(self.stages):
            tokens, global_tokens = stage(features)
            # Otherwise an exported program would be valid only for the memory format that one batch size has here.
            features = contiguous_for_export(tokens.permute(0, 3, 1, 2))
            name = f"stage{index + 1}"
            if name in self.output_norms:
                outputs[name] = contiguous_for_export(self.output_norms[name](tokens).permute(0, 3, 1, 2))
            elif name in self.feature_info:
                outputs[name] = features
        return outputs, global_tokens

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the feature maps of images.

        Args:
            images: (B, 3, H, W), of any height and width.

        Returns:
            A dict from the name of each stage in ``feature_info`` to (B, C, ceil(H / stride), ceil(W / stride)).
        """
        return self.forward_tokens(images)[0]

    # Classifiers and sequence models use this method too.
    def no_weight_decay(self: nn.Module) -> set[str]:
        """Return the names of the parameters without weight decay.

        These are parameters with at most one axis, such as biases and norms, and parameters that their module lists in
        ``no_weight_decay_names``: position tables, global tokens and bias tables.
        """
        names = set()
        for prefix, module in self.named_modules():
            listed = getattr(module, "no_weight_decay_names", ())
            for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
                if parameter.ndim <= 1 or name.rpartition(".")[2] in listed:
                    names.add(name)
        return names

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return self._num_blocks_before(len(self.stages))

    def layer_id(self, name: str) -> int:
        """Return the layer of a parameter, for layer-wise learning rate decay.

        Each block is a layer. The embedding before the first block is layer 0. The embedding, positions and global
        tokens of a later stage belong to the layer of its first block. An output norm belongs to the layer of the last
        block of its stage. Sources: BEiT (Bao et al. 2022), and ViTDet (Li et al. 2022) for detection.

        Args:
            name: A name of ``named_parameters()``.

        Returns:
            0 to ``num_layers``.
        """
        part, stage, *rest = name.split(".")
        if part == "output_norms":
            return self._num_blocks_before(int(stage.removeprefix("stage")))
        first = self._num_blocks_before(int(stage)) + 1
        if rest[0] == "blocks":
            return first + int(rest[1])
        return first if int(stage) else 0

    def _num_blocks_before(self, index: int) -> int:
        return sum(len(stage.blocks) for stage in self.stages[:index])

    def freeze_stages(self, number: int) -> None:
        """Freeze the first ``number`` stages: no gradients, no stochastic depth, no new batch statistics."""
        self.num_frozen_stages = number
        self.stages[:number].requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        """Set the training mode, as ``nn.Module.train``. Frozen stages stay in evaluation mode."""
        super().train(mode)
        self.stages[: self.num_frozen_stages].eval()
        return self


class Classifier(nn.Module):
    """A backbone with the head of the papers: LayerNorm, pooling and a linear layer.

    Args:
        backbone: A backbone that returns its last stage.
        num_classes: Number of classes.
        pool: ``"mean"`` for the mean of all local and global tokens, or ``"global_token"`` for the first global token.
        norm_eps: Epsilon of the norm.
    """

    def __init__(self, backbone: Backbone, *, num_classes: int, pool: str, norm_eps: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.pool = pool
        (feature_info,) = backbone.feature_info.values()
        self.norm = nn.LayerNorm(feature_info.channels, eps=norm_eps)
        self.head = nn.Linear(feature_info.channels, num_classes)
        self.head.apply(init_linear)

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the normalized tokens (B, G + H' * W', C) of images (B, 3, H, W), global tokens first."""
        features, global_tokens = self.backbone.forward_tokens(images)
        (features,) = features.values()
        return self.norm(join_tokens(features.permute(0, 2, 3, 1), global_tokens))

    def pooled(self, tokens: Tensor) -> Tensor:
        """Return one vector (B, C) per image from the tokens of :meth:`forward_features`."""
        return tokens[:, 0] if self.pool == "global_token" else tokens.mean(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of images (B, 3, H, W)."""
        return self.head(self.pooled(self.forward_features(images)))

    no_weight_decay = Backbone.no_weight_decay


def init_linear(module: nn.Module) -> None:
    """Initialize a linear layer as in all three papers. Pass this function to ``module.apply``."""
    if isinstance(module, nn.Linear):
        init_trunc_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
