"""Evaluate classifiers on variants of ImageNet, such as ImageNet-V2 and ImageNet-C (Transformer-LS section 4.3)."""
