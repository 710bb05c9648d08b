"""The command line: arguments that the tools share, which parse without PyTorch."""
