"""Small datasets of drawn shapes for the demos and the tests: boxes and masks as COCO has them, or labels as ADE20K.

Bright circles, squares and triangles lie on dim noise. The class shows in the outline and in the hue; hues,
sizes and rotations vary, objects overlap a little, and images differ in size.
"""

import colorsys
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np

from backbones.utils.errors import InputError, check_choice
from projects_vil.data.datasets.builtin_meta import SHAPES_CLASSES, SHAPES_SEM_SEG_CLASSES

SPLITS = ("train", "val")
SHAPES_TASKS = ("detection", "sem_seg", "panoptic")
SEM_SEG_FOLDERS = {"train": "training", "val": "validation"}

GENERATOR_VERSION = 1
DESCRIPTION = "Drawn shapes on dim noise, written by tools/make_shapes_dataset.py"

CLASS_HUES = (0.0, 1 / 3, 0.62)  # red, green, blue, in turns of the colour circle
HUE_SPREAD = 0.05
BACKGROUND_MAX = 90  # of 255; an object's brightest channel starts at OBJECT_MIN
OBJECT_MIN = 140
MAX_OBJECTS = 5
OBJECT_SIZES = (0.14, 0.5)  # longer side of an object's box, as a fraction of the image's short side
MIN_VISIBLE = 0.65  # of an object's area, after all later objects have been drawn
MAX_COVERING = 0.4  # of a new object's area, over earlier objects
PLACING_ATTEMPTS = 20
CONTOUR_UPSAMPLING = 4


@dataclass(frozen=True)
class ShapesParameters:
    """All that determines a dataset's content; recorded as ``info["parameters"]`` of its annotation files."""

    num_train: int
    num_val: int
    short_side: int
    seed: int
    generator_version: int = GENERATOR_VERSION


@dataclass(frozen=True)
class ShapesSummary:
    """What lies in a dataset's folder, and whether this call wrote it or found it there."""

    output: Path
    written: bool
    num_images: dict[str, int]
    num_objects: dict[str, int]


def write_shapes_dataset(
    output: str | Path,
    *,
    task: str = "detection",
    num_train: int = 400,
    num_val: int = 100,
    short_side: int = 128,
    seed: int = 0,
    overwrite: bool = False,
) -> ShapesSummary:
    """Write a dataset under ``output``.

    For detection ``annotations/instances_{train,val}.json``, ``train/*.jpg`` and ``val/*.jpg``. For semantic
    segmentation ``images/{training,validation}/*.jpg`` and ``annotations/{training,validation}/*.png`` as ADE20K has
    them, with ``classes.txt`` and, of the same images, ``instances_{train,val}.json``: labels are 1 for the background,
    2 to 4 for circles, squares and triangles, and 0, to be ignored, along the objects' outlines. For panoptic
    segmentation what detection has, and ``stuff_{train,val}/*.png`` as COCO's have it: labels are 0 for things, 1 for
    the background.

    The same parameters give the same bytes. The folder appears complete or not at all. A folder that already
    holds the dataset with these parameters is kept; another shapes dataset is replaced, if ``overwrite``; a
    folder with anything else in it is never touched.

    Args:
        task: of ``SHAPES_TASKS``.
        num_train, num_val: images in each split, at least 1.
        short_side: mean short side of the images in pixels, 32 to 4096; each lies within 10 % of it. The long
            side is 1.1 to 1.5 times the short side, and about half of the images are portraits.
        seed: at least 0. An image depends only on the seed, its split, its place there and ``short_side``.

    Raises:
        InputError: a parameter out of range, or an ``output`` that must not or cannot be written.
    """
    parameters = ShapesParameters(num_train, num_val, short_side, seed)
    check_choice("--task", task, SHAPES_TASKS)
    _check_parameters(parameters)
    output = Path(output)
    try:
        existing = _read_existing(output, task)
        if existing is not None and not overwrite:
            _check_same(output, task, existing, parameters)
            return _summary(output, existing, written=False)
        return _summary(output, _write_and_rename(output, task, parameters), written=True)
    except OSError as error:
        blocked = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in its path" if blocked else error.strerror
        raise InputError(f"cannot write {output} ({reason}); choose another folder") from error


