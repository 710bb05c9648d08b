"""Detectors with efficient vision transformers: train, evaluate, predict and export.

Example:
    vil train photos --output output/mine
    vil predict output/mine holiday.jpg
"""

# Each command parses its arguments, imports the library and calls one function.

import argparse
import inspect
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backbones.errors import check_packages, closest
from vil import choices, install_detectron2
from vil.arguments import (
    ConfigToolParser,
    ToolParser,
    add_process_arguments,
    add_resume_argument,
    config_name,
    dataset_path,
    existing_path,
    fraction,
    image_size,
    image_source,
    keywords,
    local_path,
    model_source,
    not_negative,
    output_file,
    output_folder,
    positive,
    run_tool,
    shard,
    show,
    weights_file,
    write_json,
)

if TYPE_CHECKING:
    from detectron2.config import CfgNode

_DEVICE = "cpu, cuda or the number of a GPU (config key MODEL.DEVICE; default: the GPU if there is one)"
_TILES = "predict in overlapping tiles of N x N pixels (default: as in training)"
_IMAGES = "folder with the images, if it is not in DATA"
_VARIANT = "variant, such as vil_tiny_rpb ('vil analyze --variants' lists all), or timm:NAME for a timm model"
_DATA = "dataset folder or annotation file: COCO, YOLO, Pascal VOC, LabelMe, CVAT or VIA"
_MODEL = "output directory of a run, checkpoint with config.yaml in its folder, or name in the model zoo"
_DRAWINGS = " (default: drawings/ in the folder of the model)"
_SIZE: dict[str, Any] = {"type": positive, "nargs": 2, "metavar": ("H", "W")}
_INPUT = "images, folders, video, camera number, URL, list (.txt, .csv, .parquet), or tar files: shards-{000..127}.tar"


# Training and evaluation ---------------------------------------------------------------------------------------------


def train(parser: ConfigToolParser, words: Sequence[str]) -> None:
    """Train a detector on your photos, or on COCO.

    Without options, the command chooses the model, the pretrained weights, the image size, the anchors and the recipe
    for your photos and your device. Without DATA, it trains on the datasets in the config. For most configs, this is
    COCO 2017 in $DETECTRON2_DATASETS/coco.

    Example:
        vil train photos
        vil train photos --epochs 50 --image-size 640 --output output/mine
        vil train photos/data.yaml --model lit_ti --detector mask_rcnn --batch 4 --lr 5e-5
        vil train --config mask_rcnn/vil_small_rpb_1x --num-gpus 8
        vil train --resume --output output/mine
    """
    parser.section("Common options")
    parser.add("data", _DATA, nargs="?", type=dataset_path, metavar="DATA")
    parser.add("--epochs", "passes over the training images (default: by recipe, images and device)", type=positive)
    parser.add("--batch", "images per iteration (default: by recipe and device)", type=positive)
    size_help = "shorter side of the images in pixels, or auto (default): chosen from the sizes of the objects"
    parser.add("--image-size", size_help, type=image_size, metavar="PX")
    parser.add("--tiles", "train and predict in tiles of N x N pixels, for small objects", type=positive)
    parser.add("--output", "output directory (default: output/DATA_MODEL_DETECTOR)", type=output_folder, metavar="DIR")
    parser.add("--device", _DEVICE, metavar="DEVICE")
    add_resume_argument(parser)
    parser.section("Model")
    parser.add("--model", f"{_VARIANT} (default: a small model with ImageNet weights)", metavar="NAME")
    parser.add("--detector", "detector (default retinanet)", choices=choices.DETECTORS)
    weights_help = "output directory of a run, checkpoint, name in the model zoo, or none (default: the best available)"
    parser.add("--weights", weights_help, metavar="FILE")
    config_help = "config instead of --model and --detector: a file, or a name such as retinanet/vil_tiny_rpb_1x"
    parser.add("--config", config_help, type=config_name, metavar="NAME")
    parser.section("Training")
    recipe_help = "optimizer, schedule and augmentation: finetune (default with pretrained weights), scratch (default "
    recipe_help += "with random weights), or paper (keeps the values of the config; default with --config, or no DATA)"
    parser.add("--recipe", recipe_help, choices=choices.RECIPES)
    parser.add("--lr", "learning rate (config key SOLVER.BASE_LR)", type=float, metavar="RATE")
    schedule_help = "1x (default), or 3x_ms (several image sizes, and three times the iterations on COCO)"
    parser.add("--schedule", schedule_help, choices=choices.SCHEDULES)
    parser.section("Data")
    parser.add("--images", _IMAGES, type=existing_path, metavar="DIR")
    val_help = "fraction of the images for validation if DATA has no validation images (default 0.2)"
    parser.add("--val-fraction", val_help, type=fraction, metavar="F")
    parser.add("--workers", "data loader processes (default: at most 4)", type=not_negative)
    add_process_arguments(parser)
    args = parser.parse_args(words)
    arguments = keywords(args) | args.overrides
    has_coco = Path(os.environ.get("DETECTRON2_DATASETS", "datasets"), "coco").expanduser().is_dir()
    if not (has_coco or any(arguments.get(name) for name in ("data", "config", "resume", "DATASETS.TRAIN"))):
        parser.error("DATA is missing. Give a dataset folder, or set DETECTRON2_DATASETS to a folder with coco/")

    from projects_vil import run

    trained = run.train(**arguments)
    _show_results(trained.results)
    folder = shlex.quote(str(trained.folder))
    show(f"Next: vil predict {folder} PHOTOS, vil report {folder}, or vil export {folder} --format onnx")


