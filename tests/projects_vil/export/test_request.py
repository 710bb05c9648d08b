"""What is asked of an export: the name of its file, and what the network computes in."""

import dataclasses

import pytest
import torch

from projects_vil.export.request import EXAMPLE_SIZE, ExportRequest
from tests.projects_vil.helpers import small_config

PLAIN = ExportRequest(
    file_format="onnx",
    precision="fp32",
    input_dtype="uint8",
    batched=False,
    fixed_detections=False,
    size=None,
    evaluate=False,
    calibration_images=None,
    accept_drop=False,
)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "model.onnx"),
        ({"file_format": "aot_inductor", "precision": "bf16"}, "model_bf16.aoti.pt2"),
        ({"precision": "int8", "evaluate": True, "calibration_images": 7}, "model_int8.onnx"),
        ({"batched": True, "precision": "fp16", "fixed_detections": True, "input_dtype": "float32", "size": (96, 130)},
         "model_batched_fp16_fixed_float32_96x130.onnx"),
    ],
)  # fmt: skip
def test_the_name_of_the_file(changes, name):
    assert dataclasses.replace(PLAIN, **changes).file_name == name


def test_int8_is_made_of_a_file_in_fp32_and_evaluated():
    for precision, computed, evaluated in (("fp16", "fp16", False), ("int8", "fp32", True)):
        request = dataclasses.replace(PLAIN, precision=precision)
        assert (request.network_precision, request.is_evaluated) == (computed, evaluated)
    assert dataclasses.replace(PLAIN, evaluate=True).is_evaluated


def test_what_is_recorded():
    example = PLAIN.example()
    assert example.shape == (3, *EXAMPLE_SIZE) and example.dtype == torch.uint8
    example = dataclasses.replace(PLAIN, batched=True, input_dtype="float32", size=(40, 72)).example()
    assert example.shape == (2, 3, 40, 72) and example.dtype == torch.float32


def test_a_fixed_number_of_detections():
    cfg = small_config("retinanet", "TEST.DETECTIONS_PER_IMAGE", "17")
    assert PLAIN.fixed_number(cfg) is None
    for changes in ({"fixed_detections": True}, {"file_format": "tensorrt"}):
        assert dataclasses.replace(PLAIN, **changes).fixed_number(cfg) == 17
