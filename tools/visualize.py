"""Alias of ``vil visualize``."""

from vil.cli import main

if __name__ == "__main__":
    main("visualize")
