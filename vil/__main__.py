"""Run the ``vil`` command: ``python -m vil``."""

from vil.cli import main

main()
