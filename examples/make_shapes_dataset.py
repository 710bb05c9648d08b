"""Write a small synthetic dataset for demos and tests, with boxes and masks as in COCO or label images as in ADE20K.

The images show bright circles, squares and triangles on dim noise. Each class has its own outline and hue. Hues, sizes
and rotations vary, objects overlap slightly, and images have different sizes.

Example:
    python examples/make_shapes_dataset.py datasets/shapes --num-train 400 --num-val 100
    python examples/make_shapes_dataset.py datasets/shapes_sem_seg --task sem_seg
"""

import colorsys
import json
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from backbones.errors import ConfigError, check_choice, check_whole
from projects_vil.data.catalog import SHAPES_CLASSES, SHAPES_SEM_SEG_CLASSES
from projects_vil.files import read_json
from vil.arguments import ToolParser, run_tool

SPLITS = ("train", "val")
SHAPES_TASKS = ("detection", "sem_seg", "panoptic")

GENERATOR_VERSION = 1
DESCRIPTION = "Drawn shapes on dim noise, written by make_shapes_dataset.py"

CLASS_HUES = (0.0, 1 / 3, 0.62)  # red, green and blue, as fractions of the color wheel
HUE_SPREAD = 0.05
BACKGROUND_MAX = 90  # maximum value of the background, from 0 to 255
OBJECT_MIN = 140  # minimum value of an object's brightest channel
MAX_OBJECTS = 5
OBJECT_SIZES = (0.14, 0.5)  # range of the longer side of a box, as a fraction of the image's short side
MIN_VISIBLE = 0.65  # minimum visible fraction of an object after all objects are rendered
MAX_COVERING = 0.4  # maximum fraction of a new object that lies over earlier objects
PLACING_ATTEMPTS = 20
CONTOUR_UPSAMPLING = 4


def write_shapes_dataset(
    output: str | Path,
    *,
    task: str = "detection",
    num_train: int = 400,
    num_val: int = 100,
    short_side: int = 128,
    seed: int = 0,
    overwrite: bool = False,
) -> str:
    """Write a synthetic dataset to a folder.

    The files depend on the task:

    - ``"detection"``: ``annotations/instances_{train,val}.json``, ``train/*.jpg`` and ``val/*.jpg``.
    - ``"sem_seg"``: ``images/{training,validation}/*.jpg`` and ``annotations/{training,validation}/*.png`` as in
      ADE20K, ``classes.txt``, and ``instances_{train,val}.json`` with the objects of the same images. Label 1 is the
      background, labels 2 to 4 are circles, squares and triangles. Label 0 is ignored and covers the outlines.
    - ``"panoptic"``: the files of ``"detection"``, and ``stuff_{train,val}/*.png`` as in COCO. Label 0 is a thing, and
      label 1 is the background.

    The same parameters give the same bytes. The folder is written atomically. If the folder has the same dataset
    already, it is kept. A different shapes dataset is replaced only with ``overwrite``. A folder with other files is
    never changed.

    Args:
        output: The folder of the dataset.
        task: One of ``SHAPES_TASKS``.
        num_train: The number of training images, at least 1.
        num_val: The number of validation images, at least 1.
        short_side: The mean short side of the images in pixels, at least 32. Each short side differs by at most 10%.
            The long side is 1.1 to 1.5 times the short side, and about half of the images are portraits.
        seed: The random seed, at least 0. An image depends only on the seed, its split, its index and ``short_side``.
        overwrite: Whether to replace a different shapes dataset.

    Returns:
        A summary of the dataset in one line, which begins with whether it was written or kept.

    Raises:
        ConfigError: If a parameter is out of range, or if ``output`` has other files or cannot be written.

    Example:
        >>> print(write_shapes_dataset("datasets/shapes", num_train=16, num_val=8))
    """
    check_choice("task", task, SHAPES_TASKS)
    parameters = {"num_train": num_train, "num_val": num_val, "short_side": short_side, "seed": seed}
    for name, least in {"num_train": 1, "num_val": 1, "short_side": 32, "seed": 0}.items():
        check_whole(name, parameters[name], least=least)
    parameters["generator_version"] = GENERATOR_VERSION
    output = Path(output).resolve()
    try:
        content = _read_existing(output, task)
        is_kept = content is not None and not overwrite
        if is_kept:
            for split, part in content.items():
                given, folder = part["info"].get("parameters", {}), output / _paths(task, split)[1]
                differing = [f"{key} {given.get(key)}" for key, value in parameters.items() if given.get(key) != value]
                missing = [image["file_name"] for image in part["images"] if not (folder / image["file_name"]).exists()]
                if differing or missing:
                    reason = ", ".join([*differing, *(f"without {name}" for name in missing[:1])])
                    raise ConfigError(f"'{output}' is another dataset ({reason}). Add --overwrite to replace it.")
        else:
            content = _write_and_rename(output, task, parameters)
    except OSError as error:
        raise ConfigError(f"Cannot write '{output}': {error.strerror}. Choose another folder.") from error
    images, objects = (" and ".join(str(len(content[s][k])) for s in SPLITS) for k in ("images", "annotations"))
    verb = "kept, already complete:" if is_kept else "wrote"
    return f"{verb} {images} images for train and val ({objects} objects: {', '.join(SHAPES_CLASSES)}) in {output}"


