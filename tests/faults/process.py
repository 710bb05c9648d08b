"""Signals, killed processes, and what several processes are asked for."""

import os
import signal
import subprocess

from tests.faults.fault import AtWork, Fault
from tests.faults.spoiling import has_saved, signalled

_TRAIN = "train_net.py --config-file small.yaml"
_LONG = f"{_TRAIN} SOLVER.MAX_ITER 4000 SOLVER.CHECKPOINT_PERIOD 1 SOLVER.CHECKPOINT_KEEP 2"
_LOG = ("output/*", "output")
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
        makes=_LOG,
        meanwhile=signalled(number, when=has_saved),
    )


FAULTS = (
    *map(_told, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
    Fault(
        "SIGINT while starting",
        _LONG,
        status=130,
        line="^interrupted$",
        makes=_LOG,
        meanwhile=signalled(signal.SIGINT, when=lambda tool: (tool.folder / "output").exists()),
    ),
    Fault(
        "SIGTERM while starting",
        _LONG,
        status=143,
        line="^ended by SIGTERM$",
        makes=_LOG,
        meanwhile=signalled(signal.SIGTERM, when=lambda tool: (tool.folder / "output").exists()),
    ),
    Fault(
        "SIGTERM while predicting",
        "predict.py --config-file run/config.yaml --weights run/model_final.pth --input datasets --output out",
        status=143,
        line="^ended by SIGTERM$",
        parts=("run",),
        makes=("out", "out/drawings", "out/drawings/*"),
        meanwhile=signalled(signal.SIGTERM, when=lambda tool: list(tool.folder.glob("out/.*.partial"))),
    ),
    Fault(
        "SIGHUP while exporting",
        "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out",
        status=129,
        line="^ended by SIGHUP$",
        parts=("run",),
        makes=("out",),
        meanwhile=signalled(signal.SIGHUP, when=lambda tool: list(tool.folder.glob("out/.unfinished-*"))),
    ),
    Fault(
        "SIGTERM while exporting",
        "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out",
        status=143,
        line="^ended by SIGTERM$",
        parts=("run",),
        makes=("out",),
        meanwhile=signalled(signal.SIGTERM, when=lambda tool: list(tool.folder.glob("out/.unfinished-*"))),
    ),
    Fault("a loading process is killed", f"{_LONG} DATALOADER.NUM_WORKERS 1", makes=_LOG, meanwhile=_kill_a_worker),
    Fault("--num-gpus 0", f"{_TRAIN} --num-gpus 0"),
    Fault("--num-gpus -1", f"{_TRAIN} --num-gpus -1"),
    Fault("more processes than cores", f"{_TRAIN} --num-gpus 999"),
    Fault("a batch that is not shared out evenly", f"{_TRAIN} --num-gpus 2 SOLVER.IMS_PER_BATCH 3"),
    Fault("--num-machines 0", f"{_TRAIN} --num-machines 0"),
    Fault("--machine-rank 5 of 2", f"{_TRAIN} --num-machines 2 --machine-rank 5 --dist-url tcp://localhost:29500"),
    Fault("two machines without an address", f"{_TRAIN} --num-machines 2"),
    Fault(
        "synchronised BatchNorm in two processes on the CPU",
        f"{_TRAIN} --num-gpus 2 MODEL.TRANSFORMER.NAME lit_ti MODEL.TRANSFORMER.BATCH_NORM sync",
    ),
    Fault("several processes on one GPU", f"{_TRAIN} MODEL.DEVICE cuda:0", environment=_TORCHRUN),
    Fault("torchrun and --num-gpus", f"{_TRAIN} --num-gpus 2", environment=_TORCHRUN),
    Fault(
        "torchrun without an address",
        _TRAIN,
        environment={key: value for key, value in _TORCHRUN.items() if key != "MASTER_ADDR"},
    ),
    Fault("torchrun with text for a number", _TRAIN, environment=_TORCHRUN | {"RANK": "first"}),
    Fault("torchrun at port 0", _TRAIN, environment=_TORCHRUN | {"MASTER_PORT": "0"}),
    Fault("a GPU that is not here", f"{_TRAIN} MODEL.DEVICE cuda"),
)
