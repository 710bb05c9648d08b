"""Train a character language model on the bytes of a file: Transformer-LS, also beside full attention.

The first 90 of 100 bytes train, the next 5 choose the best weights, the last 5 test. The configs are those of the paper
(enwik8 in three phases, days on eight GPUs); the arguments make smaller runs of them.

Example:
    python tools/train_char_lm.py --data enwik8 --config small --output output/enwik8_small
    python tools/train_char_lm.py --data text --config small --output output/text --compare full --layers 4 --dim 128 \\
        --heads 4 --window 64 --length 256 --steps 500 --batch-size 8 --rate 1e-3 --dropout 0 --sample 300
    python tools/train_char_lm.py --generate --weights output/text/best_long_short.pth --sample 500 --prompt "The "
    python tools/train_char_lm.py --evaluate --weights output/enwik8_small/best_long_short.pth --data enwik8 \\
        --test-memory 32768 --test-part 256
    python tools/train_char_lm.py --measure --config small --lengths 512 1024 2048 4096 8192
"""

import argparse
from typing import Any

import torch

from backbones import InputError
from projects_vil.config import check_device_name
from projects_vil.sequence.char_lm import (
    DEFAULT_PROMPT,
    PRESETS,
    Sampling,
    evaluate_file,
    generate_from_file,
    measure_config,
    settings_of,
    size_of,
    train_and_test,
)
from projects_vil.utils import ToolParser, check_json_path, run_tool, write_json

MODES = ("generate", "evaluate", "measure")
SIZES = ("dim", "heads", "hidden", "layers", "window", "segment", "rank")
PHASES = ("length", "steps", "warm_up", "rate", "batch_size")
SAMPLING = ("sample", "prompt", "temperature", "seed")
TESTING = ("test_memory", "test_part", "test_streams")
# What is for which; the rest is for all.
USES = {
    "training": (
        *("data", "config", "output", "compare", "resume", "memory", "dropout", "weight_decay", "accumulate"),
        *("eval_every", *SIZES, *PHASES, *SAMPLING, *TESTING),
    ),
    "generate": ("weights", *SAMPLING),
    "evaluate": ("weights", "data", *TESTING),
    "measure": ("config", "lengths", "runs", "batch_size", *SIZES),
}
NEEDS = {"training": ("data", "output"), "generate": ("weights",), "evaluate": ("weights", "data"), "measure": ()}


