"""Classifiers on ImageNet's other sets (Transformer-LS section 4.3)."""
