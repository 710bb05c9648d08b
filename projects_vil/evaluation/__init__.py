"""Evaluators, and the file of results."""
