"""Alias of ``vil install-detectron2``."""

from vil.cli import main

if __name__ == "__main__":
    main("install-detectron2")
