"""The program of examples/cpp finds the detections of the detector."""

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from projects_vil import Detector
from projects_vil.export import example_image
from tests.projects_vil.helpers import ROOT

SOURCE = ROOT / "examples/cpp/detect.cpp"


@pytest.mark.slow
def test_the_program_finds_the_detections_of_the_detector(file_of, tmp_path):
    pytest.importorskip("openvino")
    model, photo = file_of("retinanet", "openvino"), tmp_path / "photo.jpg"
    # The commands of the file's first comment
    lines = re.findall(r"^//   (.*)", SOURCE.read_text(), re.MULTILINE)[2:4]
    script = "\n".join(lines).replace("examples/cpp/detect.cpp", shlex.quote(str(SOURCE)))
    script = script.replace("$(python ", f"$({shlex.quote(sys.executable)} ")
    built = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    if "jpeglib.h: No such file" in built.stderr or "g++: command not found" in built.stderr:
        pytest.skip("needs g++ and the headers of libjpeg")
    assert built.returncode == 0, built.stderr
    Image.fromarray(example_image(701, 480, seed=4).permute(1, 2, 0).numpy()).save(photo, quality=95)
    found = Detector.load(model)(photo)
    threshold = float(np.median(found.scores)) + 1e-3

    def run(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(list(map(str, [tmp_path / "detect", *arguments])), capture_output=True, text=True)

    rows = [line.split("\t") for line in run(model, photo, threshold).stdout.splitlines()]
    count = (found.scores >= threshold).sum()
    assert [row[0] for row in rows] == list(found.names[:count]) and 2 <= count < len(found)
    numbers = np.array([row[1:] for row in rows], float)
    assert numbers[:, 0] == pytest.approx(found.scores[:count], abs=1e-4)
    assert numbers[:, 1:] == pytest.approx(found.boxes[:count], abs=0.01)
    assert "no object" in run(model, photo, 1.0).stderr
    damaged = tmp_path / "damaged.jpg"
    damaged.write_bytes(b"no photo")
    for arguments, named in (
        ((model, damaged), "Cannot read the photo: Not a JPEG file"),
        ((model, "absent.jpg"), "'absent.jpg'"),
        (("absent.xml", photo), "'absent.xml'"),
        ((model, photo, "high"), "'high' is not a number"),
    ):
        result = run(*arguments)
        assert result.returncode == 1 and result.stderr.startswith("error: ") and named in result.stderr
