"""Weights and runs to go on with."""

import math
from collections.abc import Callable

from tests.faults.fault import Fault, Spoil
from tests.faults.spoiling import all_of, cut_off, emptied, flipped, made_a_folder, removed, stored, written

_TRAIN = "train_net.py --config-file small.yaml"
_FROM = f"{_TRAIN} MODEL.WEIGHTS"
_RESUME = "train_net.py --config-file run/config.yaml --resume"
_JUDGE = "train_net.py --config-file run/config.yaml --eval-only MODEL.WEIGHTS run/model_final.pth"
_PREDICT = "predict.py --config-file run/config.yaml --weights run/model_final.pth --input photos --output out"
_EXPORT = "export_model.py --config-file run/config.yaml --weights run/model_final.pth --output out"
_FINAL = "run/model_final.pth"
_RUN = ("run",)
# What a finished run that goes on writes again; the checkpoints before are not among it.
_ENDED = tuple(
    f"run/{name}"
    for name in ("log.txt", "config.yaml", "metrics.json", "evaluation.json", "last_checkpoint", "model_final.pth")
) + ("run/events.*", "run/inference/*", "run/model_best.pth")


def _not_finite(contents: dict) -> None:
    contents["model"]["head.cls_score.bias"][0] = math.nan


def _without_a_layer(contents: dict) -> None:
    for name in [name for name in contents["model"] if name.startswith("head.")]:
        del contents["model"][name]


def _all_three(spoil: Callable[[str], Spoil]) -> Spoil:
    """The checkpoints of the run."""
    return all_of(spoil(_FINAL), spoil("run/model_0000003.pth"), spoil("run/model_0000001.pth"))


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
    Fault("evaluation without weights", f"{_TRAIN} --eval-only"),
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
    Fault(
        "last_checkpoint is empty",
        _RESUME,
        emptied("run/last_checkpoint"),
        parts=_RUN,
        status=0,
        line="last_checkpoint",
        makes=_ENDED,
    ),
    Fault(
        "last_checkpoint is missing",
        _RESUME,
        removed("run/last_checkpoint"),
        parts=_RUN,
        status=0,
        line="last_checkpoint",
        makes=_ENDED,
    ),
    Fault(
        "last_checkpoint is 300 characters of something",
        _RESUME,
        written("run/last_checkpoint", "x" * 300),
        parts=_RUN,
        status=0,
        line="last_checkpoint",
        makes=_ENDED,
    ),
    Fault(
        "last_checkpoint names what is missing",
        _RESUME,
        written("run/last_checkpoint", "model_0000099.pth"),
        parts=_RUN,
        status=0,
        line="last_checkpoint",
        makes=_ENDED,
    ),
    Fault(
        "last_checkpoint names a file elsewhere",
        _RESUME,
        written("run/last_checkpoint", "../small.yaml"),
        parts=_RUN,
        status=0,
        line="last_checkpoint",
        makes=_ENDED,
    ),
    Fault(
        "the newest checkpoint breaks off",
        _RESUME,
        cut_off(_FINAL),
        parts=_RUN,
        status=0,
        line="^passed over: run/model_final.pth",
        makes=_ENDED,
    ),
    Fault(
        "the newest checkpoint has a flipped bit",
        _RESUME,
        flipped(_FINAL),
        parts=_RUN,
        status=0,
        line="^passed over: run/model_final.pth",
        makes=_ENDED,
    ),
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
    Fault(
        "resuming with another rate",
        f"{_RESUME} SOLVER.BASE_LR 1e-5",
        parts=_RUN,
        status=0,
        line="began with other learning rates",
        makes=_ENDED,
    ),
    Fault(
        "resuming another variant",
        f"{_RESUME} MODEL.TRANSFORMER.NAME vil_tiny_1_1_9_1_rpb",
        parts=_RUN,
    ),
    Fault(
        "metrics.json breaks off in a line",
        _RESUME + " SOLVER.MAX_ITER 5",
        written("run/metrics.json", '{"iteration": 1, "total_loss": 2.0}\n{"iterat'),
        parts=_RUN,
        status=0,
        line="^resuming",
        makes=_ENDED,
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
