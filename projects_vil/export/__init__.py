"""Exported detectors, and the proof that they give the same answers."""
