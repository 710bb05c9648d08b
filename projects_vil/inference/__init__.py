"""Trained detectors on images, folders of them and videos."""

from projects_vil.inference.detections import Detections
from projects_vil.inference.detector import Detector
from projects_vil.inference.predict import predict
from projects_vil.inference.runners import check_overrides, config_of_export

__all__ = [
    "Detections",
    "Detector",
    "check_overrides",
    "config_of_export",
    "predict",
]
