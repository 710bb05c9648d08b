"""Alias of ``vil predict``."""

from vil.cli import main

if __name__ == "__main__":
    main("predict")