def _show_results(results: dict[str, Any]) -> None:
    """Print the AP of each dataset and task, with advice if it is low or undefined."""
    low = ". This is low. Train for more epochs, and look at the training images with 'vil visualize data RUN'"
    undefined = "AP is undefined, because the validation images have no objects. Annotate them."
    for name, task, metrics in ((name, *item) for name, tasks in results.items() for item in tasks.items()):
        if metrics.get("AP") is not None:
            advice = low if metrics["AP"] < 5 else ""
            show(f"{task} of {name}: AP {metrics['AP']:.1f} %, AP50 {metrics['AP50']:.1f} %{advice}")
        elif "AP" in metrics:
            show(f"{task} of {name}: {undefined}")


def tune(parser: ConfigToolParser, words: Sequence[str]) -> None:
    """Search for the best learning rate, batch size, image size and augmentation for your photos.

    The command runs short trainings (trials) and compares their AP on the validation images. The first trial uses the
    recipe of vil train. The others use 0.2 to 5 times its learning rate, half to twice its batch size, and 0.75 to 1.5
    times its image size. Values that you set as KEY VALUE are the same in all trials. A trial with a low AP is stopped
    early. The command writes the config of the best trial to best.yaml. If the search is interrupted, the same command
    resumes it.

    Example:
        vil tune photos --trials 20 --epochs 10
        vil train photos --config output/photos_tune/best.yaml --epochs 50
    """
    parser.add("data", _DATA, type=existing_path, metavar="DATA")
    parser.add("--trials", "number of trials, with failed and earlier trials (default 20)", type=positive, default=20)
    parser.add("--output", "output directory (default: output/DATA_tune)", type=output_folder, metavar="DIR")
    parser.add("--epochs", "epochs of each trial (default: as for vil train)", type=positive)
    parser.add("--device", _DEVICE, metavar="DEVICE")
    parser.add("--model", f"{_VARIANT} (default: as for vil train)", metavar="NAME")
    parser.add("--detector", "detector (default retinanet)", choices=choices.DETECTORS)
    parser.add("--recipe", "recipe of the first trial (default: as for vil train)", choices=choices.RECIPES[:2])
    parser.add("--images", _IMAGES, type=existing_path, metavar="DIR")
    args = parser.parse_args(words)
    check_packages("This command", "optuna")

    from projects_vil.tune import tune

    options = {name: getattr(args, name) for name in ("epochs", "model", "detector", "recipe", "images")}
    flags = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    output = Path(args.output or f"output/{Path(args.data).resolve().stem}_tune")
    metric = "segm/AP" if args.detector == "mask_rcnn" else "bbox/AP"
    tune(args.data, output, trials=args.trials, metric=metric, words=flags, given=args.overrides)
    show(f"Next: vil train {shlex.quote(args.data)} --config {shlex.quote(str(output / 'best.yaml'))} --epochs N")


def evaluate(parser: ConfigToolParser, words: Sequence[str]) -> None:
    """Evaluate a detector on the validation images of its run, or on another dataset.

    Example:
        vil eval output/mine
        vil eval output/mine more_photos
        vil eval more_photos --predictions found/*.parquet
    """
    parser.add("model", f"{_MODEL}. Leave it out with --predictions", nargs="?", metavar="MODEL")
    data_help = f"{_DATA} (default: the dataset of the run); uses the test images, else the validation images, else all"
    parser.add("data", data_help, nargs="?", type=existing_path, metavar="DATA")
    parser.add("--images", _IMAGES, type=existing_path, metavar="DIR")
    predictions_help = "evaluate Parquet files from vil predict, or folders with such files, instead of a model"
    parser.add("--predictions", predictions_help, nargs="+", default=[], type=existing_path, metavar="PATH")
    output_help = "output folder (default: the folder of MODEL, or a folder in it, such as evaluation_DATA)"
    parser.add("--output", output_help, type=output_folder, metavar="DIR")
    parser.add("--tiles", _TILES, dest="TEST.TILE_SIZE", default=argparse.SUPPRESS, type=positive)
    add_process_arguments(parser)
    args = parser.parse_args(words)
    arguments = keywords(args) | args.overrides
    if arguments["predictions"]:
        # The first positional argument is DATA. After --predictions, argparse parses DATA as another PATH.
        paths = [path for path in (arguments["model"], arguments["data"], *arguments["predictions"]) if path]
        parts = [path for path in paths if path.endswith(".parquet") or any(Path(path).glob("*.parquet"))]
        data = [path for path in paths if path not in parts]
        if not parts or len(data) > 1:
            parser.error("--predictions takes Parquet files and no MODEL. Write vil eval DATA --predictions PATH")
        arguments |= {"model": None, "data": data[0] if data else None, "predictions": parts}
    elif arguments["model"] is None:
        parser.error("MODEL is missing. Give MODEL or --predictions")
    else:
        _check_model(parser, arguments["model"], arguments["data"])

    from projects_vil import run

    _show_results(run.evaluate(**arguments))


