"""Whether TensorRT documents what an ONNX file has in it."""

from collections.abc import Iterator, Mapping

from projects_vil.export.onnx_graph.standard import types_of

# Source: docs/operators.md of github.com/onnx/onnx-tensorrt, commit 2f3fa34, and for the types of NonZero, which also
# takes BOOL, the API's page of INonZeroLayer.
TENSORRT = "11.0"
LARGEST_TOP_K = 3839
_FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16"}
_NUMBERS = _FLOATS | {"INT32", "INT64"}
_ALL = _NUMBERS | {"BOOL"}
# By the types of the values that they compute: those that exports have, and their near relatives.
_NAMES = (
    (
        _FLOATS,
        "AveragePool BatchNormalization Ceil Clip Conv ConvTranspose Cos CumSum Einsum Elu Erf Exp Floor Gemm "
        "GlobalAveragePool GroupNormalization HardSigmoid HardSwish InstanceNormalization IsInf LayerNormalization "
        "LeakyRelu Log LogSoftmax MatMul MaxPool PRelu QuantizeLinear Reciprocal Resize Round Sigmoid Sin Softmax "
        "Softplus Sqrt Tanh",
    ),
    (_FLOATS - {"BFLOAT16"}, "DeformConv GridSample Mish NonMaxSuppression RoiAlign"),
    (_FLOATS - {"BFLOAT16"} | {"BOOL"}, "NonZero"),
    (
        _NUMBERS,
        "Abs Add ArgMax ArgMin Div Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Max Mean Min Mod Mul Neg Pad "
        "Pow Range ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu ScatterElements "
        "ScatterND Sign Sub Sum TopK",
    ),
    (_NUMBERS | {"INT8"}, "Gelu"),
    (
        _ALL,
        "Concat Constant ConstantOfShape Expand Flatten Gather GatherElements GatherND Identity If OneHot Reshape "
        "Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where",
    ),
    (_ALL | {"UINT8"}, "Cast CastLike"),
    ({"BOOL"}, "And Not Or Xor"),
    ({"INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1"}, "DequantizeLinear"),
)
DOCUMENTED = {name: types for types, names in _NAMES for name in names.split()}
# Where the first input is not what an operator computes on: the place of one that is, or None for its output.
_VALUE = {"Where": 1, "Constant": None, "ConstantOfShape": None}


def undocumented(model) -> list[str]:
    """What of an ONNX file TensorRT ``TENSORRT`` does not document, as text: operators, with their types, and TopK's K.

    Args:
        model: what :func:`.standard.inferred` gives of it.
    """
    import onnx

    graph = model.graph
    types = {name: onnx.TensorProto.DataType.Name(number) for name, number in types_of(graph).items()}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    found = set()
    for node in graph.node:
        place = _VALUE.get(node.op_type, 0)
        kind = types.get(node.output[0] if place is None else node.input[place], "an unknown type")
        if kind not in DOCUMENTED.get(node.op_type, ()):
            found.add(f"{node.op_type} of {kind}")
        found.update(_restrictions(node, constants))
    # As images come in, or something goes out, and nowhere else.
    inside = {name for node in graph.node for name in node.output} - {value.name for value in graph.output}
    if any(types.get(name) == "UINT8" for name in inside):
        found.add("UINT8 inside of the graph")
    return sorted(found)


def _restrictions(node, constants: Mapping) -> Iterator[str]:
    """What a node has beyond its type that is documented as not supported; ``constants`` are tensors by name."""
    import onnx

    if node.op_type == "TopK" and node.input[1] in constants:
        number = int(onnx.numpy_helper.to_array(constants[node.input[1]]).item())
        if number > LARGEST_TOP_K:
            yield f"TopK of {number}, above {LARGEST_TOP_K} (MODEL.RPN.PRE_NMS_TOPK_TEST and its like)"
    if node.op_type == "ScatterND" and any(attribute.s not in (b"", b"none") for attribute in node.attribute):
        yield "ScatterND with a reduction"
    # A third input that is not there is a 0.
    if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) == 3:
        zero = constants.get(node.input[2])
        if zero is None or onnx.numpy_helper.to_array(zero).any():
            yield f"{node.op_type} with a zero point other than 0"
