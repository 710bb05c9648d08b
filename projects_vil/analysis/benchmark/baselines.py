"""Backbones of other projects, behind detectron2's interface: what ours are held beside."""

import timm
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import Backbone, build_resnet_backbone
from detectron2.modeling.backbone.swin import SwinTransformer
from torch import Tensor

from backbones import InputError
from backbones.utils.errors import closest

# detectron2's own; any other name is one of timm.
_OWN = ("r50", "swin_t")


def build_baseline(name: str) -> Backbone:
    """A backbone with maps of strides 4, 8, 16 and 32, in this order.

    Args:
        name: ``"r50"``, detectron2's ResNet-50 with frozen BatchNorm and no frozen stage, ``"swin_t"``, its Swin-T
            without stochastic depth, or a model of timm that gives such maps, as ``"pvt_v2_b2"``.

    Raises:
        InputError: for an unknown name, and a model without such maps.
    """
    if name == "r50":
        cfg = get_cfg()
        cfg.MODEL.BACKBONE.FREEZE_AT = 0
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
        return build_resnet_backbone(cfg, ShapeSpec(channels=3))
    if name == "swin_t":
        return SwinTransformer(drop_path_rate=0.0)
    if not timm.is_model(name):
        hint = closest(name, [*_OWN, *timm.list_models()])
        raise InputError(f"--against {name}: it is {', '.join(_OWN)} or a model of timm{hint}")
    return _TimmBackbone(name)


class _TimmBackbone(Backbone):
    def __init__(self, name: str) -> None:
        super().__init__()
        try:
            self.net = timm.create_model(name, features_only=True)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            raise InputError(f"--against {name}: timm has no features of it") from error
        channels, strides = self.net.feature_info.channels(), self.net.feature_info.reduction()
        # Of maps of one stride the last, as FPN takes them.
        self._places = {stride: place for place, stride in enumerate(strides) if stride in (4, 8, 16, 32)}
        self._shapes = {
            f"stride{stride}": ShapeSpec(channels=channels[place], stride=stride)
            for stride, place in self._places.items()
        }
        if list(self._places) != [4, 8, 16, 32]:
            raise InputError(f"--against {name}: its maps are not of strides 4, 8, 16 and 32")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.net(images)
        return {f"stride{stride}": maps[place] for stride, place in self._places.items()}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return self._shapes
