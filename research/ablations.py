"""The models of the papers' ablation studies. The command counts their parameters and multiply-adds.

``examples/timm_run.py`` trains them, for example with ``--model cvt_ls_13 --model-kwargs changes=no_dual_norm``.

Example:
    python -m research.ablations
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import timm
import torch
from tabulate import tabulate
from torch import Tensor, nn

from backbones import ConfigError
from backbones.attention.dense import (
    DenseAttention,
    TokenAttention,
    merge_heads,
    pytorch_attention,
    split_globals,
    split_heads,
)
from backbones.attention.long_short import DualNorm
from backbones.backbone import Classifier, init_linear
from backbones.build import create_classifier
from backbones.cvt import ConvLongShortAttention
from backbones.errors import check_choice
from backbones.layers.block import PatchEmbed
from backbones.layers.position import AbsolutePositions, GridPositions, position_parameter
from research.deformable_swin import with_deformable_merging


class ConvAttention(nn.Module):
    """Full attention with the convolutional projections of CvT. Only their linear layers apply to global tokens.

    Args:
        like: The attention of CvT-LS that it replaces.
        num_global_tokens: Number G of global tokens.
    """

    update_globals = True

    def __init__(self, like: ConvLongShortAttention, *, num_global_tokens: int) -> None:
        super().__init__()
        self.num_heads, self.num_global_tokens = like.num_heads, num_global_tokens
        self.conv_qkv, self.proj = like.conv_qkv, like.proj

    def forward(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the updated tokens (B, G + H * W, C)."""
        global_tokens, tokens = split_globals(tokens, self.num_global_tokens)
        projected = self.conv_qkv(tokens.unflatten(1, size))
        if global_tokens is not None:
            projected_globals = self.conv_qkv.pointwise(global_tokens).unflatten(2, (3, -1)).movedim(2, 0)
            projected = torch.cat([projected_globals, projected], dim=2)
        return self.proj(merge_heads(pytorch_attention(*(split_heads(x, self.num_heads) for x in projected))))


class ReducedAttention(TokenAttention):
    """The spatial reduction attention of PVT: full attention to patches that a convolution and a LayerNorm reduce."""

    has_qkv = False

    def __init__(self, dim: int, *, num_heads: int, reduction: int) -> None:
        super().__init__(dim, num_heads=num_heads, num_global_tokens=0)
        self.reduce = PatchEmbed(dim, dim, patch_size=reduction, norm_eps=1e-5)

    def _attend(self, tokens: Tensor, size: tuple[int, int]) -> Tensor:
        seen = self.reduce(tokens.unflatten(1, size).permute(0, 3, 1, 2)).flatten(1, 2)
        key, value = split_heads(self.key_value(seen), 2 * self.num_heads).chunk(2, dim=1)
        return pytorch_attention(split_heads(self.query(tokens), self.num_heads), key, value)


def full_attention(model: Classifier) -> int:
    """Give CvT-LS full attention, and a class token in the last stage as in CvT (LS Table 3)."""
    blocks = [m for m in model.modules() if isinstance(getattr(m, "attention", None), ConvLongShortAttention)]
    for block in blocks:
        block.attention = ConvAttention(block.attention, num_global_tokens=0)
    if blocks:
        last = model.backbone.stages[-1]
        last.global_tokens = position_parameter(1, 1, model.head.in_features)
        for block in last.blocks:
            block.attention.num_global_tokens = 1
        model.pool = "global_token"
    return len(blocks)


def no_dual_norm(model: Classifier) -> int:
    """Remove the two norms of keys and values (LS appendix D)."""
    modules = [module for module in model.modules() if isinstance(module, DualNorm)]
    for module in modules:
        module.local_norm = module.projected_norm = nn.Identity()
    return len(modules)


def no_embed_norm(model: Classifier) -> int:
    """Remove the LayerNorm after the patch embedding (ViL section 3.1, Table 11)."""
    modules = [module for module in model.modules() if isinstance(module, PatchEmbed)]
    for module in modules:
        module.norm = nn.Identity()
    return len(modules)


