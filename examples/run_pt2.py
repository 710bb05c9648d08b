"""Detect objects in a photo with an exported model.pt2 or model.aoti.pt2, and draw them.

Needs only torch, torchvision, numpy and Pillow.

Example:
    python examples/run_pt2.py model.pt2 photo.jpg drawn.png --threshold 0.5
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision  # noqa: F401  its operators are in the model
from PIL import Image, ImageDraw, ImageFont, ImageOps

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
formats = ("torch_export", "aot_inductor")
if metadata["format"] not in formats or metadata["input"].get("size") or metadata.get("fixed_detections"):
    only = ".pt2 files for images of any size and any number of detections"
    sys.exit(f"error: {args.model!r}: this example runs only {only}. Detector.load takes all files.")
try:
    photo = ImageOps.exif_transpose(Image.open(args.photo)).convert("RGB")
except OSError:
    sys.exit(f"error: Cannot read image {args.photo!r}.")

# Prepare the input as in the metadata: size, order of the channels, type.
resized, rule = photo, metadata["resizing"]
if rule["short_side"]:
    scale = min(rule["short_side"] / min(photo.size), rule["longest_side"] / max(photo.size))
    width, height = (int(scale * side + 0.5) for side in photo.size)
    resized = photo.resize((width, height), Image.Resampling.BILINEAR)
image = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
if metadata["input"]["color_order"] == "BGR":
    image = image.flip(0)
image = image.contiguous().to(getattr(torch, metadata["input"]["dtype"]))
if metadata["input"]["batched"]:
    image = image[None]

if args.model.endswith(".aoti.pt2"):
    model = torch._inductor.aoti_load_package(args.model)
else:
    model = torch.export.load(args.model).module()
with torch.no_grad():
    outputs = model(image)
detections = dict(zip([output["name"] for output in metadata["outputs"]], outputs, strict=True))
# From pixels of the resized image to pixels of the photo.
boxes = detections["boxes"] * torch.tensor([photo.width / resized.width, photo.height / resized.height] * 2)

thick = max(1, round(min(photo.size) / 300))
font = ImageFont.load_default(12 * thick)
draw = ImageDraw.Draw(photo)
for i in (detections["scores"] >= args.threshold).nonzero()[:, 0].tolist():
    index = detections["classes"][i].item()
    label = f"{metadata['classes'][index]} {detections['scores'][i]:.2f}"
    print(label, *(f"{edge:.1f}" for edge in boxes[i].tolist()))
    color = tuple(np.random.default_rng(index).integers(100, 256, 3).tolist())
    left, top, right, bottom = boxes[i].round().int().tolist()
    if "masks" in detections and left < right and top < bottom:
        # (28, 28) probabilities inside the box
        mask = Image.fromarray(detections["masks"][i, 0].float().numpy())
        mask = np.array(mask.resize((right - left, bottom - top), Image.Resampling.BILINEAR))
        half_opaque = Image.fromarray((mask >= metadata["thresholds"]["mask"]).astype(np.uint8) * 128)
        photo.paste(color, (left, top), half_opaque)
    draw.rectangle((left, top, right, bottom), outline=color, width=thick)
    corner = left, max(top - 14 * thick, 0)
    draw.rectangle(draw.textbbox(corner, label, font), fill=color)
    draw.text(corner, label, "black", font)
try:
    photo.save(args.output)
except (OSError, ValueError) as error:
    sys.exit(f"error: Cannot write {args.output!r}: {error}")
