"""Small ONNX files."""

from collections.abc import Sequence
from pathlib import Path


def saved(folder: Path, *nodes, given: str = "FLOAT", constants: Sequence = ()) -> Path:
    """A file whose graph computes ``y`` from ``x``, (n, 4) floats."""
    import onnx

    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(dtype), ["n", 4])
        for name, dtype in (("x", "FLOAT"), ("y", given))
    ]
    graph = onnx.helper.make_graph(nodes, "graph", values[:1], values[1:], constants)
    domains = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=domains, ir_version=10), folder / "model.onnx")
    return folder / "model.onnx"


def node(operator: str, *names: str, **attributes):
    """Return a node; the last name is its output."""
    import onnx

    return onnx.helper.make_node(operator, names[:-1], names[-1:], **attributes)
