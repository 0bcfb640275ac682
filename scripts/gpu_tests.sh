#!/usr/bin/env bash
# Tests that need a Hopper GPU: ./scripts/gpu_tests.sh [forward|backward|megatron|all] [pytest arguments]
# Builds the kernels in place where the library has none, runs tests/gpu (what needs two GPUs is skipped with one), then small passes under
# compute-sanitizer where that is installed. MOK_PYTHON: the interpreter that has torch; default: .venv's, else python3.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
python=${MOK_PYTHON:-python3}
[ -n "${MOK_PYTHON:-}" ] || [ ! -x "$ROOT/.venv/bin/python" ] || python=$ROOT/.venv/bin/python
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

what=${1:-all}
[ $# -eq 0 ] || shift
case "$what" in
forward) tests=(tests/gpu/test_schedule.py tests/gpu/test_forward.py tests/gpu/test_functional.py) ;;
backward) tests=(tests/gpu/test_backward.py tests/gpu/test_functional_backward.py) ;;
megatron) tests=(tests/gpu/test_megatron_*.py) ;;
all) tests=(tests/gpu) ;;
*)
    echo "gpu_tests.sh: '$what' is not a group of tests; there are: forward, backward, megatron, all" >&2
    exit 2
    ;;
esac

if ! nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null; then
    echo "no NVIDIA GPU here: the tests are skipped"
    exec "$python" -m pytest -rs "${tests[@]}" "$@"
fi
if ! "$python" -c 'import sys; from mok_megatron.build import build_info; sys.exit("90a" not in build_info()["archs"])' 2>/dev/null; then
    echo "building the kernels" >&2
    MOK_CUDA=1 MOK_ARCH=SM90 "$python" setup.py --quiet build_ext --inplace
fi
"$python" -m pytest -rs --timeout 300 "${tests[@]}" "$@"

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "compute-sanitizer $tool"
        timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m tests.gpu.small
    done
else
    echo "compute-sanitizer is not installed: not run"
fi
