"""What the command ``vil`` and the tools of the same names share: arguments, and the call that they are for."""

import argparse
import math
import os
import sys
import tempfile

from vil.arguments import (
    ToolParser,
    config_of,
    existing_path,
    output_file,
    positive,
    shard,
    show,
    weights_file,
    write_json,
)

FORMATS = ("torchscript", "onnx", "aot_inductor", "torch_export", "openvino")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
DTYPES = ("uint8", "float32")
PART_SIZE = 1024
INPUT_HELP = "image, folder, video, camera's number, URL, list (.txt, .csv, .parquet), or tar as shards-{000..127}.tar"


def add_predict_arguments(parser: ToolParser) -> None:
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="images at once (default 1)")
    parser.add_argument("--tta", action="store_true", help="test-time augmentation: several sizes and mirror images")
    annotations_help = "COCO file of the folder: only its images are read; results have its ids and categories"
    parser.add_argument("--annotations", type=existing_path, metavar="FILE", help=annotations_help)
    format_help = "coco (default), or parquet: part files, no drawings; a killed run goes on after its last part"
    parser.add_argument("--format", choices=("coco", "parquet"), help=format_help)
    part_help = f"images in a Parquet file (default {PART_SIZE})"
    parser.add_argument("--part-size", type=positive, metavar="N", help=part_help)
    parser.add_argument("--shard", type=shard, metavar="I/N", help="only images of job I, from 0, of N; needs parquet")
    parser.add_argument("--column", metavar="NAME", help="of paths or URLs in a table (default: path, file_name, url)")
    ray_help = "spread the images over the Ray cluster at RAY_ADDRESS, or over this machine; writes parquet"
    parser.add_argument("--ray", action="store_true", help=ray_help)
    workers_help = "smallest and largest number of detectors (default: 1 to one for each GPU, or CPU but one)"
    parser.add_argument("--ray-workers", nargs=2, type=positive, metavar=("MIN", "MAX"), help=workers_help)
    parser.add_argument("--no-drawings", action="store_true", help="write no drawings, only the results")
    threshold_help = "lowest score of detections in drawings (default 0.3)"
    parser.add_argument("--score-threshold", type=float, metavar="T", help=threshold_help)
    workers_help = "processes that draw while the detector works (default 0: between its batches)"
    parser.add_argument("--workers", type=int, metavar="N", help=workers_help)


def predict(model: str, args: argparse.Namespace) -> None:
    from projects_vil.inference import predict

    summary = predict(
        model,
        args.input,
        args.output,
        file_format=args.format,
        batch_size=args.batch_size,
        column=args.column,
        annotations=args.annotations,
        drawings=not args.no_drawings,
        score_threshold=args.score_threshold,
        draw_workers=args.workers,
        part_size=args.part_size,
        shard=args.shard,
        ray=args.ray,
        ray_workers=args.ray_workers,
        tta=args.tta,
        overrides=args.opts,
    )
    show(*summary.lines)
    if summary.num_skipped:
        sys.exit(2)


def add_export_arguments(parser: ToolParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="torchscript", help="file format (default torchscript)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the network (default fp32)")
    parser.add_argument("--input-dtype", choices=DTYPES, default="uint8", help="type of the images (default uint8)")
    parser.add_argument("--batched", action="store_true", help="export a model that takes batches (B, 3, H, W)")
    fixed_help = "return TEST.DETECTIONS_PER_IMAGE rows, padded with zeros, and the number of detections"
    parser.add_argument("--fixed-detections", action="store_true", help=fixed_help)
    parser.add_argument("--size", nargs=2, type=positive, metavar=("H", "W"), help="size of all images (default: any)")
    parser.add_argument("--opset", type=positive, metavar="N", help="opset of an ONNX file, 18 or more (default 20)")
    images_help = "images on which the file and the detector are compared (default: synthetic ones)"
    parser.add_argument("--images", nargs="+", type=existing_path, default=[], metavar="FILE", help=images_help)
    parser.add_argument("--evaluate", action="store_true", help="compare average precision on DATASETS.TEST too")
    calibration_help = "images of DATASETS.TRAIN for the calibration of int8, at most (default 100)"
    parser.add_argument("--calibration-images", type=positive, default=100, metavar="N", help=calibration_help)
    parser.add_argument("--accept-drop", action="store_true", help="accept an int8 model that loses more than 1 AP")
    triton_help = "also write a folder for a model repository of Triton Inference Server"
    parser.add_argument("--triton", metavar="REPOSITORY/NAME", help=triton_help)


def export(args: argparse.Namespace) -> None:
    from projects_vil.export import check_triton, describe_report, export_detector, write_triton_model

    cfg = config_of(args)
    if args.triton:
        options = {"file_format": args.format, "batched": args.batched, "fixed_detections": args.fixed_detections}
        check_triton(args.triton, **options)
    path, report = export_detector(
        cfg,
        cfg.MODEL.WEIGHTS,
        args.output,
        file_format=args.format,
        precision=args.precision,
        input_dtype=args.input_dtype,
        batched=args.batched,
        fixed_detections=args.fixed_detections,
        size=args.size and tuple(args.size),
        images=args.images,
        evaluate=args.evaluate,
        calibration_images=args.calibration_images,
        accept_drop=args.accept_drop,
        opset=args.opset,
    )
    show(*describe_report(report).splitlines(), f"wrote {path}")
    if not report["ok"]:
        sys.exit(1)
    if args.triton:
        write_triton_model(path, args.triton)
        show(f"wrote {args.triton}")


