"""``mok-megatron doctor``: what this machine has, what MoK supports on it, and a verdict on each flag of a command line.

Nothing here initialises CUDA, and neither Transformer Engine nor APEX is imported: their presence and version are read
from package metadata and file names, so that a broken installation of either cannot stop the doctor.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok_megatron.config import CHANNEL_MULTIPLE, MAX_EP_SIZE, MAX_LOCAL_EXPERTS, MAX_TOPK
from mok_megatron.errors import MoKUnsupportedError
from mok_megatron.foreign_flags import judge_foreign_flags

OK, NOTE, PROBLEM = "ok", "note", "problem"

APEX_BUILD_ROUTE = (
    "NVIDIA's APEX is not on PyPI; it is built from its own source: git clone https://github.com/NVIDIA/apex, then in "
    "that folder APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation . "
    "Megatron also runs without it: pass --no-gradient-accumulation-fusion"
)
_APEX_PACKAGES = ("multi_tensor_apply", "optimizers", "normalization")
_FUSION_EXTENSION = "fused_weight_gradient_mlp_cuda"
_APEX_EXTENSIONS = ("amp_C", _FUSION_EXTENSION)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer.

    Attributes:
        subject: what was looked for.
        value: what was found.
        state: ``ok``, ``note`` (worth knowing, nothing is wrong) or ``problem`` (MoK cannot be used until it is solved).
        advice: the next step, where there is one.
    """

    subject: str
    value: str
    state: str = OK
    advice: str = ""


def find_gpus() -> list[dict[str, str]]:
    """The NVIDIA GPUs the driver lists, each with ``index``, ``name``, ``compute_capability`` and ``memory``; [] if none."""
    fields = ("index", "name", "compute_cap", "memory.total")
    answer = _nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    names = ("index", "name", "compute_capability", "memory")
    return [dict(zip(names, (cell.strip() for cell in line.split(",")), strict=False)) for line in answer]


