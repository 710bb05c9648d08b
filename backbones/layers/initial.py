"""How all three papers draw initial values."""

from timm.layers import trunc_normal_
from torch import Tensor


def draw_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` from a normal distribution of standard deviation 0.02, cut off at 2, and return it.

    On the meta device there is nothing to fill, and to find that out would take most of the time of making a model.
    """
    return tensor if tensor.is_meta else trunc_normal_(tensor, std=0.02)