# -- the folder ------------------------------------------------------------------------------------


def _paths(task: str, split: str) -> tuple[Path, Path, Path]:
    """Return the annotation file, the image folder and the label folder of a split, relative to the dataset."""
    if task == "sem_seg":
        folder = {"train": "training", "val": "validation"}[split]
        return Path(f"instances_{split}.json"), Path("images", folder), Path("annotations", folder)
    return Path("annotations", f"instances_{split}.json"), Path(split), Path(f"stuff_{split}")


def _read_existing(output: Path, task: str) -> dict[str, dict] | None:
    """Return the annotations by split of the shapes dataset in ``output``, or None if there is no file yet.

    Raises:
        ConfigError: If ``output`` has other files.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    parts = {path.parts[0] for split in SPLITS for path in _paths(task, split)} | {"classes.txt"}
    try:
        if {path.name for path in output.iterdir()} <= parts:
            existing = {split: read_json(output / _paths(task, split)[0]) for split in SPLITS}
            if all(content["info"]["description"] == DESCRIPTION for content in existing.values()):
                return existing
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise ConfigError(f"'{output}' is not empty and is not a shapes dataset for {task!r}. Choose another folder.")


def _write_and_rename(output: Path, task: str, parameters: dict[str, int]) -> dict[str, dict]:
    """Write the dataset atomically: next to ``output`` first, then rename. Return the annotations by split."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        new = Path(folder, "new")
        content = {split: _write_split(new, task, split, parameters) for split in SPLITS}
        if task == "sem_seg":
            (new / "classes.txt").write_text("".join(f"{name}\n" for name in SHAPES_SEM_SEG_CLASSES), encoding="utf-8")
        if output.exists():
            output.rename(Path(folder, "old"))
        new.rename(output)
    return content


def _write_split(root: Path, task: str, split: str, parameters: dict[str, int]) -> dict[str, Any]:
    """Write the images, the annotation file and the label images of a split. Return the annotations."""
    annotation_file, images, labels = (root / path for path in _paths(task, split))
    for folder in (annotation_file.parent, images, *([] if task == "detection" else [labels])):
        folder.mkdir(parents=True, exist_ok=True)
    content = {
        "info": {"description": DESCRIPTION, "version": str(GENERATOR_VERSION), "parameters": parameters},
        "licenses": [{"id": 1, "name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"}],
        "images": [],
        "annotations": [],
        "categories": [{"id": i, "name": name, "supercategory": "shape"} for i, name in enumerate(SHAPES_CLASSES, 1)],
    }
    first_id = 1 if split == "train" else parameters["num_train"] + 1
    for index in range(parameters[f"num_{split}"]):
        rng = np.random.default_rng([parameters["seed"], SPLITS.index(split), index])
        image, instances = render_image(rng, short_side=parameters["short_side"])
        image_id, (height, width) = first_id + index, image.shape[:2]
        name = f"{image_id:012d}"
        _write_image(images / f"{name}.jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95])
        if task != "detection":
            _write_image(labels / f"{name}.png", label_image((height, width), instances, task), [])
        entry = {"license": 1, "file_name": f"{name}.jpg", "height": height, "width": width, "id": image_id}
        content["images"].append(entry)
        for class_index, mask in instances:
            annotation_id = len(content["annotations"]) + 1
            content["annotations"].append(_annotation(mask, class_index, image_id, annotation_id))
    annotation_file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return content


def _write_image(path: Path, image: np.ndarray, options: list[int]) -> None:
    path.write_bytes(cv2.imencode(path.suffix, image, options)[1].tobytes())


# -- annotations -----------------------------------------------------------------------------------


def _annotation(mask: np.ndarray, class_index: int, image_id: int, annotation_id: int) -> dict:
    """Return the COCO annotation of an object with the visible pixels ``mask`` (H, W) bool."""
    left, top, width, height = cv2.boundingRect(mask.astype(np.uint8))
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": class_index + 1,
        "bbox": [float(left), float(top), float(width), float(height)],
        "area": float(np.count_nonzero(mask)),
        "iscrowd": 0,
        "segmentation": mask_polygons(mask),
    }