def _nvidia_smi(*arguments: str) -> list[str]:
    """Lines nvidia-smi prints; [] where it is absent, fails or does not answer. It makes no CUDA context."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in answer.stdout.splitlines() if line.strip()]


def examine() -> list[Finding]:
    """Everything found on this machine, in the order in which it is printed."""
    return [
        _python(),
        _torch(),
        _mok(),
        *_gpus(),
        _cuda_toolkit(),
        _megatron(),
        _transformer_engine(),
        find_apex(),
        _deep_ep(),
    ]


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} at {sys.executable}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken torch raises whatever its loader raises
        return Finding("torch", f"cannot be imported: {error}", PROBLEM, "install torch 2.10 or newer")
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", f"{torch.__version__}, built for {built_for}")


def _mok() -> Finding:
    try:
        from mok_megatron.build import build_info, load_library

        info = build_info()
        load_library()
    except ImportError as error:
        return Finding("mok_megatron", str(error), PROBLEM, "build it for this torch: pip install .")
    return Finding("mok_megatron", ", ".join(f"{key} {value}" for key, value in info.items()))


def _gpus() -> list[Finding]:
    driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    if not driver:
        return [
            Finding("CUDA driver", "none found (no nvidia-smi, or it lists no GPU)", NOTE),
            Finding("GPUs", "none: MoK runs on its CPU executor, which is for tests and demos", NOTE),
        ]
    gpus = find_gpus()
    listed = "; ".join(f"{g['index']}: {g['name']} (sm_{g['compute_capability'].replace('.', '')})" for g in gpus)
    links = _nvidia_smi("topo", "-m")
    return [
        Finding("CUDA driver", driver[0].strip()),
        _kernels_for(gpus, listed),
        Finding("links", _summarise_links(links, len(gpus)), NOTE),
    ]


def _kernels_for(gpus: Sequence[dict[str, str]], listed: str) -> Finding:
    """The GPUs, and whether the library has kernels for each of them."""
    faults = _faults_of_gpus(gpus)
    return Finding("GPUs", listed, PROBLEM, faults[0]) if faults else Finding("GPUs", listed)


def _faults_of_gpus(gpus: Sequence[dict[str, str]]) -> list[str]:
    """Why MoK cannot run on them, one text a compute capability that has no kernels; [] where it can, or where it is not built at all."""
    from mok_megatron.build import build_info, check_device_architecture

    try:
        info = build_info()
    except ImportError:
        return []  # told in another place
    faults = []
    for capability in sorted({gpu["compute_capability"] for gpu in gpus}):
        try:
            major, minor = capability.split(".")
            check_device_architecture(info, (int(major), int(minor)))
        except ImportError as error:
            faults.append(str(error))
        except ValueError:
            faults.append(f"nvidia-smi gives the compute capability {capability!r}, which is not a version")
    return faults


def _summarise_links(topology: Sequence[str], num_gpus: int) -> str:
    """The kinds of links between the GPUs, from ``nvidia-smi topo -m``: 'NV18 between all pairs', 'NV18 and SYS', …"""
    if num_gpus < 2:
        return "one GPU, no links"
    rows = [line.split()[1 : 1 + num_gpus] for line in topology if line.startswith("GPU") and len(line.split()) > num_gpus]
    kinds = sorted({cell for row in rows for cell in row if cell not in ("X",) and not cell.startswith("GPU")})
    if not kinds:
        return "unknown (nvidia-smi topo -m gave no matrix)"
    if len(kinds) == 1:
        return f"{kinds[0]} between all pairs" + ("" if kinds[0].startswith("NV") else ": no NVLink")
    return " and ".join(kinds) + ": an expert-parallel group must stay within GPUs joined by NVLink (NV…)"


def _cuda_toolkit() -> Finding:
    home = os.environ.get("CUDA_HOME")
    nvcc = str(Path(home, "bin", "nvcc")) if home and Path(home, "bin", "nvcc").exists() else shutil.which("nvcc")
    if nvcc is None:
        return Finding("CUDA toolkit", "no nvcc: only the host part of MoK can be built here", NOTE)
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("CUDA toolkit", f"nvcc at {nvcc} does not run: {error}", NOTE)
    release = next((line.strip() for line in answer.stdout.splitlines() if "release" in line), "version not told")
    return Finding("CUDA toolkit", f"{release} at {nvcc}")


def _megatron() -> Finding:
    version = _version("megatron-core")
    if version is None and importlib.util.find_spec("megatron") is None:
        return Finding(
            "megatron-core", "not found", PROBLEM,
            "pip install megatron-core==0.19.2 (Python 3.12), megatron-core==0.16.1 (Python 3.11)",
        )  # fmt: skip
    if version is None:
        return Finding("megatron-core", "from a source folder, version not recorded", NOTE)
    tested = version in ("0.16.1", "0.19.2")
    return Finding(
        "megatron-core", version, OK if tested else NOTE, "" if tested else "tested with 0.16.1 and 0.19.2"
    )  # fmt: skip


def _transformer_engine() -> Finding:
    version = _version("transformer-engine") or _version("transformer-engine-torch")
    if version is None and importlib.util.find_spec("transformer_engine") is None:
        return Finding(
            "Transformer Engine", "absent", NOTE,
            "MoK does not need it; without it Megatron uses its local layers: --transformer-impl local",
        )  # fmt: skip
    return Finding("Transformer Engine", version or "present, version not recorded")


def find_apex() -> Finding:
    """Which ``apex`` there is: NVIDIA's with or without its CUDA extensions, another project of that name, or none."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("APEX", "absent", NOTE, APEX_BUILD_ROUTE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    where = folders[0] if folders else Path(spec.origin or "?")
    has_nvidia_modules = all(any((folder / name).is_dir() for folder in folders) for name in _APEX_PACKAGES)
    if not has_nvidia_modules:
        return Finding(
            "APEX",
            f"the package 'apex' at {where} is another project that shares the name, not NVIDIA's APEX",
            NOTE,
            f"remove it, as Megatron imports it by that name. {APEX_BUILD_ROUTE}",
        )
    missing = [name for name in _APEX_EXTENSIONS if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "APEX", f"NVIDIA's, at {where}, built without {', '.join(missing)}", NOTE,
            f"it was installed without its CUDA extensions. {APEX_BUILD_ROUTE}",
        )  # fmt: skip
    return Finding("APEX", f"NVIDIA's, with its CUDA extensions, at {where}")


