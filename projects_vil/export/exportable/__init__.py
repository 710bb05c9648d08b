"""Detectors written so that all exporters take them."""
