"""LIT as the official checkpoints have it: their names and shapes, and what the paper's equations make of them.

Nothing here uses the project's layers: deformable convolution is torchvision's, attention is dense, tables are
resized by PyTorch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import deform_conv2d

from backbones.lit import LITStage, LITVariant

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


def official_state_dict(
    variant: LITVariant, *, classifier: bool, img_size: int = 64, num_classes: int = 10, seed: int = 0
) -> dict[str, Tensor]:
    """Random float64 weights under the official names: of the LIT-Ti code without relative bias, of LIT-S with it."""
    generator = torch.Generator().manual_seed(seed)
    relative, weights = variant.relative_bias, {}

    def add(name: str, *shape: int, scale: float = 0.3, centre: float = 0.0) -> None:
        weights[name] = centre + scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    def norm(name: str, dim: int) -> None:
        add(f"{name}.weight", dim, centre=1)
        add(f"{name}.bias", dim)

    def linear(name: str, out: int, *inputs: int) -> None:
        add(f"{name}.weight", out, *inputs, scale=math.prod(inputs) ** -0.5)
        add(f"{name}.bias", out)

    dims = [stage.dim for stage in variant.stages]
    for index, stage in enumerate(variant.stages):
        side = img_size // (4 * 2**index)
        embed = _embed(relative, index)
        if index == 0:
            linear(f"{embed}.proj", stage.dim, 3, 4, 4)
            norm(f"{embed}.norm", stage.dim)
        else:
            linear(f"{embed}.dconv", stage.dim, dims[index - 1], 2, 2)
            linear(f"{embed}.dconv.conv_offset", 8, dims[index - 1], 2, 2)
            norm(f"{embed}.norm_layer", stage.dim)
            add(f"{embed}.norm_layer.running_mean", stage.dim)
            weights[f"{embed}.norm_layer.running_var"] = 0.5 + weights[f"{embed}.norm_layer.weight"].abs()
            weights[f"{embed}.norm_layer.num_batches_tracked"] = torch.tensor(7)
        if not relative:
            add(f"pos_embed{index + 1}", 1, side**2 + (index == 3), stage.dim)
        for number in range(stage.depth):
            block = _block(relative, index, number)
            if stage.heads:
                norm(f"{block}.norm1", stage.dim)
                linear(f"{block}.attn.qkv", 3 * stage.dim, stage.dim)
                linear(f"{block}.attn.proj", stage.dim, stage.dim)
                if relative:
                    add(f"{block}.attn.relative_position_bias_table", (2 * side - 1) ** 2, stage.heads, scale=1)
                    if classifier:
                        weights[f"{block}.attn.relative_position_index"] = _index(side, side)
            norm(f"{block}.norm2", stage.dim)
            linear(f"{block}.mlp.fc1", stage.expansion * stage.dim, stage.dim)
            linear(f"{block}.mlp.fc2", stage.dim, stage.expansion * stage.dim)
    if classifier:
        norm("norm", dims[-1])
        linear("head", num_classes, dims[-1])
        if not relative:
            add("cls_token", 1, 1, dims[-1])
    elif relative:
        for index in (1, 2, 3):
            norm(f"norm{index}", dims[index])
    return weights


def official_forward(
    weights: dict[str, Tensor], images: Tensor, variant: LITVariant
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The maps (without those norms that a detector adds, where they are absent), and the logits of a classifier.

    Sides that no stride divides are padded with zeros below and on the right, where the official code cuts them.
    """
    relative, features, outputs = variant.relative_bias, images, {}
    classifier = "head.weight" in weights
    for index, stage in enumerate(variant.stages):
        dim = stage.dim
        embed = _embed(relative, index)
        patch = 4 if index == 0 else 2
        features = F.pad(features, (0, -features.shape[3] % patch, 0, -features.shape[2] % patch))
        if index == 0:
            features = F.conv2d(features, weights[f"{embed}.proj.weight"], weights[f"{embed}.proj.bias"], stride=4)
            tokens = _layer_norm(features.permute(0, 2, 3, 1), weights, f"{embed}.norm", 1e-5)
        else:
            kernel, bias = weights[f"{embed}.dconv.weight"], weights[f"{embed}.dconv.bias"]
            to_offset, shift = (weights[f"{embed}.dconv.conv_offset.{leaf}"] for leaf in ("weight", "bias"))
            offset = F.conv2d(features, to_offset, shift, stride=2)
            merged = deform_conv2d(features, offset, kernel, bias, stride=2)
            leaves = ("running_mean", "running_var", "weight", "bias")
            mean, var, scale, shift = (weights[f"{embed}.norm_layer.{leaf}"][:, None, None] for leaf in leaves)
            tokens = F.gelu((merged - mean) / (var + 1e-5).sqrt() * scale + shift).permute(0, 2, 3, 1)
        height, width = tokens.shape[1:3]
        sequence = tokens.reshape(len(tokens), height * width, dim)
        if not relative:
            table = weights[f"pos_embed{index + 1}"]
            own, table = (table[:, :1], table[:, 1:]) if index == 3 else (None, table)
            side = math.isqrt(table.shape[1])
            grid = table.view(1, side, side, dim).permute(0, 3, 1, 2)
            grid = F.interpolate(grid, size=(height, width), mode="bilinear", align_corners=False)
            sequence = sequence + grid.flatten(2).transpose(1, 2)
            if index == 3 and classifier:
                sequence = torch.cat([(weights["cls_token"] + own).expand(len(sequence), -1, -1), sequence], dim=1)
        for number in range(stage.depth):
            block = _block(relative, index, number)
            if stage.heads:
                normed = _layer_norm(sequence, weights, f"{block}.norm1", variant.norm_eps)
                sequence = sequence + _attention(normed, weights, f"{block}.attn", stage.heads, height, width)
            normed = _layer_norm(sequence, weights, f"{block}.norm2", variant.norm_eps)
            hidden = F.gelu(_linear(normed, weights, f"{block}.mlp.fc1"))
            sequence = sequence + _linear(hidden, weights, f"{block}.mlp.fc2")
        local = sequence[:, -height * width :]
        features = local.transpose(1, 2).reshape(len(tokens), dim, height, width)
        output = local
        if f"norm{index}.weight" in weights:
            output = _layer_norm(local, weights, f"norm{index}", variant.norm_eps)
        outputs[f"stage{index + 1}"] = output.transpose(1, 2).reshape(features.shape)
    if not classifier:
        return outputs, None
    normed = _layer_norm(sequence, weights, "norm", variant.norm_eps)
    return outputs, _linear(normed.mean(dim=1) if relative else normed[:, 0], weights, "head")


