"""What TensorRT does not document is found by operator and type."""

from pathlib import Path

import pytest

from projects_vil.export.onnx_graph.standard import inferred
from projects_vil.export.onnx_graph.tensorrt_operators import DOCUMENTED
from projects_vil.export.onnx_graph.tensorrt_operators import undocumented as undocumented_in
from tests.projects_vil.export.onnx_graph.graphs import node, saved

onnx = pytest.importorskip("onnx")
INT64 = onnx.TensorProto.INT64


def undocumented(path: Path) -> list[str]:
    return undocumented_in(inferred(path))


def constant(name: str, *numbers: int):
    return onnx.helper.make_tensor(name, INT64, [len(numbers)], numbers)


def test_what_it_documents(tmp_path):
    """Of docs/operators.md of onnx-tensorrt for TensorRT 11.0, commit 2f3fa34."""
    path = saved(tmp_path, node("Cast", "x", "a", to=INT64), node("Relu", "a", "y"), given="INT64")
    assert undocumented(path) == []
    assert (
        "INT64" not in DOCUMENTED["CumSum"] and "INT64" not in DOCUMENTED["Clip"] and "BOOL" not in DOCUMENTED["Equal"]
    )
    assert {"BOOL", "FLOAT"} <= DOCUMENTED["NonZero"] and "DOUBLE" not in DOCUMENTED["Add"]
    assert DOCUMENTED["DequantizeLinear"] == {"INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1"}
    assert DOCUMENTED["QuantizeLinear"] == DOCUMENTED["Conv"] == {"FLOAT", "FLOAT16", "BFLOAT16"}
    assert {"ConvInteger", "QLinearConv", "Unique", "Compress", "Col2Im"}.isdisjoint(DOCUMENTED)


@pytest.mark.parametrize(
    ("nodes", "types", "expected"),
    [
        ([node("Clip", "x", "y")], "INT64", ["Clip of INT64"]),
        ([node("Add", "x", "x", "y")], "DOUBLE", ["Add of DOUBLE"]),
        ([node("Shape", "x", "s"), node("Expand", "x", "s", "y")], "UINT8", ["Expand of UINT8", "Shape of UINT8"]),
        ([node("Cast", "x", "a", to=INT64), node("Cast", "a", "b", to=2), node("Cast", "b", "y", to=1)], "FLOAT",
         ["UINT8 inside of the graph"]),
        ([node("BitwiseNot", "x", "y")], "INT64", ["BitwiseNot of INT64"]),
    ],
)  # fmt: skip
def test_what_it_does_not_document(tmp_path, nodes, types, expected):
    assert undocumented(saved(tmp_path, *nodes, taken=types, given=types)) == expected


def test_the_largest_number_of_candidates(tmp_path):
    for number, expected in ((3839, 0), (3840, 1)):
        nodes = [node("Shape", "x", "s"), node("Pad", "x", "p", "a"), node("TopK", "a", "k", "v", outputs=2)]
        nodes.append(node("Expand", "x", "s", "y"))
        path = saved(tmp_path, *nodes, constants=[constant("p", 0, 4000, 0, 0), constant("k", number)])
        assert len(undocumented(path)) == expected
    assert undocumented(path)[0].startswith("TopK of 3840, above 3839")


def test_adding_while_scattering(tmp_path):
    indices = onnx.helper.make_tensor("i", INT64, [1, 1], [0])
    updates = onnx.helper.make_tensor("u", 1, [1, 4], [0.0] * 4)
    for reduction, expected in (("none", []), ("add", ["ScatterND with a reduction"])):
        path = saved(tmp_path, node("ScatterND", "x", "i", "u", "y", reduction=reduction), constants=[indices, updates])
        assert undocumented(path) == expected


@pytest.mark.parametrize(
    ("kind", "zero", "expected"),
    [
        ("INT8", 0, []),
        ("INT8", 3, [f"{name} with a zero point other than 0" for name in ("DequantizeLinear", "QuantizeLinear")]),
        ("UINT8", 0, ["DequantizeLinear of UINT8", "UINT8 inside of the graph"]),
    ],
)
def test_quantised_values(tmp_path, kind, zero, expected):
    """``y_zero_point`` and ``x_zero_point`` must be 0, and what is quantised is no UINT8, in the same page."""
    kind = onnx.TensorProto.DataType.Value(kind)
    constants = [onnx.helper.make_tensor("s", 1, [], [0.5]), onnx.helper.make_tensor("z", kind, [], [zero])]
    nodes = [node("QuantizeLinear", "x", "s", "z", "q"), node("DequantizeLinear", "q", "s", "z", "y")]
    assert undocumented(saved(tmp_path, *nodes, constants=constants)) == expected


def test_a_quantised_bias(tmp_path):
    constants = [onnx.helper.make_tensor("s", 1, [], [0.5]), onnx.helper.make_tensor("b", 6, [4], [1, 2, 3, 4])]
    nodes = [node("DequantizeLinear", "b", "s", "f"), node("Add", "x", "f", "y")]
    assert undocumented(saved(tmp_path, *nodes, constants=constants)) == ["DequantizeLinear of INT32"]
