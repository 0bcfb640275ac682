#!/usr/bin/env bash
# From a fresh clone to a trained MoE model: makes .venv, installs mok_megatron and Megatron-Core, runs the demo.
# Arguments go to `mok-megatron demo` (./scripts/quickstart.sh --steps 20). MOK_PYTHON names another interpreter.
# Exit code: the demo's (0: MoK agrees with AllToAll), 2 for a wrong argument.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"

make_venv demo
"$VENV/bin/mok-megatron" demo "$@"