def describe_shapes(summary: ShapesSummary) -> str:
    """One line for the console: what the folder holds and whether it was written or kept."""
    images = " and ".join(f"{summary.num_images[split]} {split}" for split in SPLITS)
    objects = " and ".join(str(summary.num_objects[split]) for split in SPLITS)
    verb = "wrote" if summary.written else "kept, already complete:"
    return f"{verb} {images} images ({objects} objects: {', '.join(SHAPES_CLASSES)}) in {summary.output}"


def _check_parameters(parameters: ShapesParameters) -> None:
    limits = {"num_train": (1, None), "num_val": (1, None), "short_side": (32, 4096), "seed": (0, None)}
    for name, (low, high) in limits.items():
        value = getattr(parameters, name)
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be {allowed}")


# -- the folder ------------------------------------------------------------------------------------


def _parts(task: str) -> set[str]:
    """What lies directly in a dataset's folder."""
    if task != "sem_seg":
        labels = {_label_folder(Path(), task, split).name for split in SPLITS} if task == "panoptic" else set()
        return {"annotations", *SPLITS, *labels}
    return {"annotations", "images", "classes.txt"} | {_annotation_file(Path(), task, split).name for split in SPLITS}


def _annotation_file(output: Path, task: str, split: str) -> Path:
    folder = output if task == "sem_seg" else output / "annotations"
    return folder / f"instances_{split}.json"


def _image_folder(output: Path, task: str, split: str) -> Path:
    return output / "images" / SEM_SEG_FOLDERS[split] if task == "sem_seg" else output / split


def _label_folder(output: Path, task: str, split: str) -> Path:
    return output / "annotations" / SEM_SEG_FOLDERS[split] if task == "sem_seg" else output / f"stuff_{split}"