def _check_model(parser: ToolParser, model: str, data: str | None) -> None:
    """Print an error unless ``model`` can be a model. ``data`` is the next argument, which may be the model."""
    is_run = [Path(path or "", "config.yaml").is_file() for path in (model, data)]
    is_file = Path(model).suffix in (".pth", ".safetensors", ".yaml", *choices.EXPORT_SUFFIXES)
    is_file &= Path(model).name != "data.yaml"  # of a YOLO dataset
    if data and is_run == [False, True] and Path(model).exists() and not is_file:
        parser.error(f"'{model}' is not a model, but '{data}' is. Write {parser.prog} {data} {model}")
    parser.check("MODEL", model_source, model)


# Prediction and export -----------------------------------------------------------------------------------------------


def predict(parser: ToolParser, words: Sequence[str]) -> None:
    """Detect objects in images, videos or the stream of a camera.

    The command writes results.json (COCO format), images.json (image ids, categories, skipped files) and drawings/ to
    the output folder. With --format parquet, it writes part files instead, and an interrupted command resumes after the
    last complete part. If the command skips a file that it cannot read, the exit status is 2.

    Example:
        vil predict output/mine holiday.jpg
        vil predict output/mine photos --output found --score-threshold 0.5
        vil predict output/mine street.mp4 --track
        vil predict output/mine 'shards-{000..127}.tar' --output found --format parquet
    """
    parser.add("model", f"exported file, {_MODEL}", nargs="?", metavar="MODEL")
    parser.add("input", _INPUT, nargs="*", metavar="INPUT")
    parser.add("--input", "the same as INPUT", dest="named_input", metavar="INPUT")
    output_help = "output folder (default: predictions); replaces earlier results, keeps drawings of other images"
    parser.add("--output", output_help, type=output_folder, default="predictions", metavar="DIR")
    parser.add("--batch", "maximum images per batch (default 1)", dest="batch_size", type=positive, default=1)
    parser.add("--device", _DEVICE, metavar="DEVICE")
    parser.add("--tiles", _TILES, type=positive)
    parser.add("--tta", "test-time augmentation: predict on several sizes and flips of each image", action="store_true")
    parser.add("--track", "track objects through a video or a folder of frames", action="store_true")
    annotations_help = "COCO file of images in the folder INPUT: predict only these images, and use the ids of the file"
    parser.add("--annotations", annotations_help, type=existing_path, metavar="FILE")
    format_help = "format of the results: coco (default), or parquet (part files, no drawings)"
    parser.add("--format", format_help, dest="file_format", choices=choices.PREDICTION_FORMATS)
    parser.add("--part-size", f"images (rows) per Parquet file (default {choices.PART_SIZE})", type=positive)
    parser.add("--shard", "predict only shard I (from 0) of N; needs --format parquet", type=shard, metavar="I/N")
    column_help = "column of INPUT with paths or URLs (default: path, file_name, url, image or image_url)"
    parser.add("--column", column_help, metavar="NAME")
    parser.add("--ray", "predict with Ray (RAY_ADDRESS, or this machine) to Parquet files", action="store_true")
    workers_help = "minimum and maximum number of Ray workers (default: 1 and one per GPU, or CPU cores minus 1)"
    parser.add("--ray-workers", workers_help, nargs=2, type=positive, metavar=("MIN", "MAX"))
    parser.add("--workers-per-gpu", "with --ray: workers that share a GPU (default 1)", type=positive, metavar="N")
    parser.add("--no-drawings", "do not write drawings", dest="drawings", action="store_false")
    threshold_help = f"minimum score of detections in drawings and labels (default {choices.SCORE_THRESHOLD})"
    parser.add("--score-threshold", threshold_help, type=float, metavar="T")
    labels_help = "also write detections and images as a dataset to DIR/dataset, for correction in an annotation tool"
    parser.add("--save-labels", labels_help, choices=choices.LABEL_FORMATS)
    args = parser.parse_args(words)
    positional = [word for word in (args.model, *args.input) if word]
    model, source, weights = args.config_file, args.named_input, args.weights
    # With weights, a single positional argument is INPUT.
    if model is None and positional and not (weights and source is None and len(positional) == 1):
        model = positional.pop(0)
    model = model or weights
    if source and positional:
        parser.error(f"unexpected argument {positional[0]}. Give MODEL or --config-file, and INPUT or --input")
    sources = [source] if source else positional
    if not model or not sources:
        missing = [name for name, value in (("MODEL", model), ("INPUT", sources)) if not value]
        parser.error(f"no {' and no '.join(missing)}. Write vil predict MODEL INPUT")
    if args.file_format == "parquet":
        check_packages("--format parquet", "pyarrow")
    if args.ray:
        check_packages("--ray", "ray", "pyarrow")
    if args.track:
        check_packages("--track", "supervision", "trackers")
    for source in sources:
        parser.check("INPUT", image_source, source)
    _check_model(parser, model, sources[0])

    from projects_vil.inference import predict

    options = keywords(args, "model", "input", "named_input", "output", "tiles")
    tiles = {"TEST.TILE_SIZE": args.tiles} if args.tiles else {}
    source = sources[0] if len(sources) == 1 else sources
    summary = predict(model, source, args.output, overrides=args.overrides | tiles, **options)
    show(*summary.lines)
    if summary.num_skipped:
        sys.exit(2)