def _deep_ep() -> Finding:
    spec = importlib.util.find_spec("deep_ep")
    if spec is None:
        return Finding("deep_ep", "absent: --moe-backend=deepep and hybridep, the baselines, cannot run", NOTE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    compiled = importlib.util.find_spec("deep_ep_cpp") is not None or any(
        entry.name.endswith(suffixes) for folder in folders for entry in folder.iterdir()
    )
    if not compiled:
        return Finding("deep_ep", "a package of that name without DeepEP's compiled part (a placeholder?)", NOTE)
    return Finding("deep_ep", _version("deep_ep") or "present, version not recorded")


def supported_here() -> list[tuple[str, str]]:
    """What MoK supports on this machine, as (property, rule)."""
    return [
        ("executor", "GPU: Hopper (sm_90a), with kernels built for it; where no GPU is visible the CPU executor, for tests and demos"),
        ("expert-parallel sizes", f"1 to {MAX_EP_SIZE}, processes of one host; the number of experts must be a multiple"),
        ("local experts", f"up to {MAX_LOCAL_EXPERTS} a rank"),
        ("routes a token", f"up to {MAX_TOPK}; rows with fewer are fine"),
        ("hidden size", f"a multiple of {CHANNEL_MULTIPLE}"),
        ("expert intermediate size", f"a multiple of {CHANNEL_MULTIPLE}"),
        ("tokens a rank", "any number, other than its peers' too, or none"),
        ("precision", "BF16, on the CPU executor FP32 too; gradients accumulate into FP32 or BF16 main_grad; FP16, FP8, FP4 are refused"),
        ("links", "NVLink between the GPUs of a group; on the CPU shared memory of one host"),
    ]


def judge(command: Sequence[str]) -> list[dict[str, str]]:
    """The feature table's verdict on each flag of a Megatron command line, refusals first.

    Args:
        command: launcher and script first, where given; flags are what follows the first word that ends in ``.py``, or
            the whole where none does.

    Returns:
        ``flag``, ``value``, ``verdict`` (supported, transparent, refused, or unknown: it cannot be judged) and ``reason`` of each.

    Raises:
        MoKUnsupportedError: Megatron-Core, which the table is about, is missing or of an unknown version.
    """
    script = next((i for i, word in enumerate(command) if word.endswith(".py")), -1)
    try:
        from mok_megatron.megatron.arguments import check_own_flags
        from mok_megatron.megatron.support import check_arguments, is_own, join_flags, split_flags
    except ImportError as error:
        raise MoKUnsupportedError(f"the command line cannot be judged: {error}") from error
    given = split_flags(command[script + 1 :])
    foreign = judge_foreign_flags(
        [flag for flag, _ in given], command[script] if script >= 0 else None, launched=not any(word.startswith("--") for word in command[:1])
    )
    values = {flag: " ".join(texts) or "True" for flag, texts in given}
    flags = join_flags([(flag, texts) for flag, texts in given if flag not in foreign])
    table = [v for v in check_arguments(flags) if not is_own(v.flag)]
    found = [{"flag": v.flag, "value": str(v.value), "verdict": v.verdict, "reason": v.reason} for v in [*check_own_flags(flags), *table]]
    found += [{"flag": flag, "value": values[flag], "verdict": verdict, "reason": why} for flag, (verdict, why) in foreign.items()]
    return _one_line_each(_judge_gpus() + _judge_gradient_fusion(flags) + found)


def _one_line_each(verdicts: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Refusals first, then what is unknown. What is refused is not called anything else, and its reasons stand together."""
    refused = {word.split("=")[0] for verdict in verdicts if verdict["verdict"] == "refused" for word in verdict["flag"].split()}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for verdict in verdicts:
        if verdict["verdict"] != "refused" and verdict["flag"] in refused:
            continue
        line = lines.setdefault((verdict["flag"], verdict["value"]), dict(verdict))
        if verdict["reason"] not in line["reason"]:
            line["reason"] += f"; {verdict['reason']}"
    order = ("refused", "unknown")
    return sorted(lines.values(), key=lambda v: order.index(v["verdict"]) if v["verdict"] in order else len(order))


def _judge_gpus() -> list[dict[str, str]]:
    """A run that sees a GPU uses it, and is refused at its start where there are no kernels for it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    faults = _faults_of_gpus(find_gpus())
    return [{"flag": "--moe-backend", "value": "mok, on this machine's GPUs", "verdict": "refused", "reason": fault} for fault in faults]


def _judge_gradient_fusion(flags: Sequence[str]) -> list[dict[str, str]]:
    """Megatron's own output layer, on which MoK has no say, stops at construction when fusion is on without an extension."""
    if "--no-gradient-accumulation-fusion" in flags or importlib.util.find_spec(_FUSION_EXTENSION) is not None:
        return []
    apex = find_apex()
    return [
        {
            "flag": "--gradient-accumulation-fusion",
            "value": "on (Megatron's default)",
            "verdict": "refused",
            "reason": f"Megatron's output layer needs APEX's {_FUSION_EXTENSION} for it. APEX: {apex.value}. {apex.advice}",
        }
    ]


def diagnose(command: Sequence[str]) -> dict[str, Any]:
    """The doctor's whole answer as JSON values.

    Args:
        command: a Megatron command line, script first; empty to ask about the machine alone.

    Returns:
        ``findings``, ``supported``, ``flags`` (the verdicts, for a command line) and ``healthy``: whether nothing found
        is a problem and no flag is refused.
    """
    findings = examine()
    healthy = all(finding.state != PROBLEM for finding in findings)
    answer: dict[str, Any] = {
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "supported": [list(row) for row in supported_here()],
    }
    if command:
        answer["command"] = list(command)
        answer["flags"] = judge(command)
        healthy = healthy and all(flag["verdict"] != "refused" for flag in answer["flags"])
    answer["healthy"] = healthy
    return answer


def to_text(answer: dict[str, Any]) -> str:
    """The answer for a terminal."""
    marks = {OK: "ok     ", NOTE: "note   ", PROBLEM: "PROBLEM"}
    lines = ["found on this machine"]
    for finding in answer["findings"]:
        lines.append(f"  {marks[finding['state']]} {finding['subject']}: {finding['value']}")
        if finding["advice"]:
            lines.append(f"          {finding['advice']}")
    lines += ["", "what MoK supports here"]
    lines += [f"  {name}: {rule}" for name, rule in answer["supported"]]
    if "flags" in answer:
        lines += ["", "the command line under --moe-backend=mok"]
        width = max((len(flag["verdict"]) for flag in answer["flags"]), default=0)
        if not any(word.split("=")[0] == "--num-experts" for word in answer["command"]):
            lines.append("  without --num-experts the model has no MoE layer, and MoK nothing to do")
        lines += [f"  {f['verdict']:<{width}} {f['flag']} {f['value']}: {f['reason']}" for f in answer["flags"]]
    unknown = [flag["flag"] for flag in answer.get("flags", ()) if flag["verdict"] == "unknown"]
    used = f"MoK can be used; not judged: {', '.join(unknown)}" if unknown else "MoK can be used"
    lines += ["", used if answer["healthy"] else "MoK cannot be used like this; see above"]
    return "\n".join(lines)
