"""Train a detector of a LazyConfig, or evaluate one: as tools/train_net.py does with YAML.

Overrides are key=value, in Hydra's syntax, after all flags; +key=value adds a key that the config does not have.

Example:
    python tools/lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny.py --num-gpus 8
    python tools/lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny.py --eval-only \\
        train.init_checkpoint=model.pth
    python tools/lazyconfig_train_net.py --config-file configs/lazy/retinanet_vil_tiny.py train.device=cpu \\
        train.max_iter=300 model.num_classes=2 'dataloader.coco=[[mine,mine.json,photos]]' \\
        'dataloader.train.dataset.names=[mine]' 'dataloader.test.dataset.names=[mine]'
"""

from projects_vil.engine import lazy_training_parser, train_lazily_from_command_line
from projects_vil.utils import run_tool


def main() -> None:
    train_lazily_from_command_line(lazy_training_parser(__doc__).parse_args())


if __name__ == "__main__":
    run_tool(main)
