"""Attention on feature maps: in each file the pure functions come before their modules."""
