"""Write the detections in a folder of photos as one COCO file for FiftyOne, CVAT and other viewers.

Example:
    python examples/export_coco.py output/vil_tiny photos found.json --threshold 0.3

Then, with FiftyOne:
    coco = fiftyone.types.COCODetectionDataset
    fiftyone.Dataset.from_dir(dataset_type=coco, data_path="photos", labels_path="found.json")
"""

import argparse
import json
import sys
from pathlib import Path

from pycocotools import mask as run_lengths

from backbones import ConfigError
from projects_vil import Detector
from projects_vil.data import IMAGE_SUFFIXES

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("detector", "photos", "output"):
    parser.add_argument(name)
parser.add_argument("--threshold", type=float, default=0.3, help="lowest score to write (default 0.3)")
args = parser.parse_args()
try:
    detector = Detector.load(args.detector, score_threshold=args.threshold)
    if Path(args.output).suffix != ".json":
        raise ConfigError(f"Output {args.output!r} must end in .json.")
    if not Path(args.photos).is_dir():
        raise ConfigError(f"Folder {args.photos!r} does not exist.")
    files = sorted(path for path in Path(args.photos).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    images, annotations = [], []
    for image_id, file in enumerate(files, start=1):
        try:
            detections = detector(file)
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        height, width = detections.image_size
        images.append({"id": image_id, "file_name": file.name, "height": height, "width": width})
        for item in detections.to_coco(image_id):
            area = (
                run_lengths.area(item["segmentation"]) if "segmentation" in item else item["bbox"][2] * item["bbox"][3]
            )
            annotations.append({"id": len(annotations) + 1, "area": float(area), "iscrowd": 0} | item)
    if not images:
        raise ConfigError(f"Folder {args.photos!r} has no readable photos.")
    pairs = zip(detector.categories.ids, detector.names, strict=True)
    categories = [{"id": category_id, "name": name} for category_id, name in pairs]
    content = {"images": images, "annotations": annotations, "categories": categories}
    Path(args.output).write_text(json.dumps(content))
    print(f"{len(annotations)} objects in {len(images)} photos: {args.output}")
    if len(images) < len(files):
        sys.exit(2)
except (ConfigError, OSError) as error:
    sys.exit(f"error: {error}")