def export(parser: ToolParser, words: Sequence[str]) -> None:
    """Export a detector to ONNX, TorchScript or another format, and run the parity check.

    The command writes the model (model.ts, model.onnx, model.xml or model.pt2), its metadata (inputs, outputs, class
    names) as JSON, and the parity report as JSON. If a detection differs by more than the tolerance, the exit status
    is 1.

    Example:
        vil export output/mine --format onnx
        vil export lit_ti_retinanet_1x --format openvino --precision fp16 --evaluate
    """
    parser.add("model", _MODEL, nargs="?", type=model_source, metavar="MODEL")
    parser.add("--output", "output folder (default: export/ in the folder of MODEL)", type=output_folder, metavar="DIR")
    formats, precisions, dtypes = choices.EXPORT_FORMATS, choices.PRECISIONS, choices.INPUT_DTYPES
    parser.add("--format", "file format (default torchscript)", dest="file_format", choices=formats, default=formats[0])
    parser.add("--precision", "model precision (default fp32)", choices=precisions, default="fp32")
    parser.add("--input-dtype", "dtype of the images (default uint8)", choices=dtypes, default="uint8")
    parser.add("--batched", "export a model with batches as input (B, 3, H, W)", action="store_true")
    fixed_help = "always return TEST.DETECTIONS_PER_IMAGE rows, padded with zeros, and the number of detections"
    parser.add("--fixed-detections", fixed_help, action="store_true")
    size_help = "the only input size (default: any size); not with --evaluate or int8"
    parser.add("--image-size", size_help, dest="size", **_SIZE)
    parser.add("--opset", "ONNX opset, at least 18 (default 20)", type=positive)
    parity = {"dest": "images", "nargs": "+", "type": existing_path, "default": [], "metavar": "FILE"}
    parser.add("--parity-images", "images for the parity check (default: validation and synthetic ones)", **parity)
    parser.add("--evaluate", "also compare the AP on DATASETS.TEST; always on for int8", action="store_true")
    parser.add("--calibration-images", "images of DATASETS.TRAIN for int8 (default 100)", type=positive, default=100)
    parser.add("--accept-drop", "accept an int8 model that loses more than 1 AP", action="store_true")
    args = parser.parse_args(words)
    cfg, output = _load_config(parser, args, "export")

    from projects_vil.export import describe_report, export_detector

    path, report = export_detector(cfg, cfg.MODEL.WEIGHTS, output, **keywords(args, "model", "output"))
    show(*describe_report(report).splitlines(), f"wrote {path}")
    if not report["ok"]:
        sys.exit(1)


def _load_config(parser: ToolParser, args: argparse.Namespace, subfolder: str) -> tuple["CfgNode", str]:
    """Return the config of ``MODEL``, or of ``--config-file`` and ``--weights``, for the CPU, and the output folder.

    The default of ``--output`` is a subfolder in the folder of the model.
    """
    source = args.model or args.config_file or args.weights
    if not source:
        parser.error("MODEL is missing. Give MODEL, --config-file or --weights")
    if args.model and args.config_file:
        parser.error(f"MODEL {args.model} and --config-file are both given. Give one of them")

    from projects_vil.checkpoint import find_model
    from projects_vil.config import choose_device, load_config
    from projects_vil.run import folder_of

    path, weights = find_model(Path(source), args.weights)
    cfg = load_config(path, args.overrides | ({} if weights is None else {"MODEL.WEIGHTS": str(weights)}))
    cfg = choose_device(cfg, devices=("cpu",), requested="MODEL.DEVICE" in args.overrides)
    return cfg, args.output or str(folder_of(path) / subfolder)


# Datasets, reports and checkpoints -----------------------------------------------------------------------------------


