"""How every tool starts, and how it ends on a user's mistake."""

import sys
from collections.abc import Callable

from backbones.errors import InputError


def run_tool(main: Callable[[], None]) -> None:
    """Call ``main``; an :class:`InputError` becomes one line on stderr and exit status 1."""
    try:
        main()
    except InputError as error:
        # A data loader's worker puts its traceback before the message.
        print(f"error: {str(error).strip().splitlines()[-1].removeprefix('backbones.errors.InputError: ')}", file=sys.stderr)
        sys.exit(1)
