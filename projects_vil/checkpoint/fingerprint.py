"""What tells one trained model from another: its tensors, and what its config does with them in testing."""

import json

from detectron2.config import CfgNode
from torch import nn

from backbones.utils.files import digest_of_tensors

_OF_THE_PLACE = ("WEIGHTS", "DEVICE")


def fingerprint(cfg: CfgNode, model: nn.Module) -> str:
    """SHA-256 of a model's tensors and of what in its config changes its answers, whatever file it came from.

    An evaluation and a report of parity name it, so that they are never taken for those of other weights, or of the
    same ones with another threshold or another size of images.
    """
    test = {key: cfg.INPUT[key] for key in ("FORMAT", "MIN_SIZE_TEST", "MAX_SIZE_TEST")}
    test["DETECTIONS_PER_IMAGE"] = cfg.TEST.DETECTIONS_PER_IMAGE
    of_model = {key: value for key, value in cfg.MODEL.items() if key not in _OF_THE_PLACE}
    return digest_of_tensors(model.state_dict(), json.dumps([of_model, test], sort_keys=True))
