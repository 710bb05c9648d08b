"""Train a detector, or evaluate one, with detectron2's own arguments.

Example:
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_rpb_1x.yaml --num-gpus 8
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_rpb_1x.yaml --eval-only MODEL.WEIGHTS model.pth
"""

from vil.arguments import ConfigToolParser, add_training_arguments, run_tool


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    add_training_arguments(parser)
    args = parser.parse_args()

    from projects_vil.engine import train_from_command_line

    train_from_command_line(args)


if __name__ == "__main__":
    run_tool(main)
