"""Errors, checkpoint files and the report of a conversion: what models and their users share."""
