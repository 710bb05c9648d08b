"""Predict on images, folders and videos, and share detectors on the Hugging Face Hub."""

from projects_vil.inference.detector import Detections, Detector
from projects_vil.inference.predict import predict
