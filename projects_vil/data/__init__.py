"""Datasets by name, how image files are read, and the loaders."""
