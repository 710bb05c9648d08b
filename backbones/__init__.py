"""Efficient vision transformers in plain PyTorch, as backbones and as classifiers.

There are five families: ViL (Vision Longformer, and the other attention mechanisms that its paper compares), LS (ViL
with the long-short attention of Transformer-LS), CvT-LS (CvT with long-short attention), LIT and LITv2.
:func:`create_backbone` creates a model that returns feature maps. :mod:`backbones.convert` converts official
checkpoints.
"""

from typing import TYPE_CHECKING, Any

from backbones.errors import ConfigError

if TYPE_CHECKING:
    from backbones.build import create_backbone, create_classifier, list_variants

__all__ = ["ConfigError", "create_backbone", "create_classifier", "list_variants"]


def __getattr__(name: str) -> Any:
    """Import PyTorch and timm at the first use of a model, so that ``--help`` of a command is fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from backbones import build

    return getattr(build, name)
