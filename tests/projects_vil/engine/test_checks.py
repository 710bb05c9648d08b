"""What is found wrong with a run before it starts."""

import pytest
import torch

from backbones import InputError
from projects_vil.engine import check_setup
from tests.projects_vil.helpers import small_config


def setup_message(*overrides: str, **options) -> str:
    with pytest.raises(InputError) as caught:
        check_setup(small_config("retinanet", *overrides), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_setup_that_is_right(shapes, trained_run):
    final = str(trained_run / "model_final.pth")
    check_setup(small_config())
    check_setup(small_config("retinanet", "MODEL.WEIGHTS", final), eval_only=True)
    absent = ["MODEL.WEIGHTS", final, "DATASETS.TRAIN", "('absent',)"]
    check_setup(small_config("retinanet", *absent), eval_only=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused without a CUDA device")
def test_no_cuda_device():
    assert "MODEL.DEVICE is cuda" in setup_message("MODEL.DEVICE", "cuda")
    assert "there is no CUDA device" in setup_message("MODEL.DEVICE", "cuda:1", "SOLVER.AMP.ENABLED", "True")


def test_amp_on_the_cpu(shapes):
    assert setup_message("SOLVER.AMP.ENABLED", "True").startswith("SOLVER.AMP.ENABLED is True")


def test_another_device():
    assert setup_message("MODEL.DEVICE", "tpu") == "MODEL.DEVICE is 'tpu': it is cpu or cuda"


def test_batch_is_shared_out_evenly(shapes):
    overrides = ["SOLVER.IMS_PER_BATCH", "6"]
    assert setup_message(*overrides, processes=4) == "SOLVER.IMS_PER_BATCH is 6, no multiple of 4 processes"
    check_setup(small_config("retinanet", *overrides), processes=3)


def test_something_to_train_and_to_evaluate_on(shapes):
    neither = ["DATASETS.TRAIN", "()", "DATASETS.TEST", "()", "MODEL.WEIGHTS", __file__]
    assert setup_message(*neither) == "DATASETS.TRAIN is empty: name a dataset"
    assert setup_message(*neither, eval_only=True) == "DATASETS.TEST is empty: name a dataset"


def test_variant_is_checked_first():
    assert "did you mean 'vil_tiny_rpb'" in setup_message("MODEL.TRANSFORMER.NAME", "vil_tinny_rpb")


@pytest.mark.parametrize("key", ["TRAIN", "TEST"])
def test_datasets_are_checked_first(shapes, key):
    assert "did you mean 'shapes_val'" in setup_message(f"DATASETS.{key}", "('shapes_vall',)")


def test_weights_are_checked_first(shapes, tmp_path):
    absent = str(tmp_path / "absent.pth")
    assert setup_message("MODEL.WEIGHTS", absent) == f"there is no weights file {absent} (MODEL.WEIGHTS)"
    assert setup_message(eval_only=True).startswith("MODEL.WEIGHTS is empty")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["MODEL.FPN.NORM", "foo"], "the model cannot be built from this config: .*foo"),
        (["MODEL.META_ARCHITECTURE", "foo"], "cannot be built from this config: .*foo"),
        (["MODEL.TRANSFORMER.SHARED_PROJECTIONS", "maybe"], "shared_projections='maybe': it is True or False"),
        (["MODEL.TRANSFORMER.RANK", "[8, 8, 8, 8]"], "rank has no effect: no stage has long_short attention"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(shapes, overrides, message):
    with pytest.raises(InputError, match=message):
        check_setup(small_config("retinanet", *overrides))
