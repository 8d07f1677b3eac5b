"""`python -m specserve.tools.gpu_check`: `specserve gpu-check` from a bare checkout."""

from __future__ import annotations

import sys
import time

from specserve.tools.gpu_check.requirements import advice, shortages


def main() -> int:
    """Look for the packages first, then run the command; return the process's exit code."""
    began = time.monotonic()
    if missing := shortages():
        sys.stderr.write(advice(missing) + "\n")
        return 2
    # With these come the packages that were just looked for.
    from specserve.errors import ConfigurationError
    from specserve.tools.flags import Parser
    from specserve.tools.gpu_check.command import add_arguments, run
    from specserve.tools.terminal import warn

    parser = Parser("python -m specserve.tools.gpu_check", "check exactness and speed on a GPU")
    add_arguments(parser)
    try:
        return run(parser.parse(sys.argv[1:]), began)
    except ConfigurationError as error:
        warn(f"gpu-check: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
