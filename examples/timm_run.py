"""Run timm's train.py or validate.py with the models of this project.

The scripts are in timm's repository (https://github.com/huggingface/pytorch-image-models), not in its package. Use the
scripts from the tag of your timm version.

Example:
    python examples/timm_run.py train.py --model vil_small_rpb --data-dir imagenet --epochs 300
    torchrun --nproc_per_node 8 examples/timm_run.py train.py --model lit_s --opt litadamw --data-dir imagenet
    python examples/timm_run.py validate.py --model vil_small_rpb --data-dir imagenet --checkpoint model_best.pth.tar
"""

import argparse
import importlib
import runpy
import sys
from pathlib import Path

from vil.arguments import ToolParser, existing_path, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("script", type=existing_path, metavar="SCRIPT", help="path of timm's train.py or validate.py")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")
    args = parser.parse_args()
    # research/ is not an installed package.
    sys.path.insert(0, str(Path(__file__).absolute().parents[1]))
    importlib.import_module("research.timm_models")
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).absolute().parent))
    runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    # timm's scripts set up logging.
    run_tool(main, log=False)
