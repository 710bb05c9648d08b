"""Detect objects in a photo with an exported model.onnx, and draw them. Needs only onnxruntime, numpy and OpenCV.

Example:
    python examples/run_onnx.py model.onnx photo.jpg drawn.png --threshold 0.5
"""

import argparse
import json
import sys
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("model", "photo", "output"):
    parser.add_argument(name)
parser.add_argument("--threshold", type=float, default=0.3, help="lowest score to show (default 0.3)")
args = parser.parse_args()
for file in (args.model, f"{args.model}.metadata.json", args.photo):
    if not Path(file).is_file():
        sys.exit(f"error: File {file!r} does not exist.")
    if Path(file).resolve() == Path(args.output).resolve():
        sys.exit(f"error: Output {args.output!r} is an input too. Choose another output.")
metadata = json.loads(Path(f"{args.model}.metadata.json").read_text())
if metadata["format"] != "onnx" or metadata["input"].get("size") or metadata.get("fixed_detections"):
    only = "ONNX files for images of any size and any number of detections"
    sys.exit(f"error: {args.model!r}: this example runs only {only}. Detector.load takes all files.")
try:
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
except Exception as error:  # onnxruntime's exceptions have no base class
    sys.exit(f"error: {args.model!r} is not a complete ONNX file: {' '.join(str(error).split())}")
photo = pixels = cv2.imread(args.photo)  # (height, width, BGR), upright by its EXIF orientation
if photo is None:
    sys.exit(f"error: Cannot read image {args.photo!r}.")
(height, width), rule = photo.shape[:2], metadata["resizing"]
if rule["short_side"]:
    # The same as Pillow's BILINEAR, with weights in units of 2^-22. On COCO photos, cv2's INTER_AREA moves boxes by 1.2
    # pixels, and INTER_LINEAR by 5.
    scale = min(rule["short_side"] / min(height, width), rule["longest_side"] / max(height, width))
    for old in (width, height):  # each pass resizes the second axis and moves it to the front
        new = int(scale * old + 0.5)
        distance = np.arange(old) + 0.5 - (np.arange(new)[:, None] + 0.5) * old / new
        weights = np.maximum(1 - np.abs(distance) / max(old / new, 1), 0)
        units = np.floor(0.5 + weights / weights.sum(1, keepdims=True) * 2**22)
        pixels = np.clip(np.floor(np.tensordot(units, pixels, (1, 1)) / 2**22 + 0.5), 0, 255)
image = (pixels[..., ::-1] if metadata["input"]["color_order"] == "RGB" else pixels).transpose(2, 0, 1)
image = np.ascontiguousarray(image[None] if metadata["input"]["batched"] else image, metadata["input"]["dtype"])
outputs = session.run(None, {metadata["input"]["name"]: image})
detections = dict(zip([output["name"] for output in metadata["outputs"]], outputs, strict=True))
boxes = detections["boxes"] * ([width / pixels.shape[1], height / pixels.shape[0]] * 2)  # in pixels of the photo
thick = max(1, round(min(height, width) / 300))
for i in np.flatnonzero(detections["scores"] >= args.threshold):
    label = f"{metadata['classes'][detections['classes'][i]]} {detections['scores'][i]:.2f}"
    print(label, *(f"{edge:.1f}" for edge in boxes[i]))
    color = np.random.default_rng(detections["classes"][i]).integers(100, 256, 3).tolist()
    left, top, right, bottom = boxes[i].round().astype(int).tolist()
    if "masks" in detections and left < right and top < bottom:
        mask = cv2.resize(detections["masks"][i, 0], (right - left, bottom - top)) >= metadata["thresholds"]["mask"]
        photo[top:bottom, left:right][mask] = photo[top:bottom, left:right][mask] / 2 + np.array(color) / 2
    cv2.rectangle(photo, (left, top), (right, bottom), color, thick)
    (text_width, text_height), _ = cv2.getTextSize(label, cv2.FONT_HERSHEY_SIMPLEX, thick / 2.5, thick)
    foot = max(top, text_height + 4)
    cv2.rectangle(photo, (left, foot - text_height - 4), (left + text_width, foot), color, -1)
    cv2.putText(photo, label, (left, foot - 2), cv2.FONT_HERSHEY_SIMPLEX, thick / 2.5, (0, 0, 0), thick, cv2.LINE_AA)
if not (cv2.haveImageWriter(args.output) and cv2.imwrite(args.output, photo)):
    sys.exit(f"error: Cannot write {args.output!r}. Its suffix is unknown, or its folder is not writable.")
