"""Register every variant with timm. After the import, ``timm.create_model("vil_small_rpb")`` works.

``features_only=True`` returns a list of feature maps. ``examples/timm_run.py`` imports this module and runs timm's own
``train.py`` or ``validate.py``. The commands are in docs/checkpoints.md.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import Format
from timm.models import (
    FeatureInfo,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
)
from timm.models._features import feature_take_indices
from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
from torch import Tensor, nn

from backbones.attention.dense import join_tokens
from backbones.attention.efficient import PerformerAttention, redraw_features
from backbones.attention.sliding_chunk import sample_shifts
from backbones.backbone import Backbone, Classifier, init_linear
from backbones.build import OPTIONS, create_backbone, get_variant, list_variants
from backbones.errors import ConfigError, check_choice, check_whole
from backbones.layers.position import fit_table
from backbones.layers.token_merging import DeformableTokenMerging
from research.ablations import create_changed_classifier

# 1e-5 versus 1e-3 (LIT section 4.1)
OFFSET_LR_SCALE = 0.01
_POOLS = {"mean": "avg", "global_token": "token"}


class TimmClassifier(Classifier):
    """The model of :func:`.create_classifier` with the methods that timm's scripts call.

    Args:
        name: One of :func:`.list_variants`.
        num_classes: Number of classes. 0 for no head.
        in_chans: 3.
        img_size: See :func:`.create_classifier`. None for the default of the variant.
        global_pool: The pooling of the variant, ``"avg"`` or ``"token"``. With ``""`` there is no pooling, and the head
            is applied to each token.
        drop_rate: Dropout rate before the head. The papers use none.
        redraw_epoch_length: Iterations of an epoch, for a Performer that redraws its random features in training. It
            redraws them every 1 + 5T iterations of epoch T (ViL appendix D). An iteration is a forward pass in
            training mode. None to keep the features.
        redraw_first_epoch: Epoch T of the first iteration, for a resumed run.
        random_shift_iterations: Number of iterations in which ViL's local attention uses only one neighboring chunk,
            sampled for each layer and iteration. The official code does this for 0.875 of all iterations.
        random_shift_first_iteration: Number of the first iteration, for a resumed run.
        options: See :func:`.create_changed_classifier`.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Sequence[int] | None = None,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        redraw_epoch_length: int | None = None,
        redraw_first_epoch: int = 0,
        random_shift_iterations: int = 0,
        random_shift_first_iteration: int = 0,
        **options: object,
    ) -> None:
        check_choice("in_chans", in_chans, (3,))
        classifier = create_changed_classifier(
            name, img_size=get_variant(name).classifier_img_size if img_size is None else img_size, **options
        )
        super().__init__(classifier.backbone, num_classes=1, pool=classifier.pool, norm_eps=classifier.norm.eps)
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.num_features = self.head_hidden_size = self.head.in_features
        self.feature_info = _feature_info(self.backbone, range(len(self.backbone.stages)))
        self.reset_classifier(num_classes, _POOLS[self.pool] if global_pool is None else global_pool)
        if redraw_epoch_length is not None:
            self.register_forward_pre_hook(RedrawHook(self, redraw_epoch_length, redraw_first_epoch))
        if random_shift_iterations:
            self.register_forward_pre_hook(ShiftHook(self, random_shift_iterations, random_shift_first_iteration))
        for module in self.modules():
            if isinstance(module, DeformableTokenMerging):
                for parameter in module.offset.parameters():
                    parameter.lr_scale = OFFSET_LR_SCALE

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the tokens of :meth:`forward_features` and the feature maps of stages, as timm's models do.

        Args:
            images: (B, 3, H, W).
            indices: Stages from 0, or from the end if negative. A number n selects the last n stages, None all.
            norm: Whether to normalize the feature map of the last stage too.
            stop_early: Whether to skip the stages after the last of ``indices``. The tokens are then the output of that
                stage, without norm.
            output_fmt: ``"NCHW"``.
            intermediates_only: Whether to return only the feature maps.
        """
        check_choice("output_fmt", output_fmt, ("NCHW",))
        stages = self.backbone.stages
        chosen, last = feature_take_indices(len(stages), indices)
        features, intermediates, global_tokens = images, [], None
        for index, stage in enumerate(stages[: last + 1] if stop_early else stages):
            tokens, global_tokens = stage(features)
            features, is_last = tokens.permute(0, 3, 1, 2), index + 1 == len(stages)
            if index in chosen:
                intermediates.append(self.norm(tokens).permute(0, 3, 1, 2) if norm and is_last else features)
        if intermediates_only:
            return intermediates
        tokens = join_tokens(tokens, global_tokens)
        return self.norm(tokens) if is_last else tokens, intermediates

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits (B, num_classes), or the input of the head (B, C), of tokens (B, G + H' * W', C)."""
        pooled = F.dropout(self.pooled(tokens) if self.global_pool else tokens, self.drop_rate, self.training)
        return pooled if pre_logits else self.head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of images (B, 3, H, W), or logits of each token without pooling."""
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Create a new head. 0 classes remove the head. With None for ``global_pool``, the pooling is unchanged."""
        check_whole("num_classes", num_classes, least=0)
        if global_pool is not None:
            check_choice("global_pool", global_pool, (_POOLS[self.pool], ""))
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes:
            like = next(self.backbone.parameters())
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            self.head.apply(init_linear)
            self.head.train(self.training)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the layers that the feature maps of ``indices`` do not need, as timm's models do.

        Args:
            indices: See :meth:`forward_intermediates`.
            prune_norm: Whether to remove the final norm.
            prune_head: Whether to remove the head.

        Returns:
            The indices of the stages, from 0.
        """
        chosen, last = feature_take_indices(len(self.backbone.stages), indices)
        is_shorter = last + 1 < len(self.backbone.stages)
        if prune_norm or is_shorter:
            self.norm = nn.Identity()
        if is_shorter:
            _keep_stages(self.backbone, last + 1)
            # Only the last stage of a classifier keeps its global tokens.
            self.pool = "mean"
            self.feature_info = _feature_info(self.backbone, range(last + 1))
            self.num_features = self.head_hidden_size = self.feature_info.channels()[-1]
        if prune_head or is_shorter:
            self.reset_classifier(0, "")
        return sorted(chosen)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Set whether the backward pass recomputes the activations of each block."""
        for stage in self.backbone.stages:
            stage.activation_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict:
        """Return timm's layers for layer-wise learning rate decay: one per block, or one per stage if ``coarse``."""
        blocks = [(r"^backbone\.stages\.(\d+)\.blocks\.(\d+)", None), (r"^backbone\.stages\.(\d+)", (-1,))]
        return {
            "stem": r"^backbone\.stages\.0\.(?!blocks)",
            "blocks": r"^backbone\.stages\.(\d+)" if coarse else [*blocks, (r"^norm", (99999,))],
        }


