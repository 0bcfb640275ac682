#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py with MoK, a small model and mock data: ./scripts/pretrain_gpu.sh [more flags]
# On two GPUs, one expert-parallel group of both; on one where there is no second.
# MEGATRON_LM: folder of Megatron-LM's pretrain_gpt.py (tag core_v0.19.0). MOK_PYTHON: an interpreter with torch, Megatron-Core, Transformer
# Engine and this package; default: .venv's, else python3. MOK_LOSSES=FILE also writes every step's loss with all its bits (MOK_MOVE_INIT=N:
# from an initial embedding moved by one unit in the last place, up or down by random numbers of seed N). Without MoK's flag the command is
# what it would be without this package.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/environment.sh"
megatron_run # sets python, port and ranks
start=(-m mok_megatron.launch)
[ -z "${MOK_LOSSES:-}" ] || start=("$ROOT/scripts/loss_log.py" "$MOK_LOSSES" ${MOK_MOVE_INIT:+"--move-init=$MOK_MOVE_INIT"})
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
exec "$python" -m torch.distributed.run --nproc-per-node $ranks --master-port $port "${start[@]}" \
    "$MEGATRON_LM/pretrain_gpt.py" \
    --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 4 \
    --ffn-hidden-size 6144 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 \
    --global-batch-size 8 --train-iters 200 --lr 1e-4 --min-lr 1e-5 --lr-decay-style constant --bf16 --swiglu \
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \
    --untie-embeddings-and-output-weights --num-experts 32 --moe-ffn-hidden-size 768 --moe-router-topk 8 \
    --moe-grouped-gemm --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
    --expert-model-parallel-size $ranks --moe-router-dtype fp32 --moe-permute-fusion --use-distributed-optimizer \
    --overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \
    --transformer-impl transformer_engine --log-interval 1 --eval-iters 0 --eval-interval 1000 --log-throughput \
    --seed 7 --no-gradient-accumulation-fusion --moe-backend=mok "$@"
