"""How long the check of a dataset takes, and how much memory."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backbones import InputError
from projects_vil.analysis.drawn_coco import draw_objects, write_annotations, write_images
from projects_vil.utils import memory_of


class CheckCost(NamedTuple):
    """Of a check in a process of its own: the file's size in bytes, seconds by the clock, and peak memory in bytes.

    The memory is None where the system has no /proc.
    """

    file_size: int
    seconds: float
    memory: int | None


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
        with (Path(name) / "said").open("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
            memory = _peak_memory(process)
            seconds = time.perf_counter() - begun
            if process.returncode:
                said.seek(0)
                raise InputError(f"{tool} ended with {process.returncode}: {said.read().strip()}")
        return CheckCost(annotations.stat().st_size, seconds, memory)


def _peak_memory(process: subprocess.Popen) -> int | None:
    """Wait for a process, and return the most bytes that it had."""
    peak = None
    while process.poll() is None:
        # One that has ended in between has none.
        peak = memory_of(process.pid, peak=True) or peak
        time.sleep(0.02)
    return peak
