"""Benchmarks of COCO evaluation, dataset checks and prediction, and a roofline model of the backbones."""
