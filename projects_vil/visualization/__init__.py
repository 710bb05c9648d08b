"""Drawings of results and of what happens inside a model."""
