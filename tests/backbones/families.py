"""Small named models of all families, for tests that apply to all of them."""

import torch
from torch import nn

from backbones.backbone import Backbone, BackboneSettings, Classifier, Variant
from backbones.cvt import CvT, CvTStage, CvTVariant
from backbones.lit import LIT, LITVariant
from backbones.litv2 import LITv2
from backbones.vil import ViL
from tests.backbones.helpers import FAMILIES, randomize, small_variant
from tests.backbones.official_lit import TI, V2, S

CVT = CvTVariant((CvTStage(1, 4, 1, 5, 4), CvTStage(2, 8, 2, 3, 3), CvTStage(1, 12, 3, 2, 2)))
# Absolute positions as in LIT-Ti, relative bias as in LIT-S, -M and -B
LITS = {
    "absolute": TI,
    "relative": S,
    "absolute_uniform": TI.with_options(token_merging="uniform"),
    "relative_uniform": S.with_options(token_merging="uniform"),
    "frozen": S.with_options(norm="FrozenBN"),
}
VARIANTS: dict[str, Variant] = (
    {f"vil_{family}": small_variant(**options) for family, options in FAMILIES.items()}
    | {f"lit_{family}": variant for family, variant in LITS.items()}
    | {"litv2": V2, "cvt": CVT}
)
_CLASSES = {"vil": ViL, "lit": LIT, "litv2": LITv2, "cvt": CvT}


def small_model(name: str, **options) -> Backbone:
    """Return a model of ``VARIANTS`` in eval mode, with random float64 weights and statistics."""
    options = {"max_img_size": (160, 160)} | options
    return _randomized(_CLASSES[name.partition("_")[0]](VARIANTS[name], BackboneSettings(**options)))


def small_classifier(name: str) -> Classifier:
    """Return a :func:`small_model` with a head for 5 classes."""
    variant = VARIANTS[name]
    settings = BackboneSettings(out_features=(f"stage{len(variant.stages)}",), keep_global_tokens=True)
    backbone = _CLASSES[name.partition("_")[0]](variant, settings)
    return _randomized(Classifier(backbone, num_classes=5, pool=variant.pool, norm_eps=variant.norm_eps))


def small_lit(variant: str | LITVariant = "relative", **options) -> LIT:
    """Return a :func:`small_model`, also of a variant without a name."""
    return _randomized(LIT(LITS[variant] if isinstance(variant, str) else variant, BackboneSettings(**options)))


def _randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(9)
    for name, buffer in randomize(model).named_buffers():
        values = torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
        if name.endswith(("running_var", "norm.weight")):
            buffer.copy_(1 + 0.3 * values.abs())
        elif name.endswith(("running_mean", "norm.bias")):
            buffer.copy_(0.3 * values)
    return model.double().eval()
