"""What all families share: stages in order, the maps of those that are asked for, and a classification head."""

import abc
import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backbones.attention.dense import join_tokens
from backbones.execution.tracing import in_order
from backbones.layers.block import Block
from backbones.layers.parameters import draw_, undecayed_names
from backbones.layers.position import position_parameter, resize_tables
from backbones.utils.errors import InputError, check_choice
from backbones.variants import Variant, stage_names

ATTENTION_BACKENDS = ("auto", "sdpa", "triton", "reference")


@dataclasses.dataclass(frozen=True)
class FeatureInfo:
    """What a detector needs to know of a map: its channels, and how many image pixels a side of a place covers."""

    channels: int
    stride: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a backbone is made with, beside its variant.

    Attributes:
        out_features: names of the stages to return, ``"stage1"`` onwards; None for all. Stages after the last one are
            not built.
        max_img_size: height and width of the largest image in pixels, for tables that are resized when weights are
            loaded.
        position_img_size: the same for tables that are resized to each map; None for the variant's own.
        drop_path_rate: stochastic depth of the last block; it grows linearly from 0 at the first.
        keep_global_tokens: as a classifier is built: the last stage keeps its global tokens
            (:meth:`Backbone.forward_tokens`), and no map is normed on its way out.
        activation_checkpointing: compute the activations of a block again in the backward pass.
        attention_backend: of ``ATTENTION_BACKENDS``: ``"sdpa"`` by PyTorch's attention, ``"triton"`` by kernels for
            CUDA, which sliding chunks alone have, ``"auto"`` by the fastest on the device, ``"reference"`` for
            debugging, quadratic.
    """

    out_features: Sequence[str] | None = None
    max_img_size: tuple[int, int] = (1333, 1333)
    position_img_size: tuple[int, int] | None = None
    drop_path_rate: float = 0.0
    keep_global_tokens: bool = False
    activation_checkpointing: bool = False
    attention_backend: str = "auto"

    def table_img_size(self, resizing: str, side: int) -> tuple[int, int]:
        """Height and width in pixels of the image that tables are made for, of which ``side`` is the variant's."""
        return self.max_img_size if resizing == "load" else self.position_img_size or (side, side)


class Stage(nn.Module):
    """One resolution: an embedding that shrinks the map, positions, global tokens and blocks.

    Args:
        patch_embed: (B, C_in, H, W) -> tokens (B, H', W', dim).
        blocks: on tokens and global tokens.
        dim: channels of a token.
        num_global_tokens: G.
        positions: a module from height and width to what is added to the tokens, whose ``global_tokens`` is added to
            the global tokens; None for no absolute positions.
        activation_checkpointing: compute the activations of a block again in the backward pass.
    """

    undecayed = ("global_tokens",)

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

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, C_in, H, W) -> (B, H', W', C) and (B, G, C), or None where they are not kept."""
        tokens, global_tokens = self.patch_embed(maps), self.global_tokens
        if self.positions is not None:
            tokens = tokens + self.positions(tokens.shape[1], tokens.shape[2])
            if global_tokens is not None:
                global_tokens = global_tokens + self.positions.global_tokens
        if global_tokens is not None:
            global_tokens = global_tokens.expand(tokens.shape[0], -1, -1)
        for block in self.blocks:
            if self.activation_checkpointing and self.training and torch.is_grad_enabled():
                contexts = functools.partial(_contexts_of_checkpoint, block)
                tokens, global_tokens = checkpoint(
                    block, tokens, global_tokens, use_reentrant=False, context_fn=contexts
                )
            else:
                tokens, global_tokens = block(tokens, global_tokens)
        return tokens, global_tokens


def _contexts_of_checkpoint(block: nn.Module) -> tuple[contextlib.AbstractContextManager, ...]:
    """For the first pass and for the second one, which must not count a batch's statistics again."""
    return contextlib.nullcontext(), _untracked(block)


