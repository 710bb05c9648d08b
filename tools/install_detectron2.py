"""Alias of ``vil install-detectron2``. It runs in a clone in which the project is not installed."""

from vil.install_detectron2 import main

if __name__ == "__main__":
    main()
