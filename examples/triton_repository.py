"""Write an exported ONNX file into a model repository of Triton Inference Server.

Export with --format onnx --batched --fixed-detections. Triton serves the model by the name of the folder. It batches up
to 8 requests with images of one size.

Example:
    python examples/triton_repository.py output/mine/export/model_batched_fixed.onnx models/shapes
    tritonserver --model-repository models
"""

import json
import shutil
from pathlib import Path

from backbones import ConfigError
from projects_vil.export import ExportedModel, metadata_path
from projects_vil.files import atomic_folder
from vil.arguments import ToolParser, existing_path, local_path, run_tool

_MAX_BATCH_SIZE = 8
_TYPES = {"uint8": "TYPE_UINT8", "float32": "TYPE_FP32", "int64": "TYPE_INT64"}


def triton_config(metadata: dict) -> str:
    """Return the ``config.pbtxt`` of an exported model.

    The text is in the format of ``model_config.proto`` in https://github.com/triton-inference-server/common.

    Args:
        metadata: The metadata of a model with a batched input and a fixed number of detections.
    """
    lines = ['backend: "onnxruntime"', f"max_batch_size: {_MAX_BATCH_SIZE}", "dynamic_batching { }"]
    for kind, tensors in (("input", [metadata["input"]]), ("output", metadata["outputs"])):
        for tensor in tensors:
            # Triton omits the batch dimension. It has no scalars: the count of an image is [ 1 ], reshaped.
            sizes = ", ".join(str(size) if isinstance(size, int) else "-1" for size in tensor["shape"][1:])
            dims = f"dims: [ {sizes} ]" if sizes else "dims: [ 1 ] reshape: { }"
            lines.append(f'{kind} {{ name: "{tensor["name"]}" data_type: {_TYPES[tensor["dtype"]]} {dims} }}')
    return "\n".join(lines) + "\n"


def write_triton_model(model: str | Path, folder: str | Path) -> None:
    """Write ``config.pbtxt``, ``1/model.onnx`` and its metadata into a new folder of a model repository.

    Args:
        model: An ONNX file with a batched input and a fixed number of detections.
        folder: The folder of the model in the model repository.

    Raises:
        ConfigError: If Triton cannot serve the model, or the folder exists.
    """
    if Path(folder).exists():
        raise ConfigError(f"Folder '{folder}' already exists. Remove it, or choose another folder.")
    metadata = ExportedModel(model).metadata
    if metadata["format"] != "onnx" or not metadata["input"]["batched"] or not metadata["fixed_detections"]:
        needed = "an ONNX file with batches and a fixed number of detections"
        raise ConfigError(f"'{model}' is not {needed}. Export with --format onnx --batched --fixed-detections.")
    with atomic_folder(Path(folder).parent) as unfinished:
        new = unfinished / "model"
        (new / "1").mkdir(parents=True)
        (new / "config.pbtxt").write_text(triton_config(metadata))
        shutil.copyfile(model, new / "1/model.onnx")
        metadata_path(new / "1/model.onnx").write_text(json.dumps(metadata, indent=2))
        new.rename(folder)


def main() -> None:
    parser = ToolParser(__doc__)
    parser.add_argument("model", type=existing_path, metavar="MODEL", help="ONNX file from vil export")
    parser.add_argument("folder", type=local_path, metavar="REPOSITORY/NAME", help="new folder for the model")
    args = parser.parse_args()
    write_triton_model(args.model, args.folder)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    run_tool(main)
