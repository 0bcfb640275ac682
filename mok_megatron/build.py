"""The compiled library: what it was built with, and whether it fits what it meets, told before any linker error."""

import functools
import json
import platform
from pathlib import Path
from typing import Any

from mok_megatron.errors import MoKBuildError

_FOLDER = Path(__file__).resolve().parent
LIBRARY = _FOLDER / "_C.abi3.so"
BUILD_INFO = _FOLDER / "_build_info.json"
_REBUILD = "build it for this environment: pip install --no-build-isolation -e . in the checkout"


def _not_built(missing: Path) -> str:
    return (
        f"mok_megatron is not built: {missing.name} is missing in {_FOLDER}; {_REBUILD}. (Python takes the package from the folder it is "
        "started in before an installed one: from inside a checkout that is not built, an installed copy is not seen.)"
    )


def build_info() -> dict[str, Any]:
    """What the library was built with.

    Keys: version, torch (whose headers), minimum_torch, cuda (None: host part only), archs (list of nvcc architectures), compiler, abi,
    cxx11_abi, machine.

    Raises:
        MoKBuildError: the package was not built.
    """
    if not BUILD_INFO.exists():
        raise MoKBuildError(_not_built(BUILD_INFO))
    return json.loads(BUILD_INFO.read_text())


def _version_pair(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def check_build_fits(info: dict[str, Any], *, torch_version: str, torch_cuda: str | None, cxx11_abi: bool, machine: str) -> None:
    """Compare a build record with the torch and machine that would load the library.

    One library serves every torch from `minimum_torch` on (stable ABI). The kernels carry their own CUDA runtime, which must be of the major
    version that torch's driver interface is; a library without kernels fits every torch build.

    Raises:
        MoKBuildError: names what the library was built for and what was found.
    """
    faults = []
    if _version_pair(torch_version) < _version_pair(info["minimum_torch"]):
        faults.append(f"torch: built for >= {info['minimum_torch']} (headers of {info['torch']}), found {torch_version}")
    if info["cuda"] is not None and torch_cuda is not None and _version_pair(info["cuda"])[0] != _version_pair(torch_cuda)[0]:
        faults.append(f"CUDA: kernels built with toolkit {info['cuda']}, found torch for CUDA {torch_cuda} (majors must agree)")
    if info["cxx11_abi"] != cxx11_abi:
        faults.append(f"C++ ABI: built with cxx11_abi={info['cxx11_abi']}, found torch with cxx11_abi={cxx11_abi}")
    if info["machine"] != machine:
        faults.append(f"machine: built for {info['machine']}, found {machine}")
    if faults:
        raise MoKBuildError(f"the compiled library of mok_megatron does not fit: {'; '.join(faults)}; {_REBUILD}")


def check_device_architecture(info: dict[str, Any], capability: tuple[int, int]) -> str:
    """The built architecture that runs on a GPU of this compute capability.

    Kernels use instructions of one architecture ("a" targets), which no other runs: sm_100a code does not run on 10.3.

    Raises:
        MoKBuildError: lists built and found targets.
    """
    found = f"{capability[0]}{capability[1]}a"
    if found not in info["archs"]:
        built = ", ".join(f"sm_{arch}" for arch in info["archs"]) or "none (host part only)"
        raise MoKBuildError(
            f"no kernels for this GPU: built for {built}, found compute capability {capability[0]}.{capability[1]} (sm_{found}); "
            + ("build with MOK_ARCH=SM90" if capability == (9, 0) else "there are kernels for Hopper (9.0) alone")
        )
    return found


@functools.cache
def load_library() -> None:
    """Load the operators, once.

    Raises:
        MoKBuildError: the library is missing or does not fit.
    """
    import torch

    info = build_info()
    if not LIBRARY.exists():
        raise MoKBuildError(_not_built(LIBRARY))
    check_build_fits(
        info,
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        cxx11_abi=torch.compiled_with_cxx11_abi(),
        machine=platform.machine(),
    )
    torch.ops.load_library(str(LIBRARY))