def parse() -> argparse.Namespace:
    parser = ToolParser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--generate", action="store_true", help="text from trained --weights, and no training")
    what.add_argument(
        "--evaluate", action="store_true", help="bits per character of --weights on the test part of --data"
    )
    what.add_argument("--measure", action="store_true", help="seconds and memory of a step by length, of both models")
    parser.add_argument("--data", metavar="FILE", help="any file: its bytes are the characters")
    parser.add_argument("--config", choices=sorted(PRESETS), help="of the paper (default: small)")
    parser.add_argument("--output", metavar="DIR", help="for last.pth, which resumes, and best_MODEL.pth")
    parser.add_argument("--compare", choices=("full",), help="train full attention too, by turns on the same parts")
    parser.add_argument("--resume", action="store_true", default=None, help="go on from --output's last.pth")
    parser.add_argument("--weights", metavar="FILE", help="a best_MODEL.pth, for --generate and --evaluate")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--seed", type=int, metavar="K", help="of weights, dropout and samples (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write what was found there too")

    sizes = parser.add_argument_group("the model instead of the config's")
    sizes.add_argument("--layers", type=int, metavar="N", help="depth")
    sizes.add_argument("--dim", type=int, metavar="C", help="channels; the MLPs have four times as many")
    sizes.add_argument("--hidden", type=int, metavar="C", help="channels inside the MLPs")
    sizes.add_argument("--heads", type=int, metavar="M", help="of attention")
    sizes.add_argument("--window", type=int, metavar="W", help="bytes of the window")
    sizes.add_argument("--segment", type=int, metavar="L", help="bytes that are projected together")
    sizes.add_argument("--rank", type=int, metavar="R", help="projected keys of a segment")

    phases = parser.add_argument_group(
        "training instead of the config's", "a value for each phase, or one for all; as many --steps, so many phases"
    )
    phases.add_argument("--steps", type=int, nargs="+", metavar="N")
    phases.add_argument("--length", type=int, nargs="+", metavar="N", help="bytes of a part")
    phases.add_argument("--batch-size", type=int, nargs="+", metavar="B", help="parallel streams (--measure: 1)")
    phases.add_argument("--rate", type=float, nargs="+", metavar="R", help="learning rate after the warm-up")
    phases.add_argument("--warm-up", type=int, nargs="+", metavar="N", help="steps (default: the config's share)")
    phases.add_argument("--memory", type=int, metavar="N", help="bytes before a part (default: as many as it has)")
    phases.add_argument("--dropout", type=float, metavar="P")
    phases.add_argument("--weight-decay", type=float, metavar="D")
    phases.add_argument(
        "--accumulate", type=int, metavar="K", help="groups of streams, one after the other (default 1)"
    )
    phases.add_argument("--eval-every", type=int, metavar="N", help="steps between evaluations on dev (default 1000)")

    testing = parser.add_argument_group("testing")
    testing.add_argument("--test-memory", type=int, metavar="N", help="bytes before a part (published: 32768)")
    testing.add_argument("--test-part", type=int, metavar="N", help="bytes of a part (published: 256)")
    testing.add_argument("--test-streams", type=int, metavar="B", help="side by side, each without a past (default 1)")

    sampling = parser.add_argument_group("samples")
    sampling.add_argument("--sample", type=int, metavar="N", help="bytes to generate (--generate: 500)")
    sampling.add_argument("--prompt", metavar="TEXT", help="what the sample goes on from (default: a new line)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="below 1 is surer (default 1)")

    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--lengths", type=int, nargs="+", metavar="N", help="(default: 512 to 8192)")
    measuring.add_argument("--runs", type=int, metavar="N", help="timed steps (default 5)")
    return parser.parse_args()


def check_uses(args: argparse.Namespace, mode: str) -> None:
    """An argument that would have no effect is a mistake."""
    for name in {name for names in USES.values() for name in names}:
        if getattr(args, name) is not None and name not in USES[mode]:
            raise InputError(f"--{name.replace('_', '-')} has no effect on {_called(mode)}: leave it out")
    for name in NEEDS[mode]:
        if getattr(args, name) is None:
            raise InputError(f"--{name} is missing: {_called(mode)} needs it")
    if mode == "training" and args.sample is None and (args.prompt is not None or args.temperature is not None):
        raise InputError("--prompt and --temperature are of a sample: add --sample N")


def _called(mode: str) -> str:
    return mode if mode == "training" else f"--{mode}"


def given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def main() -> None:
    args = parse()
    mode = next((mode for mode in MODES if getattr(args, mode)), "training")
    check_json_path(args.json, not_one_of=[path for path in (args.data, args.weights) if path])
    check_uses(args, mode)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device_name("--device", device, instead="use --device cpu")
    config = args.config or "small"
    seed = 0 if args.seed is None else args.seed
    sampling = None
    if mode == "generate" or args.sample is not None:
        sampling = Sampling(
            number=500 if args.sample is None else args.sample,
            prompt=DEFAULT_PROMPT if args.prompt is None else args.prompt,
            seed=seed,
            temperature=1.0 if args.temperature is None else args.temperature,
        )
    testing = {"memory_length": args.test_memory, "length": args.test_part, "num_streams": args.test_streams}
    if mode == "generate":
        found = generate_from_file(args.weights, sampling, device=device)
    elif mode == "evaluate":
        found = evaluate_file(args.weights, args.data, testing=testing, device=device)
    elif mode == "measure":
        size = size_of(config, **given(args, SIZES))
        found = measure_config(size, args.lengths, batch_size=args.batch_size, runs=args.runs, device=device)
    else:
        settings = settings_of(
            config,
            size=given(args, SIZES),
            phases=given(args, PHASES),
            compare=args.compare,
            dropout=args.dropout,
            weight_decay=args.weight_decay,
            seed=seed,
            memory_length=args.memory,
            accumulate=args.accumulate,
            eval_period=args.eval_every,
        )
        found = train_and_test(
            settings,
            data=args.data,
            output=args.output,
            device=device,
            resume=bool(args.resume),
            sampling=sampling,
            testing=testing,
        )
    write_json(args.json, found)


if __name__ == "__main__":
    run_tool(main)
