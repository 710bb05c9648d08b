"""Signals, killed processes, and what several processes are asked for."""

import os
import signal
import subprocess

from tests.faults.fault import OUTPUT, TRAIN, AtWork, Fault
from tests.faults.spoiling import has_saved, signalled

_LONG = f"{TRAIN} SOLVER.MAX_ITER 4000 SOLVER.CHECKPOINT_PERIOD 1 SOLVER.CHECKPOINT_KEEP 2"
_TORCHRUN = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip


def _workers(tool: AtWork) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(tool.pid)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def _kill_a_worker(tool: AtWork) -> None:
    tool.wait_for(lambda: has_saved(tool))
    tool.wait_for(lambda: _workers(tool))
    os.kill(_workers(tool)[-1], signal.SIGKILL)


def _told(number: signal.Signals) -> Fault:
    return Fault(
        f"{number.name} while training",
        _LONG,
        status=128 + number,
        line=f"^{number.name}: saved after iteration",
        makes=OUTPUT,
        meanwhile=signalled(number, when=has_saved),
    )


def _while_starting(number: signal.Signals, says: str) -> Fault:
    return Fault(
        f"{number.name} while starting",
        _LONG,
        status=128 + number,
        line=f"^{says}$",
        makes=OUTPUT,
        meanwhile=signalled(number, when=lambda tool: (tool.folder / "output").exists()),
    )


def _while_exporting(number: signal.Signals) -> Fault:
    return Fault(
        f"{number.name} while exporting",
        "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out",
        status=128 + number,
        line=f"^ended by {number.name}$",
        parts=("run",),
        makes=("out",),
        meanwhile=signalled(number, when=lambda tool: list(tool.folder.glob("out/.unfinished-*"))),
    )


def _under_torchrun(name: str, arguments: str = "", **variables: str | None) -> Fault:
    """With the variables that torchrun sets, or others for some of them; without one where it is None."""
    environment = {key: value for key, value in (_TORCHRUN | variables).items() if value is not None}
    return Fault(name, f"{TRAIN}{arguments}", environment=environment)


FAULTS = (
    *map(_told, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    _while_starting(signal.SIGINT, "interrupted"),
    _while_starting(signal.SIGTERM, "ended by SIGTERM"),
    Fault(
        "SIGTERM while predicting",
        "predict.py --config-file run/config.yaml --weights run/model_final.pth --input datasets --output out",
        status=143,
        line="^ended by SIGTERM$",
        parts=("run",),
        makes=("out", "out/drawings", "out/drawings/*"),
        meanwhile=signalled(signal.SIGTERM, when=lambda tool: list(tool.folder.glob("out/.*.partial"))),
    ),
    *map(_while_exporting, (signal.SIGHUP, signal.SIGTERM)),
    Fault("a loading process is killed", f"{_LONG} DATALOADER.NUM_WORKERS 1", makes=OUTPUT, meanwhile=_kill_a_worker),
    Fault("--num-gpus 0", f"{TRAIN} --num-gpus 0"),
    Fault("--num-gpus -1", f"{TRAIN} --num-gpus -1"),
    Fault("more processes than cores", f"{TRAIN} --num-gpus 999"),
    Fault("a batch that is not shared out evenly", f"{TRAIN} --num-gpus 2 SOLVER.IMS_PER_BATCH 3"),
    Fault("--num-machines 0", f"{TRAIN} --num-machines 0"),
    Fault("--machine-rank 5 of 2", f"{TRAIN} --num-machines 2 --machine-rank 5 --dist-url tcp://localhost:29500"),
    Fault("two machines without an address", f"{TRAIN} --num-machines 2"),
    Fault(
        "synchronised BatchNorm in two processes on the CPU",
        f"{TRAIN} --num-gpus 2 MODEL.TRANSFORMER.NAME lit_ti MODEL.TRANSFORMER.BATCH_NORM sync",
    ),
    _under_torchrun("several processes on one GPU", " MODEL.DEVICE cuda:0"),
    _under_torchrun("torchrun and --num-gpus", " --num-gpus 2"),
    _under_torchrun("torchrun without an address", MASTER_ADDR=None),
    _under_torchrun("torchrun with text for a number", RANK="first"),
    _under_torchrun("torchrun at port 0", MASTER_PORT="0"),
    Fault("a GPU that is not here", f"{TRAIN} MODEL.DEVICE cuda"),
)
