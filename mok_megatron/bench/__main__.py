"""``python -m mok_megatron.bench``."""

import sys

from mok_megatron.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
