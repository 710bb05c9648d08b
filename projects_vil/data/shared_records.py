"""Share dataset records between the processes of a machine: one process reads them, and all processes map them."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from detectron2.data import DatasetFromList
from detectron2.data.common import _TorchSerializedList
from detectron2.utils import comm

from backbones import ConfigError
from backbones.checkpoint_files import atomic_write

# Objects that are read once per run, by cache key.
SHARED: dict[tuple, DatasetFromList] = {}


def read_and_share(read: Callable[[], Any]) -> Any:
    """Call ``read`` in the first process of each machine. The others get the objects that it adds to :data:`SHARED`.

    All processes call this function. The objects are written to a temporary file that all processes of the machine map.
    They are therefore in memory once per machine. detectron2's ``DatasetFromList`` shares them with worker processes
    only.

    Args:
        read: A function that adds objects to :data:`SHARED`.

    Returns:
        The return value of ``read``, in all processes.

    Raises:
        ConfigError: In all processes, if any ``read`` raises a ``ConfigError`` or an ``OSError``, or if machines have
            different return values.
    """
    if comm.get_world_size() == 1:
        return read()
    before, outcome = set(SHARED), None
    with tempfile.TemporaryDirectory(prefix="records_") as folder:
        if comm.get_local_rank() == 0:
            try:
                value, files = read(), {}
                for key in SHARED.keys() - before:
                    files[key] = os.path.join(folder, str(len(files)))
                    with atomic_write(files[key], sync=False) as partial, partial.open("wb") as file:
                        torch.save(SHARED[key], file)
                outcome = value, files, ""
            except (ConfigError, OSError) as error:
                outcome = None, {}, str(error)
        outcomes = comm.all_gather(outcome)
        content, files, _ = outcomes[comm.get_rank() - comm.get_local_rank()]
        for key, path in files.items():
            with torch.serialization.safe_globals([DatasetFromList, _TorchSerializedList]):
                SHARED[key] = torch.load(path, mmap=True, weights_only=True)
        # The files are deleted after all processes have mapped them.
        comm.synchronize()
    # The error of a machine has priority over different return values.
    for other, _, message in sorted(filter(None, outcomes), key=lambda one: not one[2]):
        if message or other != content:
            raise ConfigError(message or "DATASETS.TRAIN or TEST differs between machines. Copy the same files to all.")
    return content
