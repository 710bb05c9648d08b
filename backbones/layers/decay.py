"""Which parameters take no weight decay."""

from torch import nn


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
