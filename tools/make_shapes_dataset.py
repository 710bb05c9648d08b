"""Write a small synthetic dataset of shapes in COCO format, or with label images as in ADE20K.

Example:
    python tools/make_shapes_dataset.py datasets/shapes --num-train 400 --num-val 100
    python tools/make_shapes_dataset.py datasets/shapes_sem_seg --task sem_seg
"""

from vil.arguments import ToolParser, run_tool
from vil.choices import SHAPES_TASKS


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("output", metavar="OUT", help="folder to write, such as datasets/shapes")
    parser.add_argument(
        "--task", choices=SHAPES_TASKS, default=SHAPES_TASKS[0], help="task of the annotations (default detection)"
    )
    parser.add_argument("--num-train", type=int, default=400, metavar="N", help="training images (default 400)")
    parser.add_argument("--num-val", type=int, default=100, metavar="N", help="validation images (default 100)")
    parser.add_argument(
        "--short-side", type=int, default=128, metavar="S", help="mean shorter side in pixels (default 128)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="random seed (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing shapes dataset in OUT")
    options = vars(parser.parse_args())

    from projects_vil.data import write_shapes_dataset

    print(write_shapes_dataset(options.pop("output"), **options))


if __name__ == "__main__":
    run_tool(main)
