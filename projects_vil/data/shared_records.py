"""Records of datasets, read and checked by the first process of each machine, and mapped by the others."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.data import DatasetFromList
from detectron2.data.common import _TorchSerializedList
from detectron2.utils import comm

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write

# What :func:`read_once` has read, by what it depends on.
KEPT: dict[tuple, DatasetFromList] = {}


def read_once(read: Callable[[Callable[[tuple, Sequence[Any]], None]], Any]) -> Any:
    """Let the first process of each machine read datasets; all processes call this.

    What it keeps is a file that all of them map, so that it is in the machine's memory once; detectron2's
    ``DatasetFromList`` alone is shared with loading processes only.

    Args:
        read: takes a function (key, objects), which keeps objects in :data:`KEPT` of all processes of the machine.

    Returns:
        What ``read`` returns, in all processes.

    Raises:
        ConfigError: in all processes, if any ``read`` raises one or an OSError, or what they return
            differs between machines.
    """
    files: dict[tuple, str] = {}
    outcome = None
    with tempfile.TemporaryDirectory(prefix="records_") as folder:

        def keep(key: tuple, objects: Sequence[Any]) -> None:
            files[key] = os.path.join(folder, str(len(files)))
            with atomic_write(files[key], sync=False) as partial, partial.open("wb") as file:
                torch.save(DatasetFromList(objects, copy=False), file)
            KEPT[key] = _mapped(files[key])

        if comm.get_local_rank() == 0:
            try:
                outcome = read(keep), files, ""
            except (ConfigError, OSError) as error:
                outcome = None, {}, str(error)
        outcomes = comm.all_gather(outcome)
        content, files, _ = outcomes[comm.get_rank() - comm.get_local_rank()]
        KEPT.update({key: _mapped(files[key]) for key in files.keys() - KEPT.keys()})
        # The files are removed when all have mapped them.
        comm.synchronize()
    # Errors come first.
    for other, _, message in sorted(filter(None, outcomes), key=lambda one: not one[2]):
        if message or other != content:
            raise ConfigError(message or "the machines have different files of DATASETS.TRAIN or DATASETS.TEST")
    return content


def _mapped(path: str) -> DatasetFromList:
    with torch.serialization.safe_globals([DatasetFromList, _TorchSerializedList]):
        return torch.load(path, mmap=True, weights_only=True)
