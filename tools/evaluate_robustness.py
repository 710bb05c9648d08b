"""Top-1 and top-5 of a classifier on ImageNet val, V2, Real, A, R, Sketch and ImageNet-9, and its errors on ImageNet-C.

--data has the sets' folders: docs/classifiers.md lists them. Most are as their archives unpack; val's images are sorted
into folders of classes, and ImageNet-C's five archives go into imagenet-c. Sets that are not there are named in the
table and left out. A file that does not say which variant it is of needs --model.

Example:
    python tools/evaluate_robustness.py --weights model_best.pth.tar --data imagenet
    python tools/evaluate_robustness.py --weights cvt_ls_13.safetensors --data imagenet --sets v2 real a r c \\
        --device cuda --json robustness.json
"""

import torch

from backbones import InputError
from projects_vil.analysis import ROBUSTNESS_SETS, evaluate_robustness, format_robustness, robustness_as_json
from projects_vil.config import check_device_name
from projects_vil.utils import ToolParser, check_json_path, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("--weights", required=True, metavar="FILE", help="the classifier's checkpoint")
    parser.add_argument("--model", metavar="VARIANT", help="its name, as vil_small_rpb, where the file does not say it")
    parser.add_argument("--data", required=True, metavar="DIR", help="the folder that the sets' folders are in")
    sets = list(ROBUSTNESS_SETS)
    parser.add_argument("--sets", nargs="+", default=sets, metavar="SET", help=f"of {' '.join(sets)} (default all)")
    parser.add_argument("--img-size", type=int, metavar="PIXELS", help="resizes tables too (default: of the run)")
    parser.add_argument("--crop-pct", type=float, metavar="SHARE", help="of the shorter side that the crop has")
    parser.add_argument("--averaged", action="store_true", help="the averaged weights of train.py --model-ema")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="images at once (default 64)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="processes that read images (default 4)")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default_device, help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there too")
    args = parser.parse_args()
    check_json_path(args.json, not_one_of=(args.weights,))
    if args.batch_size < 1 or args.workers < 0 or (args.img_size is not None and args.img_size < 1):
        raise InputError("--batch-size and --img-size are 1 or more, --workers 0 or more")
    if args.crop_pct is not None and not 0 < args.crop_pct <= 1:
        raise InputError(f"--crop-pct {args.crop_pct}: it is above 0 and at most 1")
    check_device_name("--device", args.device, instead="take --device cpu")
    evaluation = evaluate_robustness(
        args.weights,
        args.data,
        args.sets,
        variant=args.model,
        img_size=args.img_size,
        crop_pct=args.crop_pct,
        averaged=args.averaged,
        batch_size=args.batch_size,
        num_workers=args.workers,
        device=args.device,
    )
    print(format_robustness(evaluation))
    write_json(args.json, robustness_as_json(evaluation))


if __name__ == "__main__":
    run_tool(main)
