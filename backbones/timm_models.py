"""Importing this module registers every variant with timm: ``timm.create_model("vil_small_rpb", num_classes=10)``.

``features_only=True`` gives the backbone as timm's users know it: a list of maps. ``tools/timm_run.py`` imports this
module and runs timm's own ``train.py`` or ``validate.py``; the recipes are in docs/checkpoints.md.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    FeatureInfo,
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

from backbones.attention.dense import join_tokens
from backbones.attention.performer import PerformerAttention, redraw_features, redraw_interval
from backbones.attention.sliding_chunk import draw_shifts
from backbones.backbone import Classifier
from backbones.build import create_backbone, create_classifier, list_variants
from backbones.errors import InputError
from backbones.layers.position import fit_table
from backbones.layers.token_merging import DeformableTokenMerging
from backbones.lit import LIT
from backbones.variants import get_variant

# 1e-5 beside 1e-3 (LIT section 4.1)
OFFSET_LR_SCALE = 0.01
_POOLS = {"mean": "avg", "global_token": "token"}


class TimmClassifier(Classifier):
    """:func:`.create_classifier`'s model, with what timm's scripts and users ask of a model.

    Args:
        name: one of :func:`.list_variants`.
        num_classes: of the head; 0 for none.
        in_chans: 3.
        img_size: as for :func:`.create_classifier`; None for the variant's own.
        global_pool: the variant's own, ``"avg"`` or ``"token"``, or None.
        drop_rate: dropout before the head; the papers have none.
        redraw_epoch_length: iterations of an epoch, for a Performer that redraws its random features in training every
            1 + 5T iterations of epoch T (ViL appendix D); None to keep those that it has. An iteration is a forward
            pass in training mode.
        redraw_first_epoch: T of the first iteration: of a resumed run, the epoch that it resumes at.
        random_shift_iterations: how many iterations, from the first, ViL's local attention sees one neighbouring chunk,
            drawn anew for each layer and iteration (:mod:`.attention.random_shift`); 0.875 of all in the official code.
        random_shift_first_iteration: of a resumed run, the iteration that it resumes at.
        options: of :func:`.create_classifier`.

    Raises:
        InputError: for what these models do not have.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Sequence[int] | None = None,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        redraw_epoch_length: int | None = None,
        redraw_first_epoch: int = 0,
        random_shift_iterations: int = 0,
        random_shift_first_iteration: int = 0,
        **options: object,
    ) -> None:
        _check_in_chans(name, in_chans)
        img_size = default_cfgs[name].default.input_size[1:] if img_size is None else img_size
        made = create_classifier(name, num_classes=max(num_classes, 1), img_size=img_size, **options)
        super().__init__(made.backbone, num_classes=max(num_classes, 1), pool=made.pool, norm_eps=made.norm.eps)
        self.num_features = self.head_hidden_size = self.head.in_features
        self.drop_rate = drop_rate
        self.reset_classifier(num_classes, global_pool)
        if redraw_epoch_length is not None:
            redraw = _Redraw(name, self, redraw_epoch_length, redraw_first_epoch)
            self.register_forward_pre_hook(redraw)
        if random_shift_iterations or random_shift_first_iteration:
            shift = _Shift(name, self, random_shift_iterations, random_shift_first_iteration)
            self.register_forward_pre_hook(shift)
        for module in self.modules():
            if isinstance(module, DeformableTokenMerging):
                for parameter in module.offset.parameters():
                    parameter.lr_scale = OFFSET_LR_SCALE  # for LITAdamW

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of stages beside the tokens of :meth:`forward_features`, in the form of timm's models.

        Args:
            images: (B, 3, H, W).
            indices: stages as ``out_indices`` of :class:`TimmFeatures`, whose norms of LIT's maps a classifier lacks.
            norm: apply the norm to the last stage's map too.
            stop_early: leave out the stages after the last one asked for; the tokens are then its own, without norm.
            output_fmt: ``"NCHW"``.
            intermediates_only: return the maps alone.

        Raises:
            InputError: for another format, or a stage that the model does not have.
        """
        if output_fmt != "NCHW":
            raise InputError(f"output_fmt={output_fmt!r}: maps are 'NCHW'")
        stages = self.backbone.stages
        chosen = _chosen_stages("indices", indices, len(stages), "the model")
        maps, intermediates, global_tokens = images, [], None
        for index, stage in enumerate(stages[: chosen[-1] + 1] if stop_early else stages):
            tokens, global_tokens = stage(maps)
            maps, is_last = tokens.permute(0, 3, 1, 2), index + 1 == len(stages)
            if index in chosen:
                intermediates.append(self.norm(tokens).permute(0, 3, 1, 2) if norm and is_last else maps)
        if intermediates_only:
            return intermediates
        tokens = join_tokens(tokens, global_tokens)
        return self.norm(tokens) if is_last else tokens, intermediates

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens of :meth:`forward_features` -> logits (B, num_classes), or what the head takes (B, C)."""
        pooled = F.dropout(self.pooled(tokens), self.drop_rate, self.training)
        return pooled if pre_logits else self.head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for ``num_classes``, or none for 0; the same head stays where it has as many."""
        if global_pool not in (None, _POOLS[self.pool]):
            raise InputError(f"global_pool={global_pool!r}: this variant pools by {_POOLS[self.pool]!r}")
        if num_classes != getattr(self.head, "out_features", 0):
            weight = self.norm.weight
            head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
            self.head = head.to(device=weight.device, dtype=weight.dtype)
            if num_classes:
                nn.init.trunc_normal_(self.head.weight, std=0.02)
                nn.init.zeros_(self.head.bias)
        self.num_classes = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the activations of a block again in the backward pass."""
        _set_checkpointing(self.backbone, enable)

    def group_matcher(self, coarse: bool = False) -> dict:
        """For timm's layer-wise decay of learning rates: a group a block, or a stage."""
        blocks = [(r"^backbone\.stages\.(\d+)\.blocks\.(\d+)", None), (r"^backbone\.stages\.(\d+)", (-1,))]
        return {
            "stem": r"^backbone\.stages\.0\.(?!blocks)",
            "blocks": r"^backbone\.stages\.(\d+)" if coarse else [*blocks, (r"^norm", (99999,))],
        }


