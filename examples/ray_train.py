"""Train on a Ray cluster with the training loop of tools/train_net.py and Ray Train's TorchTrainer.

Ray starts the processes and sets the same variables as torchrun. If a process dies, Ray restarts all processes, and the
run resumes from its last checkpoint. OUTPUT_DIR, the data and this repository must have the same path on all machines.

Example:
    pip install "ray[train]"
    python examples/make_shapes_dataset.py datasets/shapes
    python examples/ray_train.py --num-workers 2 --config-file configs/demo/retinanet_vil_shapes.yaml \\
        MODEL.DEVICE cpu OUTPUT_DIR /shared/output/demo
"""

import os

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from vil.arguments import ConfigToolParser, add_training_arguments, positive, run_tool


def train_worker(config: dict) -> None:
    from projects_vil import load_config, train

    os.chdir(config["folder"])
    train(config=load_config(config["config_file"]), resume=True, **config["overrides"])


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    parser.add_argument("--num-workers", type=positive, default=2, metavar="N", help="processes on all machines")
    parser.add_argument("--gpu", action="store_true", help="give each process a GPU")
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="number of restarts")
    add_training_arguments(parser)
    args = parser.parse_args()
    ray.init()
    TorchTrainer(
        train_worker,
        train_loop_config={"config_file": args.config_file, "overrides": args.overrides, "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=args.num_workers, use_gpu=args.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_failures)),
    ).fit()


if __name__ == "__main__":
    run_tool(main)
