#!/usr/bin/env bash
# The A/B of one flag, without a GPU: scripts/pretrain_cpu.py on two processes, once with Megatron's AllToAll and once with MoK.
# After ./scripts/quickstart.sh; needs Python 3.12 or 3.13 there (Megatron's parser is not in the package for 3.11). More flags may follow.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"
VENV=${MOK_VENV:-$ROOT/.venv}
[ -x "$VENV/bin/torchrun" ] || die "there is no $VENV/bin/torchrun; run ./scripts/quickstart.sh first"
"$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("megatron") and u.find_spec("megatron.training")))' ||
    die "$VENV has no Megatron with its parser (megatron.training); make it with Python 3.12 or 3.13"

flags=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --vocab-size 63
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --expert-model-parallel-size 2 --swiglu --disable-bias-linear
    --normalization RMSNorm --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-3
    --use-cpu-initialization --transformer-impl local --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
)
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_VISIBLE_DEVICES= PYTHONWARNINGS=ignore
for backend in alltoall mok; do
    echo "--moe-backend=$backend"
    "$VENV/bin/torchrun" --nproc-per-node 2 -m mok_megatron.launch "$ROOT/scripts/pretrain_cpu.py" "${flags[@]}" --moe-backend=$backend "$@" |
        grep -E "^iteration|mok_megatron:"
done
