"""Trained detectors on images, folders of them and videos."""

from projects_vil.inference.predict import predict

__all__ = [
    "predict",
]
