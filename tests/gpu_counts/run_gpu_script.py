"""Run :mod:`research.benchmarks.gpu` on a GPU that only counts, with the arguments of the command line."""

import sys

import mockcuda  # noqa: F401  also in the processes that compile kernels

from research.benchmarks import gpu

if __name__ == "__main__":
    sys.exit(gpu.main())
