"""Trained detectors on images, folders of them and videos."""
