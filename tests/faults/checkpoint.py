"""Weights and runs to go on with."""

import math
from collections.abc import Callable
from pathlib import Path

from backbones.utils.files import read_checkpoint, write_checkpoint
from tests.faults.fault import TRAIN, Fault, Spoil
from tests.faults.spoiling import all_of, cut_off, emptied, flipped, made_a_folder, removed, stored, written

_FROM = f"{TRAIN} MODEL.WEIGHTS"
_RESUME = "train_net.py --config-file run/config.yaml --resume"
_JUDGE = "train_net.py --config-file run/config.yaml --eval-only MODEL.WEIGHTS run/model_final.pth"
_PREDICT = "predict.py --config-file run/config.yaml --weights run/model_final.pth --input photos --output out"
_EXPORT = "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out"
_FINAL = "run/model_final.pth"
_RUN = ("run",)
_PASSED = "^passed over: run/model_final.pth"
# What a finished run that goes on writes again; the checkpoints before are not among it.
_ENDED = tuple(
    f"run/{name}"
    for name in ("log.txt", "config.yaml", "metrics.json", "evaluation.json", "last_checkpoint", "model_final.pth")
) + ("run/events.*", "run/inference/*", "run/model_best.pth")


def _slim_and_flip(folder: Path) -> None:
    """The last byte of safetensors is one of a tensor."""
    path = folder / "slim.safetensors"
    write_checkpoint(path, {"model": read_checkpoint(folder / _FINAL)["model"]})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _not_finite(contents: dict) -> None:
    contents["model"]["head.cls_score.bias"][0] = math.nan


def _without_a_layer(contents: dict) -> None:
    for name in [name for name in contents["model"] if name.startswith("head.")]:
        del contents["model"][name]


def _all_three(spoil: Callable[[str], Spoil]) -> Spoil:
    """The checkpoints of the run."""
    return all_of(spoil(_FINAL), spoil("run/model_0000003.pth"), spoil("run/model_0000001.pth"))


def _goes_on(name: str, spoil: Spoil | None, line: str, *, more: str = "") -> Fault:
    """A run that is resumed all the same, and says what was wrong."""
    return Fault(name, _RESUME + more, spoil, parts=_RUN, status=0, line=line, makes=_ENDED)


def _tag(name: str, spoil: Spoil) -> Fault:
    return _goes_on(f"last_checkpoint {name}", spoil, "last_checkpoint")


