"""Alias of ``vil export``."""

from vil.cli import main

if __name__ == "__main__":
    main("export")
