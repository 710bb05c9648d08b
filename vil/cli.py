"""Detectors with efficient vision transformers: train, evaluate, predict and export.

Example:
    vil train photos --model vil_tiny --detector retinanet --epochs 50
    vil predict output/photos_vil_tiny_retinanet holiday.jpg
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from backbones.errors import closest
from vil import commands, install_detectron2
from vil.arguments import (
    ConfigToolParser,
    ToolParser,
    add_process_arguments,
    add_resume_argument,
    existing_path,
    image_source,
    positive,
    run_tool,
    show,
)

DETECTORS = ("retinanet", "mask_rcnn", "faster_rcnn")
_DATA = "folder or file of COCO, YOLO, Pascal VOC, LabelMe or CVAT"
_MODEL = "a run's folder, a name of the model zoo, or a checkpoint next to its config.yaml"


def main() -> None:
    """Run the command that the first argument names."""
    run_tool(_main)


def _main() -> None:
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        run, options = COMMANDS[words[0]]
        make = ToolParser if options is None else ConfigToolParser
        run(make(inspect.getdoc(run), prog=f"vil {words[0]}", **(options or {})), words[1:])
        return
    width = max(map(len, COMMANDS))
    listed = [f"    {name.ljust(width)}  {inspect.getdoc(run).splitlines()[0]}" for name, (run, _) in COMMANDS.items()]
    description = "\n".join([__doc__, "Commands, each with its own --help:", *listed])
    parser = ToolParser(description, prog="vil", usage="vil COMMAND ...")
    parser.add_argument("--version", action="version", version=version("vil-detectron2"))
    if words and not words[0].startswith("-"):
        parser.error(f"unknown command {words[0]}{closest(words[0], COMMANDS)}")
    parser.parse_args(words or ["--help"])


def _options(parser: ConfigToolParser, words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments as keywords, config keys among them."""
    options = vars(parser.parse_args(words))
    keys = options.pop("opts")
    # Among the keys too, or not a keyword of a function.
    for name in ("devices", "device", "weights"):
        options.pop(name, None)
    return options | dict(zip(keys[::2], keys[1::2], strict=True))


def train(parser: ToolParser, words: Sequence[str]) -> None:
    """Train a detector on your photos, or on COCO.

    Without DATA the datasets are those of the config: COCO 2017 in $DETECTRON2_DATASETS/coco.

    Example:
        vil train photos --model vil_tiny --detector retinanet --epochs 50
        vil train photos/data.yaml --model lit_ti --detector mask_rcnn --batch 4 SOLVER.BASE_LR 5e-5
        vil train --config mask_rcnn/vil_small_rpb_1x --num-gpus 8
    """
    parser.add_argument("data", nargs="?", type=existing_path, metavar="DATA", help=_DATA)
    parser.add_argument("--model", metavar="NAME", help="variant (default vil_tiny), or timm:NAME for one of timm's")
    parser.add_argument("--detector", choices=DETECTORS, help="default: retinanet")
    config_help = "instead of --model and --detector: a config as a file, or by name as retinanet/vil_tiny_rpb_1x"
    parser.add_argument("--config", metavar="NAME", help=config_help)
    parser.add_argument("--epochs", type=positive, metavar="N", help="passes over the training images (default 50)")
    batch_help = (
        "images per iteration, to which the learning rate is scaled unless SOLVER.BASE_LR is given (default: the "
        "config's 16, with gradient accumulation if the memory requires it)"
    )
    parser.add_argument("--batch", type=positive, metavar="N", help=batch_help)
    val_help = "share of the images for validation, where DATA has no validation images (default 0.2)"
    parser.add_argument("--val", type=float, metavar="SHARE", help=val_help)
    parser.add_argument("--output", metavar="DIR", help="OUTPUT_DIR (default: output/DATA_MODEL_DETECTOR)")
    add_resume_argument(parser)
    add_process_arguments(parser)
    arguments = _options(parser, words)

    from projects_vil import run

    trained = run.train(**arguments)
    folder = trained.folder
    if trained.results and not any(task.get("AP") for tasks in trained.results.values() for task in tasks.values()):
        print("the detector has learned nothing yet: train for more epochs, or from other weights (--weights)")
    else:
        show(f"vil predict {folder} PHOTOS finds objects, vil report {folder} shows how well it does")