@contextlib.contextmanager
def _untracked(module: nn.Module) -> Iterator[None]:
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
    """A multi-scale backbone: images in, a map for each asked stage out.

    A family's class says what its stages are made of, by the methods that start with ``_make``; they are called in the
    order of the stages, and read ``variant``, ``settings`` and ``strides``.

    Args:
        variant: the sizes.
        settings: the rest; None for those of :class:`Settings` itself.

    Raises:
        InputError: for an unknown stage or backend, no stage, or a rate of stochastic depth that is not at least 0 and
            below 1.
    """

    def __init__(self, variant: Variant, settings: Settings | None = None) -> None:
        super().__init__()
        settings = settings or Settings()
        names = stage_names(variant)
        out_features = settings.out_features
        if isinstance(out_features, str):
            out_features = (out_features,)
        out_features = tuple(names if out_features is None else out_features)
        for name in out_features:
            check_choice("feature", name, names)
        if not out_features:
            raise InputError(f"out_features is empty: name at least one of {', '.join(names)}")
        rate = settings.drop_path_rate
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise InputError(f"drop_path_rate={rate!r}: it is at least 0 and below 1")
        check_choice("attention backend", settings.attention_backend, ATTENTION_BACKENDS)
        self.variant = variant
        self.settings = settings
        self.strides = tuple(itertools.accumulate(variant.steps, operator.mul))
        self.out_features = out_features
        self.num_stages = 1 + max(names.index(name) for name in out_features)
        self.feature_info: dict[str, FeatureInfo] = {
            name: FeatureInfo(spec.dim, stride)
            for name, spec, stride in zip(names, variant.stages, self.strides, strict=True)
            if name in out_features
        }
        self.num_frozen_stages = 0
        self.stages = nn.ModuleList()
        self.output_norms = nn.ModuleDict()
        rates = drop_path_rates(rate, [spec.depth for spec in variant.stages])
        for index in range(self.num_stages):
            self.stages.append(self._make_stage(index, rates[index]))
            norm = self._make_output_norm(index) if names[index] in out_features else None
            if norm is not None:
                self.output_norms[names[index]] = norm
        self.apply(init_linear)
        backend = settings.attention_backend
        if backend == "triton" and not any(getattr(module, "backend", None) == backend for module in self.modules()):
            raise InputError(f"attention backend {backend!r} is of sliding chunks, and there are none: take 'auto'")

    @property
    def common_backend(self) -> str:
        """Of attention that has no kernel but PyTorch's."""
        return "reference" if self.settings.attention_backend == "reference" else "sdpa"

    def _make_stage(self, index: int, rates: Sequence[float]) -> Stage:
        """A stage, with the rates of stochastic depth of its blocks."""
        spec, in_channels = self.variant.stages[index], self.variant.stages[index - 1].dim if index else 3
        positions = self._make_positions(index)
        blocks = [
            Block(
                spec.dim,
                self._make_attention(index, number),
                expansion=spec.expansion,
                norm_eps=self.variant.norm_eps,
                drop_path_rate=rate,
            )
            for number, rate in enumerate(rates)
        ]
        return Stage(
            self._make_embedding(index, in_channels),
            blocks,
            dim=spec.dim,
            num_global_tokens=self._num_global_tokens(index),
            positions=positions,
            activation_checkpointing=self.settings.activation_checkpointing,
        )

    @abc.abstractmethod
    def _make_embedding(self, index: int, in_channels: int) -> nn.Module:
        """What stage ``index``, from 0, starts with: (B, in_channels, H, W) -> tokens (B, H / step, W / step, C)."""

    @abc.abstractmethod
    def _make_attention(self, index: int, number: int) -> nn.Module | None:
        """The attention of block ``number`` of a stage, both from 0; None for a block of the MLP alone."""

    def _make_positions(self, index: int) -> nn.Module | None:
        """The absolute positions of a stage."""
        return None

    def _make_output_norm(self, index: int) -> nn.Module | None:
        """The norm of a stage's map that is applied on its way out only."""
        return None

    def _num_global_tokens(self, index: int) -> int:
        return 0

    def _is_last(self, index: int) -> bool:
        return index + 1 == self.num_stages

    def forward_tokens(self, images: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """The maps of :meth:`forward`, and the last stage's global tokens (B, G, C) where they are kept."""
        maps, outputs, global_tokens = images, {}, None
        for index, stage in enumerate(self.stages):
            tokens, global_tokens = stage(maps)
            # In order for the convolutions behind: an export would ask their memory format for the number of images.
            maps = in_order(tokens.permute(0, 3, 1, 2))
            name = f"stage{index + 1}"
            if name in self.output_norms:
                outputs[name] = in_order(self.output_norms[name](tokens).permute(0, 3, 1, 2))
            elif name in self.out_features:
                outputs[name] = maps
        return outputs, global_tokens

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) of any height and width -> {name: (B, C, ceil(H / stride), ceil(W / stride))}."""
        return self.forward_tokens(images)[0]

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that take no weight decay: biases, norms, positions, global tokens, bias tables."""
        return undecayed_names(self)

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return self._num_blocks_before(len(self.stages))

    def layer_id(self, name: str) -> int:
        """How deep a parameter lies, for learning rates that decay layer by layer.

        A block is a layer, and the embedding before the first is 0. What a later stage begins with, its embedding,
        positions and global tokens, is of its first block's layer; the norm of a map on its way out is of the last
        block's. Source: BEiT (Bao et al. 2022) counts so, and ViTDet (Li et al. 2022) in detection, for one stage.

        Args:
            name: of one of ``named_parameters()``.

        Returns:
            0 to ``num_layers``.

        Raises:
            InputError: for a name of none.
        """
        try:
            self.get_parameter(name)
        except AttributeError as error:
            raise InputError(f"{type(self).__name__} has no parameter {name!r}") from error
        part, place, *rest = name.split(".")
        if part == "output_norms":
            return self._num_blocks_before(int(place.removeprefix("stage")))
        first = self._num_blocks_before(int(place)) + 1
        if rest[0] == "blocks":
            return first + int(rest[1])
        return first if int(place) else 0

    def _num_blocks_before(self, index: int) -> int:
        return sum(len(stage.blocks) for stage in self.stages[:index])

    def freeze_stages(self, number: int) -> None:
        """Stop the gradients of the first ``number`` stages, their stochastic depth and their batch statistics."""
        self.num_frozen_stages = number
        for stage in self.stages[:number]:
            stage.requires_grad_(False)
            for block in stage.blocks:
                block.drop_path_rate = 0.0
        self.train(self.training)

    def keep_stages(self, number: int) -> None:
        """Drop the stages after the first ``number``: the map of the last one that is left is the only output."""
        name = f"stage{number}"
        self.num_stages = number
        self.stages = self.stages[:number]
        self.output_norms = nn.ModuleDict({key: norm for key, norm in self.output_norms.items() if key == name})
        self.out_features = (name,)
        self.feature_info = {name: FeatureInfo(self.variant.stages[number - 1].dim, self.strides[number - 1])}

    def set_img_size(self, img_size: tuple[int, int]) -> None:
        """Resize all tables of positions in place, to those of a model that is made for images of another size.

        Args:
            img_size: height and width in pixels.

        Raises:
            InputError: where a parameter belongs to one size, as Linformer's do; nothing has changed then.
        """
        position_img_size = None if self.settings.position_img_size is None else img_size
        settings = dataclasses.replace(self.settings, max_img_size=img_size, position_img_size=position_img_size)
        with torch.device("meta"):
            twin = type(self)(self.variant, settings)
        resize_tables(self, twin)
        self.settings = settings

    def train(self, mode: bool = True) -> "Backbone":
        """As ``nn.Module.train``; frozen stages stay in eval mode."""
        super().train(mode)
        self.stages[: self.num_frozen_stages].eval()
        return self


