"""The page of a run, from its folder to one HTML file."""

import logging
from collections.abc import Sequence
from pathlib import Path

from backbones import InputError
from backbones.utils.files import written_whole
from projects_vil.data import register_datasets
from projects_vil.report.dataset_part import DatasetPart, dataset_parts
from projects_vil.report.figures import training_figures
from projects_vil.report.page import render
from projects_vil.report.run_folder import differences, read_run

REPORT_FILE = "report.html"


def write_report(
    folder: str | Path, output: str | Path | None = None, *, num_images: int = 8, overrides: Sequence[str] = ()
) -> Path:
    """Write one HTML page about a run, which needs no network and no other file; what it says is never changed.

    Args:
        folder: ``OUTPUT_DIR`` of ``tools/train_net.py``.
        output: the page; ``report.html`` in the folder by default.
        num_images: validation images to draw, 0 or more.
        overrides: keys and values for the run's config.

    Returns:
        Where the page is.

    Raises:
        InputError: for a folder that is no run, a number of images below 0, or a page that cannot be written.
    """
    folder = Path(folder)
    if num_images < 0:
        raise InputError(f"--num-images is {num_images}: it is 0 or more")
    run = read_run(folder, overrides)
    path = folder / REPORT_FILE if output is None else Path(output)
    if path.is_dir():
        raise InputError(f"--output {path} is a folder: name a file, {path / REPORT_FILE} for one")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--output {path}: there is no folder {path.absolute().parent}")
    datasets: list[DatasetPart] = []
    left_out = list(run.left_out)
    if run.cfg is not None:
        try:
            register_datasets(run.cfg)
        except InputError as error:
            left_out.append(f"what is judged with the dataset: {error}")
    datasets = dataset_parts(run, left_out, num_images=num_images)
    page = render(
        run,
        curves=training_figures(run.metrics),
        datasets=datasets,
        differences=differences(run.cfg) if run.cfg is not None else [],
        left_out=left_out,
    )
    with written_whole(path) as partial:
        partial.write_text(page, encoding="utf-8")
    for line in left_out:
        logging.getLogger(__name__).info("left out: %s", line)
    return path