def evaluate(parser: ToolParser, words: Sequence[str]) -> None:
    """Evaluate a detector on the validation images of its run, or on other ones.

    Example:
        vil eval output/photos_vil_tiny_retinanet
        vil eval output/photos_vil_tiny_retinanet more_photos
        vil eval more_photos --predictions found/*.parquet
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"{_MODEL}; none with --predictions")
    data_help = f"{_DATA}: its test images, or else those for validation (default: the run's own)"
    parser.add_argument("data", nargs="?", type=existing_path, metavar="DATA", help=data_help)
    predictions_help = "Parquet files of vil predict, or folders of them, to evaluate instead of a model"
    parser.add_argument(
        "--predictions", nargs="+", default=[], type=existing_path, metavar="PATH", help=predictions_help
    )
    parser.add_argument("--output", metavar="DIR", help="folder (default: MODEL's, or evaluation_DATA in it)")
    add_process_arguments(parser)
    arguments = _options(parser, words)
    if arguments["predictions"]:
        # DATA takes the place of MODEL, and behind PATH argparse does not tell it from another one.
        paths = [path for path in (arguments["model"], arguments["data"], *arguments["predictions"]) if path]
        parts = [path for path in paths if path.endswith(".parquet") or any(Path(path).glob("*.parquet"))]
        data = [path for path in paths if path not in parts]
        if not parts or len(data) > 1:
            parser.error(f"--predictions takes .parquet files and folders of them, and one DATA: {', '.join(data)}")
        arguments |= {"model": None, "data": data[0] if data else None, "predictions": parts}
    elif arguments["model"] is None:
        parser.error("the following arguments are required: MODEL, or --predictions")

    from projects_vil import run

    run.evaluate(**arguments)


def predict(parser: ToolParser, words: Sequence[str]) -> None:
    """Detect objects in a photo, a folder, a video, or what a camera sees.

    Example:
        vil predict output/photos_vil_tiny_retinanet holiday.jpg
        vil predict output/photos_vil_tiny_retinanet photos --output found --score-threshold 0.5
        vil predict output/photos_vil_tiny_retinanet 0
        vil predict output/photos_vil_tiny_retinanet 'shards-{000..127}.tar' --output found --format parquet
    """
    parser.add_argument("model", metavar="MODEL", help=f"{_MODEL}; or an exported file")
    parser.add_argument("input", type=image_source, metavar="INPUT", help=commands.INPUT_HELP)
    parser.add_argument("--output", default="predictions", metavar="DIR", help="folder (default: predictions)")
    commands.add_predict_arguments(parser)
    args = parser.parse_args(words)
    commands.predict(args.model, args)


def export(parser: ToolParser, words: Sequence[str]) -> None:
    """Export a detector to ONNX, TorchScript, OpenVINO and others, and compare the file with it.

    Example:
        vil export output/photos_vil_tiny_retinanet --format onnx
    """
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--output", metavar="DIR", help="folder (default: export in MODEL's folder)")
    commands.add_export_arguments(parser)
    args = parser.parse_args(words)

    from projects_vil.inference import find_model
    from projects_vil.run import folder_of

    given = dict(zip(args.opts[::2], args.opts[1::2], strict=True)).get("MODEL.WEIGHTS")
    args.config_file, weights = find_model(Path(args.model), given)
    args.opts += [] if weights is None else ["MODEL.WEIGHTS", str(weights)]
    args.output = args.output or str(folder_of(args.config_file) / "export")
    commands.export(args)


def check(parser: ToolParser, words: Sequence[str]) -> None:
    """Check a dataset for what would stop or harm training.

    Example:
        vil check photos
        vil check photos --fix photos_coco
    """
    commands.add_check_arguments(parser)
    commands.check(parser.parse_args(words))


def report(parser: ToolParser, words: Sequence[str]) -> None:
    """Write one HTML page about a training run.

    Example:
        vil report output/photos_vil_tiny_retinanet
    """
    commands.add_report_arguments(parser)
    commands.report(parser.parse_args(words))


def convert(parser: ToolParser, words: Sequence[str]) -> None:
    """Convert a checkpoint of an official project.

    Example:
        vil convert model_best.pth vil_tiny.safetensors --model vil_tiny_rpb
    """
    commands.add_convert_arguments(parser)
    commands.convert(parser.parse_args(words))


def install(parser: ToolParser, words: Sequence[str]) -> None:
    """Install detectron2, which is not on the package index, next to torch.

    Example:
        vil install-detectron2
    """
    install_detectron2.add_arguments(parser)
    install_detectron2.install_or_exit(parser.parse_args(words).source)


# Each with the options of its parser; None for one that takes no config keys.
COMMANDS: dict[str, tuple[Callable[[ToolParser, Sequence[str]], None], dict[str, Any] | None]] = {
    "train": (train, {"config_file": False, "weights": True}),
    "eval": (evaluate, {"config_file": False}),
    "predict": (predict, {"config_file": False, "weights": True}),
    "export": (export, {"config_file": False, "weights": True, "devices": ("cpu",)}),
    "check": (check, None),
    "report": (report, {"config_file": False, "devices": ()}),
    "convert": (convert, None),
    "install-detectron2": (install, None),
}

if __name__ == "__main__":
    main()
