"""How long the check of a dataset takes, and how much memory."""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbones import InputError
from projects_vil.analysis.drawn_coco import draw_objects, write_annotations, write_images


class CheckCost(NamedTuple):
    """Of a check in a process of its own: the file's size in bytes, seconds by the clock, and peak memory in bytes."""

    file_size: int
    seconds: float
    memory: int


def time_dataset_check(tool: Path, *, num_images: int) -> CheckCost:
    """Run ``tool``, ``tools/check_dataset.py``, over a drawn COCO file with masks and its images.

    Raises:
        InputError: where the check finds fault with it.
    """
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        annotations, images = Path(name) / "annotations.json", Path(name) / "images"
        write_annotations(annotations, *draw_objects(generator, num_images), masks=True)
        write_images(images, generator, num_images)
        begun = time.perf_counter()
        command = [sys.executable, str(tool), str(annotations), str(images)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begun
        if result.returncode:
            raise InputError(f"{tool} ended with {result.returncode}: {result.stderr.strip()}")
        # Linux counts in units of 1024 bytes.
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return CheckCost(annotations.stat().st_size, seconds, memory)
