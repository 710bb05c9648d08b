"""Check a dataset of any supported format, and write a fixed copy in COCO format."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbones import ConfigError
from backbones.errors import closest, counted, first_of
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.readers import Dataset, read_dataset
from projects_vil.data.segmentation import count_masks
from projects_vil.data.splits import entries_of, save_coco, with_file_names, without_masks
from projects_vil.files import paused_garbage_collection


@paused_garbage_collection()
def check_dataset(
    data: str | Path,
    images: str | Path | None = None,
    *,
    report: str | Path | None = None,
    fixed: str | Path | None = None,
    **options: Any,
) -> tuple[Dataset, dict[str, CocoFile]]:
    """Check a dataset, and return it with the findings of each split.

    Args:
        data: The folder or file of a dataset.
        images: The folder with the images, if it is not the folder of the dataset.
        report: The file that the findings will be written to.
        fixed: The folder of the fixed copy. Images that exist only in annotation files are written to it.
        options: Options of :class:`~projects_vil.data.coco_checks.CocoFile`.

    Returns:
        The dataset, and a dict that maps each split to its findings.

    Raises:
        ConfigError: If the dataset cannot be read, or if ``report`` is one of its annotation files.
    """
    with tempfile.TemporaryDirectory() as folder:
        extracted = None if fixed is None else Path(fixed, "images")
        dataset = read_dataset(data, folder, val=0, images=images, extracted=extracted)
        if options.get("masks") is None:
            options["masks"] = dataset.has_masks
        if report and os.path.realpath(report) in map(os.path.realpath, (data, *dict(dataset.splits.values()))):
            raise ConfigError(f"--json: '{report}' is an annotation file of the dataset. Name another file.")
        contents = dataset.contents
        files = {split: CocoFile(*paths, dataset=contents[split], **options) for split, paths in dataset.splits.items()}
    for split, file in files.items():
        if split != "train":
            # A small validation split often lacks a class.
            file.found.pop("category_without_objects", None)
        if not os.path.exists(file.path):
            # The file was temporary: it was converted from another format.
            file.path = f"{data} ({split})" if len(files) > 1 else str(data)
    return dataset, files


def check_classes(files: Mapping[str, CocoFile]) -> None:
    """Raise a :class:`ConfigError` if validation images have a class that training images lack. Training rejects it."""
    train, val = files["train"], files.get("val", files["train"])
    ours, theirs = ([str(one.get("name")) for one in entries_of(f.dataset, "categories")] for f in (train, val))
    if unknown := [name for name in theirs if name not in ours]:
        text = f"'{val.path}' has classes that do not exist in '{train.path}': {first_of([*map(repr, unknown)], 5)}"
        raise ConfigError(f"{text}{closest(unknown[0], ours) or '.'} Rename or remove them.")


def write_fixed(files: Mapping[str, CocoFile], output: str | Path | None) -> list[str]:
    """Write a fixed copy of checked files, and return one line of text per file.

    Args:
        files: The findings from :func:`check_dataset`.
        output: A new folder, or None to write nothing.

    Raises:
        ConfigError: If an error cannot be fixed, or if there are errors and ``output`` is None.
    """
    for file in filter(CocoFile.unfixable, files.values()):
        raise file.error()
    lines = []
    if output:
        for split, file in files.items():
            # The output is a dataset, so its file names are relative to its folder.
            names = [image["file_name"] for image in entries_of(file.dataset, "images")]
            relative = {name: os.path.relpath(os.path.join(file.image_root, name), output) for name in names}
            file.dataset = with_file_names(file.dataset, relative)
            path = os.path.join(output, f"{split}.json")
            lines.append(f"wrote {path}: {write_cleaned(file, path)}")
    elif wrong := [file for file in files.values() if file.findings("error")]:
        number = sum(len(file.findings("error")) for file in wrong)
        paths = " and ".join(file.path for file in wrong)
        raise ConfigError(f"Found {counted(number, 'type')} of errors in {paths}. Add --fix OUT to write a fixed copy.")
    return lines


def write_cleaned(file: CocoFile, output: str | Path) -> str:
    """Write a fixed copy of a COCO file, and return a summary of the removed and changed entries.

    Args:
        file: The file and its findings.
        output: A new file.

    Raises:
        ConfigError: If ``output`` exists, if an error cannot be fixed, or if no image, annotation or category is left.
    """
    if os.path.lexists(output):
        raise ConfigError(f"'{output}' already exists. Name a new file.")
    if file.unfixable() is not None:
        raise file.error()
    dataset, counts = file.fixed()
    for what in ("images", "annotations", "categories"):
        if file.dataset.get(what) and not dataset.get(what):
            reason = next(map(file.describe, file.findings("error")), "no error")
            raise ConfigError(f"A fixed copy of '{file.path}' would have no {what} ({reason}). Repair the file.")
    num_masks = 0 if file.masks else count_masks(dataset.get("annotations", ()))[0]
    save_coco(output, without_masks(dataset) if num_masks else dataset)
    left = ", ".join(counted(len(dataset.get(f"{name}s", ())), name) for name in ("image", "annotation"))
    removed = ", ".join(counted(counts[f"{name}s"], name) for name in ("image", "annotation"))
    masks = f", left out {num_masks:,} masks" * (num_masks > 0)
    return f"{left}; removed {removed}; changed {counts['changed']:,}{masks}"
