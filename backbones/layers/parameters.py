"""Initialisation of parameters, and the parameters without weight decay."""

from timm.layers import trunc_normal_
from torch import Tensor, nn


def init_trunc_normal_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` from a normal distribution with a deviation of 0.02, truncated at 2, and return it.

    All three papers do so. On the meta device it returns at once, which saves most of the time of a build.
    """
    return tensor if tensor.is_meta else trunc_normal_(tensor, std=0.02)


def names_without_weight_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay.

    They are those with one axis at most, as biases and norms, and those that their module lists in
    ``no_weight_decay_names``: position tables, global tokens and tables of bias.
    """
    names = set()
    for prefix, module in model.named_modules():
        listed = getattr(module, "no_weight_decay_names", ())
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if parameter.ndim <= 1 or name.rpartition(".")[2] in listed:
                names.add(name)
    return names
