"""Helpers of the tests of exported backbones: an exported program, and a session of onnxruntime."""

import io

import numpy as np
import pytest
import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

# Height and width: square, portrait and landscape; maps smaller than a window, and sizes that no stride divides.
SIZES = ((32, 32), (64, 64), (32, 160), (160, 96), (96, 352), (416, 64), (45, 70), (131, 57))


def export_backbone(model: nn.Module, example: Tensor) -> ExportedProgram:
    """``model`` by ``torch.export``, for any batch, height and width from 32 to 1344.

    A guard that does not hold for all of them is an error of the export.

    Args:
        model: in eval mode.
        example: (B, 3, H, W) with B of 2 or more: a size of 1 is taken to be always 1.
    """
    dynamic = {0: Dim("batch", min=1), 2: Dim("height", min=32, max=1344), 3: Dim("width", min=32, max=1344)}
    with torch.no_grad(), symbolic_config.patch(backed_size_oblivious=True):
        return torch.export.export(model, (example,), dynamic_shapes=(dynamic,), strict=False)


class OnnxSession:
    """A backbone's program in onnxruntime on the CPU: images (B, 3, H, W) in, the maps of the backbone out.

    Skips the test where a package that it needs is missing.
    """

    def __init__(self, program: ExportedProgram) -> None:
        reason = "ONNX files are written with onnx and onnxscript, and run with onnxruntime"
        for package in ("onnx", "onnxscript"):
            pytest.importorskip(package, reason=reason)
        onnxruntime = pytest.importorskip("onnxruntime", reason=reason)
        with torch.no_grad(), symbolic_config.patch(backed_size_oblivious=True):
            self.program = torch.onnx.export(program, dynamo=True, optimize=True, verbose=False)
        file = io.BytesIO()
        self.program.save(file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
        self.names = [spec.name for spec in self.session.get_outputs()]

    def __call__(self, images: Tensor) -> list[Tensor]:
        """The maps in the order of the backbone's outputs."""
        [name] = [spec.name for spec in self.session.get_inputs()]
        outputs = self.session.run(None, {name: np.asarray(images)})
        return [torch.from_numpy(output) for output in outputs]
