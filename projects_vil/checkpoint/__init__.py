"""Checkpoints: reading, converting, and what they say of themselves."""
