"""Keys that were typed and would have no effect."""

import pytest

from backbones import InputError
from projects_vil.config import check_typed_keys
from tests.projects_vil.helpers import small_config

AUGMENTATION, AVERAGE = "INPUT.AUGMENTATION", "MODEL.EMA.ENABLED"


@pytest.mark.parametrize(
    "other, value, key, way_out",
    [
        (AUGMENTATION, "lsj", "INPUT.MIN_SIZE_TRAIN", "default"),
        (AUGMENTATION, "strong", "INPUT.MIN_SIZE_TRAIN_SAMPLING", "default"),
        (AUGMENTATION, "lsj", "INPUT.MAX_SIZE_TRAIN", "default"),
        (AUGMENTATION, "lsj", "INPUT.COPY_PASTE.PROBABILITY", "strong"),
        (AUGMENTATION, "strong", "INPUT.PHOTOMETRIC_DISTORTION", "default or lsj"),
        (AUGMENTATION, "lsj", "INPUT.MASK_FORMAT", "default"),
        (AUGMENTATION, "default", "INPUT.LSJ.SIZE", "lsj or strong"),
        (AVERAGE, "False", "MODEL.EMA.DECAY", "True"),
    ],
)
def test_a_key_that_was_typed_and_has_no_effect(other, value, key, way_out):
    cfg = small_config("retinanet", other, value)
    with pytest.raises(InputError) as caught:
        check_typed_keys(cfg, [other, value, key, "64"])
    assert str(caught.value) == f"{key} has no effect with {other} {value}: leave it out, or add {other} {way_out}"
    check_typed_keys(cfg, [other, value, "SOLVER.MAX_ITER", "5"])


def test_a_key_that_was_typed_and_has_one():
    typed = ["MODEL.EMA.DECAY", "0.5", AVERAGE, "True", "INPUT.MIN_SIZE_TRAIN", "(64,)"]
    check_typed_keys(small_config("retinanet", *typed), typed)
