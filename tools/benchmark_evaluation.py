"""Time COCO's metrics by pycocotools and by faster-coco-eval on drawn boxes, by turns in one process.

Example:
    python tools/benchmark_evaluation.py --images 5000 --detections 100
"""

from backbones import InputError
from projects_vil.analysis import compare_coco_apis
from projects_vil.utils import ToolParser, check_json_path, run_tool, write_json


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("--images", type=int, default=5000, metavar="N", help="of 7 objects each (default 5000)")
    parser.add_argument("--detections", type=int, default=100, metavar="N", help="of each image (default 100)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="times each is timed (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    check_json_path(args.json)
    if min(args.images, args.detections, args.runs) < 1:
        raise InputError("--images, --detections and --runs are 1 or more")
    seconds, metrics = compare_coco_apis(num_images=args.images, num_detections=args.detections, runs=args.runs)
    reference, *others = seconds
    for api, duration in seconds.items():
        print(f"{api}: {duration:.2f} s, AP {metrics[api]['AP']:.4f}")
    for api in others:
        most = max(abs(metrics[api][name] - value) for name, value in metrics[reference].items() if value == value)
        share = seconds[api] / seconds[reference]
        print(f"{api} takes {share:.3f} of {reference}'s time; metrics differ by {most:.1e}")
    write_json(args.json, {"seconds": seconds, "metrics": metrics})


if __name__ == "__main__":
    run_tool(main)
