"""Efficient vision transformers in plain PyTorch, as backbones and as classifiers.

Four families: ViL (Vision Longformer, and its comparisons with other mechanisms of attention), LS (ViL with the
long-short attention of Transformer-LS), CvT-LS (CvT with it) and LIT. :func:`create_backbone` gives a detector its
maps, with what it needs to know of them; :mod:`backbones.convert` takes official checkpoints.
"""

from backbones.build import create_backbone, create_classifier, list_variants
from backbones.utils.errors import InputError

__all__ = ["InputError", "create_backbone", "create_classifier", "list_variants"]