def label_image(size: tuple[int, int], instances: list[tuple[int, np.ndarray]], task: str) -> np.ndarray:
    """Return a label image (H, W) uint8, in which 1 is the background.

    For ``"sem_seg"``, as in ADE20K, the first class is 2, and pixels within one pixel of an outline are 0. For
    ``"panoptic"``, as in COCO's panoptic_stuff folders, all things are 0.
    """
    labels = np.ones(size, np.uint8)
    for class_index, mask in instances:
        labels[mask] = class_index + 2 if task == "sem_seg" else 0
    kernel = np.ones((3, 3), np.uint8)
    for _, mask in instances if task == "sem_seg" else ():
        labels[cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_GRADIENT, kernel) > 0] = 0
    return labels


def mask_polygons(mask: np.ndarray) -> list[list[float]]:
    """Return a polygon ``[x0, y0, x1, y1, ...]`` in pixels for each connected part of a mask (H, W) without holes.

    Pixel (row, column) covers [column, column + 1] x [row, row + 1], as in COCO. OpenCV connects pixel centers. The
    mask is therefore upsampled first, so that the outline lies only an eighth of a pixel inside the mask.
    """
    enlarged = np.kron(mask.astype(np.uint8), np.ones((CONTOUR_UPSAMPLING,) * 2, np.uint8))
    contours, _ = cv2.findContours(enlarged, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    polygons = []
    for contour in contours:
        outline = cv2.approxPolyDP(contour, CONTOUR_UPSAMPLING / 2, True).reshape(-1)
        if len(outline) >= 6:
            polygons.append(((outline + 0.5) / CONTOUR_UPSAMPLING).round(2).tolist())
    return polygons


# -- rendering -------------------------------------------------------------------------------------


def render_image(rng: np.random.Generator, *, short_side: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Render one image with 1 to 5 objects. Its height and width differ.

    Returns:
        The image (H, W, 3) uint8 BGR, and for each object its class index and the mask (H, W) bool of its visible
        pixels.
    """
    short = round(short_side * rng.uniform(0.9, 1.1))
    long = round(short * rng.uniform(1.1, 1.5))
    height, width = (short, long) if rng.random() < 0.5 else (long, short)
    owner, classes = _place_objects(rng, height, width)
    image = _background(rng, height, width)
    instances = []
    for index, class_index in enumerate(classes):
        mask = owner == index + 1
        image[mask] = _object_color(rng, class_index) * _shading(rng, height, width)[mask]
        instances.append((class_index, mask))
    image += rng.normal(0.0, rng.uniform(4.0, 10.0), image.shape)
    return image.round().clip(0, 255).astype(np.uint8), instances


def _place_objects(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, list[int]]:
    """Place objects at random positions. Later objects cover earlier objects.

    Returns:
        The owner of each pixel (H, W), which is 0 for the background and k for the k-th object, and the class indices.
    """
    owner = np.zeros((height, width), np.uint8)
    classes, areas = [], []
    for _ in range(rng.integers(1, MAX_OBJECTS + 1)):
        for _ in range(PLACING_ATTEMPTS):
            class_index = int(rng.integers(len(SHAPES_CLASSES)))
            mask = _object_mask(rng, class_index, height, width)
            if _fits(owner, areas, mask):
                classes.append(class_index)
                areas.append(np.count_nonzero(mask))
                owner[mask] = len(classes)
                break
    return owner, classes


def _fits(owner: np.ndarray, areas: list[int], mask: np.ndarray) -> bool:
    """Return whether a new object leaves earlier objects visible enough, and does not lie mostly on other objects.

    The second condition also prevents masks with holes, which polygons do not support. All outlines are convex, so an
    object makes a hole only if it lies inside another object.
    """
    visible = np.bincount(owner.ravel(), minlength=len(areas) + 1)[1:]
    covered = np.bincount(owner[mask], minlength=len(areas) + 1)[1:]
    stays_visible = np.all(visible - covered >= MIN_VISIBLE * np.asarray(areas))
    return bool(stays_visible and covered.sum() <= MAX_COVERING * np.count_nonzero(mask))


def _object_mask(rng: np.random.Generator, class_index: int, height: int, width: int) -> np.ndarray:
    """Return the mask (H, W) bool of a random object of a class, completely inside the image."""
    outline, angle = _outline(rng, class_index), rng.uniform(0, 2 * np.pi)
    corners = outline @ [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    corners -= corners.min(axis=0)
    size = min(height, width) * rng.uniform(*OBJECT_SIZES)
    corners *= size / corners.max()
    free = np.array([width, height]) - 1 - corners.max(axis=0)
    corners += rng.uniform(0, 1, 2) * free
    mask = np.zeros((height, width), np.uint8)
    cv2.fillConvexPoly(mask, np.round(corners * 16).astype(np.int32), 1, shift=4)
    return mask.astype(bool)


def _outline(rng: np.random.Generator, class_index: int) -> np.ndarray:
    """Return the corners (N, 2) of a convex outline around the origin."""
    if SHAPES_CLASSES[class_index] == "square":
        return np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [1.0, rng.uniform(0.65, 1.0)]
    if SHAPES_CLASSES[class_index] == "circle":
        angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    else:
        angles = np.arange(3) * 2 * np.pi / 3 + rng.uniform(-0.25, 0.25, 3)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return smooth, tinted, dim noise: (H, W, 3) float in [0, BACKGROUND_MAX]."""
    image = rng.uniform(15, 55) + rng.uniform(-12, 12, 3) + np.zeros((height, width, 3))
    for cells, amplitude in ((3, 14.0), (9, 8.0)):
        coarse = rng.normal(0.0, amplitude, (cells, cells, 3))
        image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return image.clip(0, BACKGROUND_MAX)


def _object_color(rng: np.random.Generator, class_index: int) -> np.ndarray:
    """Return a random color of a class: (3,) BGR with a brightest channel from OBJECT_MIN to 255."""
    hue = (CLASS_HUES[class_index] + rng.uniform(-HUE_SPREAD, HUE_SPREAD)) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, rng.uniform(0.5, 0.95), rng.uniform(OBJECT_MIN, 255))
    return np.array([blue, green, red])


def _shading(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return a linear brightness gradient in a random direction: (H, W, 1) in [0.85, 1.15]."""
    angle = rng.uniform(0, 2 * np.pi)
    across = np.sin(angle) * np.linspace(-1, 1, height)[:, None] + np.cos(angle) * np.linspace(-1, 1, width)
    return (1 + 0.15 * across / np.sqrt(2))[..., None]


# -- the command -----------------------------------------------------------------------------------


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("output", metavar="OUT", help="folder to write, such as datasets/shapes")
    parser.add_argument(
        "--task", choices=SHAPES_TASKS, default=SHAPES_TASKS[0], help="task of the annotations (default detection)"
    )
    parser.add_argument("--num-train", type=int, default=400, metavar="N", help="training images (default 400)")
    parser.add_argument("--num-val", type=int, default=100, metavar="N", help="validation images (default 100)")
    parser.add_argument(
        "--short-side", type=int, default=128, metavar="S", help="mean shorter side in pixels (default 128)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="random seed (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing shapes dataset in OUT")
    options = vars(parser.parse_args())
    print(write_shapes_dataset(options.pop("output"), **options))


if __name__ == "__main__":
    run_tool(main)
