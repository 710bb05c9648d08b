"""Train a detector, or evaluate one, with detectron2's own arguments.

Example:
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_1x.yaml --num-gpus 8
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_1x.yaml --eval-only MODEL.WEIGHTS model.pth
"""

from projects_vil.engine import train_from_command_line, training_parser
from projects_vil.utils import run_tool


def main() -> None:
    train_from_command_line(training_parser(__doc__).parse_args())


if __name__ == "__main__":
    run_tool(main)
