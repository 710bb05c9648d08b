"""Efficient vision transformers in plain PyTorch: ViL, with what a detector needs to know of them."""

from backbones.build import create_backbone, create_classifier, list_variants
from backbones.errors import InputError

__all__ = ["InputError", "create_backbone", "create_classifier", "list_variants"]