def check(parser: ToolParser, words: Sequence[str]) -> None:
    """Check a dataset for problems that stop or harm training.

    DATA is a folder or annotation file of COCO, YOLO, Pascal VOC, LabelMe, CVAT or VIA. The command detects the format,
    and lists errors first, then notes. An error has examples, and the change that --fix makes. A note has examples, and
    its effect on training. Unused files are counted. If there are errors and no fixed copy, the exit status is 1.

    Example:
        vil check photos
        vil check photos --fix photos_coco
        vil check mine/train.json --images mine/images --deep --fix mine_coco
    """
    parser.add("data", "folder or annotation file of a dataset", type=existing_path, metavar="DATA")
    parser.add("--images", _IMAGES, type=existing_path, metavar="DIR")
    parser.add("--json", "write findings and unused files as JSON", type=output_file, metavar="FILE")
    parser.add("--fix", "new folder for a corrected copy, with a COCO file per split", type=local_path, metavar="OUT")
    parser.add("--draw", "draw images with annotations, one PNG file per split", type=output_folder, metavar="DIR")
    parser.add("--deep", "decode every image, even if a split has more than 2,000", action="store_true")
    parser.add("--boxes", "ignore masks, for detectors without masks", action="store_true")
    args = parser.parse_args(words)
    if args.fix and (os.path.lexists(args.fix) or args.fix.endswith(".json")):
        parser.error(f"argument --fix: '{args.fix}' already exists or is the name of a file. Give a new folder")

    if args.draw and Path(args.draw).resolve().is_relative_to(Path(args.data).resolve()):
        parser.error(f"argument --draw: '{args.draw}' is in the dataset. Give a folder outside of it")
    choices.registers_builders = bool(args.draw)  # Drawing needs PyTorch, which takes seconds to import.
    from projects_vil.data.check import check_classes, check_dataset, write_fixed
    from projects_vil.data.object_sizes import IMAGE_SIZES, RETINANET, choose_size, objects_of
    from projects_vil.data.splits import split_by_hash

    def progress(number: int) -> None:
        if not number % 10_000:
            print(f"{number:,} images checked", file=sys.stderr)

    options: dict[str, Any] = {"masks": False if args.boxes else None, "pixels": args.deep, "progress": progress}
    if args.json:
        options |= {"num_examples": math.inf, "report": args.json}
    lines: list[str] = []
    try:
        dataset, files = check_dataset(args.data, args.images, fixed=args.fix, **options)
        lines += dataset.line().splitlines()
        for file in files.values():
            lines += file.lines()
        train = files["train"].fixed(areas=False)[0] if files["train"].findings("error") else files["train"].dataset
        if "val" not in files and train.get("images"):
            halves = split_by_hash(train, Path(files["train"].image_root), None, dataset.copies)
            train, effect = halves["train"], "needs a second, different image for it"
            if "val" in halves:
                effect = f"validates on {len(halves['val']['images']):,} of the images (--val-fraction)"
            lines.append(f"no validation split: 'vil train' {effect}")
        if len(objects := objects_of(train)):
            # You may check a dataset on another machine than the one that trains.
            for device, sizes in zip(("CPU", "GPU"), IMAGE_SIZES.values(), strict=True):
                lines.append(f"'vil train' on a {device}: {choose_size(RETINANET, objects, sizes=sizes, fit=True)[-1]}")
        splits = {split: file.to_json() for split, file in files.items()}
        write_json(args.json, {"splits": splits, "notes": dataset.notes, "unused": dataset.unused})
        if args.draw:
            from projects_vil.visualization.predictions import draw_annotations

            for split, file in files.items():
                lines.append(draw_annotations(file, Path(args.draw, f"{split}.png")))
        lines += write_fixed(files, args.fix)
    except BaseException:
        if args.fix:
            shutil.rmtree(args.fix, ignore_errors=True)
        raise
    finally:
        # Print last, because an error of a closed pipe must not remove the fixed copy.
        show(*lines)
    check_classes(files)


def convert_data(parser: ToolParser, words: Sequence[str]) -> None:
    """Convert a dataset to COCO, YOLO, Pascal VOC, LabelMe or CVAT format, with its images and splits.

    The command copies the images, and counts the entries that the new format does not support.

    Example:
        vil convert-dataset photos photos_yolo --format yolo
    """
    parser.add("data", _DATA, type=existing_path, metavar="DATA")
    parser.add("output", "new folder", type=local_path, metavar="OUT")
    parser.add("--format", "format of OUT", dest="output_format", choices=choices.LABEL_FORMATS, required=True)
    parser.add("--images", _IMAGES, type=existing_path, metavar="DIR")
    args = parser.parse_args(words)

    choices.registers_builders = False
    from projects_vil.data.writers import convert_dataset

    show(*convert_dataset(**vars(args)))


def report(parser: ToolParser, words: Sequence[str]) -> None:
    """Write an HTML report of a training run.

    The report has training curves, precision and recall, AP per class, a confusion matrix, validation images and the
    config. It is one file that works offline. If a file of the run is missing, the report names what it leaves out.

    Example:
        vil report output/mine
        vil report output/mine DATASETS.COCO "[['mine', 'mine.json', 'photos']]"
    """
    parser.add("run", "output directory of a training run", type=existing_path, metavar="RUN")
    parser.add("--output", "HTML file (default: RUN/report.html)", type=output_file, metavar="FILE")
    parser.add("--num-images", "validation images to draw (default 8)", type=int, default=8, metavar="N")
    args = parser.parse_args(words)

    from projects_vil.report import write_report

    path = write_report(args.run, args.output, num_images=args.num_images, overrides=args.overrides)
    show(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MB)")


