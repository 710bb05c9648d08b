"""timm models as detectron2 backbones, from ``timm.create_model(..., features_only=True)``."""

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence

import timm
import torch
import torch.nn.functional as F
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import Backbone
from timm.layers import Conv2dSame, FrozenBatchNormAct2d, convert_sync_batchnorm, freeze_batch_norm_2d
from timm.models import group_parameters
from torch import Tensor, nn

from backbones import ConfigError
from backbones.errors import check_choice, closest, counted, one_line
from backbones.layers.tracing import contiguous_for_export, is_captured, is_tracing

TIMM_PREFIX = "timm:"
TIMM_STAGES = {"stage1": 4, "stage2": 8, "stage3": 16, "stage4": 32}
# Accept images of any size, and shift windows in the last stage too, as Swin's official detectors do.
_ANY_SIZE = {"strict_img_size": False, "always_partition": True, "dynamic_img_size": True}
_BATCH_NORMS = {"BN": lambda net: net, "FrozenBN": freeze_batch_norm_2d, "SyncBN": convert_sync_batchnorm}


class TimmBackbone(Backbone):
    """A timm model with random weights. ``stage1`` to ``stage4`` are its feature maps of strides 4, 8, 16 and 32.

    A plain ViT of patch size 16 has one feature map, ``stage3``, the output of its last block. Its position embeddings
    are interpolated to the size of the image.

    Args:
        name: ``timm:MODEL``, or ``timm:MODEL.TAG`` for a model with pretrained weights (:meth:`pretrained_weights`).
        out_features: Names of the stages to return. Later stages are not built. A plain ViT returns its feature map.
        freeze_at: Number of frozen stages, counted from the first; 0 or 1 for a plain ViT.
        drop_path_rate: timm's stochastic depth rate; by default 0.1 for models that have it.
        activation_checkpointing: Recompute activations in the backward pass.
        attention_backend: ``"auto"`` or ``"sdpa"``, because timm uses PyTorch's attention.
        norm: ``"BN"`` (also None), ``"FrozenBN"`` or ``"SyncBN"``.
        options: Options of other backbones, which raise an error.

    Raises:
        ConfigError: For an unknown model, a model without these strides or with a fixed image size, and an option that
            the model does not have.
    """

    def __init__(
        self,
        name: str,
        *,
        out_features: Sequence[str],
        freeze_at: int = 0,
        drop_path_rate: float | None = None,
        activation_checkpointing: bool = False,
        attention_backend: str = "auto",
        norm: str | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        for option in options:
            raise ConfigError(f"{name} has no option {option!r}. Leave it out: timm models have only norm.")
        check_choice("attention_backend", attention_backend, ("auto", "sdpa"))
        check_choice("norm", norm or "BN", _BATCH_NORMS)
        self.variant, self.name = name, name.removeprefix(TIMM_PREFIX)
        self.variant_options: dict[str, object] = {}
        for stage in out_features:
            check_choice("out_features", stage, TIMM_STAGES)
        with torch.device("meta"):
            probe = _create(name)
            parameters = inspect.signature(type(probe.model).__init__).parameters
            if drop_path_rate and "drop_path_rate" not in parameters:
                raise ConfigError(f"{name} has no stochastic depth. Set MODEL.TRANSFORMER.DROP_PATH to 0.0.")
            wanted = _ANY_SIZE | {"drop_path_rate": 0.1 if drop_path_rate is None else drop_path_rate}
            self.options = {option: value for option, value in wanted.items() if option in parameters}
            indices = _indices(name, probe)
            self.is_plain = len(indices) == 1
            self.stages = [stage for stage in indices if stage in out_features or self.is_plain]
            check_freeze_at(freeze_at, name, len(indices))
            probe = _create(name, out_indices=list(indices.values()), **self.options)
            frozen = _parameters_before(probe, freeze_at, name)
        self.net = _create(name, out_indices=[indices[stage] for stage in self.stages], **self.options)
        if norm is not None:
            if not any(isinstance(module, nn.BatchNorm2d) for module in self.net.modules()):
                raise ConfigError(f"{name} has no batch norm. Leave out MODEL.TRANSFORMER.NORM.")
            self.net = _BATCH_NORMS[norm](self.net)
        _fold_batch_norms(self.net)
        self._is_depthwise = any(isinstance(one, nn.Conv2d) and one.groups > 1 for one in self.net.modules())
        if activation_checkpointing:
            self.net.model.set_grad_checkpointing(True)
        for parameter in [parameter for key, parameter in self.net.named_parameters() if key in frozen]:
            parameter.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "TimmBackbone":
        """Set the mode. Frozen modules stay in eval mode, without batch statistics and stochastic depth."""
        super().train(mode)
        for module in self.net.modules():
            own = list(module.parameters())
            if own and not any(parameter.requires_grad for parameter in own):
                module.eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W), with H and W multiples of 32 -> {stage: (B, C, H / stride, W / stride)}."""
        # On a CPU, depthwise convolutions and their gradients are faster in channels_last (docs/benchmarks.md).
        is_channels_last = self._is_depthwise and images.device.type == "cpu" and not is_tracing()
        features = self.net(images.contiguous(memory_format=torch.channels_last) if is_channels_last else images)
        features = [x.contiguous() if is_channels_last else contiguous_for_export(x) for x in features]
        return dict(zip(self.stages, features, strict=True))

    def output_shape(self) -> dict[str, ShapeSpec]:
        channels = zip(self.stages, self.net.feature_info.channels(), strict=True)
        return {stage: ShapeSpec(channels=number, stride=TIMM_STAGES[stage]) for stage, number in channels}

    @functools.cached_property
    def _layer_ids(self) -> dict[str, int]:
        return group_parameters(self.net.model, self.net.model.group_matcher(), reverse=True)

    @property
    def num_layers(self) -> int:
        """The number of timm's parameter groups after the stem."""
        return max(self._layer_ids.values())

    def layer_id(self, name: str) -> int:
        """Return timm's group of a parameter, for layer-wise learning-rate decay."""
        return self._layer_ids[name.removeprefix("net.model.")]

    def pretrained_weights(self, classifier: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a state dict for ``net`` with timm's pretrained weights, downloaded once, or a classifier's.

        Args:
            classifier: A state dict with names of timm, names that timm can convert, or the names of
                lukemelas/EfficientNet-PyTorch.

        Raises:
            ConfigError: If the weights cannot be downloaded, or do not fit.
        """
        overlay: dict[str, object] = {}
        if classifier is not None:
            classifier = {key.removeprefix("module."): tensor for key, tensor in classifier.items()}
            if "_conv_stem.weight" in classifier:
                # The tensors are in the order of timm's. Only the names differ.
                with torch.device("meta"):
                    names = timm.create_model(self.name).state_dict()
                classifier = dict(zip(names, classifier.values(), strict=False))
            overlay["state_dict"] = classifier
            heads = timm.get_pretrained_cfg(self.name).classifier or ()
            for head in [heads] if isinstance(heads, str) else heads:
                if f"{head}.weight" in classifier:
                    overlay["num_classes"] = len(classifier[f"{head}.weight"])
        try:
            # With the head, because timm does not check the names of a model without one.
            model = timm.create_model(self.name, pretrained=True, pretrained_cfg_overlay=overlay, **self.options)
        except Exception as error:  # The Hub's client and timm's conversion raise many types.
            raise ConfigError(f"{one_line(error)} ({type(error).__name__}).") from error
        own = self.net.model.state_dict()
        return {f"model.{key}": tensor for key, tensor in model.state_dict().items() if key in own}


class _FrozenBatchNorm(FrozenBatchNormAct2d):
    """timm's frozen batch norm without its scale and shift, which the convolution before it applies.

    Exported and compiled models have timm's batch norm. A quantization needs convolutions with constant weights, and
    ``torch.compile`` fuses the batch norm with the activation.
    """

    def __init__(self, norm: FrozenBatchNormAct2d) -> None:
        super().__init__(norm.weight.numel(), norm.eps)
        vars(self).update(vars(norm))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return super().forward(x) if is_captured() else self.act(self.drop(x))


class _Conv2d(nn.Conv2d):
    """A convolution of timm that also applies the frozen batch norm after it, which saves a pass over its output.

    The padding of timm's ``Conv2dSame`` depends on the size of the input. In an export for any size, its expressions
    grow with each layer, and the export does not end. Here the sides are multiples of the stride.
    """

    def __init__(self, conv: nn.Conv2d, norm: _FrozenBatchNorm | None) -> None:
        super().__init__(conv.in_channels, conv.out_channels, conv.kernel_size, device="meta")
        vars(self).update(vars(conv))
        self.norms = [] if norm is None else [norm]  # A list, because the batch norm is a module of the parent.
        self.pads: list[int] = []
        for side, stride, dilation in zip(conv.kernel_size, conv.stride, conv.dilation, strict=True):
            total = max((side - 1) * dilation + 1 - stride, 0) if isinstance(conv, Conv2dSame) else 0
            self.pads = [total // 2, total - total // 2, *self.pads]

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride)."""
        weight, bias = self.weight, self.bias
        for norm in () if is_captured() else self.norms:
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            weight = weight * scale[:, None, None, None]
            bias = norm.bias + ((0 if bias is None else bias) - norm.running_mean) * scale
        return self._conv_forward(F.pad(images, self.pads) if any(self.pads) else images, weight, bias)


def _fold_batch_norms(net: nn.Module) -> None:
    """Replace ``Conv2dSame``, and timm's frozen batch norms with the convolutions registered before them, in place."""
    for parent in [*net.modules()]:
        for (name, conv), (next_name, after) in itertools.pairwise([*parent.named_children(), ("", None)]):
            norm = _FrozenBatchNorm(after) if type(after) is FrozenBatchNormAct2d else None
            if type(conv) is Conv2dSame or (type(conv) is nn.Conv2d and norm is not None):
                parent.add_module(name, _Conv2d(conv, norm))
                if norm is not None:
                    parent.add_module(next_name, norm)


def check_freeze_at(freeze_at: int, name: str, num_stages: int) -> None:
    """Raise a :class:`ConfigError` unless ``freeze_at`` is from 0 to the number of stages."""
    if not 0 <= freeze_at <= num_stages:
        stages = counted(num_stages, "stage")
        raise ConfigError(f"MODEL.BACKBONE.FREEZE_AT is {freeze_at}, but {name} has {stages}. Use 0 to {num_stages}.")


def check_timm_name(name: str) -> None:
    """Raise a :class:`ConfigError` unless timm has the model ``"timm:NAME"``."""
    if not timm.is_model(name.removeprefix(TIMM_PREFIX)):
        models = [f"{TIMM_PREFIX}{model}" for model in timm.list_models()]
        raise ConfigError(f"Unknown timm model {name!r}{closest(name, models) or '. Check its name.'}")


def _create(name: str, **options: object) -> nn.Module:
    """Create timm's feature extractor, in NCHW, with random weights."""
    check_timm_name(name)
    model = name.removeprefix(TIMM_PREFIX)
    try:
        return timm.create_model(model, features_only=True, feature_cls="getter", **options)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = f"timm cannot build {name} as a backbone: {one_line(error)}"
        raise ConfigError(f"{reason}. Choose another model.") from error


def _indices(name: str, net: nn.Module) -> dict[str, int]:
    """Return the index of each stage among the feature maps of the model."""
    last = dict(zip(net.feature_info.reduction(), net.out_indices, strict=True))
    if last.keys() == {TIMM_STAGES["stage3"]}:
        return {"stage3": last[TIMM_STAGES["stage3"]]}
    if not last.keys() >= set(TIMM_STAGES.values()):
        advice = "Choose a model with four stages, such as Swin, ConvNeXt, PVTv2 or ResNet, or a ViT of patch size 16."
        strides = f"strides {', '.join(map(str, last))}, but a detector needs 4, 8, 16 and 32"
        raise ConfigError(f"{name} has feature maps of {strides}. {advice}")
    return {stage: last[stride] for stage, stride in TIMM_STAGES.items()}


def _parameters_before(net: nn.Module, freeze_at: int, name: str) -> set[str]:
    """Return the parameters that the feature map of stage ``freeze_at`` depends on; ``net`` is on the meta device.

    Raises:
        ConfigError: If the model has a fixed image size.
    """
    height, width = 96, 160
    try:
        with torch.enable_grad():
            features = net.eval()(torch.empty(1, 3, height, width))
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"{name} has a fixed image size ({one_line(error)}). Choose another model.") from error
    if not freeze_at:
        return set()
    names, parameters = zip(*net.named_parameters(), strict=True)
    gradients = torch.autograd.grad(features[freeze_at - 1].sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