def _read_existing(output: Path, task: str) -> dict[str, dict] | None:
    """The annotations by split of the shapes dataset in ``output``; None where nothing is there yet."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not output.is_dir():
        raise InputError(f"{output} is a file; give a folder for the dataset")
    strangers = sorted({path.name for path in output.iterdir()} - _parts(task))
    if strangers:
        raise InputError(f"{output} holds {strangers[0]}, no part of a shapes dataset; choose another folder")
    try:
        existing = {split: json.loads(_annotation_file(output, task, split).read_bytes()) for split in SPLITS}
        if all(content["info"]["description"] == DESCRIPTION for content in existing.values()):
            return existing
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise InputError(f"{output} is not empty and holds no shapes dataset; choose another folder")


def _check_same(output: Path, task: str, existing: dict[str, dict], parameters: ShapesParameters) -> None:
    for split in SPLITS:
        found = existing[split]["info"].get("parameters", {})
        wanted = asdict(parameters)
        differing = [f"{name} {found.get(name)}" for name in wanted if found.get(name) != wanted[name]]
        if differing:
            what = ", ".join(differing)
            raise InputError(f"{output} holds a shapes dataset with {what}; replace it with --overwrite")
        stems = {Path(image["file_name"]).stem for image in existing[split]["images"]}
        _check_complete(_image_folder(output, task, split), stems, "images")
        if task != "detection":
            _check_complete(_label_folder(output, task, split), stems, "label images")


def _check_complete(folder: Path, stems: set[str], what: str) -> None:
    num_missing = len(stems - {path.stem for path in folder.glob("*.*")})
    if num_missing:
        raise InputError(f"{folder} lacks {num_missing} {what}; write them anew with --overwrite")


def _write_and_rename(output: Path, task: str, parameters: ShapesParameters) -> dict[str, dict]:
    """Write beside ``output``, then rename; returns the annotations by split."""
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        new, old = Path(folder, "new"), Path(folder, "old")
        new.mkdir()
        content = {split: _write_split(new, task, split, parameters) for split in SPLITS}
        if task == "sem_seg":
            (new / "classes.txt").write_text("".join(f"{name}\n" for name in SHAPES_SEM_SEG_CLASSES), encoding="utf-8")
        if output.exists():
            output.rename(old)
        try:
            new.rename(output)
        except OSError:
            if old.exists():
                old.rename(output)
            raise
    return content


def _write_split(root: Path, task: str, split: str, parameters: ShapesParameters) -> dict:
    """Write one split's images, annotation file and label images; returns the annotation file's content."""
    split_index = SPLITS.index(split)
    count = (parameters.num_train, parameters.num_val)[split_index]
    first_id = (1, parameters.num_train + 1)[split_index]
    content = _empty_content(parameters)
    images = _image_folder(root, task, split)
    images.mkdir(parents=True)
    if task != "detection":
        _label_folder(root, task, split).mkdir(parents=True)
    for index in range(count):
        rng = np.random.default_rng([parameters.seed, split_index, index])
        image, instances = draw_image(rng, short_side=parameters.short_side)
        image_id, (height, width) = first_id + index, image.shape[:2]
        file_name = f"{image_id:012d}.jpg"
        (images / file_name).write_bytes(_encode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 95]))
        if task != "detection":
            draw = label_image if task == "sem_seg" else stuff_image
            label_file = _label_folder(root, task, split) / f"{image_id:012d}.png"
            label_file.write_bytes(_encode(".png", draw(image.shape[:2], instances)))
        content["images"].append(
            {"license": 1, "file_name": file_name, "height": height, "width": width, "id": image_id}
        )
        for class_index, mask in instances:
            annotation_id = len(content["annotations"]) + 1
            content["annotations"].append(_annotation(mask, class_index, image_id, annotation_id))
    path = _annotation_file(root, task, split)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return content


def _empty_content(parameters: ShapesParameters) -> dict:
    info = {"description": DESCRIPTION, "version": str(GENERATOR_VERSION), "parameters": asdict(parameters)}
    return {
        "info": info,
        "licenses": [{"id": 1, "name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"}],
        "images": [],
        "annotations": [],
        "categories": [
            {"id": category_id, "name": name, "supercategory": "shape"}
            for category_id, name in enumerate(SHAPES_CLASSES, start=1)
        ],
    }


def _encode(suffix: str, image: np.ndarray, options: list[int] | None = None) -> bytes:
    encoded, buffer = cv2.imencode(suffix, image, options or [])
    if not encoded:
        raise RuntimeError(f"OpenCV could not encode a {suffix} image")
    return buffer.tobytes()


def _summary(output: Path, content: dict[str, dict], *, written: bool) -> ShapesSummary:
    return ShapesSummary(
        output=output,
        written=written,
        num_images={split: len(content[split]["images"]) for split in SPLITS},
        num_objects={split: len(content[split]["annotations"]) for split in SPLITS},
    )


# -- annotations -----------------------------------------------------------------------------------


def _annotation(mask: np.ndarray, class_index: int, image_id: int, annotation_id: int) -> dict:
    """The COCO entry of the object whose visible pixels are ``mask`` (H, W) bool."""
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


def label_image(size: tuple[int, int], instances: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Labels (H, W) uint8 as in ADE20K: 1 background, 2 and on the objects' classes, 0 within a pixel of an outline."""
    labels = np.ones(size, np.uint8)
    for class_index, mask in instances:
        labels[mask] = class_index + 2
    kernel = np.ones((3, 3), np.uint8)
    for _, mask in instances:
        labels[cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_GRADIENT, kernel) > 0] = 0
    return labels


