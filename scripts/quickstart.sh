#!/usr/bin/env bash
# From a fresh clone to a trained MoE model: makes .venv, installs mok_megatron and Megatron-Core, runs the demo.
# Arguments go to `mok-megatron demo` (./scripts/quickstart.sh --steps 20). MOK_PYTHON names another interpreter.
# Exit code: 0 MoK agrees with AllToAll, 1 it does not, 2 a wrong argument, 3 no answer: the installation, the training or its report failed.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"

make_venv demo
"$VENV/bin/mok-megatron" demo "$@"
