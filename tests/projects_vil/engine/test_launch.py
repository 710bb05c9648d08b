"""How many processes train, checked before any starts."""

import pytest

from backbones import InputError
from projects_vil.engine import train_from_command_line, training_parser
from tests.projects_vil.helpers import CONFIGS


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--num-gpus 0", "--num-gpus is 0: it is 1 or more, one process each; to train without a GPU leave it out"),
        ("--num-gpus -1", "--num-gpus is -1: it is 1 or more"),
        ("--num-gpus 99", "--num-gpus is 99, and there are "),
        ("--num-machines 0", "--num-machines is 0: it is 1 or more"),
        ("--num-machines 2 --machine-rank 5", "--machine-rank is 5: of 2 machines it is 0 to 1"),
        ("--num-machines 2 --machine-rank -1", "--machine-rank is -1: of 2 machines it is 0 to 1"),
    ],
)
def test_processes_that_cannot_be(shapes, tmp_path, arguments, message):
    output = tmp_path / "run"
    command = ["--config-file", str(CONFIGS["retinanet"]), "OUTPUT_DIR", str(output), *arguments.split()]
    with pytest.raises(InputError) as caught:
        train_from_command_line(training_parser("Train.").parse_args(command))
    assert str(caught.value).startswith(message) and not output.exists()
