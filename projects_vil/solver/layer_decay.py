"""Learning rates that fall from the head to the first layer."""

from torch import nn

from backbones import InputError


def layer_factors(model: nn.Module, decay: float, *, key: str) -> dict[str, float]:
    """What the learning rates of a backbone are multiplied by: the full name of a parameter, and its factor.

    ``decay ** (num_layers + 1 - layer_id)``, as detectron2's ``get_vit_lr_decay_rate`` has it for ViTDet: the last
    block learns at ``decay`` of the rate of FPN and heads, the embedding at ``decay ** (num_layers + 1)``.

    Args:
        model: a module of which has ``num_layers`` and ``layer_id(name)``, as :class:`backbones.backbone.Backbone`.
        decay: above 0 to 1, which is none.
        key: what a config calls it.

    Raises:
        InputError: for another decay, or one below 1 where no module knows its layers.
    """
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise InputError(f"{key} is {decay!r}: it is above 0 and at most 1.0, at which nothing decays")
    if decay == 1:
        return {}
    factors = {
        f"{prefix}.{name}".lstrip("."): decay ** (module.num_layers + 1 - module.layer_id(name))
        for prefix, module in model.named_modules()
        if hasattr(module, "layer_id")
        for name, _ in module.named_parameters()
    }
    if not factors:
        raise InputError(f"{key} is {decay}, and only the backbones of this project know their layers: set it to 1.0")
    return factors