def positions_1d(model: Classifier) -> int:
    """Use one position per token instead of one per row and one per column (ViL section 3.1, Table 11)."""
    stages = [stage for stage in model.backbone.stages if isinstance(stage.positions, AbsolutePositions)]
    for stage in stages:
        old = stage.positions
        (height, half), width = old.rows.shape, len(old.cols)
        number = 0 if stage.global_tokens is None else stage.global_tokens.shape[1]
        stage.positions = GridPositions((height, width), 2 * half, num_global_tokens=number, resizing=old.resizing)
    return len(stages)


def pvt(model: Classifier, *, reductions: Sequence[int]) -> int:
    """Give LIT-Ti the attention of PVT-S in all stages (LIT section 3.2, Tables 4 and 5).

    Args:
        model: LIT-Ti.
        reductions: R of each stage. 1 is full attention, 0 is no attention.
    """
    variant = model.backbone.variant
    if getattr(variant, "relative_bias", True) or variant.stages[0].dim != 64:
        return 0
    for stage, spec, heads, reduction in zip(
        model.backbone.stages, variant.stages, (1, 2, 5, 8), reductions, strict=True
    ):
        number = 0 if stage.global_tokens is None else 1
        for block in stage.blocks:
            if not reduction:
                block.attention_norm = block.attention = None
                continue
            if reduction > 1:
                block.attention = ReducedAttention(spec.dim, num_heads=heads, reduction=reduction)
            else:
                block.attention = DenseAttention(spec.dim, num_heads=heads, num_global_tokens=number)
            block.attention.apply(init_linear)
            block.attention_norm = nn.LayerNorm(spec.dim, eps=variant.norm_eps)
    if not reductions[-1]:
        # Without attention, the class token gets no information from the other tokens.
        model.pool = "mean"
    return 1


# timm's model for the rows of Swin-Ti
SWIN = "swin_tiny_patch4_window7_224"
# LIT Table 5 removes the attention of the first stages.
_PVT = {
    "pvt": (8, 4, 2, 1),
    "pvt_msa": (1, 1, 1, 1),
    "pvt_msa_without_1": (0, 1, 1, 1),
    "pvt_msa_without_123": (0, 0, 0, 1),
    "pvt_msa_without_1234": (0, 0, 0, 0),
}
CHANGES: dict[str, Callable[[Classifier], int]] = {
    "full_attention": full_attention,
    "no_dual_norm": no_dual_norm,
    "no_embed_norm": no_embed_norm,
    "positions_1d": positions_1d,
} | {name: functools.partial(pvt, reductions=reductions) for name, reductions in _PVT.items()}


def create_changed_classifier(name: str, *, changes: str | Sequence[str] = (), **options: Any) -> Classifier:
    """Create a classifier and change it.

    Args:
        name: One of :func:`.list_variants`.
        changes: Names of ``CHANGES``.
        options: See :func:`.create_classifier`.

    Raises:
        ConfigError: If a change is unknown, has no effect on the model, or replaces another change or option.
    """
    model, changes = create_classifier(name, **options), [changes] if isinstance(changes, str) else list(changes)
    for change in changes:
        check_choice("changes", change, CHANGES)
    if len([change for change in changes if change in _PVT]) > 1:
        raise ConfigError(f"changes={changes} replace the same attention. Choose one of {', '.join(_PVT)}.")
    # In this order, a change of a part that another change has removed has no effect.
    for change in sorted(changes, key=list(CHANGES).index):
        if not CHANGES[change](model):
            raise ConfigError(f"changes={change!r} has no effect on {name}. Leave it out.")
    if "pool" in options and model.pool != options["pool"]:
        raise ConfigError(f"changes={changes} need pool={model.pool!r}. Leave out pool={options['pool']!r}.")
    return model


