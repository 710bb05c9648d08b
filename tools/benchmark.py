"""Alias of ``vil benchmark``."""

from vil.cli import main

if __name__ == "__main__":
    main("benchmark")