def convert(parser: ToolParser, words: Sequence[str]) -> None:
    """Convert an official checkpoint to weights of a detector (MODEL.WEIGHTS), or to a classifier.

    The command supports checkpoints of vision-longformer, VisionLongformerForObjectDetection, transformer-ls, LIT
    (classification, detection and segmentation) and LITv2. It detects the format from the names of the tensors.

    Example:
        vil convert model_best.pth vil_tiny.safetensors --model vil_tiny_rpb
        vil convert model_final.pth vil_small_coco.pth --model vil_small_rpb --json report.json
        vil convert model_best.pth vil_tiny_224.pth --model vil_tiny --classifier
        vil convert lit_ti_retinanet_1x lit_ti_coco.safetensors
    """
    parser.add("source", "official checkpoint: a file, or a name in the model zoo", type=weights_file, metavar="SOURCE")
    parser.add("output", "file to write, .pth or .safetensors", type=output_file, metavar="OUTPUT")
    parser.add("--model", "variant, such as vil_small_rpb; not needed for a name in the model zoo", metavar="VARIANT")
    size_help = "height and width of the largest image, for position tables; for a detector, the longer side twice"
    size_help += " (default: by variant, such as 1333 1333 for ViL's absolute positions)"
    parser.add("--image-size", size_help, **_SIZE)
    parser.add("--classifier", "write a classifier with the input size --image-size", action="store_true")
    parser.add("--json", "write a report of all tensors as JSON", type=output_file, metavar="REPORT")
    args = parser.parse_args(words)

    from projects_vil.checkpoint import convert_file

    size = tuple(args.image_size) if args.image_size else None
    conversion = convert_file(args.source, args.output, args.model, img_size=size, classifier=args.classifier)
    show(*conversion.lines(), f"wrote {args.output}")
    write_json(args.json, conversion.as_json())


# Models --------------------------------------------------------------------------------------------------------------


def analyze(parser: ToolParser, words: Sequence[str]) -> None:
    """Count the parameters and FLOPs of detectors, or compare backbones with the published figures.

    Example:
        vil analyze --config-file configs/retinanet/vil_tiny_rpb_1x.yaml
        vil analyze --no-flops --config-file configs/*/vil_*_1x.yaml --json counts.json
        vil analyze --variants
        vil analyze --variants vil_tiny lit --json variants.json
    """
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config-file", nargs="+", type=existing_path, metavar="FILE", help="configs of detectors")
    variants_help = "backbones: all variants, or the variants whose names start with PREFIX"
    what.add_argument("--variants", nargs="*", metavar="PREFIX", help=variants_help)
    parser.add("--image-size", "image size (default 800 1333)", **_SIZE)
    parser.add("--no-flops", "count parameters only (fast)", action="store_true")
    parser.add("--json", "write the counts as JSON", type=output_file, metavar="FILE")
    args = parser.parse_args(words)
    if args.variants is not None and (args.image_size or args.no_flops or args.overrides):
        parser.error("--image-size, --no-flops and overrides need --config-file. Remove them, or remove --variants")

    from projects_vil import load_config
    from projects_vil.analysis import count_detector, count_variants, format_detectors, format_variants

    if args.variants is not None:
        counts = count_variants(args.variants)
        print(format_variants(counts))
    else:
        size = tuple(args.image_size or (800, 1333))
        options: dict[str, Any] = {"size": size, "with_flops": not args.no_flops}
        counts = [count_detector(load_config(path, args.overrides), path, **options) for path in args.config_file]
        print(format_detectors(counts))
    write_json(args.json, counts)


def benchmark(parser: ToolParser, words: Sequence[str]) -> None:
    """Measure the time and memory of models, and compare them with baselines.

    The runs of all models alternate in one process. The table has medians, quartiles, and the ratio to the first
    baseline, or to the first model if there is no baseline. KEY VALUE pairs apply to the models, not to baselines.

    A model name can have suffixes: +shift (random-shift training), or +KEY=VALUE for a config key of
    MODEL.TRANSFORMER, such as +ATTENTION_BACKEND=triton or +ACTIVATION_CHECKPOINTING=True.

    --tune measures forward and backward passes of backbones with PyTorch's attention and with the Triton kernels on a
    GPU. It stores the faster backend in ~/.cache/vil-detectron2 as the choice of ATTENTION_BACKEND auto, for this type
    of GPU, this --dtype and the installed versions of torch and Triton.

    Example:
        vil benchmark --models vil_tiny_rpb vil_small_rpb --against swin_t --image-size 800 1344
        vil benchmark --backward --models vil_small_rpb vil_small_rpb+shift --against swin_t --image-size 512 672
        vil benchmark --what train-step --detector mask_rcnn --models vil_small_rpb --against r50 swin_t \\
            --image-size 512 672 --batch 2 --json step.json
        vil benchmark --what attention --models vil_small_rpb full_small --image-size 400 672 --image-size 800 1344
        vil benchmark --tune --models vil_small_rpb --dtype bfloat16 --batch 2
    """
    parts, dtypes, detectors = choices.BENCHMARK_PARTS, choices.DTYPES, choices.DETECTORS[:2]
    parser.add("--what", "what to measure (default backbone)", choices=parts, default="backbone")
    parser.add("--models", "models: variants, timm:NAME or configs", nargs="+", required=True, metavar="NAME")
    parser.add("--against", "baselines: r50, swin_t, or timm models", nargs="+", default=[], metavar="NAME")
    parser.add("--detector", "detector around a variant (default retinanet)", choices=detectors, default=detectors[0])
    parser.add("--backward", "also run the backward pass of attention and backbones", action="store_true")
    parser.add("--image-size", "image size in pixels; can be repeated (default 800 1344)", action="append", **_SIZE)
    parser.add("--batch", "images per batch (default 1)", type=positive, default=1)
    parser.add("--dtype", "data type for autocast (default float32)", choices=dtypes, default="float32")
    parser.add("--tune", "choose the attention backend of ATTENTION_BACKEND auto on this GPU", action="store_true")
    parser.add("--runs", "timed runs per model (default 5)", type=positive, default=5)
    parser.add("--no-memory", "measure time only (faster on a CPU)", action="store_true")
    parser.add("--json", "write the measurements as JSON", type=output_file, metavar="FILE")
    args = parser.parse_args(words)

    from projects_vil import analysis
    from projects_vil.config import choose_device, config_path, load_config

    base = config_path(f"base/{args.detector}")
    cfg = choose_device(load_config(base, args.overrides), requested="MODEL.DEVICE" in args.overrides)
    options: dict[str, Any] = {"part": args.what, "base": base, "batch_size": args.batch, "backward": args.backward}
    options |= {"device": cfg.MODEL.DEVICE, "dtype": args.dtype, "overrides": args.overrides}
    names = [(name, False) for name in args.models] + [(name, True) for name in args.against]
    sizes = [tuple(size) for size in args.image_size or [(800, 1344)]]
    if args.tune:
        if args.json or args.against or args.what != parts[1]:
            parser.error("--json, --against and --what have no effect with --tune. Leave them out")
        cases = [analysis.BenchmarkCase(name, False, size=size, **options) for name in args.models for size in sizes]
        return show(*analysis.tune_attention(cases, runs=args.runs))
    reference, rows = len(args.models) if args.against else 0, []
    for size in sizes:
        cases = [analysis.BenchmarkCase(*name, size=size, **options) for name in names]
        rows += analysis.measure(cases, reference=reference, runs=args.runs, memory=not args.no_memory)
    print(analysis.format_measurements(rows, reference=names[reference][0]))
    write_json(args.json, {"measurements": rows})


