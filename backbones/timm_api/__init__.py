"""The variants as timm's users and scripts know models; :mod:`backbones.timm_models` registers them."""

from backbones.timm_api.classifier import TimmClassifier
from backbones.timm_api.features import TimmFeatures, feature_request
from backbones.timm_api.stages import has_fixed_input_size
from backbones.timm_api.training import LITAdamW

__all__ = ["LITAdamW", "TimmClassifier", "TimmFeatures", "feature_request", "has_fixed_input_size"]
