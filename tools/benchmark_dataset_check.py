"""Time tools/check_dataset.py on drawn annotations with masks, of as many images as COCO train2017 has.

Example:
    python tools/benchmark_dataset_check.py
"""

from pathlib import Path

from backbones import InputError
from projects_vil.analysis import time_dataset_check
from projects_vil.utils import ToolParser, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("--images", type=int, default=118_287, metavar="N", help="of 7 objects each (default 118287)")
    args = parser.parse_args()
    if args.images < 1:
        raise InputError(f"--images is {args.images}: it is 1 or more")
    cost = time_dataset_check(Path(__file__).with_name("check_dataset.py"), num_images=args.images)
    memory = "memory not measured (no /proc)" if cost.memory is None else f"{cost.memory / 1e9:.2f} GB"
    size = cost.file_size / 1e6
    print(f"{args.images:,} images, {size:.0f} MB of annotations: {cost.seconds:.1f} s, {memory}")


if __name__ == "__main__":
    run_tool(main)
