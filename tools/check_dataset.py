"""Alias of ``vil check``."""

from vil.cli import main

if __name__ == "__main__":
    main("check")