FAULTS = (
    # -- weights ---------------------------------------------------------------------------------------
    Fault("weights that are missing", f"{_FROM} absent.pth"),
    Fault("weights that are a folder", f"{_FROM} own"),
    Fault("weights that are text", f"{_FROM} small.yaml"),
    Fault("weights of no bytes", f"{_FROM} {_FINAL}", emptied(_FINAL), parts=_RUN),
    Fault("weights that break off", f"{_FROM} {_FINAL}", cut_off(_FINAL), parts=_RUN),
    Fault("weights with a flipped bit, in training", f"{_FROM} {_FINAL}", flipped(_FINAL), parts=_RUN),
    Fault("weights with a flipped bit, in evaluation", _JUDGE, flipped(_FINAL), parts=_RUN),
    Fault("weights with a flipped bit, in prediction", _PREDICT, flipped(_FINAL), parts=_RUN),
    Fault("weights with a flipped bit, in an export", _EXPORT, flipped(_FINAL), parts=_RUN),
    Fault("weights with a flipped bit, in safetensors", f"{_FROM} slim.safetensors", _slim_and_flip, parts=_RUN),
    Fault("weights of NaN, in training", f"{_FROM} {_FINAL}", stored(_FINAL, _not_finite), parts=_RUN),
    Fault("weights of NaN, in evaluation", _JUDGE, stored(_FINAL, _not_finite), parts=_RUN),
    Fault("weights of NaN, in prediction", _PREDICT, stored(_FINAL, _not_finite), parts=_RUN),
    Fault("weights of NaN, in an export", _EXPORT, stored(_FINAL, _not_finite), parts=_RUN),
    Fault("weights without a head, in evaluation", _JUDGE, stored(_FINAL, _without_a_layer), parts=_RUN),
    Fault(
        "weights that are no tensors",
        f"{_FROM} {_FINAL}",
        stored(_FINAL, lambda c: c["model"].update({"head.cls_score.bias": "text"})),
        parts=_RUN,
    ),
    Fault("weights of another variant", f"{_FROM} {_FINAL} MODEL.TRANSFORMER.NAME vil_tiny_1_1_9_1_rpb", parts=_RUN),
    Fault("weights of another width", f"{_JUDGE} MODEL.FPN.OUT_CHANNELS 64", parts=_RUN),
    Fault("weights of other options", f'{_JUDGE} MODEL.TRANSFORMER.GLOBAL_TOKENS "[0, 0, 0, 0]"', parts=_RUN),
    Fault("weights of images in another order of channels", f"{_JUDGE} INPUT.FORMAT BGR", parts=_RUN),
    Fault(
        "weights of other classes",
        _JUDGE,
        stored(_FINAL, lambda c: c["vil_detectron2"].update(classes=["square", "circle", "star"])),
        parts=_RUN,
    ),
    Fault(
        "an exported model for weights",
        "train_net.py --config-file run/config.yaml --eval-only MODEL.WEIGHTS export/model.ts",
        parts=("run", "export"),
    ),
    Fault("evaluation without weights", f"{TRAIN} --eval-only"),
    Fault("an export without weights", "export_model.py --config-file small.yaml --output out"),
    Fault("slimming over the source", f"slim_checkpoint.py {_FINAL} {_FINAL}", parts=_RUN),
    Fault("slimming into another kind of file", f"slim_checkpoint.py {_FINAL} slim.txt", parts=_RUN),
    Fault(
        "conversion of what is not official", f"convert_checkpoint.py {_FINAL} out.pth --model vil_tiny_rpb", parts=_RUN
    ),
    Fault("conversion of text", "convert_checkpoint.py small.yaml out.pth --model vil_tiny_rpb"),
    Fault("conversion to an unknown variant", f"convert_checkpoint.py {_FINAL} out.pth --model vil_tinny", parts=_RUN),
    # -- runs ------------------------------------------------------------------------------------------
    Fault("training over the checkpoints of another run", "train_net.py --config-file run/config.yaml", parts=_RUN),
    _tag("is empty", emptied("run/last_checkpoint")),
    _tag("is missing", removed("run/last_checkpoint")),
    _tag("is 300 characters of something", written("run/last_checkpoint", "x" * 300)),
    _tag("names what is missing", written("run/last_checkpoint", "model_0000099.pth")),
    _tag("names a file elsewhere", written("run/last_checkpoint", "../small.yaml")),
    _goes_on("the newest checkpoint breaks off", cut_off(_FINAL), _PASSED),
    _goes_on("the newest checkpoint has a flipped bit", flipped(_FINAL), _PASSED),
    Fault("no checkpoint is whole", _RESUME, _all_three(cut_off), parts=_RUN, makes=("run/log.txt",)),
    Fault("last_checkpoint names one, and there is none", _RESUME, _all_three(made_a_folder), parts=_RUN),
    Fault(
        "resuming with another optimizer",
        f"{_RESUME} SOLVER.OPTIMIZER SGD SOLVER.MAX_ITER 6",
        parts=_RUN,
    ),
    Fault(
        "resuming with other multipliers",
        f"{_RESUME} SOLVER.LR_MULTIPLIERS \"[['backbone.*', 0.1]]\" SOLVER.MAX_ITER 6",
        parts=_RUN,
    ),
    Fault(
        "resuming with frozen stages",
        f"{_RESUME} MODEL.BACKBONE.FREEZE_AT 2 SOLVER.MAX_ITER 6",
        parts=_RUN,
    ),
    _goes_on("resuming with another rate", None, "began with other learning rates", more=" SOLVER.BASE_LR 1e-5"),
    Fault(
        "resuming another variant",
        f"{_RESUME} MODEL.TRANSFORMER.NAME vil_tiny_1_1_9_1_rpb",
        parts=_RUN,
    ),
    _goes_on(
        "metrics.json breaks off in a line",
        written("run/metrics.json", '{"iteration": 1, "total_loss": 2.0}\n{"iterat'),
        "^resuming",
        more=" SOLVER.MAX_ITER 5",
    ),
    Fault("a report of no run", "report.py own"),
    Fault(
        "a report of a run whose config breaks off",
        "report.py run",
        written("run/config.yaml", "SOLVER: [1\n"),
        parts=_RUN,
        status=0,
        line="^left out: ",
        makes=("run/report.html",),
    ),
    Fault(
        "drawings of a run without results",
        "visualize_results.py --run run",
        removed("run/inference/coco_instances_results.json"),
        parts=_RUN,
    ),
)
