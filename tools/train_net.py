"""Train a detector, or evaluate one, with detectron2's own arguments.

Example:
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_1x.yaml --num-gpus 8
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_1x.yaml --eval-only MODEL.WEIGHTS model.pth
"""

import argparse
import sys

from detectron2.engine import default_argument_parser, launch

from projects_vil.cli import run_tool
from projects_vil.trainer import run_training


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = default_argument_parser(epilog=__doc__.partition("Example:")[2])
    parser.description = __doc__.partition("Example:")[0].strip()
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    launch(
        run_training,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


if __name__ == "__main__":
    sys.exit(run_tool(main))
