"""LIT and LITv2 as the official checkpoints have it: their names and shapes."""

import torch
from torch import Tensor

from backbones.lit import LITStage, LITVariant
from backbones.litv2 import LITv2Stage, LITv2Variant
from tests.golden import golden_values

# Two stages of MLP blocks and two of attention; odd widths of the heads, tables for images of 64 pixels
TI = LITVariant(
    (LITStage(2, 6, 0, 3), LITStage(1, 10, 0, 2), LITStage(2, 12, 2), LITStage(2, 16, 4)),
    relative_bias=False,
    norm_eps=1e-6,
    output_norms=(),
    position_img_size=64,
)
S = LITVariant(
    (LITStage(1, 6), LITStage(1, 12), LITStage(2, 24, 3), LITStage(1, 48, 6)),
    relative_bias=True,
    norm_eps=1e-5,
    output_norms=("stage2", "stage3", "stage4"),
    position_img_size=64,
)
# One head of HiLo is Hi-Fi, and two are Lo-Fi. Few feature maps are whole windows of 3.
V2 = LITv2Variant((LITv2Stage(1, 6), LITv2Stage(1, 12), LITv2Stage(1, 24, 3, window_size=3), LITv2Stage(1, 48, 6)))


def official_state_dict(
    variant: LITVariant | LITv2Variant, *, classifier: bool, img_size: int = 64, num_classes: int = 10
) -> dict[str, Tensor]:
    """Return random float64 weights with official names: of LITv2, of LIT-S with relative bias, or of LIT-Ti."""
    shapes = official_shapes(variant, classifier=classifier, img_size=img_size, num_classes=num_classes)
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("num_batches_tracked"):
            weights[name] = torch.tensor(7)
        elif name.endswith("relative_position_index"):
            weights[name] = torch.zeros(shape).long()
        else:
            weights[name] = golden_values(name, shape).double()
    return weights


def official_shapes(
    variant: LITVariant | LITv2Variant, *, classifier: bool, img_size: int = 64, num_classes: int = 10
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of :func:`official_state_dict`."""
    is_v2, shapes = isinstance(variant, LITv2Variant), {}
    relative = is_v2 or variant.relative_bias

    def add(name: str, *shape: int) -> None:
        shapes[name] = shape

    def layer(name: str, out: int, *inputs: int) -> None:
        add(f"{name}.weight", out, *inputs)
        add(f"{name}.bias", out)

    dims = [stage.dim for stage in variant.stages]
    for index, stage in enumerate(variant.stages):
        side = img_size // (4 * 2**index)
        embed = _embed(relative, index)
        if index == 0:
            layer(f"{embed}.proj", stage.dim, 3, 4, 4)
            layer(f"{embed}.norm", stage.dim)
        else:
            layer(f"{embed}.dconv", stage.dim, dims[index - 1], 2, 2)
            layer(f"{embed}.dconv.conv_offset", 8, dims[index - 1], 2, 2)
            layer(f"{embed}.norm_layer", stage.dim)
            add(f"{embed}.norm_layer.running_mean", stage.dim)
            add(f"{embed}.norm_layer.running_var", stage.dim)
            add(f"{embed}.norm_layer.num_batches_tracked")
        if not relative:
            add(f"pos_embed{index + 1}", 1, side**2 + (index == 3), stage.dim)
        for number in range(stage.depth):
            block = _block(relative, index, number)
            if stage.heads:
                layer(f"{block}.norm1", stage.dim)
                if is_v2:
                    low = stage.dim
                    if stage.window_size > 1:
                        low = int(0.9 * stage.heads) * (stage.dim // stage.heads)
                        layer(f"{block}.attn.h_qkv", 3 * (stage.dim - low), stage.dim)
                        layer(f"{block}.attn.h_proj", stage.dim - low, stage.dim - low)
                    layer(f"{block}.attn.l_q", low, stage.dim)
                    layer(f"{block}.attn.l_kv", 2 * low, stage.dim)
                    layer(f"{block}.attn.l_proj", low, low)
                else:
                    layer(f"{block}.attn.qkv", 3 * stage.dim, stage.dim)
                    layer(f"{block}.attn.proj", stage.dim, stage.dim)
                if relative and not is_v2:
                    add(f"{block}.attn.relative_position_bias_table", (2 * side - 1) ** 2, stage.heads)
                    if classifier:
                        add(f"{block}.attn.relative_position_index", side**2, side**2)
            layer(f"{block}.norm2", stage.dim)
            layer(f"{block}.mlp.fc1", stage.expansion * stage.dim, stage.dim)
            if is_v2:
                layer(f"{block}.mlp.dwconv.dwconv", stage.expansion * stage.dim, 1, 3, 3)
            layer(f"{block}.mlp.fc2", stage.dim, stage.expansion * stage.dim)
    if classifier:
        layer("norm", dims[-1])
        layer("head", num_classes, dims[-1])
        if not relative:
            add("cls_token", 1, 1, dims[-1])
    elif relative:
        for index in (1, 2, 3):
            layer(f"norm{index}", dims[index])
    return shapes


def _embed(relative: bool, index: int) -> str:
    if relative:
        return "patch_embed" if index == 0 else f"layers.{index - 1}.downsample"
    return f"patch_embed{index + 1}"


def _block(relative: bool, index: int, number: int) -> str:
    return f"layers.{index}.blocks.{number}" if relative else f"block{index + 1}.{number}"
