"""Attention on feature maps: a mechanism a file, a pure function first, then the module."""
