"""Initialize parameters, and list the parameters without weight decay."""

from timm.layers import trunc_normal_
from torch import Tensor, nn


def init_trunc_normal_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` from a normal distribution with a standard deviation of 0.02, truncated at 2, and return it.

    All three papers use it. Tensors on the meta device are returned at once, which saves most of the build time.
    """
    return tensor if tensor.is_meta else trunc_normal_(tensor, std=0.02)


def names_without_weight_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay.

    These are parameters with at most one axis, such as biases and norms, and parameters that their module lists in
    ``no_weight_decay_names``: position tables, global tokens and bias tables.
    """
    names = set()
    for prefix, module in model.named_modules():
        listed = getattr(module, "no_weight_decay_names", ())
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            if parameter.ndim <= 1 or name.rpartition(".")[2] in listed:
                names.add(name)
    return names
