"""A backbone as timm's ``features_only=True`` gives it, and what may be asked of it."""

import dataclasses
from collections.abc import Sequence

from timm.layers import Format
from torch import Tensor, nn

from backbones.build import create_backbone
from backbones.timm_api.stages import check_in_chans, chosen_stages, set_checkpointing, stage_info
from backbones.utils.errors import InputError, check_choice
from backbones.variants import get_variant, stage_names

FEATURE_CLASSES = ("list", "dict", "getter")
_TIMM_CLASSES = {"FeatureListNet": "list", "FeatureDictNet": "dict", "FeatureGetterNet": "getter"}


class TimmFeatures(nn.Module):
    """:func:`.create_backbone`'s model as timm's ``features_only=True`` has it: images of any size -> a list of maps.

    Args:
        name: one of :func:`.list_variants` that can be a backbone.
        out_indices: stages, from 0, or from the end where negative; a number n for the last n; None for all. The maps
            come in the order of the stages.
        return_dict: for a dict in the place of a list, from the number of a stage as text to its map.
        in_chans: 3.
        num_classes: ignored, as by timm: a backbone has no head.
        options: of :func:`.create_backbone`.

    Raises:
        InputError: for what these models do not have.
    """

    def __init__(
        self,
        name: str,
        *,
        out_indices: int | Sequence[int] | None = None,
        return_dict: bool = False,
        in_chans: int = 3,
        num_classes: int = 0,
        **options: object,
    ) -> None:
        super().__init__()
        check_in_chans(name, in_chans)
        if "out_features" in options:
            raise InputError("features_only=True takes out_indices, stages from 0, in the place of out_features")
        variant = get_variant(name)
        stages = stage_names(variant)
        indices = chosen_stages("out_indices", out_indices, len(stages), name)
        self.backbone = create_backbone(name, out_features=[stages[index] for index in indices], **options)
        self.return_dict = return_dict
        self.output_fmt = Format.NCHW
        self.feature_info = stage_info(variant, indices)

    def forward(self, images: Tensor) -> list[Tensor] | dict[str, Tensor]:
        """(B, 3, H, W) -> [(B, C, ceil(H / stride), ceil(W / stride)), ...], or a dict of them."""
        maps = list(self.backbone(images).values())
        return dict(zip(map(str, self.feature_info.out_indices), maps, strict=True)) if self.return_dict else maps

    def no_weight_decay(self) -> set[str]:
        """As :meth:`.Backbone.no_weight_decay`, with the names of this model."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the activations of a block again in the backward pass."""
        set_checkpointing(self.backbone, enable)


@dataclasses.dataclass(frozen=True)
class FeatureRequest:
    """What ``timm.create_model(name, features_only=True, ...)`` asks for.

    Attributes:
        kind: of ``FEATURE_CLASSES``: ``"list"`` and ``"dict"`` are :class:`TimmFeatures`, ``"getter"`` is timm's
            ``FeatureGetterNet`` round a classifier.
        options: of that class; ``out_indices`` among them.
    """

    kind: str
    options: dict[str, object]


def feature_request(name: str, keywords: dict[str, object]) -> FeatureRequest:
    """Take ``feature_cls``, ``feature_cfg`` and ``out_indices`` out of ``keywords``.

    As in timm, what ``feature_cfg`` has too is that of the keyword of its own.

    Raises:
        InputError: for a class that these models do not fit into, or an option that it does not have.
    """
    options = keywords.pop("feature_cfg", None)
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise InputError(f"feature_cfg={options!r}: it is a dict, such as {{'feature_cls': 'getter', 'norm': True}}")
    options = dict(options)
    for key in ("feature_cls", "out_indices"):
        if key in keywords:
            options[key] = keywords.pop(key)
    kind = options.pop("feature_cls", "list")
    if isinstance(kind, type):
        kind = _TIMM_CLASSES.get(kind.__name__, kind.__name__)
    elif isinstance(kind, str):
        kind = kind.lower()
    check_choice("feature_cls", kind, FEATURE_CLASSES)
    known = ("out_indices", "norm") if kind == "getter" else ("out_indices",)
    for key in options:
        if key not in known:
            raise InputError(f"feature_cfg has {key!r}, and feature_cls={kind!r} has only {' and '.join(known)}")
    number = len(get_variant(name).stages)
    options["out_indices"] = chosen_stages("out_indices", options.get("out_indices"), number, name)
    return FeatureRequest(kind, options)
