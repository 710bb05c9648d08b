"""Write a COCO dataset in the other formats, based on their specifications and independent of the readers.

The arguments of each writer are the output folder, the contents of the COCO files by split, the image folders by split,
and whether to write polygons. The writers copy the images.
"""

import json
import shutil
from pathlib import Path
from xml.sax.saxutils import escape


def _classes(contents: dict) -> list[str]:
    return [entry["name"] for entry in contents["train"]["categories"]]


def _objects(content: dict, image: dict):
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    return [(names[a["category_id"]], a) for a in content["annotations"] if a["image_id"] == image["id"]]


def write_yolo(root: Path, contents: dict, images: dict, *, masks: bool) -> Path:
    """Write Ultralytics' format: images/SPLIT, labels/SPLIT, and lines with the class and the normalized box."""
    for split, content in contents.items():
        shutil.copytree(images[split], root / "images" / split)
        (root / "labels" / split).mkdir(parents=True)
        for image in content["images"]:
            lines, (w, h) = [], (image["width"], image["height"])
            for name, a in _objects(content, image):
                left, top, width, height = a["bbox"]
                numbers = [(left + width / 2) / w, (top + height / 2) / h, width / w, height / h]
                if masks:
                    numbers = [number / (w, h)[i % 2] for i, number in enumerate(sum(a["segmentation"], []))]
                lines.append(" ".join([str(_classes(contents).index(name)), *(f"{number:.6f}" for number in numbers)]))
            if lines:
                (root / "labels" / split / image["file_name"]).with_suffix(".txt").write_text("\n".join(lines))
    names = "".join(f"  {index}: {name}\n" for index, name in enumerate(_classes(contents)))
    splits = "".join(f"{split}: images/{split}\n" for split in contents)
    (root / "data.yaml").write_text(f"path: /where/it/was/made\n{splits}names:\n{names}")
    return root / "data.yaml"


def write_voc(root: Path, contents: dict, images: dict, *, masks: bool = False) -> Path:
    """Write the format of VOC 2007. Pixels are counted from 1, and a box includes the last pixel."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for split, content in contents.items():
        shutil.copytree(images[split], root / "JPEGImages", dirs_exist_ok=True)
        stems = [Path(image["file_name"]).stem for image in content["images"]]
        (root / f"ImageSets/Main/{split}.txt").write_text("\n".join(stems) + "\n")
        (root / f"ImageSets/Main/circle_{split}.txt").write_text("".join(f"{stem} -1\n" for stem in stems))
        for image, stem in zip(content["images"], stems, strict=True):
            objects = ""
            for name, a in _objects(content, image):
                left, top, width, height = map(int, a["bbox"])
                corners = {"xmin": left + 1, "ymin": top + 1, "xmax": left + width, "ymax": top + height}
                box = "".join(f"<{side}>{number}</{side}>" for side, number in corners.items())
                objects += f"<object><name>{name}</name><difficult>0</difficult><bndbox>{box}</bndbox></object>"
            size = f"<size><width>{image['width']}</width><height>{image['height']}</height><depth>3</depth></size>"
            text = f"<annotation><filename>{image['file_name']}</filename>{size}{objects}</annotation>"
            (root / f"Annotations/{stem}.xml").write_text(text)
    return root


def write_labelme(root: Path, contents: dict, images: dict, *, masks: bool) -> Path:
    """Write a JSON file next to each image. The parts of an object have the same group."""
    for split, content in contents.items():
        shutil.copytree(images[split], root / split)
        for image in content["images"]:
            shapes = []
            for name, a in _objects(content, image):
                left, top, width, height = a["bbox"]
                shape = {"label": name, "group_id": None, "flags": {}, "shape_type": "rectangle"}
                parts = [[[left + width, top], [left, top + height]]]
                if masks:
                    parts = list(map(_points, a["segmentation"]))
                    shape |= {"group_id": a["id"] if len(parts) > 1 else None, "shape_type": "polygon"}
                shapes += [shape | {"points": points} for points in parts]
            entry = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": image["file_name"]}
            entry |= {"imageData": None, "imageHeight": image["height"], "imageWidth": image["width"]}
            (root / split / image["file_name"]).with_suffix(".json").write_text(json.dumps(entry, indent=2))
    return root


def _points(polygon: list[float]) -> list[list[float]]:
    return [polygon[i : i + 2] for i in range(0, len(polygon), 2)]


def write_cvat(root: Path, contents: dict, images: dict, *, masks: bool) -> Path:
    """Write CVAT for images 1.1 with subsets. The parts of an object have the same group."""
    text = "".join(f"<label><name>{name}</name></label>" for name in _classes(contents))
    text = f"<version>1.1</version><meta><project><labels>{text}</labels></project></meta>"
    for split, content in contents.items():
        shutil.copytree(images[split], root / "images" / split.title())
        for image in content["images"]:
            size = f'width="{image["width"]}" height="{image["height"]}"'
            text += f'<image id="{image["id"]}" name="{escape(image["file_name"])}" subset="{split.title()}" {size}>'
            for name, a in _objects(content, image):
                left, top, width, height = a["bbox"]
                if masks:
                    group = f'group_id="{a["id"]}" ' * (len(a["segmentation"]) > 1)
                    for polygon in a["segmentation"]:
                        pairs = ";".join(f"{x:.2f},{y:.2f}" for x, y in _points(polygon))
                        text += f'<polygon label="{name}" {group}points="{pairs}" z_order="0"></polygon>'
                else:
                    sides = f'xtl="{left:.2f}" ytl="{top:.2f}" xbr="{left + width:.2f}" ybr="{top + height:.2f}"'
                    text += f'<box label="{name}" occluded="0" {sides} z_order="0"></box>'
            text += "</image>"
    (root / "annotations.xml").write_text(f'<?xml version="1.0" encoding="utf-8"?>\n<annotations>{text}</annotations>')
    return root


def write_coco(root: Path, contents: dict, images: dict, *, masks: bool) -> Path:
    """Write the format of COCO 2017."""
    (root / "annotations").mkdir(parents=True)
    for split, content in contents.items():
        shutil.copytree(images[split], root / f"{split}2017")
        kept = content["annotations"] if masks else [{**a, "segmentation": []} for a in content["annotations"]]
        path = root / f"annotations/instances_{split}2017.json"
        path.write_text(json.dumps(content | {"annotations": kept}))
    return root


WRITERS = {
    "COCO": write_coco, "YOLO": write_yolo, "Pascal VOC": write_voc, "LabelMe": write_labelme, "CVAT": write_cvat,
}  # fmt: skip
