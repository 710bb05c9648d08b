"""The sides of images that detectors take."""

import torchvision  # noqa: F401  its operators are in every exported detector
from torch import nn

# Of the images that torch.export's programs, and what is made of them, take: pixels, and images of a batch.
SMALLEST_SIDE, LARGEST_SIDE, LARGEST_BATCH = 32, 8192, 1024


def largest_side(detector: nn.Module) -> int:
    """The longest side, in pixels, of an image that a recorded detector takes: absolute positions have an end."""
    options = getattr(getattr(detector.backbone, "bottom_up", None), "options", {})
    has_tables = any(getattr(module, "resizing", None) == "load" for module in detector.modules())
    return options["max_img_size"] if has_tables else LARGEST_SIDE