class Classifier(nn.Module):
    """A backbone and the papers' head: LayerNorm, one vector an image, a linear layer.

    Args:
        backbone: returns its last stage, with the global tokens where they are kept.
        num_classes: of the head.
        pool: ``"mean"`` over all tokens of the last stage, global ones too, or its first ``"global_token"``.
        norm_eps: of the norm.
    """

    def __init__(self, backbone: Backbone, *, num_classes: int, pool: str, norm_eps: float) -> None:
        super().__init__()
        check_choice("pooling", pool, ("mean", "global_token"))
        self.backbone = backbone
        self.pool = pool
        dim = backbone.feature_info[backbone.out_features[-1]].channels
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, num_classes)
        self.head.apply(init_linear)

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> the last stage's tokens after the norm (B, G + H' W', C), global tokens first."""
        maps, global_tokens = self.backbone.forward_tokens(images)
        tokens = maps[self.backbone.out_features[-1]].permute(0, 2, 3, 1)
        return self.norm(join_tokens(tokens, global_tokens))

    def pooled(self, tokens: Tensor) -> Tensor:
        """Tokens of :meth:`forward_features` -> the vector of each image, (B, C)."""
        return tokens[:, 0] if self.pool == "global_token" else tokens.mean(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, num_classes)."""
        return self.head(self.pooled(self.forward_features(images)))

    def no_weight_decay(self) -> set[str]:
        """As :meth:`Backbone.no_weight_decay`, with the names of this model."""
        own = {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}
        return own | {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Rates of stochastic depth, a list for each stage: from 0 at the first block linearly to ``rate`` at the last."""
    last = max(1, sum(depths) - 1)
    rates = iter([rate * index / last for index in range(sum(depths))])
    return [[next(rates) for _ in range(depth)] for depth in depths]


def init_linear(module: nn.Module) -> None:
    """The initial values of linear layers in all three papers: for ``module.apply``."""
    if isinstance(module, nn.Linear):
        draw_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
