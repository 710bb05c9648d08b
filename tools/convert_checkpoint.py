"""Alias of ``vil convert``."""

from vil.cli import main

if __name__ == "__main__":
    main("convert")
