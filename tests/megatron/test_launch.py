"""The launcher and the one-line import: argv, sys.path[0] and __name__ as the script expects, flags, errors and exit codes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.megatron.helpers import MEGATRON

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("megatron.training") is not None:
    PARSE = "from megatron.training.arguments import parse_args\nargs = parse_args()\n"
else:
    # megatron-core 0.16.1's wheel has no megatron.training: a stand-in in the script's folder, as a checkout would be.
    PARSE = "import megatron.training.arguments as arguments\nargs = arguments.parse_args()\n"

STAND_IN = """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--moe-flex-dispatcher-backend", default="deepep")
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    return parser

def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for scripts, with megatron.training in it where the wheel has none."""
    if MEGATRON < (0, 17):
        training = tmp_path / "megatron" / "training"
        training.mkdir(parents=True)
        (training / "arguments.py").write_text(STAND_IN)
        (training / "training.py").write_text("def training_log(loss_dict, iteration): ...\n")
    return tmp_path


def run(folder: Path, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environment}
    return subprocess.run(command, cwd=folder.parent, env=environ, capture_output=True, text=True, timeout=120)


def launch(folder: Path, body: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(body))
    return run(folder, [sys.executable, "-m", "mok_megatron.launch", str(script), *arguments], **environment)


def test_the_loss_log_leaves_the_names_of_megatrons_log(folder: Path) -> None:
    """Both wrap Megatron's training_log, the loss log first."""
    (folder / "train.py").write_text(
        "import inspect\nimport megatron.training.training as training\n"
        "print(training.training_log.__module__, 'iteration' in inspect.signature(training.training_log).parameters)\n"
    )
    command = [sys.executable, str(ROOT / "scripts/loss_log.py"), str(folder / "losses"), str(folder / "train.py")]
    done = run(folder, command)
    assert done.stdout.splitlines()[-1:] == ["megatron.training.training True"], done.stdout + done.stderr


def test_the_script_finds_itself_as_without_the_launcher(folder: Path) -> None:
    """Through a link, which Python follows for sys.path[0] and keeps in argv."""
    real = folder / "real"
    real.mkdir()
    (real / "neighbour.py").write_text("VALUE = 'the module beside the script'\n")
    body = """
        import pickle, sys
        import neighbour
        class Here: pass
        print(repr((sys.argv, sys.path[0], __name__, __file__, neighbour.VALUE)))
        print(type(pickle.loads(pickle.dumps(Here()))) is Here, sys.modules["__main__"].__file__ == __file__)
        if __name__ == "__main__":
            sys.exit(7)
    """
    (real / "train.py").write_text(textwrap.dedent(body))
    link = folder / "link.py"
    link.symlink_to(real / "train.py")
    words = [str(link), "--flag", "a b", "--x=1"]
    launched = run(folder, [sys.executable, "-m", "mok_megatron.launch", *words])
    plain = run(folder, [sys.executable, *words])
    assert launched.returncode == plain.returncode == 7, launched.stderr
    assert launched.stdout == plain.stdout
    assert str(words) in launched.stdout and "True True" in launched.stdout


@pytest.mark.parametrize("arguments", [[], ["no_such_script.py"]])
def test_a_missing_script_is_an_error(folder: Path, arguments: list[str]) -> None:
    ended = run(folder, [sys.executable, "-m", "mok_megatron.launch", *arguments])
    assert ended.returncode != 0
    assert ("usage" if not arguments else "no such script: no_such_script.py") in ended.stderr


SHOW = PARSE + "print(args.moe_backend, args.moe_token_dispatcher_type, args.moe_flex_dispatcher_backend, args.mok_sm_reserve)\n"


def test_megatrons_parser_has_the_flags_and_its_defaults_are_not_refused(folder: Path) -> None:
    model = ["--num-experts", "8", "--hidden-size", "128", "--num-layers", "1", "--swiglu", "--disable-bias-linear"]
    body = SHOW + "import sys\nsys.argv[2] = 'mok'\n" + SHOW
    ended = launch(folder, body, "--moe-backend", "hybridep", "--mok-sm-reserve", "5", *model)
    assert ended.returncode == 0, ended.stderr
    hybridep, mok = ended.stdout.splitlines()[-2:]
    assert hybridep == "hybridep flex hybridep 5"
    assert mok.startswith("mok ") and mok.endswith(" 5")


