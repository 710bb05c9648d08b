"""Small ONNX files."""

from collections.abc import Sequence
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")


def saved(folder: Path, *nodes, taken="FLOAT", given="FLOAT", functions=(), constants: Sequence = ()) -> Path:
    """A file whose graph makes ``y`` of ``x``, (n, 4)."""
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(kind), ["n", 4])
        for name, kind in (("x", taken), ("y", given))
    ]
    graph = onnx.helper.make_graph(nodes, "graph", values[:1], values[1:], constants)
    domains = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=domains, functions=functions, ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def node(operator: str, *names: str, outputs: int = 1, **attributes):
    """The last name is its output, and of more outputs the first."""
    given = [names[-1], *(f"{names[-1]}{index}" for index in range(1, outputs))]
    return onnx.helper.make_node(operator, names[:-1], given, **attributes)
