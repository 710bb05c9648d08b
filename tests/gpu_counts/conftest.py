"""Fixture that runs a script with a CUDA runtime that computes nothing (``mock.cpp``)."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.projects_vil.helpers import ROOT

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
# CUDA's compiler has the headers, and so has Triton.
HEADERS = (*Path("/usr/local").glob("cuda-13*/include"), TORCH.parent / "triton/backends/nvidia/include")
# Functions of cuBLAS that compute
PRODUCT = re.compile("gem[mv]|dot|LtMatmul$", re.IGNORECASE)


@pytest.fixture(scope="session")
def run_on_mock(tmp_path_factory) -> Callable[..., str]:
    """Return a function that runs a script in this folder on a ``cuda:0`` that only counts, and returns its output."""
    headers = [folder for folder in HEADERS if (folder / "crt/host_defines.h").exists()]
    missing = [program for program in ("g++", "nm") if shutil.which(program) is None]
    if missing or not headers or not (torch.version.cuda or "").startswith("13."):
        pytest.skip("needs g++, nm, CUDA's headers and a torch for CUDA 13")
    build = tmp_path_factory.mktemp("mock")
    library, stubs = build / "libmock.so", build / "stubs.cpp"
    stubs.write_text("\n".join(['extern "C" int mock_launch();', *map(stub, unresolved())]))
    # PyTorch opens the driver by its name.
    options = ["-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers[0]}", "-o", library]
    subprocess.run(["g++", *options, HERE / "mock.cpp", stubs], check=True)
    environment = {"LD_PRELOAD": str(library), "MOCK_CUDA": str(library), "PYTHONPATH": str(ROOT)}
    # Triton kernels of PyTorch cannot start here.
    environment["TORCH_DISABLE_NATIVE_JIT"] = "1"

    def run(script: str, *args) -> str:
        command = [sys.executable, str(HERE / script), *map(str, args)]
        result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def unresolved() -> set[str]:
    """Return the names of the functions of CUDA and cuBLAS that torch calls."""
    names = ("torch_cuda", "c10_cuda", "torch_python", "caffe2_nvrtc")
    files = [TORCH / f"lib/lib{name}.so" for name in names]
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *files], capture_output=True, text=True, check=True)
    return set(re.findall(r" U ((?:cu[A-Z]|cuda|cublas|__cudaLaunch)\w+)", symbols.stdout))


def stub(name: str) -> str:
    """Return the source of a function that counts a launch, or does nothing. Functions in ``mock.cpp`` override it."""
    counts = PRODUCT.search(name) if name.startswith("cublas") else "Launch" in name
    return f'extern "C" __attribute__((weak)) int {name}(...) {{ return {"mock_launch()" if counts else "0"}; }}'
