"""A training script of one's own on Megatron's parser and model, which runs without CUDA: what a launch with MoK looks like.

scripts/ab_cpu.sh starts it with two backends. Nothing in it knows of MoK: the launcher adds the flag and the layers.
"""

import torch
import torch.distributed as dist

from mok_megatron.stock_cpu import enable_stock_cpu

enable_stock_cpu()  # for Megatron itself, which asks for CUDA at every turn; a script for GPUs has no such line

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args  # noqa: E402

VOCABULARY = 64


def main() -> None:
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=args.expert_model_parallel_size)
    torch.manual_seed(args.seed)
    model = GPTModel(
        config=core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts, False, normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mask = torch.ones(args.seq_length, args.seq_length).tril().logical_not()[None, None]
    positions = torch.arange(args.seq_length)[None]
    data = torch.Generator().manual_seed(dist.get_rank())
    for iteration in range(args.train_iters):
        tokens = torch.randint(VOCABULARY, (args.micro_batch_size, args.seq_length + 1), generator=data)
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if ".local_experts." not in name:  # experts have seen every rank's tokens already
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"iteration {iteration}: loss {loss.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
