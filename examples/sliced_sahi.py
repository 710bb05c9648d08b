"""Find small objects in a large photo with SAHI: the detector sees overlapping slices of it, and one list comes out.
Example: python examples/sliced_sahi.py output/vil_tiny photo.jpg found.png --slice 640 --threshold 0.5
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
    raise SystemExit(f"error: {error}: docs/hub.md, With other libraries, describes how to install it") from error


class SlicedDetector(DetectionModel):
    """A Detector with the interface of SAHI, which passes slices (H, W, 3) uint8 RGB of a photo."""

    def set_model(self, model: Detector) -> None:
        self.model = model

    def perform_inference(self, image) -> None:
        self._original_predictions = self.model(image)

    def _create_object_prediction_list_from_original_predictions(self, shift_amount_list, full_shape_list) -> None:
        found, full = self._original_predictions, fix_full_shape_list(full_shape_list)
        position = {"shift_amount": fix_shift_amount_list(shift_amount_list)[0], "full_shape": full and full[0]}
        self._object_prediction_list_per_image = [objects := []]
        for i in range(len(found)):
            outline = None if found.masks is None else get_coco_segmentation_from_bool_mask(found.masks[i])
            shape = {"bbox": found.boxes[i].tolist(), "segmentation": outline or None}  # few pixels have no outline
            category = {"category_id": self.model.categories.ids[found.classes[i]], "category_name": found.names[i]}
            objects.append(ObjectPrediction(**shape, **category, **position, score=float(found.scores[i])))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("detector", "photo", "output"):
    parser.add_argument(name)
parser.add_argument("--slice", type=int, default=640, help="side of a slice in pixels (default 640)")
parser.add_argument("--threshold", type=float, default=0.3, help="lowest score to show (default 0.3)")
args = parser.parse_args()
try:
    if args.slice < 32 or Path(args.output).resolve() == Path(args.photo).resolve():
        raise ConfigError(f"--slice {args.slice} must be at least 32, and the output another file than the photo")
    model = SlicedDetector(model=Detector.load(args.detector, score_threshold=args.threshold))
    photo = read_image(args.photo)
    found = get_sliced_prediction(photo, model, args.slice, args.slice, verbose=0).object_prediction_list
    for item in found:
        print(f"{item.category.name} {item.score.value:.2f}", *(f"{edge:.1f}" for edge in item.bbox.to_xyxy()))
    Image.fromarray(visualize_object_predictions(photo, found)["image"]).save(args.output)
except (ConfigError, OSError, ValueError) as error:
    raise SystemExit(f"error: {error}") from error
