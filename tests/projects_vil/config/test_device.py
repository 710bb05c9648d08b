"""The device of a config, and the attention that runs there."""

import logging

import pytest
import torch

from backbones import InputError
from projects_vil.config import check_device
from projects_vil.config.device import choose_device
from tests.projects_vil.helpers import small_config

TRITON = ["MODEL.TRANSFORMER.ATTENTION_BACKEND", "triton"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what becomes of a GPU's config without one")
def test_a_config_of_a_gpu_on_a_cpu(caplog):
    """As a run's config.yaml is, where it is exported or predicted with."""
    cfg = small_config("retinanet", *TRITON, "MODEL.DEVICE", "cuda")
    caplog.set_level(logging.INFO)
    for kinds in (("cpu",), ("cpu", "cuda")):
        caplog.clear()
        found = choose_device(cfg, kinds=kinds)
        assert (found.MODEL.DEVICE, found.MODEL.TRANSFORMER.ATTENTION_BACKEND) == ("cpu", "auto")
        assert not check_device(found)
        assert "attention by auto: triton, as the config has it, does not run on cpu" in caplog.messages
    assert cfg.MODEL.TRANSFORMER.ATTENTION_BACKEND == "triton"


def test_a_cpu_that_is_asked_for_has_no_triton():
    with pytest.raises(InputError) as caught:
        check_device(small_config("retinanet", *TRITON, "MODEL.DEVICE", "cpu"))
    assert str(caught.value) == (
        "MODEL.TRANSFORMER.ATTENTION_BACKEND is triton, which needs a CUDA device, not 'cpu' (MODEL.DEVICE): take auto"
    )
