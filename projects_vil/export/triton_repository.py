"""Write an exported model into a model repository of Triton Inference Server."""

import shutil
from pathlib import Path

from backbones import ConfigError
from projects_vil.export.metadata import metadata_path
from projects_vil.utils import atomic_folder

# The server batches up to this many images of one size from concurrent requests.
_MAX_BATCH_SIZE = 8
_TYPES = {"tensor(uint8)": "TYPE_UINT8", "tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64"}


def check_triton(folder: str | Path, *, file_format: str, batched: bool, fixed_detections: bool) -> None:
    """Raise a :class:`ConfigError` if Triton cannot serve an export with these options, or ``folder`` exists."""
    if file_format != "onnx" or not batched or not fixed_detections:
        raise ConfigError("triton needs format onnx, batched and fixed_detections. Add the missing options.")
    if Path(folder).exists():
        raise ConfigError(f"triton: '{folder}' already exists. Remove it, or choose another folder.")


def write_triton_model(model: str | Path, folder: str | Path) -> None:
    """Write ``config.pbtxt``, ``1/model.onnx`` and its metadata into a new folder.

    Triton serves the model by the name of the folder. The config is text of
    ``model_config.proto`` in https://github.com/triton-inference-server/common.

    Args:
        model: An ONNX file with a batched input and a fixed number of detections.
        folder: The folder of the model in the model repository.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    lines = ['backend: "onnxruntime"', f"max_batch_size: {_MAX_BATCH_SIZE}", "dynamic_batching { }"]
    for kind, tensors in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for tensor in tensors:
            # Triton omits the batch dimension. It has no scalars: the count of an image is [ 1 ], reshaped.
            sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in tensor.shape[1:])
            dims = f"dims: [ {sizes} ]" if sizes else "dims: [ 1 ] reshape: { }"
            lines.append(f'{kind} {{ name: "{tensor.name}" data_type: {_TYPES[tensor.type]} {dims} }}')
    with atomic_folder(Path(folder).parent) as unfinished:
        new = unfinished / "model"
        (new / "1").mkdir(parents=True)
        (new / "config.pbtxt").write_text("\n".join(lines) + "\n")
        shutil.copyfile(model, new / "1/model.onnx")
        shutil.copyfile(metadata_path(model), metadata_path(new / "1/model.onnx"))
        new.rename(folder)
