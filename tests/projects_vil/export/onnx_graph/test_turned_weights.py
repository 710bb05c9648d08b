"""Weights behind a Transpose become weights, and the file gives the same."""

import numpy as np
import pytest
import torch

from projects_vil.export.formats import load_model
from projects_vil.export.onnx_graph.turned_weights import turn_weights
from tests.projects_vil.export.onnx_graph.graphs import node, saved

onnx = pytest.importorskip("onnx")


def test_weights_behind_a_transpose(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    constants = [onnx.numpy_helper.from_array(values, name) for name in ("a.weight", "b.weight")]
    nodes = [
        node("Transpose", "a.weight", "t", perm=[1, 0]),
        # Used twice, which the exporter's optimiser leaves; and a weight that is used as it is too.
        *(node("MatMul", "x", "t", "c"), node("MatMul", "c", "t", "d")),
        *(node("Transpose", "b.weight", "u"), node("MatMul", "d", "u", "e"), node("MatMul", "e", "b.weight", "f")),
        # Of a value, and not of a weight.
        *(
            node("Transpose", "x", "v", perm=[1, 0]),
            node("Transpose", "v", "w", perm=[1, 0]),
            node("Add", "w", "f", "y"),
        ),
    ]
    path, image = saved(tmp_path, *nodes, constants=constants), torch.rand(3, 4)
    (expected,) = load_model(path)(image)
    model = onnx.load(path)
    turn_weights(model.graph)
    assert {tensor.name for tensor in model.graph.initializer} == {"a.weight.t", "b.weight", "b.weight.u"}
    assert [one.op_type for one in model.graph.node] == ["MatMul"] * 4 + ["Transpose"] * 2 + ["Add"]
    onnx.save(model, path)
    torch.testing.assert_close(load_model(path)(image)[0], expected)


def test_a_graph_with_branches_is_refused():
    """What only a branch uses would be taken for unused."""
    branch = onnx.helper.make_graph([node("Identity", "weight", "y")], "branch", [], [])
    choice = onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    weight = onnx.numpy_helper.from_array(np.zeros(2, np.float32), "weight")
    with pytest.raises(NotImplementedError, match="branches"):
        turn_weights(onnx.helper.make_graph([choice], "graph", [], [], [weight]))