def visualize(parser: ToolParser, words: Sequence[str]) -> None:
    """Draw the attention, training samples, sampling offsets or predictions of a detector as PNG files.

    Example:
        vil visualize attention output/vil_tiny --input photo.jpg --stage 3 --point 120 200
        vil visualize data output/mine INPUT.AUGMENTATION lsj_copy_paste INPUT.LSJ.SIZE 128
        vil visualize offsets output/lit_s --input photo.jpg --output drawings --points 8
        vil visualize results output/demo_retinanet --num-images 8
    """
    commands = parser.add_subparsers(required=True, metavar="WHAT", parser_class=ConfigToolParser)
    model: dict[str, Any] = {"weights": True, "devices": ("cpu",)}

    def add(render: Callable[[argparse.Namespace], list[str]], summary: str, **options: Any) -> ConfigToolParser:
        name = render.__name__.removeprefix("_draw_")
        command = commands.add_parser(name, help=summary, description=render.__doc__, **(options or model))
        command.set_defaults(render=render, parser=command)
        if not options:
            command.add("model", _MODEL, nargs="?", type=model_source, metavar="MODEL")
            command.add("--output", f"folder{_DRAWINGS}", type=output_folder, metavar="DIR")
        return command

    image = {"required": True, "type": existing_path, "metavar": "IMAGE"}
    command = add(_draw_attention, "attention of one token, one heat map per head (not for timm models)")
    command.add("--input", "image file", **image)
    command.add("--stage", "stage of the backbone, counted from 1 (default: the last)", type=int, metavar="S")
    command.add("--block", "block of the stage, counted from 1 (default: the last)", type=int, metavar="B")
    command.add("--point", "pixel of the image (default: the center)", type=int, nargs=2, metavar=("Y", "X"))

    command = add(_draw_data, "training samples after augmentation")
    command.add("--number", "number of samples (default 16)", type=positive, default=16)
    command.add("--seed", "random seed (default: SEED in the config, or 0)", type=int, metavar="S")

    command = add(_draw_offsets, "sampling points of LIT's deformable token merging")
    command.add("--input", "image files, one PNG per image", nargs="+", **image)
    points = command.add_mutually_exclusive_group()
    points.add_argument("--points", type=positive, default=8, metavar="N", help="number of positions (default 8)")
    points.add_argument("--point", type=int, nargs=2, metavar=("Y", "X"), help="draw only the position at this pixel")

    command = add(_draw_results, "predictions of a run next to the ground truth", config_file=False, devices=())
    command.add("run", "output directory of a training run", type=model_source, metavar="RUN")
    command.add("--dataset", "dataset (default: the first of DATASETS.TEST)", metavar="NAME")
    command.add("--output", f"PNG or JPEG file, or a folder for predictions.png{_DRAWINGS}", type=local_path)
    command.add("--num-images", "images, one per row (default 8)", type=positive, default=8)
    default = choices.SCORE_THRESHOLD
    command.add("--score-threshold", f"minimum score (default {default})", type=fraction, default=default, metavar="T")

    args = parser.parse_args(words)
    show(*args.render(args))


def _draw_attention(args: argparse.Namespace) -> list[str]:
    """Draw the attention of one token in one block as a heat map per head."""
    from projects_vil.visualization.inspection import draw_attention

    cfg, output = _load_config(args.parser, args, "drawings")
    position = {"stage": args.stage, "block": args.block, "point": args.point}
    return [f"wrote {draw_attention(cfg, cfg.MODEL.WEIGHTS, args.input, output, **position)}"]


