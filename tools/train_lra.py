"""Train Transformer-LS on a task of the Long Range Arena, or measure what its encoder costs against the length.

ListOps is generated, once, in --data; text reads aclImdb in it, retrieval new_aan_pairs.train.tsv and its like.

Example:
    python tools/train_lra.py --task listops --config best --output output/listops
    python tools/train_lra.py --task listops --min-length 10 --max-length 200 --num-train 20000 --steps 500 \\
        --warmup 50 --lr 1e-3 --eval-every 100 --ablate window
    python tools/train_lra.py --task text --data datasets/lra --model full --output output/text_full
    python tools/train_lra.py --task listops --config fixed --measure --lengths 512 2048 8192
"""

import argparse
import dataclasses

import torch

from backbones import InputError
from projects_vil.config import check_device_name
from projects_vil.sequence.lra import (
    ABLATIONS,
    CLASS_TOKENS,
    CONFIGS,
    MODELS,
    SCHEDULES,
    TASKS,
    Dataset,
    Evaluation,
    ListOpsRules,
    Run,
    Settings,
    check_output,
    format_costs,
    load_listops,
    measure_lengths,
    read_imdb,
    read_pairs,
    read_released_listops,
    settings_of,
    train_lra,
    without_brackets,
)
from projects_vil.utils import ToolParser, check_json_path, run_tool, write_json

LENGTHS = (512, 1024, 2048, 4096, 8192)
DATA = "datasets/lra"
# Of the course, what a step that is measured has too.
MEASURED = {"batch_size", "dropout", "attention_dropout"}
# Of Settings, with the arguments that take their place.
COURSE = {
    "learning_rate": "lr",
    "batch_size": "batch_size",
    "warmup_steps": "warmup",
    "steps": "steps",
    "eval_every": "eval_every",
    "weight_decay": "weight_decay",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
}
GENERATED = ("min_length", "max_length", "num_train", "num_dev", "num_test", "data_seed")
LISTOPS = ("released", "drop_brackets", *GENERATED)
# What has no effect with what: the arguments, and the one that makes them idle.
IDLE = (
    (("window_size", "rank", "ablate", "class_token"), "--model full", lambda args: args.model == "full"),
    (LISTOPS, "a --task other than listops", lambda args: args.task != "listops"),
    (GENERATED, "--released", lambda args: args.released),
    (("window_size",), "--ablate window", lambda args: args.ablate == "window"),
    (("rank",), "--ablate projection", lambda args: args.ablate == "projection"),
    (("lengths", "runs"), "training", lambda args: not args.measure),
    (
        ("output", "overwrite", "data", "seed", "schedule", *LISTOPS, *sorted(set(COURSE.values()) - MEASURED)),
        "--measure",
        lambda args: args.measure,
    ),
    (("overwrite",), "no --output", lambda args: not args.output),
)


