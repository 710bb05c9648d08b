"""Train or evaluate a detector with the arguments of detectron2's train_net.py.

Example:
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_rpb_1x.yaml --num-gpus 8
    python tools/train_net.py --config-file configs/retinanet/vil_tiny_rpb_1x.yaml --eval-only MODEL.WEIGHTS model.pth
"""

from vil.arguments import ConfigToolParser, add_training_arguments, keywords, run_tool


def main() -> None:
    parser = ConfigToolParser(__doc__, config_file=False)
    add_training_arguments(parser)
    args = parser.parse_args()

    from projects_vil.config import load_config
    from projects_vil.run import evaluate, train

    cfg, options = load_config(args.config_file), keywords(args, "eval_only") | args.overrides
    if args.eval_only:
        evaluate(cfg, **options)
    else:
        train(config=cfg, **options)


if __name__ == "__main__":
    run_tool(main)