class TimmFeatures(nn.Module):
    """The model of :func:`.create_backbone` for timm's ``features_only=True``.

    Args:
        name: One of :func:`.list_variants` that can be a backbone.
        out_indices: See ``indices`` of :meth:`TimmClassifier.forward_intermediates`.
        feature_cls: ``"list"``, or ``"dict"`` for a dict from the index of a stage, as a string, to its feature map.
        in_chans: 3.
        num_classes: Ignored, as in timm. A backbone has no head.
        options: See :func:`.create_backbone`.
    """

    output_fmt = Format.NCHW

    def __init__(
        self,
        name: str,
        *,
        out_indices: int | Sequence[int] | None = None,
        feature_cls: str = "list",
        in_chans: int = 3,
        num_classes: int = 0,
        **options: object,
    ) -> None:
        super().__init__()
        check_choice("in_chans", in_chans, (3,))
        names = get_variant(name).stage_names
        indices = sorted(feature_take_indices(len(names), out_indices)[0])
        self.backbone = create_backbone(name, out_features=[names[index] for index in indices], **options)
        self.feature_cls = feature_cls
        self.feature_info = _feature_info(self.backbone, indices)

    def forward(self, images: Tensor) -> list[Tensor] | dict[str, Tensor]:
        """Return the feature maps (B, C, ceil(H / stride), ceil(W / stride)) of images (B, 3, H, W)."""
        features = self.backbone(images).values()
        if self.feature_cls == "dict":
            return dict(zip(map(str, self.feature_info.out_indices), features, strict=True))
        return list(features)

    no_weight_decay = Backbone.no_weight_decay

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Set whether the backward pass recomputes the activations of each block."""
        for stage in self.backbone.stages:
            stage.activation_checkpointing = enable


def _keep_stages(backbone: Backbone, number: int) -> None:
    """Remove the stages after the first ``number``. Only the last remaining stage is returned."""
    name = f"stage{number}"
    backbone.num_stages, backbone.stages = number, backbone.stages[:number]
    backbone.output_norms = nn.ModuleDict({key: norm for key, norm in backbone.output_norms.items() if key == name})
    (info,), sizes = backbone.feature_info.values(), backbone.variant.stages[number - 1]
    info = dataclasses.replace(info, channels=sizes.dim, stride=backbone.strides[number - 1])
    backbone.feature_info = {name: info}


def _feature_info(backbone: Backbone, indices: Sequence[int]) -> FeatureInfo:
    infos = [
        {"num_chs": stage.dim, "reduction": stride, "module": f"backbone.stages.{index}"}
        for index, (stage, stride) in enumerate(zip(backbone.variant.stages, backbone.strides, strict=True))
    ]
    return FeatureInfo(infos[: len(backbone.stages)], tuple(indices))


class RedrawHook:
    """Redraws a Performer's random features in training, every 1 + 5T forward passes of epoch T (ViL appendix D)."""

    def __init__(self, model: nn.Module, epoch_length: int, first_epoch: int) -> None:
        check_whole("redraw_epoch_length", epoch_length)
        if not any(isinstance(module, PerformerAttention) for module in model.modules()):
            raise ConfigError(
                "redraw_epoch_length has no effect, because the model has no random features. Leave it out."
            )
        self.epoch_length = epoch_length
        self.iteration = epoch_length * first_epoch
        self.since = 0

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        if not model.training:
            return
        if self.since >= 1 + 5 * (self.iteration // self.epoch_length):
            # The same in every process
            redraw_features(model, seed=self.iteration)
            self.since = 0
        self.since += 1
        self.iteration += 1


class ShiftHook:
    """Samples the shifts of local attention before each of the first forward passes in training."""

    def __init__(self, model: nn.Module, iterations: int, first_iteration: int) -> None:
        check_whole("random_shift_iterations", iterations)
        if not sample_shifts(model, seed=None):
            raise ConfigError(
                "random_shift_iterations has no effect, because the model has no sliding chunks. Leave it out."
            )
        self.iterations = iterations
        self.iteration = first_iteration

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        if model.training:
            # The same in every process
            sample_shifts(model, seed=self.iteration if self.iteration < self.iterations else None)
            self.iteration += 1


class LITAdamW(torch.optim.AdamW):
    """AdamW with 0.01 times the learning rate for the offsets of deformable token merging: ``--opt litadamw``.

    The factor is ``lr_scale`` of the parameter groups. timm's schedulers apply it, also to the minimum learning rate.
    """

    def add_param_group(self, param_group: dict) -> None:
        by_scale: dict[float, list[nn.Parameter]] = collections.defaultdict(list)
        for parameter in param_group["params"]:
            by_scale[getattr(parameter, "lr_scale", 1.0)].append(parameter)
        for scale, parameters in by_scale.items():
            lr_scale = scale * param_group.get("lr_scale", 1.0)
            super().add_param_group({**param_group, "params": parameters, "lr_scale": lr_scale})


def _adapt_state_dict(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Adapt a state dict of :class:`TimmClassifier` to another image size, another head, or :class:`TimmFeatures`.

    timm does not check names if the number of classes differs. Here all parameters but the head must match.
    """
    target, modules = model.state_dict(), dict(model.named_modules())
    adapted = {}
    for key, tensor in state_dict.items():
        owner, _, leaf = key.rpartition(".")
        adapted[key] = fit_table(tensor, modules.get(owner), leaf)
    heads = ("head.",)
    if isinstance(model, TimmFeatures):
        heads = ("head.", "norm.")
        # A LIT backbone has output norms and no global tokens.
        extra = (*heads, "backbone.stages.3.global_tokens", "backbone.stages.3.positions.global_tokens")
        adapted = {key: t for key, t in adapted.items() if key in target or not key.startswith(extra)}
        adapted |= {key: tensor for key, tensor in target.items() if key.startswith("backbone.output_norms.")}
    ours, theirs = ({key: t.shape for key, t in d.items() if not key.startswith(heads)} for d in (target, adapted))
    if ours != theirs:
        wrong = sorted(dict(ours.items() ^ theirs.items()))
        raise ConfigError(
            f"The checkpoint is of another model: {len(wrong)} names or shapes differ, such as '{wrong[0]}'. Use a "
            "checkpoint of this variant."
        )
    return adapted


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    def create(
        pretrained: bool = False, features_only: bool = False, feature_cfg: dict | None = None, **kwargs: object
    ) -> nn.Module:
        variant = get_variant(name, {key: value for key, value in kwargs.items() if key in OPTIONS})
        model, is_fixed = functools.partial(TimmClassifier, name), variant.has_fixed_input_size
        if features_only:
            feature_cfg = {"feature_cls": "list", "out_indices": len(variant.stages)} | (feature_cfg or {})
            for key in ("feature_cls", "out_indices"):
                feature_cfg[key] = kwargs.pop(key, feature_cfg[key])
            check_choice("feature_cls", feature_cfg["feature_cls"], ("list", "dict", "getter"))
            if feature_cfg["feature_cls"] == "getter":
                kwargs |= {"features_only": True, "feature_cfg": feature_cfg}
            else:
                model, is_fixed = functools.partial(TimmFeatures, name, **feature_cfg), False
        overlay = {"fixed_input_size": is_fixed} | (kwargs.pop("pretrained_cfg_overlay", None) or {})
        return build_model_with_cfg(
            model,
            name,
            pretrained,
            pretrained_cfg_overlay=overlay,
            pretrained_filter_fn=_adapt_state_dict,
            **kwargs,
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name}: see :class:`TimmClassifier`, and :class:`TimmFeatures` for ``features_only=True``."
    return create


def _pretrained_cfg(name: str) -> dict:
    """Return the ImageNet preprocessing of the official projects: bicubic, with a crop of 0.875 at 224 and 384 (LS).

    ViL is fine-tuned at 384 pixels with a crop of 0.922. It has no variant of its own: use ``--crop-pct``.
    """
    variant = get_variant(name)
    side = variant.classifier_img_size
    last = -(-side // math.prod(variant.downsample_factors))
    return {
        "input_size": (3, side, side),
        "pool_size": (last, last),
        "fixed_input_size": variant.has_fixed_input_size,
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "num_classes": 1000,
        "first_conv": "backbone.stages.0.patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }


default_cfgs = generate_default_cfgs({name: _pretrained_cfg(name) for name in list_variants()})
for _name in list_variants():
    globals()[_name] = register_model(_entrypoint(_name))
default_registry.register(
    OptimInfo("litadamw", LITAdamW, "AdamW, with LIT's offsets at 0.01 of the learning rate", has_betas=True)
)
