"""Share dataset records between the processes of a machine: one process reads them, and all processes map them."""

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

# The objects that :func:`read_and_share` has shared, by cache key.
SHARED: dict[tuple, DatasetFromList] = {}


def serialized(records: Sequence[Any]) -> DatasetFromList:
    """Return records in the serialized form that a process shares with its worker processes."""
    return records if isinstance(records, DatasetFromList) else DatasetFromList(records, copy=False)


def read_and_share(read: Callable[[Callable[[tuple, Sequence[Any]], None]], Any]) -> Any:
    """Call ``read`` in the first process of each machine, and share its objects. All processes call this function.

    The objects are written to a temporary file that all processes of the machine map. They are therefore in memory once
    per machine. detectron2's ``DatasetFromList`` shares them with worker processes only.

    Args:
        read: A function with one argument ``share``. ``share(key, objects)`` adds objects to :data:`SHARED` in all
            processes of the machine.

    Returns:
        The return value of ``read``, in all processes.

    Raises:
        ConfigError: In all processes, if any ``read`` raises a ``ConfigError`` or an ``OSError``, or if machines have
            different return values.
    """
    files: dict[tuple, str] = {}
    outcome = None
    with tempfile.TemporaryDirectory(prefix="records_") as folder:

        def share(key: tuple, objects: Sequence[Any]) -> None:
            files[key] = os.path.join(folder, str(len(files)))
            with atomic_write(files[key], sync=False) as partial, partial.open("wb") as file:
                torch.save(DatasetFromList(objects, copy=False), file)
            SHARED[key] = _mapped(files[key])

        if comm.get_local_rank() == 0:
            try:
                outcome = read(share), files, ""
            except (ConfigError, OSError) as error:
                outcome = None, {}, str(error)
        outcomes = comm.all_gather(outcome)
        content, files, _ = outcomes[comm.get_rank() - comm.get_local_rank()]
        SHARED.update({key: _mapped(files[key]) for key in files.keys() - SHARED.keys()})
        # The files are deleted after all processes have mapped them.
        comm.synchronize()
    # The error of a machine has priority over different return values.
    for other, _, message in sorted(filter(None, outcomes), key=lambda one: not one[2]):
        if message or other != content:
            raise ConfigError(
                message or "The machines have different files of DATASETS.TRAIN or DATASETS.TEST. Use the same files."
            )
    return content


def _mapped(path: str) -> DatasetFromList:
    with torch.serialization.safe_globals([DatasetFromList, _TorchSerializedList]):
        return torch.load(path, mmap=True, weights_only=True)
