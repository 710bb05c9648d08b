"""Fixtures of the tests of attention."""

import pytest

from backbones.attention import triton_chunks, triton_dense
from tests.backbones.attention.triton_cases import interpreted_kernels


@pytest.fixture
def interpreter(monkeypatch):
    """The kernels are interpreted, and triton is left as it was found, so that other tests can compile."""
    # The interpreter of 3.2 has no products of float64, and fails with numpy 2.
    pytest.importorskip("triton", minversion="3.3", reason="triton 3.3 or later is not installed")
    import triton.language as tl
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    # Triton reads it when a kernel is defined, and while it runs.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_chunks, "_kernels", interpreted_kernels)
    monkeypatch.setattr(triton_dense, "_kernels", lambda: interpreted_kernels("triton_dense_kernels"))
    # The interpreter does not undo all that it patches there.
    patched = [tl, tl.core, tl.math, tl.tensor, getattr(tl.core, "tensor_descriptor_base", tl.tensor)]
    found = [dict(vars(scope)) for scope in patched]
    for name, function in found[0].items():
        if isinstance(function, JITFunction):
            setattr(tl, name, InterpretedFunction(function.fn))
    yield
    for scope, names in zip(patched, found, strict=True):
        for name, value in list(vars(scope).items()):
            if name not in names:
                delattr(scope, name)
            elif names[name] is not value:
                setattr(scope, name, names[name])
