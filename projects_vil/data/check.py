"""Check a dataset of any format, and write a cleaned copy in COCO format."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbones import ConfigError
from projects_vil.data.coco import write_cleaned
from projects_vil.data.coco_checks import CocoFile
from projects_vil.data.formats import Dataset, read_dataset


def check_dataset(
    data: str | Path, images: str | Path | None = None, *, report: str | Path | None = None, **options: Any
) -> tuple[Dataset | None, dict[str, CocoFile]]:
    """Check a dataset, and return it with the findings of each split.

    Args:
        data: folder or file of a dataset.
        images: image folder of a COCO file. If it is given, the file is checked as it is.
        report: file into which the findings will be written.
        options: of :class:`~projects_vil.data.coco_checks.CocoFile`.

    Returns:
        The dataset (None with ``images``), and split -> findings (the split is empty with ``images``).

    Raises:
        ConfigError: if the dataset cannot be read, or ``report`` is one of its annotation files.
    """
    with tempfile.TemporaryDirectory() as folder:
        contents: dict[str, Any] = {}
        dataset = None if images else read_dataset(data, folder, val=0, contents=contents)
        splits = dataset.splits if dataset else {"": (data, images)}
        if report and any(os.path.realpath(report) == os.path.realpath(path) for path, _ in splits.values()):
            raise ConfigError(f"--json: '{report}' is an annotation file of the dataset. Name another file.")
        files = {split: CocoFile(*paths, dataset=contents.get(split), **options) for split, paths in splits.items()}
    for split, file in files.items():
        if not os.path.exists(file.path):
            # The file was converted from another format.
            file.path = f"{data} ({split})" if len(files) > 1 else str(data)
    return dataset, files


def write_fixed(files: Mapping[str, CocoFile], output: str | Path | None) -> list[str]:
    """Write a cleaned copy of checked files, and return a line for each.

    Args:
        files: of :func:`check_dataset`.
        output: a new folder, or a new file for a COCO file that was checked with its image folder; None to write
            nothing.

    Raises:
        ConfigError: if there are errors that no copy can fix, or any errors without ``output``.
    """
    unfixable = next((file for file in files.values() if file.unfixable()), None)
    if unfixable is not None:
        raise unfixable.error()
    lines = []
    for split, file in files.items():
        if output and split:
            os.makedirs(output, exist_ok=True)
            # The folder is a dataset of its own: file names lead from there to the images.
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
        raise ConfigError(
            f"{paths} has {number} type{'s' * (number > 1)} of errors. Add --fix OUT to write a copy without them."
        )
    return lines
