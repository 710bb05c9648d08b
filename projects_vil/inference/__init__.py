"""Trained detectors on images, folders and videos, and on the Hugging Face Hub."""

from projects_vil.inference.detector import Detections, Detector
from projects_vil.inference.predict import predict
from projects_vil.inference.runners import check_overrides, config_of_export

__all__ = ["Detections", "Detector", "check_overrides", "config_of_export", "predict"]
