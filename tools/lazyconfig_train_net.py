"""Train or evaluate a detector from a LazyConfig. For a YAML config, use tools/train_net.py.

Overrides are key=value in Hydra's syntax. +key=value adds a key.

Example:
    python tools/lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny_rpb.py --num-gpus 8
    python tools/lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny_rpb.py --eval-only \\
        train.init_checkpoint=model.pth
    python tools/lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny_rpb.py train.device=cpu \\
        train.max_iter=300 model.num_classes=2 'dataloader.coco=[[mine,mine.json,photos]]' \\
        'dataloader.train.dataset.names=[mine]' 'dataloader.test.dataset.names=[mine]'
"""

from vil.arguments import ToolParser, add_training_arguments, keywords, run_tool


def main() -> None:
    parser = ToolParser(__doc__)
    add_training_arguments(parser)
    parser.add_argument("opts", nargs="*", metavar="key=value", help="overrides of the config, in any position")
    args = parser.parse_args()

    from projects_vil.engine import run_lazy_config

    run_lazy_config(args.config_file, args.opts, **keywords(args, "opts"))


if __name__ == "__main__":
    run_tool(main)