class TimmFeatures(nn.Module):
    """:func:`.create_backbone`'s model as timm's ``features_only=True`` has it: images of any size -> a list of maps.

    Args:
        name: one of :func:`.list_variants` that can be a backbone.
        out_indices: stages, from 0, or from the end where negative; a number n for the last n; None for all. The maps
            come in the order of the stages.
        in_chans: 3.
        num_classes: ignored, as by timm: a backbone has no head.
        options: of :func:`.create_backbone`.

    Raises:
        InputError: for what these models do not have.
    """

    def __init__(
        self,
        name: str,
        *,
        out_indices: int | Sequence[int] | None = None,
        in_chans: int = 3,
        num_classes: int = 0,
        **options: object,
    ) -> None:
        super().__init__()
        _check_in_chans(name, in_chans)
        if "out_features" in options:
            raise InputError("features_only=True takes out_indices, stages from 0, in the place of out_features")
        features = _features(name)
        stages = list(features)
        indices = _chosen_stages("out_indices", out_indices, len(stages), name)
        self.backbone = create_backbone(name, out_features=[stages[index] for index in indices], **options)
        infos = [
            {"num_chs": info.channels, "reduction": info.stride, "module": f"backbone.stages.{index}"}
            for index, info in enumerate(features.values())
        ]
        self.feature_info = FeatureInfo(infos, tuple(indices))

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> [(B, C, ceil(H / stride), ceil(W / stride)), ...]."""
        return list(self.backbone(images).values())

    def no_weight_decay(self) -> set[str]:
        """As :meth:`.Backbone.no_weight_decay`, with the names of this model."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the activations of a block again in the backward pass."""
        _set_checkpointing(self.backbone, enable)