def add_report_arguments(parser: ToolParser) -> None:
    parser.add_argument("run", type=existing_path, metavar="RUN", help="the folder of a training run (OUTPUT_DIR)")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--num-images", type=int, default=8, metavar="N", help="validation images to draw (default 8)")


def report(args: argparse.Namespace) -> None:
    from projects_vil.report import write_report

    path = write_report(args.run, args.output, num_images=args.num_images, overrides=args.opts)
    show(f"report written to {path} ({path.stat().st_size / 2**20:.1f} MB)")


def add_convert_arguments(parser: ToolParser) -> None:
    source_help = "the official checkpoint: a file, or its name in the model zoo (docs/model_zoo.md)"
    parser.add_argument("source", type=weights_file, metavar="SOURCE", help=source_help)
    parser.add_argument("output", type=output_file, metavar="OUTPUT", help="file to write, .pth or .safetensors")
    model_help = "variant, such as vil_small_rpb; a name of the model zoo has its own"
    parser.add_argument("--model", metavar="VARIANT", help=model_help)
    size_help = (
        "largest image in pixels to which position tables are resized now: a detector's longer side in both "
        "directions, since images are landscape and portrait; by default ViL's absolute positions are made for "
        "1333 x 1333, and other tables keep the size from which models resize them to each feature map"
    )
    parser.add_argument("--img-size", type=positive, nargs=2, metavar=("H", "W"), help=size_help)
    classifier_help = "convert a whole classifier, for create_classifier; H W is its image size"
    parser.add_argument("--classifier", action="store_true", help=classifier_help)
    parser.add_argument("--json", type=output_file, metavar="REPORT", help="write what became of each name as JSON")


def convert(args: argparse.Namespace) -> None:
    from projects_vil.checkpoint import convert_file

    img_size = tuple(args.img_size) if args.img_size else None
    conversion = convert_file(args.source, args.output, args.model, img_size=img_size, classifier=args.classifier)
    show(*conversion.lines(), f"wrote {args.output}")
    write_json(args.json, conversion.as_json())


def add_check_arguments(parser: ToolParser) -> None:
    parser.add_argument("data", type=existing_path, metavar="DATA", help="folder or annotation file of a dataset")
    parser.add_argument("images", type=existing_path, nargs="?", metavar="IMAGES", help="image folder of a COCO file")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all findings as JSON")
    fix_help = "write a cleaned copy: a folder with a COCO file for each split, or with IMAGES a file; must not exist"
    parser.add_argument("--fix", type=output_file, metavar="OUT", help=fix_help)
    parser.add_argument("--deep", action="store_true", help="read every pixel of every image, not only the headers")
    parser.add_argument("--boxes", action="store_true", help="ignore masks, for a detector without them")


def check(args: argparse.Namespace) -> None:
    from backbones import ConfigError

    if args.fix and os.path.lexists(args.fix):
        raise ConfigError(f"--fix: {args.fix} exists: name a new file")

    from projects_vil.data import CocoFile, read_dataset, write_cleaned

    options = {"masks": False if args.boxes else None, "pixels": args.deep, "progress": _progress}
    options |= {"num_examples": math.inf} if args.json else {}
    with tempfile.TemporaryDirectory() as folder:
        splits, contents = {"": (args.data, args.images)}, {}
        if not args.images:
            dataset = read_dataset(args.data, folder, val=0, contents=contents)
            splits = dataset.splits
            show(dataset.line())
        files = {split: CocoFile(*paths, dataset=contents.get(split), **options) for split, paths in splits.items()}
    for split, file in files.items():
        if not os.path.exists(file.path):
            file.path = f"{args.data} ({split})" if len(files) > 1 else args.data
        show(*file.lines())
    found = {split: file.to_json() for split, file in files.items()}
    if args.json and any(os.path.realpath(args.json) == os.path.realpath(path) for path, _ in splits.values()):
        raise ConfigError(f"--json: '{args.json}' is an annotation file of the dataset. Name another file.")
    write_json(args.json, found.get("") or {"splits": found})
    for split, file in files.items():
        if args.fix:
            output = os.path.join(args.fix, f"{split}.json") if split else args.fix
            if split:
                os.makedirs(args.fix, exist_ok=True)
                # The folder is a dataset of its own: names lead from there to the images.
                for image in file.images:
                    if isinstance(image, dict) and isinstance(image.get("file_name"), str):
                        path = os.path.join(file.image_root, image["file_name"])
                        image["file_name"] = os.path.relpath(path, args.fix)
            show(f"wrote {output}: {write_cleaned(file, output)}")
        elif file.unfixable():
            raise file.error()
    if not args.fix and (wrong := [file for file in files.values() if file.findings("error")]):
        number = sum(len(file.findings("error")) for file in wrong)
        types = f"{number} type{'s' * (number > 1)} of errors"
        paths = " and ".join(file.path for file in wrong)
        raise ConfigError(f"{paths} has {types}; --fix OUT writes a copy without them")


def _progress(number: int) -> None:
    if not number % 10_000:
        print(f"{number:,} images checked", file=sys.stderr)