def _attention(tokens: Tensor, weights: dict, name: str, heads: int, height: int, width: int) -> Tensor:
    batch, length, dim = tokens.shape
    query, key, value = _linear(tokens, weights, f"{name}.qkv").view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(2, 3) / math.sqrt(dim // heads)
    if f"{name}.relative_position_bias_table" in weights:
        table = weights[f"{name}.relative_position_bias_table"]
        side = math.isqrt(len(table))
        grid = table.T.reshape(1, heads, side, side)
        if (side, side) != (2 * height - 1, 2 * width - 1):
            grid = F.interpolate(grid, size=(2 * height - 1, 2 * width - 1), mode="bicubic", align_corners=False)
        scores = scores + grid.flatten(1)[0].view(heads, -1)[:, _index(height, width)]
    output = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, length, dim)
    return _linear(output, weights, f"{name}.proj")


def _index(height: int, width: int) -> Tensor:
    """(N, N): the position in the table of (2 height - 1) x (2 width - 1) offsets, query minus key."""
    row, col = (
        position.flatten() for position in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    )
    rows, cols = row[:, None] - row[None, :] + height - 1, col[:, None] - col[None, :] + width - 1
    return rows * (2 * width - 1) + cols


def _layer_norm(tokens: Tensor, weights: dict, name: str, eps: float) -> Tensor:
    return F.layer_norm(tokens, tokens.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def _linear(tokens: Tensor, weights: dict, name: str) -> Tensor:
    return F.linear(tokens, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _embed(relative: bool, index: int) -> str:
    if relative:
        return "patch_embed" if index == 0 else f"layers.{index - 1}.downsample"
    return f"patch_embed{index + 1}"


def _block(relative: bool, index: int, number: int) -> str:
    return f"layers.{index}.blocks.{number}" if relative else f"block{index + 1}.{number}"
