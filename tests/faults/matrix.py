"""All faults, by what they are of."""

from tests.faults import checkpoint, config, data, disk, prediction, process, sequences
from tests.faults.fault import Fault

# Of a page of docs/faults.md: its title -> the faults.
MATRIX: dict[str, tuple[Fault, ...]] = {
    "Data": data.FAULTS,
    "Checkpoints": checkpoint.FAULTS,
    "Configs and arguments": config.FAULTS,
    "Processes": process.FAULTS,
    "Disks": disk.FAULTS,
    "Prediction and exported files": prediction.FAULTS,
    "Sequences": sequences.FAULTS,
}
FAULTS = {fault.name: fault for faults in MATRIX.values() for fault in faults}