def parse() -> argparse.Namespace:
    parser = ToolParser(__doc__)
    parser.add_argument("--task", required=True, choices=TASKS, help="of the Long Range Arena")
    parser.add_argument(
        "--config", default="best", choices=CONFIGS, help="window and rank: of tables 5 and 1 (default: %(default)s)"
    )
    parser.add_argument("--window-size", type=int, metavar="W", help="in place of the config's; 0 for none")
    parser.add_argument("--rank", type=int, metavar="R", help="in place of the config's; 0 for none")
    parser.add_argument("--ablate", choices=ABLATIONS, help="leave out the window, or the projection")
    parser.add_argument("--model", default="ls", choices=MODELS, help="full: softmax attention over all tokens")
    parser.add_argument(
        "--class-token",
        choices=CLASS_TOKENS,
        help="all_layers: a global token as the paper says (default: last_layer, as the official scripts)",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="DIR", help=f"where it lies (default: {DATA})")
    data.add_argument(
        "--released",
        action="store_true",
        default=None,
        help="ListOps: read basic_train.tsv and its like in --data; generate none",
    )
    data.add_argument(
        "--drop-brackets",
        action="store_true",
        default=None,
        help="ListOps without closing brackets, as the paper's pipeline read it",
    )
    data.add_argument("--min-length", type=int, metavar="N", help="ListOps: samples are longer (default: 500)")
    data.add_argument("--max-length", type=int, metavar="N", help="ListOps: samples are shorter (default: 2000)")
    data.add_argument("--num-train", type=int, metavar="N", help="ListOps: samples (default: 96000)")
    data.add_argument("--num-dev", type=int, metavar="N", help="ListOps: samples (default: 2000)")
    data.add_argument("--num-test", type=int, metavar="N", help="ListOps: samples (default: 2000)")
    data.add_argument("--data-seed", type=int, metavar="N", help="ListOps: of the generator (default: 0)")
    course = parser.add_argument_group("training (default: table 6 and the official scripts)")
    course.add_argument("--steps", type=int, metavar="N", help="how many")
    course.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="steps until the learning rate is reached (default: its share of --steps)",
    )
    course.add_argument("--lr", type=float, metavar="RATE", help="the highest learning rate")
    course.add_argument("--schedule", choices=SCHEDULES, help="after the warm-up (default: linear)")
    course.add_argument("--weight-decay", type=float, metavar="RATE", help="of AdamW")
    course.add_argument("--batch-size", type=int, metavar="B", help="samples a step; with --measure 1 without it")
    course.add_argument("--dropout", type=float, metavar="RATE", help="after embeddings, attention and in the MLPs")
    course.add_argument("--attention-dropout", type=float, metavar="RATE", help="of the attention weights")
    course.add_argument("--eval-every", type=int, metavar="N", help="steps between two evaluations on dev")
    course.add_argument("--seed", type=int, metavar="N", help="of weights and order (default: 0)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--measure", action="store_true", help="cost against length, beside full attention")
    measuring.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", help=f"(default: {' '.join(map(str, LENGTHS))})"
    )
    measuring.add_argument("--runs", type=int, metavar="N", help="passes that are timed (default: 3)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda; a GPU where there is one without it")
    parser.add_argument("--output", metavar="DIR", help="where the best checkpoint goes")
    parser.add_argument("--overwrite", action="store_true", default=None, help="even where --output has one")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, object]:
    """The arguments among ``names`` that were typed."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def check_uses(args: argparse.Namespace) -> None:
    """An argument that would have no effect is a mistake."""
    for names, beside, is_idle in IDLE:
        for name in names:
            if is_idle(args) and getattr(args, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} has no effect with {beside}: leave it out")


def read_settings(args: argparse.Namespace) -> Settings:
    settings = settings_of(args.task, args.config, ablate=args.ablate, **given(args, ("class_token",)))
    sizes = given(args, ("window_size", "rank"))
    # Samples that are longer than the published ones need as many positions.
    settings = settings.with_sizes(**sizes, max_length=max(settings.sizes.max_length, args.max_length or 0))
    typed = given(args, tuple(COURSE.values()))
    if "steps" in typed and "warmup" not in typed:
        # The same share of fewer steps; a warm-up of one step is none.
        share = settings.warmup_steps * typed["steps"] // settings.steps
        typed["warmup"] = share if share > 1 else 0
    return dataclasses.replace(settings, **{field: typed[name] for field, name in COURSE.items() if name in typed})


def load(args: argparse.Namespace, longest: int) -> Dataset:
    """The data of the task."""
    folder = args.data or DATA
    if args.task == "text":
        return read_imdb(folder, longest=longest)
    if args.task == "retrieval":
        return read_pairs(folder, longest=longest)
    if args.released:
        dataset = read_released_listops(folder, longest=longest)
    else:
        rules = ListOpsRules(**given(args, ("min_length", "max_length")))
        sizes = given(args, ("num_train", "num_dev", "num_test"))
        dataset = load_listops(folder, rules, **sizes, seed=args.data_seed or 0)
    return without_brackets(dataset) if args.drop_brackets else dataset


def show(evaluation: Evaluation) -> None:
    dev = evaluation.dev
    print(
        f"step {evaluation.step}: train loss {evaluation.train_loss:.4f}, dev loss {dev.loss:.4f}, "
        f"dev accuracy {dev.accuracy:.4f}, {evaluation.seconds:.0f} s",
        flush=True,
    )


def main() -> None:
    args = parse()
    check_json_path(args.json)
    check_uses(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device_name("--device", device, instead="take --device cpu")
    settings = read_settings(args)
    if args.measure:
        models = MODELS if args.model == "ls" else (args.model,)
        batch_size = 1 if args.batch_size is None else args.batch_size
        costs = measure_lengths(
            settings,
            args.lengths or LENGTHS,
            models=models,
            batch_size=batch_size,
            device=device,
            runs=3 if args.runs is None else args.runs,
        )
        print(format_costs(costs))
        write_json(args.json, [dataclasses.asdict(cost) for cost in costs])
        return
    run = Run(settings, args.model, device=device, **given(args, ("schedule", "seed")))
    run.check()
    if args.output:
        check_output(args.output, overwrite=bool(args.overwrite))
    dataset = load(args, settings.data.longest)
    _, result = train_lra(run, dataset, output=args.output, report=show)
    print(
        f"test accuracy {result.test.accuracy:.4f} (chance {result.chance:.4f}), of step {result.best.step}, best on "
        f"dev with {result.best.dev.accuracy:.4f}; {result.parameters} parameters, {result.seconds:.0f} s"
    )
    typed = {name: value for name, value in vars(args).items() if value is not None}
    write_json(args.json, {"arguments": typed, "run": dataclasses.asdict(run)} | dataclasses.asdict(result))


if __name__ == "__main__":
    run_tool(main)