def stuff_image(size: tuple[int, int], instances: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Labels (H, W) uint8 as in COCO's panoptic_stuff folders: 0 for all things, 1 for the background."""
    labels = np.ones(size, np.uint8)
    for _, mask in instances:
        labels[mask] = 0
    return labels


def mask_polygons(mask: np.ndarray) -> list[list[float]]:
    """Outlines of a mask (H, W) without holes: ``[x0, y0, x1, y1, ...]`` in pixels for each connected part.

    Pixel (row, column) covers [column, column + 1] x [row, row + 1], as in COCO. OpenCV joins pixel centres,
    so the mask is enlarged first, which leaves the outline an eighth of a pixel inside.
    """
    enlarged = np.kron(mask.astype(np.uint8), np.ones((CONTOUR_UPSAMPLING,) * 2, np.uint8))
    contours, _ = cv2.findContours(enlarged, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    polygons = []
    for contour in contours:
        outline = cv2.approxPolyDP(contour, CONTOUR_UPSAMPLING / 2, True).reshape(-1)
        if len(outline) >= 6:
            polygons.append(((outline + 0.5) / CONTOUR_UPSAMPLING).round(2).tolist())
    return polygons


# -- drawing ---------------------------------------------------------------------------------------


def draw_image(rng: np.random.Generator, *, short_side: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """Draw one image (H, W, 3) uint8 BGR, H != W, with 1 to 5 objects.

    Returns the image, and for each object its class index and the mask (H, W) bool of its visible pixels.
    """
    height, width = _image_size(rng, short_side)
    owner, classes = _place_objects(rng, height, width)
    image = _background(rng, height, width)
    instances = []
    for index, class_index in enumerate(classes):
        mask = owner == index + 1
        image[mask] = _object_color(rng, class_index) * _shading(rng, height, width)[mask]
        instances.append((class_index, mask))
    image += rng.normal(0.0, rng.uniform(4.0, 10.0), image.shape)
    return image.round().clip(0, 255).astype(np.uint8), instances


def _image_size(rng: np.random.Generator, short_side: int) -> tuple[int, int]:
    short = round(short_side * rng.uniform(0.9, 1.1))
    long = round(short * rng.uniform(1.1, 1.5))
    return (short, long) if rng.random() < 0.5 else (long, short)


def _place_objects(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, list[int]]:
    """Place objects one over another, later ones on top.

    Returns an owner map (H, W), 0 for background and k where the k-th object is visible, and class indices.
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
    """Whether a new object leaves enough of each earlier one visible and does not lie mostly on others.

    The second condition also keeps masks free of holes, which polygons cannot express: all outlines are
    convex, so only an object inside another would cut one.
    """
    visible = np.bincount(owner.ravel(), minlength=len(areas) + 1)[1:]
    covered = np.bincount(owner[mask], minlength=len(areas) + 1)[1:]
    stays_visible = np.all(visible - covered >= MIN_VISIBLE * np.asarray(areas))
    return bool(stays_visible and covered.sum() <= MAX_COVERING * np.count_nonzero(mask))


def _object_mask(rng: np.random.Generator, class_index: int, height: int, width: int) -> np.ndarray:
    """A random object of the class, wholly inside the image: (H, W) bool."""
    corners = _outline(rng, class_index) @ _rotation(rng.uniform(0, 2 * np.pi))
    corners -= corners.min(axis=0)
    size = min(height, width) * rng.uniform(*OBJECT_SIZES)
    corners *= size / corners.max()
    free = np.array([width, height]) - 1 - corners.max(axis=0)
    corners += rng.uniform(0, 1, 2) * free
    mask = np.zeros((height, width), np.uint8)
    cv2.fillConvexPoly(mask, np.round(corners * 16).astype(np.int32), 1, shift=4)
    return mask.astype(bool)


def _outline(rng: np.random.Generator, class_index: int) -> np.ndarray:
    """Corners (N, 2) of a convex outline round the origin."""
    if SHAPES_CLASSES[class_index] == "square":
        return np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [1.0, rng.uniform(0.65, 1.0)]
    if SHAPES_CLASSES[class_index] == "circle":
        angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    else:
        angles = np.arange(3) * 2 * np.pi / 3 + rng.uniform(-0.25, 0.25, 3)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _rotation(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def _background(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Dim, slowly varying, tinted noise: (H, W, 3) float in [0, BACKGROUND_MAX]."""
    image = rng.uniform(15, 55) + rng.uniform(-12, 12, 3) + np.zeros((height, width, 3))
    for cells, amplitude in ((3, 14.0), (9, 8.0)):
        coarse = rng.normal(0.0, amplitude, (cells, cells, 3))
        image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return image.clip(0, BACKGROUND_MAX)


def _object_color(rng: np.random.Generator, class_index: int) -> np.ndarray:
    """A colour of the class: (3,) BGR, brightest channel from OBJECT_MIN to 255."""
    hue = (CLASS_HUES[class_index] + rng.uniform(-HUE_SPREAD, HUE_SPREAD)) % 1.0
    red, green, blue = colorsys.hsv_to_rgb(hue, rng.uniform(0.5, 0.95), rng.uniform(OBJECT_MIN, 255))
    return np.array([blue, green, red])


def _shading(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A slow brightness gradient across the image in a random direction: (H, W, 1) in [0.85, 1.15]."""
    angle = rng.uniform(0, 2 * np.pi)
    across = np.sin(angle) * np.linspace(-1, 1, height)[:, None] + np.cos(angle) * np.linspace(-1, 1, width)
    return (1 + 0.15 * across / np.sqrt(2))[..., None]
