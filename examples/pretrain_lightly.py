"""Pretrain a backbone on photos without labels, with LightlyTrain.

The output has the weights of the backbone: use it with "vil train --weights". LightlyTrain (AGPL-3.0 or a commercial
license) is not a dependency of this project: pip install lightly-train.

Example:
    python examples/pretrain_lightly.py photos vil_tiny pretrained.pth --epochs 100
    vil train labeled_photos --model vil_tiny --weights pretrained.pth
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import create_backbone, list_variants
from backbones.checkpoint_files import check_writable, write_checkpoint
from projects_vil.checkpoint import METADATA_KEY, CheckpointMetadata
from projects_vil.checkpoint.metadata import OFFICIAL_INPUT
from projects_vil.checkpoint.pretrained import BACKBONE_PREFIX
from vil.arguments import ToolParser, existing_path, output_file, positive, run_tool


class LightlyBackbone(nn.Module):
    """A backbone as LightlyTrain's custom model. Its feature map is the last stage, (B, C, H/32, W/32)."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.net = create_backbone(variant)
        self.stage, self.info = list(self.net.feature_info.items())[-1]

    def feature_dim(self) -> int:
        return self.info.channels

    def forward_features(self, images: Tensor) -> dict[str, Tensor]:
        return {"features": self.net(images)[self.stage]}

    def forward_pool(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"pooled_features": F.adaptive_avg_pool2d(features["features"], 1)}

    def get_model(self) -> nn.Module:
        return self.net


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("photos", type=existing_path, metavar="PHOTOS", help="folder with images, searched recursively")
    parser.add_argument("variant", choices=list_variants(), metavar="VARIANT", help="variant of the backbone")
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="file to write, .pth or .safetensors")
    parser.add_argument("--method", default="distillation", help="method of LightlyTrain (default: distillation)")
    parser.add_argument("--epochs", type=positive, default=100, metavar="N", help="default: 100")
    parser.add_argument("--batch", type=positive, default=32, metavar="N", help="images per step (default: 32)")
    args = parser.parse_args()
    check_writable(args.output)
    import lightly_train

    with tempfile.TemporaryDirectory() as folder:
        lightly_train.pretrain(
            out=f"{folder}/run",
            data=args.photos,
            model=LightlyBackbone(args.variant),
            method=args.method,
            epochs=args.epochs,
            batch_size=args.batch,
        )
        weights = torch.load(Path(folder, "run/exported_models/exported_last.pt"), weights_only=True)
    # LightlyTrain normalizes images like the official models.
    metadata = CheckpointMetadata(variant=args.variant, input=OFFICIAL_INPUT).to_dict()
    model = {f"{BACKBONE_PREFIX}{name}": tensor for name, tensor in weights.items()}
    write_checkpoint(args.output, {"model": model, METADATA_KEY: metadata})
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_tool(main)
