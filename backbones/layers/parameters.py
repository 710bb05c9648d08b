"""How parameters begin, and which take no weight decay."""

from timm.layers import trunc_normal_
from torch import Tensor, nn


def draw_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` as all three papers do, normal with a deviation of 0.02 and cut off at 2, and return it.

    On the meta device there is nothing to fill, and to find that out would take most of the time of making a model.
    """
    return tensor if tensor.is_meta else trunc_normal_(tensor, std=0.02)


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters with one axis at most, as biases and norms, and of those that a module says are such.

    A module names its own in ``undecayed``: positions, tokens that all inputs share, tables of bias.
    """
    names = set()
    for prefix, module in model.named_modules():
        listed = getattr(module, "undecayed", ())
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if parameter.ndim <= 1 or name.rpartition(".")[2] in listed:
                names.add(name)
    return names
