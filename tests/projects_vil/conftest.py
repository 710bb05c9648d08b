"""What is the same in all of these tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """On models as small as these, several wait for each other, and for long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
