"""Entry point of `python -m layerswap` and the script; Ctrl-C works while modules load."""

import os
import signal
from functools import partial


def _stop(*_: object) -> None:
    """End at once: an exception would be a traceback, or lost in a finaliser of a module."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the `layerswap` command."""
    first = signal.getsignal(signal.SIGINT)
    if first is signal.default_int_handler:  # not in a background job, which ignores it
        signal.signal(signal.SIGINT, _stop)
    from layerswap.cli import main as run

    run(partial(signal.signal, signal.SIGINT, first))


if __name__ == "__main__":
    main()
