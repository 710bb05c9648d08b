"""Train Transformer-LS on a task of the Long Range Arena, or measure its encoder at several sequence lengths.

ListOps is generated once and saved in --data. The other tasks read files in --data: text reads aclImdb, and retrieval
reads new_aan_pairs.{train,eval,test}.tsv.

Example:
    python -m research.long_range_arena --task listops --output output/listops
    python -m research.long_range_arena --task listops --min-length 10 --max-length 200 --num-train 20000 --steps 500 \\
        --warmup-steps 50 --learning-rate 1e-3 --eval-every 100 --window-size 0
    python -m research.long_range_arena --task text --data datasets/lra --model full --output output/text_full
    python -m research.long_range_arena --task listops --seed 0 1 2 3 --output output/listops_seeds
    python -m research.long_range_arena --task listops --config fixed --measure --lengths 512 2048 8192
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

from vil.arguments import ToolParser, output_file, positive, run_tool, write_json

SETTINGS_OPTIONS = {
    "model": (str, "ls, or full: softmax attention over all tokens (default: ls)"),
    "window_size": (int, "tokens of a segment (w); 0 for only the projection (default: the value of the config)"),
    "rank": (int, "projected keys (r); 0 for only the window (default: the value of the config)"),
    "class_token": (str, "all_layers as in the paper, or last_layer as in the official scripts (default)"),
    "steps": (positive, "number of training steps"),
    "warmup_steps": (int, "warm-up steps (default: the published share of the steps)"),
    "learning_rate": (float, "highest learning rate"),
    "schedule": (str, "after the warm-up: linear to zero as in the official scripts (default), or fixed"),
    "weight_decay": (float, "weight decay of AdamW"),
    "batch_size": (positive, "batch size"),
    "dropout": (float, "dropout rate after embeddings and attention, and in the MLPs"),
    "attention_dropout": (float, "dropout rate of the attention weights"),
    "eval_every": (positive, "steps between two evaluations on the validation split"),
}
# Default and help
LISTOPS = {
    "min_length": (500, "samples have more tokens than this"),
    "max_length": (2000, "samples have fewer tokens than this"),
    "num_train": (96000, "number of training samples"),
    "num_val": (2000, "number of validation samples"),
    "num_test": (2000, "number of test samples"),
}


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(__doc__)
    parser.add_argument("--task", required=True, metavar="TASK", help="listops, text or retrieval")
    parser.add_argument("--config", default="best", metavar="NAME", help="window and rank: best, fixed or projection")
    for name, (of_type, text) in SETTINGS_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=of_type, metavar="VALUE", help=text)
    data = parser.add_argument_group("data")
    data.add_argument("--data", default="datasets/lra", metavar="DIR", help="folder of the data (default: %(default)s)")
    data.add_argument(
        "--released", action="store_true", help="ListOps: read basic_{train,val,test}.tsv instead of generating samples"
    )
    data.add_argument("--drop-brackets", action="store_true", help="ListOps without closing brackets, as in the paper")
    for name, (default, text) in LISTOPS.items():
        flag = f"--{name.replace('_', '-')}"
        data.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"ListOps: {text} (default {default})"
        )
    data.add_argument(
        "--data-seed", type=int, default=0, metavar="N", help="ListOps: seed of the generator (default 0)"
    )
    seeds = "seeds of the weights and of the order of the samples, one for each run (default: 0)"
    parser.add_argument("--seed", type=int, nargs="+", default=[0], metavar="N", help=seeds)
    parser.add_argument("--output", metavar="DIR", help="folder for the best checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in --output")
    parser.add_argument("--measure", action="store_true", help="measure time and memory of a step instead of training")
    lengths = (512, 1024, 2048, 4096, 8192)
    parser.add_argument("--lengths", type=positive, nargs="+", default=lengths, metavar="N", help="lengths to measure")
    parser.add_argument("--runs", type=positive, default=3, metavar="N", help="timed steps of --measure")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()

    import torch

    from research.long_range_arena import listops
    from research.long_range_arena.data import read_imdb, read_pairs, read_released_listops
    from research.long_range_arena.tasks import MODELS, settings_for
    from research.long_range_arena.training import checkpoint_path, measure_models, train_classifier
    from research.sequence.training import format_costs

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given = {name: getattr(args, name) for name in SETTINGS_OPTIONS if getattr(args, name) is not None}
    settings = settings_for(args.task, args.config, **given)
    if args.measure:
        models = (args.model,) if args.model else MODELS
        options = {"models": models, "batch_size": args.batch_size or 1, "device": device, "runs": args.runs}
        rows = measure_models(settings, args.lengths, **options)
        print(format_costs(rows, {name: name for name in MODELS}))
        write_json(args.json, rows)
        return
    if args.task == "text":
        dataset = read_imdb(args.data, read_length=settings.read_length)
    elif args.task == "retrieval":
        dataset = read_pairs(args.data, read_length=settings.read_length)
    elif args.released:
        dataset = read_released_listops(args.data, read_length=settings.read_length, words=listops.WORDS)
    else:
        rules = listops.ListOpsRules(min_length=args.min_length, max_length=args.max_length)
        sizes = {name: getattr(args, name) for name in ("num_train", "num_val", "num_test")}
        dataset = listops.load_listops(args.data, rules, seed=args.data_seed, **sizes)
        settings = dataclasses.replace(settings, max_length=max(settings.max_length, args.max_length))
    if args.task == "listops" and args.drop_brackets:
        dataset = listops.drop_brackets(dataset)

    def log(row: dict) -> None:
        losses = "train loss {train_loss:.4f}, val loss {loss:.4f}, val accuracy {accuracy:.4f}".format(**row)
        print(f"step {row['step']}: {losses}, {row['seconds']:.0f} s", flush=True)

    seeds, runs = list(dict.fromkeys(args.seed)), []
    outputs = [args.output and Path(args.output, f"seed_{seed}" if len(seeds) > 1 else "") for seed in seeds]
    # Check the folders now, because an error after hours of training would lose the results.
    for output in filter(None, outputs):
        checkpoint_path(output, overwrite=args.overwrite)
    for seed, output in zip(seeds, outputs, strict=True):
        settings = dataclasses.replace(settings, seed=seed)
        _, result = train_classifier(settings, dataset, output=output, overwrite=args.overwrite, device=device, log=log)
        print(
            f"test accuracy {result['test']['accuracy']:.4f} (chance {result['chance']:.4f}), of step "
            f"{result['best']['step']}, best on val with {result['best']['accuracy']:.4f}; {result['parameters']} "
            f"parameters, {result['seconds']:.0f} s",
            flush=True,
        )
        runs.append({"settings": dataclasses.asdict(settings), **result})
    if len(runs) == 1:
        write_json(args.json, runs[0])
        return
    accuracies = [run["test"]["accuracy"] for run in runs]
    mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
    print(f"test accuracy {mean:.4f} +- {deviation:.4f}, mean and standard deviation of {len(runs)} seeds")
    write_json(args.json, {"runs": runs, "accuracy": mean, "deviation": deviation})


if __name__ == "__main__":
    run_tool(main)
