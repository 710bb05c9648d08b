"""What every provider of ONNX can be asked for: a file of the standard operators alone, valid to its last shape."""

from collections import Counter
from pathlib import Path

from backbones import InputError


def inferred(path: Path):
    """A file's ``onnx.ModelProto``, checked, with the type and shape of each value.

    Raises:
        InputError: for operators that are not of ONNX's own domain, and where ``onnx.checker`` or strict inference of
            shapes finds a mistake.
    """
    import onnx

    model = onnx.load(path)
    other = sorted({f"{node.domain}.{node.op_type}" for node in model.graph.node if node.domain not in ("", "ai.onnx")})
    other += sorted(f"{function.domain}.{function.name}" for function in model.functions)
    if other:
        raise InputError(f"{path.name} has operators that are not of ONNX's standard set: {', '.join(other)}")
    try:
        onnx.checker.check_model(model, full_check=True)
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise InputError(f"{path.name} is no valid ONNX: {' '.join(str(error).split())}") from error


def describe_onnx(model, path: Path) -> dict:
    """What is in an ONNX file, for the report of an export.

    Args:
        model: what :func:`inferred` gives of it.
        path: the file.

    Returns:
        ``operators`` and ``types`` (of values, as ONNX names them), each with how many there are, the most frequent
        first; ``providers`` of onnxruntime here that the file loads with.
    """
    import onnx

    types = Counter(onnx.TensorProto.DataType.Name(number) for number in types_of(model.graph).values())
    return {
        "operators": dict(Counter(node.op_type for node in model.graph.node).most_common()),
        "types": dict(types.most_common()),
        "providers": _providers(path),
    }


def types_of(graph) -> dict[str, int]:
    """The element type of each value of an ``onnx.GraphProto`` whose shapes are inferred, by name."""
    values = (*graph.input, *graph.output, *graph.value_info)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _providers(path: Path) -> list[str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    sessions = {
        name: onnxruntime.InferenceSession(str(path), options, providers=[name])
        for name in onnxruntime.get_available_providers()
    }
    return [name for name, session in sessions.items() if name in session.get_providers()]
