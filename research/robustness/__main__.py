"""Evaluate a classifier: top-1 and top-5 on ImageNet val, V2, Real, A, R, Sketch and ImageNet-9, mCE on ImageNet-C.

research/robustness/README.md lists the folders in --data. Missing sets are skipped.

Example:
    python -m research.robustness --weights model_best.pth.tar --data imagenet
    python -m research.robustness --weights cvt_ls_13.safetensors --data imagenet --sets v2 real a r c --device cuda
"""

from vil.arguments import ToolParser, existing_path, output_file, positive, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--weights", required=True, type=existing_path, metavar="FILE", help="checkpoint of the classifier"
    )
    parser.add_argument("--model", metavar="VARIANT", help="variant, if the file does not have it")
    parser.add_argument("--data", required=True, type=existing_path, metavar="DIR", help="folder of the sets")
    parser.add_argument("--sets", nargs="+", metavar="SET", help="sets to evaluate (default: all in DIR)")
    parser.add_argument("--img-size", type=positive, metavar="PIXELS", help="side of images and position tables")
    parser.add_argument("--crop-pct", type=float, metavar="SHARE", help="crop side / shorter image side")
    parser.add_argument("--averaged", action="store_true", help="use the averaged weights of train.py --model-ema")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="images per batch (default 64)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="processes that read images (default 4)")
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()

    import torch

    from research.robustness.evaluate import evaluate_robustness, format_results
    from research.robustness.sets import ROBUSTNESS_SETS

    results = evaluate_robustness(
        args.weights,
        args.data,
        args.sets or tuple(ROBUSTNESS_SETS),
        variant=args.model,
        img_size=args.img_size,
        crop_pct=args.crop_pct,
        averaged=args.averaged,
        batch_size=args.batch_size,
        num_workers=args.workers,
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    print(format_results(results))
    write_json(args.json, results)


if __name__ == "__main__":
    run_tool(main)
