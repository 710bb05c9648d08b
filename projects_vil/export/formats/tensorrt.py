"""TensorRT, on an NVIDIA GPU: ``model.engine``, built from the ONNX file that :mod:`.onnx` writes.

Networks are strongly typed, which TensorRT 10 has and 11 always is: the types of the ONNX file decide what is computed,
and so do its QuantizeLinear and DequantizeLinear in int8 ("explicit quantization" in NVIDIA's documentation).
What is data-dependent (NonZero, NonMaxSuppression) stays inside; the outputs have a fixed number of rows.
"""

import functools
import importlib.util
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from backbones import InputError
from projects_vil.export.exportable.detector import ExportableDetector
from projects_vil.export.formats.format import Format, Run, damaged
from projects_vil.export.formats.onnx import ONNX, quantize_onnx
from projects_vil.export.onnx_graph.standard import inferred
from projects_vil.export.onnx_graph.tensorrt_operators import TENSORRT, undocumented
from projects_vil.export.stages import Stages
from projects_vil.modeling import SMALLEST_SIDE, largest_side

# An engine has memory for the largest batch of the largest images, and kernels chosen for detectron2's size of testing.
LARGEST_SIDE, LARGEST_BATCH = 1536, 4
OPTIMAL_SIZE = (800, 1333)
_TYPES = {"FLOAT": torch.float32, "INT64": torch.int64}


def _check() -> None:
    _check_runtime()
    ONNX.check()


def _check_runtime() -> None:
    missing = [] if torch.cuda.is_available() else ["an NVIDIA GPU that torch can use"]
    if importlib.util.find_spec("tensorrt") is None:
        missing.append("the package tensorrt (pip install tensorrt-cu12, or tensorrt-cu13 where CUDA is 13)")
    if missing:
        raise InputError(f"--format tensorrt needs what is not here: {'; '.join(missing)}")


def _built_for() -> dict[str, str]:
    _check_runtime()
    import tensorrt

    return {"TensorRT": tensorrt.__version__, "GPU": torch.cuda.get_device_name()}


def _write(exportable: ExportableDetector, example: Tensor, path: Path, stages: Stages) -> None:
    with tempfile.TemporaryDirectory() as folder:
        onnx_file = Path(folder) / "model.onnx"
        ONNX.write(exportable, example, onnx_file, stages)
        _build(exportable, onnx_file, path, stages)


def _build(exportable: ExportableDetector, onnx_file: Path, path: Path, stages: Stages) -> None:
    with stages("building", "TensorRT tries kernels for minutes"):
        engine = build_engine(onnx_file, largest=min(LARGEST_SIDE, largest_side(exportable.detector)))
    path.write_bytes(engine)


def build_engine(onnx_file: Path, *, largest: int) -> memoryview:
    """The engine of an ONNX file, in the types that the file has, for images with sides of up to ``largest`` pixels.

    Raises:
        InputError: for a file with operators that TensorRT does not document, or that it does not build.
    """
    import tensorrt

    unknown = undocumented(inferred(onnx_file))
    if unknown:
        raise InputError(f"TensorRT {TENSORRT} does not document what the ONNX file has: {'; '.join(unknown)}")
    builder = tensorrt.Builder(_logger())
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, _logger())
    if not parser.parse(onnx_file.read_bytes()):
        errors = "; ".join(parser.get_error(index).desc() for index in range(parser.num_errors))
        raise InputError(f"TensorRT {tensorrt.__version__} does not take the ONNX file: {' '.join(errors.split())}")
    config = builder.create_builder_config()
    # float32 means float32: TF32, which is on by default, has ten bits.
    config.clear_flag(tensorrt.BuilderFlag.TF32)
    image, profile = network.get_input(0), builder.create_optimization_profile()
    if -1 in tuple(image.shape):
        profile.set_shape(image.name, *_shapes(tuple(image.shape), largest))
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise InputError(f"TensorRT {tensorrt.__version__} builds no engine of the ONNX file; its log says why")
    return memoryview(engine)


def _shapes(shape: tuple[int, ...], largest: int) -> list[tuple[int, ...]]:
    """The smallest, the optimal and the largest input: (3, H, W), or (B, 3, H, W) where there are four axes.

    Args:
        shape: of the input, -1 for what may vary.
        largest: side, in pixels.
    """
    optimal = tuple(min(side, largest) for side in OPTIMAL_SIZE)
    free = [(1, 3, SMALLEST_SIDE, SMALLEST_SIDE), (1, 3, *optimal), (LARGEST_BATCH, 3, largest, largest)]
    return [
        tuple(own if side == -1 else side for own, side in zip(sizes[-len(shape) :], shape, strict=True))
        for sizes in free
    ]


def _logger():
    import tensorrt

    return tensorrt.Logger(tensorrt.Logger.ERROR)


def _load(path: Path) -> Run:
    _check_runtime()
    import tensorrt

    runtime = tensorrt.Runtime(_logger())
    with damaged(path, RuntimeError):
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise InputError(f"cannot load {path}: damaged, or built by another TensorRT or for another GPU than is here")
    context, stream = engine.create_execution_context(), torch.cuda.Stream()
    image, *names = (engine.get_tensor_name(index) for index in range(engine.num_io_tensors))

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            buffers = {image: images.cuda().contiguous()}
            context.set_input_shape(image, tuple(images.shape))
            for name in names:
                shape, dtype = tuple(context.get_tensor_shape(name)), _TYPES[engine.get_tensor_dtype(name).name]
                buffers[name] = torch.empty(shape, dtype=dtype, device="cuda")
            for name, buffer in buffers.items():
                context.set_tensor_address(name, buffer.data_ptr())
            if not context.execute_async_v3(stream.cuda_stream):
                raise RuntimeError(f"TensorRT did not run {path}; its log says why")
            found = tuple(buffers[name].cpu() for name in names)
        stream.synchronize()
        return found

    return run


TENSORRT_ENGINE = Format(
    ".engine",
    _check,
    _write,
    _load,
    sides=(SMALLEST_SIDE, LARGEST_SIDE),
    largest_batch=LARGEST_BATCH,
    needs_fixed_detections=True,
    quantize=functools.partial(quantize_onnx, symmetric=True),
    source=ONNX,
    build=_build,
    quantizing_packages=ONNX.quantizing_packages,
    built_for=_built_for,
    refused=ONNX.refused,
)
