"""Settings of all tests of the backbones."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: on a busy machine threads that wait for each other take four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
