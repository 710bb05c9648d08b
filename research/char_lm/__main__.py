"""Train a character language model on the bytes of a file, with long-short attention or full attention.

The first 90 percent of the bytes are for training, the next 5 percent for validation, and the last 5 percent for the
test. The configs are from the paper. They train on enwik8 in three phases, which take days on eight GPUs. Use the
options for smaller runs.

Example:
    python -m research.char_lm train --data enwik8 --config small --output output/enwik8_small
    python -m research.char_lm train --data text --output output/text --compare --depth 4 --dim 128 --num-heads 4 \\
        --window-size 64 --length 256 --steps 500 --batch-size 8 --learning-rate 1e-3 --dropout 0 --sample 300
    python -m research.char_lm evaluate --weights output/enwik8_small/best_long_short.pth --data enwik8 \\
        --test-memory 512 --test-length 32768 --test-step 512
    python -m research.char_lm generate --weights output/text/best_long_short.pth --sample 500 --prompt "The "
    python -m research.char_lm measure --config small --lengths 512 1024 2048 4096 8192
"""

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from vil.arguments import ToolParser, existing_path, output_file, positive, run_tool, write_json

SIZES = ("depth", "dim", "hidden_dim", "num_heads", "window_size", "segment_length", "rank")
PHASES = {"steps": positive, "length": positive, "batch_size": positive, "learning_rate": float, "warmup_steps": int}
# Type, default and help
TRAINING_OPTIONS = {
    "memory_length": (positive, None, "bytes of memory (default: the length of a block)"),
    "dropout": (float, None, "dropout rate (default: the config's)"),
    "weight_decay": (float, None, "weight decay of AdamW (default: the config's)"),
    "accumulate": (positive, 1, "gradient accumulation steps (default 1)"),
    "eval_every": (positive, 1000, "steps between evaluations (default 1000)"),
    "seed": (int, 0, "seed of weights, dropout and samples (default 0)"),
}
TEST_OPTIONS = {
    "test_memory": (positive, None, "bytes of memory in the test (default: as in training)"),
    "test_length": (positive, None, "bytes of a block in the test (default: as in training)"),
    "test_step": (
        positive,
        None,
        "bytes from one sequence of --test-length bytes to the next (default: blocks with a memory)",
    ),
    "test_streams": (positive, 1, "number of parts of the test text to evaluate in parallel (default 1)"),
}
SAMPLE_OPTIONS = {
    "prompt": (str, "\n", "start of the sample (default: a new line)"),
    "temperature": (float, 1.0, "temperature of the sample (default 1)"),
}


def add_arguments(command: argparse.ArgumentParser, table: dict[str, tuple[Any, Any, str]], **options: Any) -> None:
    for name, (of_type, default, text) in table.items():
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, type=of_type, default=default, metavar="VALUE", help=text, **options)


