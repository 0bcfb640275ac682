#!/usr/bin/env bash
# From a fresh clone: installs what the tests need and runs everything that a CPU can.
# Arguments go to pytest and choose the tests (./scripts/test.sh tests/cli -k doctor). MOK_PYTHON and MOK_VENV as in
# scripts/environment.sh.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"

make_venv test
cd "$ROOT"
if [ $# -eq 0 ]; then
    set -- tests/cpu tests/cli tests/megatron
fi
# Several processes a test, on few cores: one thread each, and no test may hang the run.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m pytest -rs --disable-warnings --timeout 300 --durations 10 "$@"
