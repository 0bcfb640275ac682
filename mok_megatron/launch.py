"""``python -m mok_megatron.launch SCRIPT [ARGUMENTS]``: runs a Megatron training script with MoK's flags added.

The script finds ``sys.argv``, ``sys.path[0]`` and ``__name__`` as if Python had been started with it.
"""

from __future__ import annotations

import os
import runpy
import sys


def main(argv: list[str]) -> None:
    """Patches Megatron and runs the script ``argv[0]`` with the arguments that follow.

    Raises:
        SystemExit: no script is given or it does not exist.
    """
    if not argv:
        raise SystemExit("usage: python -m mok_megatron.launch SCRIPT [ARGUMENTS]")
    script = argv[0]
    if not os.path.isfile(script):
        raise SystemExit(f"mok_megatron.launch: no such script: {script}")
    sys.argv = list(argv)
    if not sys.flags.safe_path:  # -m has put the working folder first; a script has its own there, links followed
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    import mok_megatron.autoload  # noqa: F401  - after the path is right: the script's folder may hold Megatron itself

    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
