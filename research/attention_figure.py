"""Draw the mean attention of the center token in every head and block of a classifier (LIT Figure 3).

The defaults are PVT-S with standard attention. The paper uses 100 images of ImageNet's validation set.

Example:
    python -m research.attention_figure photos/*.jpg --checkpoint output/train/NAME/model_best.pth.tar
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.utils import ParseKwargs
from torch import Tensor, nn

from backbones import ConfigError
from projects_vil.visualization.attention import attention_weights
from research import timm_models

PANEL = 1.2  # inches


@torch.no_grad()
def mean_attention(model: timm_models.TimmClassifier, images: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the attention weights of the center token by stage, counted from 1: (blocks, heads, H, W).

    Stages without attention are left out. The weights of a projected key are spread over the tokens of the key.

    Args:
        model: A classifier in eval mode.
        images: Images (3, H, W) of one size.

    Raises:
        ConfigError: If there are no images, or if the model has no attention.
    """
    inputs: dict[nn.Module, tuple] = {}
    stages = {
        number: [block.attention for block in stage.blocks]
        for number, stage in enumerate(model.backbone.stages, start=1)
        if all(block.attention is not None for block in stage.blocks)
    }
    hooks = [
        module.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module, args))
        for modules in stages.values()
        for module in modules
    ]
    sums, count = {number: torch.tensor(0.0) for number in stages}, 0
    for image in images:
        model(image[None])
        count += 1
        captured = inputs.copy()
        for number, modules in stages.items():
            weights = []
            for module in modules:
                tokens, (height, width) = captured[module]
                attention = attention_weights(module, tokens, (height, width), height // 2, width // 2)
                weights.append(attention.direct + attention.spread)
            sums[number] = sums[number] + torch.stack(weights)
    for hook in hooks:
        hook.remove()
    if not count or not stages:
        raise ConfigError("There is no attention to draw. Give images and a model with attention.")
    return {number: total / count for number, total in sums.items()}


def plot_attention(attention: dict[int, Tensor]) -> Figure:
    """Plot :func:`mean_attention`: a part for each stage, with a row for each block and a column for each head."""
    shapes = [maps.shape[:2] for maps in attention.values()]
    rows, widths = max(rows for rows, _ in shapes), [heads for _, heads in shapes]
    figure = Figure((PANEL * (sum(widths) + len(widths)), PANEL * (rows + 1)), layout="constrained")
    parts = figure.subfigures(1, len(shapes), width_ratios=[heads + 1 for heads in widths], squeeze=False)[0]
    for part, (number, maps) in zip(parts, attention.items(), strict=True):
        part.suptitle(f"stage {number}")
        grid = part.subplots(rows, maps.shape[1], squeeze=False)
        height, width = maps.shape[2:]
        for row, head in np.ndindex(grid.shape):
            axes = grid[row, head]
            axes.axis("off")
            if row < len(maps):
                axes.imshow(maps[row, head].numpy(), cmap="Blues")
                axes.plot(width // 2, height // 2, "s", color="lime", fillstyle="none", markersize=4)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", help="image files")
    parser.add_argument("--model", default="lit_ti", help="timm name of a variant (default: lit_ti)")
    parser.add_argument(
        "--model-kwargs",
        nargs="*",
        action=ParseKwargs,
        default={"changes": "pvt_msa", "token_merging": "uniform"},
        help="options of the model (default: changes=pvt_msa token_merging=uniform)",
    )
    parser.add_argument("--checkpoint", default="", help="checkpoint of timm's train.py (default: random weights)")
    parser.add_argument("--output", default="attention.png", type=Path, help="PNG file (default: attention.png)")
    args = parser.parse_args()
    model = timm.create_model(args.model, checkpoint_path=args.checkpoint, **args.model_kwargs).eval()
    transform = create_transform(**resolve_model_data_config(model))
    images = (transform(Image.open(path).convert("RGB")) for path in args.images)
    plot_attention(mean_attention(model, images)).savefig(args.output, dpi=150)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
