"""Check a dataset of any supported format, and write a fixed copy in COCO format."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write
from backbones.errors import counted
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.readers import Dataset, read_dataset
from projects_vil.data.readers.coco import entries_of, with_images
from projects_vil.data.readers.dataset import annotation_format
from projects_vil.data.readers.index import FileIndex
from projects_vil.data.segmentation import count_masks
from projects_vil.utils import paused_garbage_collection


@paused_garbage_collection()
def check_dataset(
    data: str | Path,
    images: str | Path | None = None,
    *,
    report: str | Path | None = None,
    fixed: str | Path | None = None,
    **options: Any,
) -> tuple[Dataset | None, dict[str, CocoFile]]:
    """Check a dataset, and return it with the findings of each split.

    Args:
        data: The folder or file of a dataset.
        images: The folder with the images. For a COCO file, only this file and this folder are checked.
        report: The file that the findings will be written to.
        fixed: The folder of the fixed copy. Images that exist only in annotation files are written to it.
        options: Options of :class:`~projects_vil.data.coco_checks.CocoFile`.

    Returns:
        The dataset, and a dict that maps each split to its findings. For a COCO file with ``images``, the dataset is
        None and the name of the split is empty.

    Raises:
        ConfigError: If the dataset cannot be read, or if ``report`` is one of its annotation files.
    """
    with tempfile.TemporaryDirectory() as folder:
        contents: dict[str, Any] = {}
        dataset = None
        if images is None or Path(data).is_dir() or annotation_format(str(data)) not in ("COCO", None):
            extracted = None if fixed is None else Path(fixed, "images")
            dataset = read_dataset(data, folder, val=0, images=images, contents=contents, extracted=extracted)
        else:
            # The names in the fixed copy are relative to the given folder.
            contents[""], _, root = with_images(str(data), None, FileIndex(Path(images)))
            prefix = os.path.relpath(root, images)
            for image in entries_of(contents[""], "images") if prefix != "." else ():
                image["file_name"] = os.path.join(prefix, image["file_name"])
        splits = dataset.splits if dataset else {"": (data, images)}
        if dataset and options.get("masks") is None:
            options["masks"] = dataset.has_masks
        if report and any(os.path.realpath(report) == os.path.realpath(path) for path, _ in splits.values()):
            raise ConfigError(f"--json: '{report}' is an annotation file of the dataset. Name another file.")
        files = {split: CocoFile(*paths, dataset=contents.get(split), **options) for split, paths in splits.items()}
    for split, file in files.items():
        if not os.path.exists(file.path):
            # The file was temporary: it was converted from another format.
            file.path = f"{data} ({split})" if len(files) > 1 else str(data)
    return dataset, files


@contextlib.contextmanager
def removed_on_error(output: str | Path | None) -> Iterator[None]:
    """Remove a new folder, such as the folder of a fixed copy, if an error occurs inside the context."""
    try:
        yield
    except BaseException:
        if output:
            shutil.rmtree(output, ignore_errors=True)
        raise


def write_fixed(files: Mapping[str, CocoFile], output: str | Path | None) -> list[str]:
    """Write a fixed copy of checked files, and return one line of text per file.

    Args:
        files: The findings from :func:`check_dataset`.
        output: A new folder. For a COCO file that was checked with its image folder, a new file. None writes nothing.

    Raises:
        ConfigError: If an error cannot be fixed. If there are errors and ``output`` is None.
    """
    unfixable = next((file for file in files.values() if file.unfixable()), None)
    if unfixable is not None:
        raise unfixable.error()
    lines = []
    for split, file in files.items():
        if output and split:
            os.makedirs(output, exist_ok=True)
            # The output is a dataset, so its file names are relative to its folder.
            for image in file.images:
                if isinstance(image, dict) and isinstance(image.get("file_name"), str):
                    path = os.path.join(file.image_root, image["file_name"])
                    image["file_name"] = os.path.relpath(path, output)
        if output:
            path = os.path.join(output, f"{split}.json") if split else output
            lines.append(f"wrote {path}: {write_cleaned(file, path)}")
    wrong = [file for file in files.values() if file.findings("error")]
    if wrong and not output:
        number = sum(len(file.findings("error")) for file in wrong)
        paths = " and ".join(file.path for file in wrong)
        raise ConfigError(f"{paths} has errors of {counted(number, 'type')}. Add --fix OUT to write a corrected copy.")
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
            first = next(iter(file.findings("error")), None)
            reason = "" if first is None else f" ({file.describe(first)})"
            raise ConfigError(f"A fixed copy of '{file.path}' would have none of the {what}{reason}. Repair the file.")
    num_masks = 0 if file.masks else count_masks(dataset.get("annotations", ()))[0]
    for entry in dataset["annotations"] if num_masks else ():
        entry.pop("segmentation", None)
    with atomic_write(output) as partial:
        # json.dumps is much faster than json.dump, which writes each number separately.
        partial.write_text(json.dumps(dataset), encoding="utf-8")
    kept = {name: len(dataset.get(f"{name}s", ())) for name in ("image", "annotation")}
    left, removed = (
        ", ".join(counted(number, name) for name, number in numbers.items())
        for numbers in (kept, {name: counts[f"{name}s"] for name in kept})
    )
    return f"{left}; removed {removed}; changed {counts['changed']:,}" + (
        f", left out {num_masks:,} masks" if num_masks else ""
    )
