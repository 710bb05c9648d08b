"""Files for the tests of predicting."""

import pytest

from projects_vil import load_config
from projects_vil.export import export_detector


@pytest.fixture(scope="session")
def exported_run(trained_run, made_once):
    """A folder with ``model.ts`` and ``model_batched.ts``, exported from the trained detector."""

    def write(folder) -> None:
        cfg = load_config(trained_run / "config.yaml")
        for batched in (False, True):
            assert export_detector(cfg, trained_run / "model_final.pth", folder, batched=batched)[1]["ok"]

    return made_once("exported_run", write)
