#!/usr/bin/env bash
# Tests that need a Hopper GPU: ./scripts/gpu_tests.sh [forward|backward|megatron|all] [pytest arguments]
# Builds the kernels in place where the library has none, runs tests/gpu (what needs two GPUs is skipped with one), then small passes under
# compute-sanitizer where that is installed: memcheck and racecheck of one rank, memcheck of two where there are two GPUs.
# MOK_PYTHON: the interpreter that has torch; default: .venv's, else python3.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"
cd "$ROOT"
run_python
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

what=${1:-all}
[ $# -eq 0 ] || shift
both=(tests/gpu/test_{alignment,calls,faults,graphs,other_streams,promises,routings,row_offsets}.py)
case "$what" in
forward) tests=(tests/gpu/test_schedule.py tests/gpu/test_forward.py tests/gpu/test_functional.py "${both[@]}") ;;
backward) tests=(tests/gpu/test_backward.py tests/gpu/test_functional_backward.py tests/gpu/test_weight_grads.py "${both[@]}") ;;
megatron) tests=(tests/gpu/test_megatron_*.py) ;;
all) tests=(tests/gpu) ;;
*) die "'$what' is not a group of tests; there are: forward, backward, megatron, all" ;;
esac

"$python" -c 'import pytest' 2>/dev/null ||
    die "$python has no pytest; install the package with its extra: pip install -e '.[test]' (./scripts/test.sh makes .venv with it), or name" \
        "another interpreter with MOK_PYTHON"
if ! nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null; then
    echo "no NVIDIA GPU here: the tests are skipped"
    exec "$python" -m pytest -rs "${tests[@]}" "$@"
fi
if ! "$python" -c 'import sys; from mok_megatron.build import build_info; sys.exit("90a" not in build_info()["archs"])' 2>/dev/null; then
    echo "building the kernels" >&2
    MOK_CUDA=1 MOK_ARCH=SM90 "$python" setup.py --quiet build_ext --inplace
fi
"$python" -m pytest -rs --timeout 300 "${tests[@]}" "$@"

if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed: not run"
    exit 0
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
checks=("memcheck 1" "racecheck 1")
[ "$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)" -lt 2 ] || [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || checks+=("memcheck 2")
for check in "${checks[@]}"; do
    read -r tool ranks <<<"$check"
    options=()
    # Making symmetric memory, torch finds out by a call that may fail whether handles go through a fabric; the tool would count that as
    # an error.
    [ "$ranks" = 1 ] || options+=(--report-api-errors no)
    timeout 300 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 "${options[@]}" \
        "$python" -m tests.gpu.small "$ranks" >"$logs/$tool $ranks" 2>&1 &
done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
for check in "${checks[@]}"; do
    echo "compute-sanitizer, tool and ranks: $check"
    log=$logs/$check
    if grep -q "finite, and the same bits twice" "$log" && grep -q "SUMMARY: 0" "$log" && ! grep -qE "SUMMARY: [1-9]" "$log"; then
        grep SUMMARY "$log"
    else
        failed=1
        # No pipe into head: it would end grep, hence this script before the other checks are shown.
        awk '!/^=+ +(Saved host backtrace|Host Frame|in )/ && shown++ < 60' "$log"
    fi
done
exit "$failed"