def _draw_data(args: argparse.Namespace) -> list[str]:
    """Draw the first augmented training samples, exactly as the model receives them."""
    from projects_vil.data import register_datasets
    from projects_vil.engine import check_values
    from projects_vil.visualization.predictions import draw_samples

    args.weights = args.weights or (args.model and "none")  # samples do not need the weights of the run
    cfg, output = _load_config(args.parser, args, "drawings")
    check_values(cfg, args.overrides)
    register_datasets(cfg)
    return [f"wrote {path}" for path in draw_samples(cfg, output, number=args.number, seed=args.seed)]


def _draw_offsets(args: argparse.Namespace) -> list[str]:
    """Draw the image positions that LIT's deformable token merging samples, as in figure 2 of the paper."""
    from projects_vil.visualization.inspection import draw_offsets

    cfg, output = _load_config(args.parser, args, "drawings")
    tokens = {"num_points": args.points, "point": args.point}
    return [f"wrote {path}" for path in draw_offsets(cfg, cfg.MODEL.WEIGHTS, args.input, output, **tokens)]


def _draw_results(args: argparse.Namespace) -> list[str]:
    """Draw the predictions of a run next to the ground truth."""
    from projects_vil.config import load_config
    from projects_vil.data import load_dataset, register_datasets
    from projects_vil.visualization.predictions import draw_results, predictions_file

    run = Path(args.run)
    cfg = load_config(run / "config.yaml", args.overrides)
    register_datasets(cfg)
    dataset = args.dataset or next(iter(cfg.DATASETS.TEST), "")
    drawing = Path(args.output or run / "drawings")
    drawing /= "" if drawing.suffix.lower() in (".png", ".jpg", ".jpeg") else "predictions.png"
    options = {"num_images": args.num_images, "score_threshold": args.score_threshold}
    draw_results(dataset, load_dataset(cfg, [dataset], train=False), predictions_file(run, dataset), drawing, **options)
    return [f"wrote {drawing}"]


def examples(parser: ToolParser, words: Sequence[str]) -> None:
    """Copy the example programs to a folder.

    Example:
        vil examples examples
        python examples/make_shapes_dataset.py photos
    """
    parser.add("folder", "folder to create", metavar="DIR")
    folder = Path(parser.parse_args(words).folder)
    if os.path.lexists(folder):
        parser.error(f"'{folder}' already exists. Give a new folder")
    shutil.copytree(choices.EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    show(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def install(parser: ToolParser, words: Sequence[str]) -> None:
    """Install detectron2, which is not on PyPI.

    Example:
        vil install-detectron2
    """
    sources = ("auto", *install_detectron2.SOURCES)
    source_help = "git: the official repository; index: a pure-Python copy on PyPI; auto (default): git, then index"
    parser.add("--source", source_help, choices=sources, default="auto")
    install_detectron2.install(parser.parse_args(words).source)


# The command vil -----------------------------------------------------------------------------------------------------

# Commands and the options of their parsers. None means that a command has no config keys.
COMMANDS: dict[str, tuple[Callable[[Any, Sequence[str]], None], dict[str, Any] | None]] = {
    "check": (check, None),
    "train": (train, {"config_file": False, "devices": ()}),
    "tune": (tune, {"config_file": False, "weights": True, "devices": ()}),
    "eval": (evaluate, {"config_file": False}),
    "predict": (predict, {"weights": True, "devices": ()}),
    "report": (report, {"config_file": False, "devices": ()}),
    "export": (export, {"weights": True, "devices": ("cpu",)}),
    "analyze": (analyze, {"config_file": False, "devices": ()}),
    "benchmark": (benchmark, {"config_file": False}),
    "convert": (convert, None),
    "convert-dataset": (convert_data, None),
    "visualize": (visualize, {"config_file": False, "devices": ()}),
    "examples": (examples, None),
    "install-detectron2": (install, None),
}
# Titles in the list of commands, and the command below each.
_TITLES = {"check": "Your photos", "analyze": "Models and checkpoints", "examples": "Setup and examples"}


def main(command: str | None = None) -> None:
    """Run ``command``, or the command in the first argument."""
    run_tool(lambda: _main([command, *sys.argv[1:]] if command else sys.argv[1:]))


def _main(words: list[str]) -> None:
    if words and words[0] in ("help", "version"):
        words = [*words[1:], f"--{words[0]}"]
    if words and words[0] in COMMANDS:
        run, options = COMMANDS[words[0]]
        make = ToolParser if options is None else ConfigToolParser
        run(make(inspect.getdoc(run), prog=f"vil {words[0]}", **(options or {})), words[1:])
        return
    width, listed = max(map(len, COMMANDS)), [__doc__ + "\nvil COMMAND --help lists the arguments of a command."]
    for name, (run, _) in COMMANDS.items():
        listed += [f"\n{_TITLES[name]}:"] if name in _TITLES else []
        listed.append(f"    {name.ljust(width)}  {str(inspect.getdoc(run)).splitlines()[0]}")
    description = "\n".join(listed)
    parser = ToolParser(description, prog="vil", usage="vil COMMAND ...")
    parser.add_argument("--version", action="version", version=version("vil-detectron2"))
    if words and not words[0].startswith("-"):
        name = choices.NAMES_OF_OTHERS.get(words[0], words[0])
        parser.error(f"unknown command '{words[0]}'{closest(name, COMMANDS)}")
    parser.parse_args(words or ["--help"])
