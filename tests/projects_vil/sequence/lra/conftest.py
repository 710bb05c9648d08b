"""What the tests of the Long Range Arena share."""

import dataclasses

import pytest
import torch

from projects_vil.sequence.lra import ListOpsRules, Settings, generate_listops, settings_of


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny():
    """Short ListOps that can be learned by heart."""
    return generate_listops(ListOpsRules(4, 20), num_train=16, num_dev=12, num_test=14)


@pytest.fixture
def quick() -> Settings:
    """A small model for a few steps."""
    settings = settings_of("listops").with_sizes(dim=16, hidden_dim=32, depth=1, max_length=32, window_size=4)
    changes = {"batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 2, "steps": 20, "eval_every": 8}
    return dataclasses.replace(settings, **changes)
