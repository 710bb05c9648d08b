"""The backbones as detectron2 builds them, and test-time augmentation."""
