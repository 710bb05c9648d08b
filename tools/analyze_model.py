"""Alias of ``vil analyze``."""

from vil.cli import main

if __name__ == "__main__":
    main("analyze")
