"""COCO files: read once, checked, and made into detectron2's records."""

import contextlib
import gc
import json
import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from detectron2.data import MetadataCatalog
from detectron2.structures import BoxMode
from detectron2.utils.logger import log_first_n
from pycocotools import mask as mask_util

from backbones import InputError
from backbones.utils.files import written_whole
from projects_vil.data.checking import Checked, check_dataset, mend
from projects_vil.utils import unwound_by_signals

CHECKS = ("error", "warn", "off")
_LISTS = ("images", "annotations", "categories")
_COPIED = ("iscrowd", "bbox", "keypoints", "category_id")


def is_coco(name: str) -> bool:
    """Whether a registered dataset is a COCO file with boxes and masks, also with label images of stuff beside it."""
    metadata = MetadataCatalog.get(name)
    kind, has_stuff = metadata.get("evaluator_type"), bool(metadata.get("sem_seg_root"))
    return (kind == "coco" or kind == "coco_panoptic_seg" and has_stuff) and bool(metadata.get("json_file"))


def read_coco(path: str | Path) -> dict[str, Any]:
    """What a COCO file holds; of COCO's test images without the list of annotations.

    Raises:
        InputError: for a file that is missing, is not JSON, or has no lists of images, annotations and categories.
    """
    try:
        with open(path, encoding="utf-8") as file, _without_collection():
            dataset = json.load(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise InputError(f"{path} is not JSON of a COCO file: it is nested too deeply") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; write or copy it again") from error
    if not isinstance(dataset, dict):
        raise InputError(f"{path} is not a COCO annotation file: it is no JSON object")
    for name in _LISTS:
        # Without the list nothing can be evaluated, with an empty one everything is nan: it stays absent.
        if not isinstance(dataset.get(name), list) and (name != "annotations" or name in dataset):
            raise InputError(f"{path} is not a COCO annotation file: it has no list {name!r}")
    for name in ("images", "categories"):
        if not dataset[name]:
            raise InputError(f"{path} is not a COCO annotation file: its list {name!r} is empty")
    return dataset


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Python looks through all objects again and again while millions are made: half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_coco(name: str, *, check: str, masks: bool, open_images: bool, report: bool = True) -> list[dict[str, Any]]:
    """The records of a registered COCO file, as detectron2's ``load_coco_json`` makes them, of a file that is sound.

    Sets the names and ids of the classes in detectron2's metadata, as that does.

    Args:
        check: ``"error"``, or ``"warn"`` to go on without what is wrong.
        masks: whether segmentations are looked at, and among the records.
        open_images: whether every image file is opened.
        report: whether what was found is logged; errors that stop are raised in any case.

    Raises:
        InputError: where :func:`read_coco` would, and for errors that the check finds.
    """
    metadata = MetadataCatalog.get(name)
    path, root = metadata.json_file, metadata.image_root
    checked = check_dataset(read_coco(path), path, root, masks=None if masks else False, headers=open_images)
    _report(name, checked, check, log=report)
    dataset = mend(checked, errors=check == "warn", areas=False).dataset
    return _records(dataset, name, root, masks=masks)


@contextlib.contextmanager
def evaluated_as(name: str, *, check: str, masks: bool) -> Iterator[str]:
    """A name by which detectron2's evaluator finds the annotations of a registered COCO file as training reads them.

    The name itself where nothing in the file is to be mended; else that of a copy, which is gone afterwards.

    Raises:
        InputError: as :func:`load_coco`.
    """
    if check == "off" or not is_coco(name):
        yield name
        return
    metadata = MetadataCatalog.get(name)
    path, root = metadata.json_file, metadata.image_root
    # Images that cannot be opened are not evaluated with "warn"; with "error" the loader has refused them.
    checked = check_dataset(read_coco(path), path, root, masks=None if masks else False, headers=check == "warn")
    _report(name, checked, check)
    mended = mend(checked, errors=check == "warn")
    if not any(checked.findings.count(level) for level in ("error", "mended")):
        yield name
        return
    facts = {key: value for key, value in metadata.as_dict().items() if key not in ("name", "json_file")}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / Path(path).name
        copy.write_text(json.dumps(mended.dataset))
        MetadataCatalog.get(folder).set(json_file=str(copy), **facts)
        _number_classes(folder, mended.dataset)
        try:
            yield folder
        finally:
            MetadataCatalog.remove(folder)


def check_coco(
    annotations: str | Path,
    images: str | Path,
    *,
    masks: bool | None = None,
    pixels: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Checked:
    """Look for all faults in a COCO file and its folder of images; the arguments are those of ``check_dataset``.

    Raises:
        InputError: where :func:`read_coco` would, and for a folder that is missing.
    """
    if not Path(images).is_dir():
        raise InputError(f"there is no image folder {images}")
    dataset = read_coco(annotations)
    return check_dataset(dataset, annotations, images, masks=masks, pixels=pixels, progress=progress)


def write_cleaned(checked: Checked, output: str | Path) -> str:
    """Write a copy of a COCO file without what a check has found; what it has left out and changed, in words.

    Raises:
        InputError: where the copy would be the file itself, or what was found cannot be mended.
    """
    check_output(checked.findings.annotations, output)
    if checked.findings.unmendable() is not None:
        raise checked.findings.error()
    mended = mend(checked, errors=True)
    if not mended.dataset["images"]:
        raise InputError(f"{checked.findings.annotations}: nothing sound would be left in a copy")
    with unwound_by_signals(), written_whole(Path(output)) as partial:
        # Much faster than json.dump, which writes number by number.
        partial.write_text(json.dumps(mended.dataset), encoding="utf-8")
    images, annotations = (len(mended.dataset.get(name, ())) for name in ("images", "annotations"))
    return (
        f"{images:,} images, {annotations:,} annotations; left out "
        f"{mended.images:,} images and {mended.annotations:,} annotations, changed {mended.changed:,}"
    )


def check_output(annotations: str | Path, output: str | Path) -> None:
    """Raise an :class:`InputError`, before the work, where a copy cannot be written or would be the file itself."""
    output = Path(output)
    if output.is_dir():
        raise InputError(f"--fix {output}: it is a folder; name the file to write")
    if output.exists():
        same = os.path.samefile(annotations, output) if Path(annotations).exists() else False
        raise InputError(f"--fix {output}: {'it is the file itself' if same else 'it exists'}; name a new file")
    if not output.absolute().parent.is_dir():
        raise InputError(f"--fix {output}: there is no folder {output.absolute().parent}")


def _report(name: str, checked: Checked, check: str, *, log: bool = True) -> None:
    """Log what was found, once in a process; errors stop where they are to, or cannot be mended."""
    findings = checked.findings
    errors = list(findings.kinds("error"))
    if errors and (check == "error" or findings.unmendable() is not None):
        raise _missing_images(name, checked) if [k.name for k in errors] == ["file_missing"] else findings.error()
    for kind in findings.kinds() if log else ():
        level = logging.INFO if kind.level == "note" else logging.WARNING
        log_first_n(level, f"{findings.annotations}: {findings.line(kind)}", name=__name__, key="message")


def _missing_images(name: str, checked: Checked) -> InputError:
    places = checked.findings.places["file_missing"]
    number = len(checked.dataset["images"])
    first = checked.images.path(places[0])
    return InputError(f"{len(places)} of the {number} images of {name} are missing, the first is {first}")


def _records(dataset: dict[str, Any], name: str, image_root: str, *, masks: bool) -> list[dict[str, Any]]:
    index_of = _number_classes(name, dataset)
    of_image = defaultdict(list)
    entries = dataset.get("annotations", ())
    for annotation in entries:
        of_image[annotation["image_id"]].append(annotation)
    images = dataset["images"]
    logging.getLogger(__name__).info("%s: %d images and %d objects", name, len(images), len(entries))
    return [
        {
            "file_name": os.path.join(image_root, image["file_name"]),
            "height": image["height"],
            "width": image["width"],
            "image_id": image["id"],
            "annotations": [_object(annotation, index_of, masks=masks) for annotation in of_image[image["id"]]],
        }
        for image in sorted(images, key=lambda image: image["id"])
    ]


def _number_classes(name: str, dataset: dict[str, Any]) -> dict[int, int]:
    """Set the classes of a dataset in detectron2's metadata, in the order of their ids; id -> class."""
    categories = sorted(dataset["categories"], key=lambda category: category["id"])
    metadata = MetadataCatalog.get(name)
    metadata.thing_classes = [category["name"] for category in categories]
    metadata.thing_dataset_id_to_contiguous_id = {category["id"]: i for i, category in enumerate(categories)}
    return metadata.thing_dataset_id_to_contiguous_id


def _object(annotation: dict[str, Any], index_of: dict[int, int], *, masks: bool) -> dict[str, Any]:
    known = {key: annotation[key] for key in _COPIED if key in annotation}
    segmentation = annotation.get("segmentation")
    if masks and segmentation:
        if isinstance(segmentation, dict) and isinstance(segmentation["counts"], list):
            segmentation = mask_util.frPyObjects(segmentation, *segmentation["size"])
        known["segmentation"] = segmentation
    if known.get("keypoints"):
        # Of pixels, whose middle is meant.
        known["keypoints"] = [n if place % 3 == 2 else n + 0.5 for place, n in enumerate(known["keypoints"])]
    else:
        known.pop("keypoints", None)
    return known | {"bbox_mode": BoxMode.XYWH_ABS, "category_id": index_of[annotation["category_id"]]}