_CVT = {"changes": "full_attention"}
_MSA = {"token_merging": "uniform"}
_DEIT = {"changes": ("positions_1d", "no_embed_norm"), "pool": "global_token"}
# (name, source, printed millions of parameters, printed 1e9 multiply-adds, variant, its options)
ROWS: list[tuple[str, str, str, str, str, dict[str, Any]]] = [
    ("Ti-DeiT / 16", "ViL Table 2", "5.7", "1.3", "evit_full_16_tiny", _DEIT),
    ("S-DeiT / 16", "ViL Table 2", "22.1", "4.6", "evit_full_16_small", _DEIT),
    ("CvT-13", "LS Table 3", "20", "6.7", "cvt_ls_13", _CVT),
    ("CvT-21", "LS Table 3", "32", "10.1", "cvt_ls_21", _CVT),
    ("CvT-13, 384", "LS Table 3", "20", "31.9", "cvt_ls_13", _CVT | {"img_size": 384}),
    ("CvT-21, 384", "LS Table 3", "32", "45.0", "cvt_ls_21", _CVT | {"img_size": 384}),
    ("PVT-S", "LIT Table 4", "25", "3.8", "lit_ti", _MSA | {"changes": "pvt"}),
    ("PVT-S + DTM", "LIT Table 4", "25", "3.8", "lit_ti", {"changes": "pvt"}),
    ("Swin-Ti", "LIT Table 4", "28", "4.5", SWIN, {}),
    ("Swin-Ti + DTM", "LIT Table 4", "28", "4.5", SWIN, {"changes": "dtm"}),
    ("PVT-S w/ MSA", "LIT Table 5", "20", "8.4", "lit_ti", _MSA | {"changes": "pvt_msa"}),
    ("PVT-S w/ MSA, without 1", "LIT Table 5", "20", "4.5", "lit_ti", _MSA | {"changes": "pvt_msa_without_1"}),
    ("PVT-S w/ MSA, without 1,2", "LIT Table 5", "19", "3.6", "lit_ti", _MSA),
    ("PVT-S w/ MSA, without 1,2,3", "LIT Table 5", "17", "3.0", "lit_ti", _MSA | {"changes": "pvt_msa_without_123"}),
    ("PVT-S w/ MSA, without 1,2,3,4", "LIT Table 5", "14", "2.8", "lit_ti", _MSA | {"changes": "pvt_msa_without_1234"}),
]


def count_row(variant: str, options: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return millions of parameters, 1e9 multiply-adds, and the multiply-adds with norms.

    Args:
        variant: The variant of a row.
        options: The options of the row.
    """
    # detectron2 is not needed for training.
    from projects_vil.analysis.counting import count_flops

    side = options.get("img_size", 224)
    with torch.device("meta"):
        if variant == SWIN:
            model = timm.create_model(SWIN)
            model = with_deformable_merging(model) if options else model
        else:
            model = create_changed_classifier(variant, **options)
        images = torch.empty(1, 3, side, side)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    products = sum(count_flops(model, images).values())
    return parameters / 1e6, products / 1e9, (products + count_norms(model, images)) / 1e9


def count_norms(model: nn.Module, *inputs: Any) -> int:
    """Count the operations of norms as fvcore does: 5 per value for LayerNorm, 2 per value for BatchNorm."""
    counts, costs = [], {nn.LayerNorm: 5, nn.BatchNorm2d: 2}
    hooks = [
        module.register_forward_hook(lambda _, __, output, cost=cost: counts.append(cost * output.numel()))
        for module in model.modules()
        for norm, cost in costs.items()
        if isinstance(module, norm)
    ]
    with torch.no_grad():
        model.eval()(*inputs)
    for hook in hooks:
        hook.remove()
    return sum(counts)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    headers = ["model", "source", "params M", "paper", "1e9 mult-adds", "with norms", "paper", "variant", "options"]
    rows = []
    for name, source, parameters, flops, variant, options in ROWS:
        ours, products, with_norms = count_row(variant, options)
        rows.append([name, source, f"{ours:.2f}", parameters, f"{products:.2f}", f"{with_norms:.2f}", flops, variant])
        rows[-1].append(" ".join(f"{key}={value}" for key, value in options.items()))
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
