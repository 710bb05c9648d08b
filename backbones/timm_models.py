"""Importing this module registers every variant with timm: ``timm.create_model("vil_small_rpb", num_classes=10)``.

``features_only=True`` gives the backbone as timm's users know it: a list of maps. ``tools/timm_run.py`` imports this
module and runs timm's own ``train.py`` or ``validate.py``; the recipes are in docs/checkpoints.md.
"""

import functools
import math
from collections.abc import Callable

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import is_scriptable
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model,
    model_entrypoint,
    register_model,
    resolve_pretrained_cfg,
)
from timm.optim import OptimInfo, list_optimizers
from timm.optim._optim_factory import default_registry
from torch import Tensor, nn

from backbones.build import list_variants
from backbones.layers.position import fit_table
from backbones.lit import LIT
from backbones.timm_api import LITAdamW, TimmClassifier, TimmFeatures, feature_request, has_fixed_input_size
from backbones.utils.errors import InputError
from backbones.variants import get_variant


def _pretrained_cfg(name: str) -> dict:
    """ImageNet as the official projects prepare it: bicubic, 256 and a crop of 224, and the same share at 384 (LS).

    ViL's fine-tuning at 384 pixels, which has no variant of its own, takes 0.922: ``--crop-pct``.
    """
    variant = get_variant(name)
    side = variant.classifier_img_size
    last = -(-side // math.prod(variant.steps))
    return {
        "input_size": (3, side, side),
        "pool_size": (last, last),
        "fixed_input_size": has_fixed_input_size(variant),
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "num_classes": 1000,
        "first_conv": "backbone.stages.0.patch_embed.projection",
        "classifier": "head",
        "license": "apache-2.0",
    }


def _fit(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """For timm's ``pretrained_path``: a state dict of :class:`TimmClassifier`, for another size or head, or features.

    Tables of positions are resized. timm loads leniently where the number of classes differs: all but the head must fit
    all the same.
    """
    target = model.state_dict()
    is_features = isinstance(model, TimmFeatures)
    heads = ("head.", "norm.") if is_features else ("head.",)
    modules = dict(model.named_modules())
    parts = {key: key.rpartition(".") for key in state_dict}
    fitted = {key: fit_table(t, modules.get(parts[key][0]), parts[key][2]) for key, t in state_dict.items()}
    if is_features:
        # A LIT detector has norms of its maps, and no global token.
        fitted |= {key: tensor for key, tensor in target.items() if key.startswith("backbone.output_norms.")}
        if isinstance(model.backbone, LIT):
            fitted = {key: t for key, t in fitted.items() if key in target or not key.endswith(".global_tokens")}
        fitted = {key: tensor for key, tensor in fitted.items() if not key.startswith(heads)}
    wrong = {key for key in fitted.keys() ^ target.keys()}
    wrong |= {key for key in fitted.keys() & target.keys() if fitted[key].shape != target[key].shape}
    wrong = sorted(key for key in wrong if not key.startswith(heads))
    if wrong:
        raise InputError(
            f"the checkpoint is of another model: {len(wrong)} names or shapes differ, {wrong[0]} among them;"
            " docs/checkpoints.md says how official files are converted"
        )
    return fitted


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, features_only: bool = False, **kwargs: object) -> nn.Module:
        if is_scriptable():
            raise InputError(
                "scriptable=True: the models decide by sizes; torch.jit.trace, torch.compile and torch.export take them"
            )
        cfg = resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if pretrained and not (cfg.has_weights or cfg.state_dict):
            raise InputError(
                f"pretrained=True: no weights of {name} are hosted; docs/checkpoints.md says which files there are"
                " and how to convert them, and --initial-checkpoint or --pretrained-path loads the result"
            )
        for key in () if features_only else ("feature_cls", "feature_cfg"):
            if key in kwargs:
                raise InputError(f"{key}={kwargs[key]!r}: it is for features_only=True")
        request = feature_request(name, kwargs) if features_only else None
        model, fixed = functools.partial(TimmClassifier, name), None
        if request is not None and request.kind != "getter":
            options = {**request.options, "return_dict": request.kind == "dict"}
            model, fixed, request = functools.partial(TimmFeatures, name, **options), False, None
        else:
            known = get_variant(name).options
            own = {key: value for key, value in kwargs.items() if key in known and value is not None}
            fixed = has_fixed_input_size(get_variant(name, own)) if own else None
        if request is not None:
            kwargs |= {"features_only": True, "feature_cfg": {"feature_cls": request.kind, **request.options}}
        if fixed is not None:
            overlay = kwargs.get("pretrained_cfg_overlay") or {}
            kwargs["pretrained_cfg_overlay"] = {"fixed_input_size": fixed, **overlay}
        return build_model_with_cfg(model, name, pretrained, pretrained_filter_fn=_fit, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name}: see :class:`TimmClassifier`, and :class:`TimmFeatures` for ``features_only=True``."
    return create


def _register() -> None:
    for name in list_variants():
        if is_model(name) and model_entrypoint(name).__module__ != __name__:
            module = model_entrypoint(name).__module__
            raise InputError(f"timm already has a model {name}, of {module}: importing {__name__} would hide it")
    for name in list_variants():
        if not is_model(name):
            globals()[name] = register_model(_entrypoint(name))
    info = OptimInfo("litadamw", LITAdamW, "AdamW, with LIT's offsets at 0.01 of the learning rate", has_betas=True)
    if info.name not in list_optimizers():
        default_registry.register(info)


default_cfgs = generate_default_cfgs({name: _pretrained_cfg(name) for name in list_variants()})
_register()
