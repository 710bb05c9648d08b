"""Files for the tests of predicting."""

import pytest

from tests.projects_vil.inference.helpers import picture, save


@pytest.fixture
def files(tmp_path):
    """An image in a folder, and a file that stands for weights."""
    save(tmp_path / "in/a.png", picture(40, 60))
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.pth").write_text("")
    return tmp_path
