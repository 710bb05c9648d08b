"""Trained detectors on images, folders of them and videos."""

from projects_vil.inference.detections import Detections
from projects_vil.inference.detector import Detector
from projects_vil.inference.predict import predict

__all__ = [
    "Detections",
    "Detector",
    "predict",
]