class LITAdamW(torch.optim.AdamW):
    """AdamW in which the offsets of deformable token merging learn at 0.01 of the rate: ``--opt litadamw``.

    The factor stands in the groups as ``lr_scale``, which timm's schedulers apply, also to the lowest rate.

    Raises:
        InputError: where the model has no offsets.
    """

    def __init__(self, params: Iterable, **options: object) -> None:
        params = list(params)
        if not params or not isinstance(params[0], dict):
            params = [{"params": params}]
        groups, scaled = [], False
        for group in params:
            split: dict[float, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                split.setdefault(getattr(parameter, "lr_scale", 1.0), []).append(parameter)
            for scale, parameters in split.items():
                scaled = scaled or scale != 1
                groups.append({**group, "params": parameters, "lr_scale": scale * group.get("lr_scale", 1.0)})
        if not scaled:
            raise InputError("litadamw is for models with deformable token merging, lit_...: take adamw for others")
        super().__init__(groups, **options)


class _Redraw:
    """Counts forward passes in training, and redraws random features before every 1 + 5T of epoch T."""

    def __init__(self, name: str, model: nn.Module, epoch_length: int, first_epoch: int) -> None:
        if not any(isinstance(module, PerformerAttention) for module in model.modules()):
            raise InputError(f"redraw_epoch_length: {name} has no random features to redraw")
        if epoch_length < 1 or first_epoch < 0:
            raise InputError(
                f"redraw_epoch_length={epoch_length}, redraw_first_epoch={first_epoch}: 1 or more, and 0 or more"
            )
        self.epoch_length = epoch_length
        self.iteration = epoch_length * first_epoch
        self.since = 0

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        if not model.training:
            return
        if self.since >= redraw_interval(self.iteration // self.epoch_length):
            # The same in every process
            redraw_features(model, seed=self.iteration)
            self.since = 0
        self.since += 1
        self.iteration += 1


class _Shift:
    """Counts forward passes in training, and draws shifts of local attention before the first ones."""

    def __init__(self, name: str, model: nn.Module, iterations: int, first_iteration: int) -> None:
        if not draw_shifts(model, seed=None):
            raise InputError(f"random_shift_iterations: {name} has no sliding chunks")
        if iterations < 1 or first_iteration < 0:
            raise InputError(
                f"random_shift_iterations={iterations}, random_shift_first_iteration={first_iteration}: 1 or more, and "
                "0 or more"
            )
        self.iterations = iterations
        self.iteration = first_iteration

    @torch.compiler.disable
    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        if model.training:
            # The same in every process
            draw_shifts(model, seed=self.iteration if self.iteration < self.iterations else None)
            self.iteration += 1


@functools.cache
def _features(name: str) -> dict:
    """Channels and stride of all stages; Linformer raises."""
    with torch.device("meta"):
        return create_backbone(name).feature_info


def _chosen_stages(argument: str, chosen: int | Sequence[int] | None, number: int, name: str) -> list[int]:
    """Stages as timm's users name them, in their order: all, the last so many, or these."""
    if chosen is None:
        stages = range(number)
    elif isinstance(chosen, int):
        stages = range(-chosen, 0)
    else:
        stages = chosen
    if not stages or not all(-number <= index < number for index in stages):
        raise InputError(f"{argument}={chosen!r}: {name} has the stages 0 to {number - 1}")
    return sorted({index % number for index in stages})


def _check_in_chans(name: str, in_chans: int) -> None:
    if in_chans != 3:
        raise InputError(f"in_chans={in_chans}: {name} takes images of 3 channels")


def _set_checkpointing(backbone: nn.Module, enable: bool) -> None:
    for stage in backbone.stages:
        stage.activation_checkpointing = enable


def _pretrained_cfg(name: str) -> dict:
    """ImageNet as the official projects prepare it: bicubic, 256 and a crop of 224, and the same share at 384 (LS).

    ViL's fine-tuning at 384 pixels, which has no variant of its own, takes 0.922: ``--crop-pct``.
    """
    side = get_variant(name).classifier_img_size
    return {
        "input_size": (3, side, side),
        "fixed_input_size": "linformer" in name,
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
        cfg = resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if pretrained and not (cfg.has_weights or cfg.state_dict):
            raise InputError(
                f"pretrained=True: no weights of {name} are hosted; docs/checkpoints.md says which files there are"
                " and how to convert them, and --initial-checkpoint or --pretrained-path loads the result"
            )
        if features_only:
            _features(name)
        model = functools.partial(TimmFeatures if features_only else TimmClassifier, name)
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
