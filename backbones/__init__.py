"""Efficient vision transformers in plain PyTorch, as backbones and as classifiers.

Four families: ViL (Vision Longformer, and the other attention mechanisms that its paper compares), LS (ViL with the
long-short attention of Transformer-LS), CvT-LS (CvT with it) and LIT. :func:`create_backbone` gives a detector its
feature maps and their channels and strides; :mod:`backbones.convert` takes official checkpoints.
"""

from typing import TYPE_CHECKING, Any

from backbones.errors import ConfigError

if TYPE_CHECKING:
    from backbones.build import create_backbone, create_classifier, list_variants

__all__ = ["ConfigError", "create_backbone", "create_classifier", "list_variants"]


def __getattr__(name: str) -> Any:
    """Import PyTorch and timm at the first use of a model: a command's ``--help`` does without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from backbones import build

    return getattr(build, name)
