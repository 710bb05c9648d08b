"""What an ONNX file is checked for: operators of the standard set, and types and shapes that agree."""

import pytest

from projects_vil.export.onnx_graph.standard import describe_onnx, inferred
from tests.projects_vil.export.exporting import mistake
from tests.projects_vil.export.onnx_graph.graphs import node, saved

onnx = pytest.importorskip("onnx")


def test_what_is_in_a_file(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    nodes = node("Relu", "x", "a"), node("Relu", "a", "b"), node("Cast", "b", "y", to=onnx.TensorProto.INT64)
    path = saved(tmp_path, *nodes, given="INT64")
    found = describe_onnx(inferred(path), path)
    assert found["operators"] == {"Relu": 2, "Cast": 1} and list(found["operators"]) == ["Relu", "Cast"]
    assert found["types"] == {"FLOAT": 3, "INT64": 1}
    assert found["providers"] == onnxruntime.get_available_providers() and "CPUExecutionProvider" in found["providers"]


def test_an_operator_of_another_domain(tmp_path):
    path = saved(tmp_path, node("Gelu", "x", "y", domain="com.microsoft"), node("Relu", "x", "z"))
    text = mistake(inferred, path)
    assert text == "model.onnx has operators that are not of ONNX's standard set: com.microsoft.Gelu"


def test_a_function_of_a_file(tmp_path):
    own = onnx.helper.make_function(
        "mine", "twice", ["a"], ["b"], [node("Add", "a", "a", "b")], [onnx.helper.make_opsetid("", 20)]
    )
    path = saved(tmp_path, node("Relu", "x", "y"), functions=[own])
    assert mistake(inferred, path).endswith("not of ONNX's standard set: mine.twice")


@pytest.mark.parametrize(
    "make",
    [
        lambda: (node("NoSuchOperator", "x", "y"),),
        lambda: (node("Relu", "absent", "y"),),
        # Which only inference of shapes finds: there are no three axes, and y is no int64.
        lambda: (node("Transpose", "x", "y", perm=[0, 2, 1]),),
        lambda: (node("Cast", "x", "y", to=onnx.TensorProto.INT64),),
    ],
)
def test_a_file_that_is_not_valid(tmp_path, make):
    assert mistake(inferred, saved(tmp_path, *make())).startswith("model.onnx is no valid ONNX: ")