def parse_arguments() -> argparse.Namespace:
    parser = ToolParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", description="Train a model, or resume its training.")
    evaluate = commands.add_parser("evaluate", description="Test trained weights on a file.")
    generate = commands.add_parser("generate", description="Sample from trained weights.")
    measure = commands.add_parser("measure", description="Measure a training step for several block lengths.")
    for command in (train, measure):
        command.add_argument("--config", default="small", metavar="NAME", help="small, large or text8 (default: small)")
        add_arguments(command, {name: (positive, None, "default: the config's value") for name in SIZES})
    text = "one value for each phase, or one for all phases; the number of --steps is the number of phases"
    add_arguments(train, {name: (of_type, None, text) for name, of_type in PHASES.items()}, nargs="+")
    train.add_argument("--output", required=True, metavar="DIR", help="folder for last.pth and best_MODEL.pth")
    train.add_argument("--compare", action="store_true", help="also train full attention, on the same blocks")
    train.add_argument("--resume", action="store_true", help="resume from last.pth")
    add_arguments(train, TRAINING_OPTIONS)
    for command in (train, evaluate):
        command.add_argument("--data", type=existing_path, required=True, metavar="FILE", help="text file")
        add_arguments(command, TEST_OPTIONS)
    for command in (evaluate, generate):
        command.add_argument("--weights", type=existing_path, required=True, metavar="FILE", help="a best_MODEL.pth")
    for command, number in ((train, 0), (generate, 500)):
        add_arguments(
            command, {"sample": (int, number, f"number of bytes to generate (default {number})"), **SAMPLE_OPTIONS}
        )
    add_arguments(generate, {"seed": (int, 0, "seed of the sample (default 0)")})
    lengths, streams = (512, 1024, 2048, 4096, 8192), (positive, 1, "number of parallel streams (default 1)")
    add_arguments(measure, {"lengths": (positive, lengths, "bytes of a block")}, nargs="+")
    add_arguments(measure, {"batch_size": streams, "runs": (positive, 5, "timed steps of each model (default 5)")})
    for command in (train, evaluate, generate, measure):
        command.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: a GPU if there is one)")
        command.add_argument("--json", type=output_file, metavar="FILE", help="also write the results to this file")
    return parser.parse_args()


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def train(args: argparse.Namespace) -> dict[str, Any]:
    from tabulate import tabulate

    from research.char_lm.model import CONFIGS, MODELS, TITLES, count_parameters, phases_for, size_for
    from research.char_lm.text import read_text
    from research.char_lm.training import Settings, Training, best_path

    text = read_text(args.data)
    if args.sample:
        # Check the prompt before the training, not after it.
        text.vocabulary.encode_prompt(args.prompt)
    size = size_for(args.config, **given(args, SIZES))
    config = CONFIGS[args.config]
    settings = Settings(
        models=MODELS if args.compare else MODELS[:1],
        size=size,
        phases=phases_for(args.config, **given(args, tuple(PHASES))),
        **{"dropout": config.dropout, "weight_decay": config.weight_decay} | given(args, tuple(TRAINING_OPTIONS)),
    )
    training = Training(settings, text, Path(args.output), device=args.device, resume=args.resume)
    print(f"{args.data}: {len(text.train):,} bytes to train on, {len(text.vocabulary)} ids", flush=True)

    def log(row: dict[str, Any]) -> None:
        line = "phase {phase} step {step}: {title}, bits/char {train:.4f} on train, {val:.4f} on val, {seconds:.0f} s"
        print(line.format(**row, title=TITLES[row["model"]]), flush=True)

    training.run(log)
    rows, results = [], []
    for name in settings.models:
        args.weights = best_path(training.output, name)
        result = {"model": name, "parameters": count_parameters(name, size, len(text.vocabulary))}
        result["seconds"] = [row["seconds"] for row in training.evaluations if row["model"] == name][-1]
        result |= test_file(args) | ({"sample": sample_file(args)} if args.sample else {})
        results.append(result)
        figures = {"parameters": f"{result['parameters']:,}", "seconds": f"{result['seconds']:.0f}"}
        figures |= {f"bits/char {part}": f"{result[part]:.4f}" for part in ("val", "test")}
        rows.append({"model": TITLES[name], **figures})
    print("\n" + tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    for result in results if args.sample else ():
        print(f"\nsample of {TITLES[result['model']]}:\n{result['sample']}")
    print(f"{len(text.vocabulary)} ids: {math.log2(len(text.vocabulary)):.4f} bits/char for a uniform guess")
    return {"evaluations": training.evaluations, "results": results}


def test_file(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of the model of ``args.weights`` on the test part of ``args.data``."""
    from research.char_lm.text import read_text
    from research.char_lm.training import bits_per_character, load_trained

    model, vocabulary, trained = load_trained(args.weights, memory_length=args.test_memory, device=args.device)
    length = args.test_length or trained["length"]
    ids = read_text(args.data, vocabulary=vocabulary).test
    options = {"length": length, "step": args.test_step, "num_streams": args.test_streams, "device": args.device}
    bits = bits_per_character(model, ids, vocabulary, **options)
    return {"val": trained["val"], "test": bits, "length": length, "memory_length": trained["memory_length"]}


def sample_file(args: argparse.Namespace) -> str:
    """Return the prompt and the text that the model of ``args.weights`` generates after it."""
    from research.char_lm.training import generate, load_trained

    model, vocabulary, trained = load_trained(args.weights, device=args.device)
    prompt = vocabulary.encode_prompt(args.prompt)
    options = {"seed": args.seed, "temperature": args.temperature, "device": args.device}
    ids = generate(model, prompt, number=args.sample, length=trained["length"], unknown=vocabulary.other, **options)
    return vocabulary.decode([*prompt.tolist(), *ids]).decode(errors="replace")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from research.char_lm.model import MODELS, TITLES, count_parameters, size_for
    from research.char_lm.training import build_step
    from research.sequence.training import format_costs, measure_lengths

    size = size_for(args.config, **given(args, SIZES))
    builders = {name: partial(build_step, name, size, args.batch_size, args.device) for name in MODELS}
    rows = measure_lengths(builders, args.lengths, device=args.device, runs=args.runs)
    for row in rows:
        row["parameters"] = count_parameters(row["model"], size)
    print(format_costs(rows, TITLES))
    return {"costs": rows, "parameters": {row["model"]: row["parameters"] for row in rows}}


def main() -> None:
    args = parse_arguments()

    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.command == "train":
        results = train(args)
    elif args.command == "evaluate":
        results = test_file(args)
        parts = "in blocks of {length} bytes with a memory of {memory_length}"
        if args.test_step:
            parts = f"in sequences of {{length}} bytes at a step of {args.test_step}"
        print(("{test:.4f} bits/char on the test part, " + parts).format(**results))
    elif args.command == "generate":
        results = {"sample": sample_file(args)}
        print(results["sample"])
    else:
        results = measure(args)
    write_json(args.json, results)


if __name__ == "__main__":
    run_tool(main)
