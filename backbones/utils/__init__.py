"""Errors, checkpoint files and the report of a conversion: what knows nothing of models."""
