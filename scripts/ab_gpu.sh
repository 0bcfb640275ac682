#!/usr/bin/env bash
# The A/B of one flag on GPUs: pretrain_gpu.sh with each backend, the loss curves in one picture and how far MoK is from the others.
#     ./scripts/ab_gpu.sh FOLDER [RUN ...] [-- more flags of pretrain_gpt.py]
# Runs: mok mok_again (both with --deterministic-mode, bits are compared), mok_fast (without), alltoall, alltoall_deterministic, allgather,
# hybridep (skipped without deep_ep); moved, moved_again, mok_moved (alltoall twice and mok from an initial embedding moved by one unit in the
# last place, moved and mok_moved from the same one). Default: all but mok_fast and mok_moved.
# Each run takes two GPUs, or the only one; as many run at a time as there are GPUs for. Environment as pretrain_gpu.sh (MASTER_PORT:
# the first of the ports). RUN_SECONDS: the longest a run may take.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"
[ $# -gt 0 ] || die "usage: ab_gpu.sh FOLDER [RUN ...] [-- flags]: the folder for logs and the picture"
folder=$1
shift
runs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do runs+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#runs[@]} -gt 0 ] || runs=(mok mok_again alltoall alltoall_deterministic allgather hybridep moved moved_again)
for run in "${runs[@]}"; do
    case "$run" in
    mok | mok_again | mok_fast | mok_moved | alltoall | alltoall_deterministic | allgather | hybridep | moved | moved_again) ;;
    *) die "no run is called $run" ;;
    esac
done
megatron_run # sets python, gpu_count, port and ranks
export MOK_PYTHON=$python
if ! "$python" -c 'import deep_ep' 2>/dev/null; then
    kept=()
    for run in "${runs[@]}"; do
        if [ "$run" = hybridep ]; then echo "hybridep: deep_ep cannot be imported, skipped"; else kept+=("$run"); fi
    done
    runs=("${kept[@]}")
    [ ${#runs[@]} -gt 0 ] || die "no other run was asked for"
fi
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpu_count - 1)))}"
groups=$((gpu_count / ranks))
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -f "$folder"/*.losses # of earlier runs

launch() { # launch RUN GROUP [flags]: what RUN is, on the GPUs of GROUP
    local run=$1 group=$2 backend flags=() environment=() devices
    shift 2
    case "$run" in
    mok*) backend=mok ;;
    allgather) backend=megatron flags=(--moe-token-dispatcher-type allgather) ;;
    hybridep) backend=hybridep ;;
    *) backend=alltoall ;;
    esac
    case "$run" in
    mok | mok_again | mok_moved | alltoall_deterministic)
        flags+=(--deterministic-mode)
        environment+=(NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8)
        ;;
    esac
    case "$run" in
    moved | mok_moved) environment+=(MOK_MOVE_INIT=1) ;;
    moved_again) environment+=(MOK_MOVE_INIT=2) ;;
    esac
    devices=$(IFS=, && echo "${gpus[*]:group * ranks:ranks}")
    local began=$SECONDS
    if env "${environment[@]}" MOK_LOSSES="$folder/$run.losses" CUDA_VISIBLE_DEVICES="$devices" \
        MASTER_PORT=$((port + group)) timeout -k 10 "${RUN_SECONDS:-900}" \
        "$ROOT/scripts/pretrain_gpu.sh" --moe-backend=$backend "${flags[@]}" "$@" >"$folder/$run.log" 2>&1; then
        echo "$run: $((SECONDS - began)) s," \
            "$(grep -m1 -o 'mok_megatron: MoE backend: .*' "$folder/$run.log" || echo 'no line about the backend')"
    else
        echo "$run: FAILED after $((SECONDS - began)) s, see $folder/$run.log"
        tail -n 5 "$folder/$run.log"
        rm -f "$folder/$run.losses" # what it left is no run
    fi
}

next=0
for run in "${runs[@]}"; do
    launch "$run" $((next % groups)) "$@" &
    next=$((next + 1))
    [ $((next % groups)) -ne 0 ] || wait
done
wait
"$python" "$ROOT/scripts/loss_curves.py" "$folder" "${runs[@]}"
