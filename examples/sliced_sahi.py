"""Detect small objects in overlapping slices of a large photo with SAHI, and draw the merged detections.

Example:
    python examples/sliced_sahi.py output/vil_tiny photo.jpg drawn.png --slice 640 --threshold 0.5
"""

import argparse
from pathlib import Path

from PIL import Image

from backbones import ConfigError
from projects_vil import Detector
from projects_vil.data import read_image

try:
    from sahi import DetectionModel, ObjectPrediction
    from sahi.predict import get_sliced_prediction
    from sahi.utils.compatibility import fix_full_shape_list, fix_shift_amount_list
    from sahi.utils.cv import get_coco_segmentation_from_bool_mask, visualize_object_predictions
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: docs/hub.md (Other libraries) explains the installation") from error


class SlicedDetector(DetectionModel):
    """A Detector with SAHI's interface; the input is a slice (H, W, 3) uint8 RGB."""

    def set_model(self, model: Detector) -> None:
        self.model = model

    def perform_inference(self, image) -> None:
        self._original_predictions = self.model(image)

    def _create_object_prediction_list_from_original_predictions(self, shift_amount_list, full_shape_list) -> None:
        detections, full = self._original_predictions, fix_full_shape_list(full_shape_list)
        position = {"shift_amount": fix_shift_amount_list(shift_amount_list)[0], "full_shape": full and full[0]}
        self._object_prediction_list_per_image = [objects := []]
        for i in range(len(detections)):
            outline = None if detections.masks is None else get_coco_segmentation_from_bool_mask(detections.masks[i])
            # A mask of a few pixels has no outline.
            shape = {"bbox": detections.boxes[i].tolist(), "segmentation": outline or None}
            category_id = self.model.categories.ids[detections.classes[i]]
            category = {"category_id": category_id, "category_name": detections.names[i]}
            objects.append(ObjectPrediction(**shape, **category, **position, score=float(detections.scores[i])))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("detector", "photo", "output"):
    parser.add_argument(name)
parser.add_argument("--slice", type=int, default=640, help="side of a slice in pixels (default 640)")
parser.add_argument("--threshold", type=float, default=0.3, help="lowest score to show (default 0.3)")
args = parser.parse_args()
try:
    if args.slice < 32 or Path(args.output).resolve() == Path(args.photo).resolve():
        raise ConfigError(f"--slice {args.slice} must be at least 32, and the output must not be the photo.")
    model = SlicedDetector(model=Detector.load(args.detector, score_threshold=args.threshold))
    photo = read_image(args.photo)
    detections = get_sliced_prediction(photo, model, args.slice, args.slice, verbose=0).object_prediction_list
    for item in detections:
        print(f"{item.category.name} {item.score.value:.2f}", *(f"{edge:.1f}" for edge in item.bbox.to_xyxy()))
    Image.fromarray(visualize_object_predictions(photo, detections)["image"]).save(args.output)
except (ConfigError, OSError, ValueError) as error:
    raise SystemExit(f"error: {error}") from error