def test_the_one_line_import_and_the_environment(folder: Path) -> None:
    """Also after Megatron's modules were imported."""
    script = folder / "train.py"
    script.write_text("import megatron.training.arguments\nimport mok_megatron.autoload\n" + SHOW)
    ended = run(folder, [sys.executable, str(script)], MOK_MOE_BACKEND="alltoall")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "alltoall alltoall deepep None"


def test_a_refused_flag_ends_the_program_before_anything_starts(folder: Path) -> None:
    """F-T5: refused at parse time with the rule named."""
    model = ["--num-experts", "8", "--hidden-size", "100", "--num-layers", "1", "--swiglu", "--disable-bias-linear"]
    ended = launch(folder, SHOW, "--moe-backend", "mok", *model)
    assert ended.returncode == 2
    assert "--hidden-size (is 100)" in ended.stderr and "multiple of 64" in ended.stderr
    assert "usage:" not in ended.stderr
    assert "mok allgather" not in ended.stdout


def test_e_t5_mok_with_the_library_missing_ends_with_the_next_step(folder: Path) -> None:
    body = "import sys\nimport mok_megatron.build as build\nfrom pathlib import Path\nbuild.LIBRARY = Path('missing.so')\n"
    body += SHOW + "sys.argv[-1] = 'mok'\n" + SHOW
    ended = launch(folder, body, "--moe-backend", "alltoall")
    assert ended.stdout.splitlines()[-1] == "alltoall alltoall deepep None", "the others do not need it"
    assert ended.returncode == 2
    assert "--moe-backend=mok was asked for and cannot run here" in ended.stderr
    assert "missing.so is missing" in ended.stderr and "pip install" in ended.stderr


def test_e_t5_a_layer_is_never_built_with_another_backend_in_silence(folder: Path) -> None:
    body = """
        from tests.megatron.helpers import build_layer, make_config, start_megatron
        import mok_megatron.build as build
        from pathlib import Path
        start_megatron(1)
        build.load_library.cache_clear()
        build.LIBRARY = Path("missing.so")
        build_layer("mok", make_config())
        print("built")
    """
    ended = launch(folder, body)
    assert ended.returncode != 0
    assert "MoKBuildError: --moe-backend=mok was asked for and cannot run here" in ended.stderr
    assert "built" not in ended.stdout


if importlib.util.find_spec("megatron.training") is not None:
    # Megatron's own path from flags to a model; its pretrain() needs CUDA.
    STEP = """
        from mok_megatron.stock_cpu import enable_stock_cpu
        enable_stock_cpu()
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

        args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        model = GPTModel(
            config=core_transformer_config_from_args(args),
            transformer_layer_spec=get_gpt_layer_local_spec(args.num_experts, False, normalization="RMSNorm"),
            vocab_size=64,
            max_sequence_length=args.seq_length,
            position_embedding_type="rope",
        )
        ids = torch.randint(0, 64, (args.micro_batch_size, args.seq_length + 1))
        mask = torch.ones(args.seq_length, args.seq_length).tril().logical_not()[None, None]
        loss = model(ids[:, :-1], torch.arange(args.seq_length)[None], mask, labels=ids[:, 1:]).mean()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        from mok_megatron.megatron import layer, metrics
        print("workspaces", [(w.num_local_tokens, w.minibatch_size) for w in layer._workspaces.values()])
        print("layers", [type(block.mlp).__name__ for block in model.decoder.layers])
        print("routes", [summary.routes for summary in metrics.collect().layers])
    """
    FLAGS = (
        "--moe-backend mok --mok-minibatch-size 128 --mok-log-expert-load --num-experts 8 --moe-router-topk 2 --hidden-size 64 "
        "--moe-ffn-hidden-size 64 --num-attention-heads 4 --num-layers 2 --swiglu --disable-bias-linear --normalization RMSNorm "
        "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 "
        "--vocab-size 63 --use-cpu-initialization --no-gradient-accumulation-fusion --no-bias-swiglu-fusion "
        "--no-bias-dropout-fusion --no-masked-softmax-fusion --transformer-impl local --no-persist-layer-norm --no-rope-fusion"
    )

    def test_a_launch_command_trains_a_step(folder: Path) -> None:
        ended = launch(folder, STEP, *FLAGS.split(), CUDA_DEVICE_MAX_CONNECTIONS="1")
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "mok_megatron: MoE backend: mok (Mixture-of-Kittens on the CPU executor; minibatch_size=128" in ended.stdout
        assert "workspaces [(64, 128)]" in ended.stdout, "32 tokens a sequence, 2 sequences"
        assert "layers ['MoKMoELayer', 'MoKMoELayer']" in ended.stdout
        assert "routes [128, 128]" in ended.stdout
