"""What the build finds on a machine: torch's headers, nvcc, CUTLASS's headers, and the architectures that are asked for."""

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
# name in MOK_ARCH -> nvcc's architecture; the suffix "a" is required by wgmma and tcgen05
ARCHITECTURES = {"SM90": "90a", "SM100": "100a", "SM103": "103a"}


def find_torch() -> Path | None:
    """Folder of the torch that will run the package; looked up without importing it, also from an isolated build."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    candidates += [Path(sysconfig.get_paths()[key]) / "torch" for key in ("purelib", "platlib")]
    for folder in candidates:
        if (folder / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
            return folder
    return None


def torch_version(folder: Path) -> str:
    match = re.search(r"^__version__ = '([^']+)'", (folder / "version.py").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"no version in {folder / 'version.py'}")
    return match.group(1)


def kernel_sources() -> list[Path]:
    return sorted(Path(path) for path in glob.glob(str(ROOT / "csrc" / "kernels" / "*.cu")))


def uses_cutlass() -> bool:
    """Whether any kernel source includes CUTLASS or CuTe headers."""
    sources = [path for pattern in ("*.cu", "*.cuh", "*.h") for path in (ROOT / "csrc").rglob(pattern)]
    return any(re.search(r"#include <(cute|cutlass)/", path.read_text()) for path in sources)


def find_nvcc() -> str | None:
    """nvcc, or None without one or with MOK_CUDA=0: then only the host part is built."""
    wanted = os.environ.get("MOK_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise ValueError(f"MOK_CUDA={wanted!r}: must be 0 (host part only), 1 (kernels, an error without nvcc) or auto")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    if nvcc is not None and not Path(nvcc).exists():
        raise ValueError(f"CUDA_HOME={home!r}: there is no bin/nvcc in it")
    if nvcc is None and wanted == "1":
        raise ValueError("MOK_CUDA=1 asks for the kernels, but nvcc is neither on PATH nor in CUDA_HOME")
    return nvcc


def toolkit_folder(nvcc: str) -> Path:
    """The toolkit's own folder, as nvcc itself says: nvcc on PATH may be a wrapper that lies elsewhere."""
    text = subprocess.run([nvcc, "-dryrun", "-c", "-x", "cu", os.devnull], check=True, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"cannot read the toolkit's folder from: {text}")
    return Path(match.group(1)).resolve()


def nvcc_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise RuntimeError(f"cannot read the version from: {text}")
    return match.group(1)


def wanted_architectures() -> list[str]:
    """Architectures of MOK_ARCH, one of SM90, SM100, SM103 or ALL (the default)."""
    value = os.environ.get("MOK_ARCH", "ALL").upper()
    if value == "ALL":
        return list(ARCHITECTURES)
    if value not in ARCHITECTURES:
        raise ValueError(f"MOK_ARCH={value!r}: must be one of {', '.join(ARCHITECTURES)} or ALL")
    return [value]


def source_architectures(source: Path, wanted: list[str]) -> list[str]:
    """Of the wanted architectures those that a kernel file is for: sm90_… and sm100_… name theirs, other names serve all."""
    family = source.name.split("_", 1)[0]
    served = {"sm90": ["SM90"], "sm100": ["SM100", "SM103"]}.get(family, list(ARCHITECTURES))
    return [arch for arch in wanted if arch in served]


def find_cutlass() -> Path | None:
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        return None
    include = Path(next(iter(spec.submodule_search_locations))) / "source" / "include"
    return include if (include / "cutlass" / "cutlass.h").exists() else None
