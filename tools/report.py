"""Alias of ``vil report``."""

from vil.cli import main

if __name__ == "__main__":
    main("report")
