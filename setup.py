"""Builds mok_megatron/_C.abi3.so: the host part with the C++ compiler alone, and the kernels too where there is nvcc.

Environment: MOK_CUDA=0|1|auto (kernels never, always, where nvcc is found), MOK_ARCH=SM90|SM100|SM103|ALL, CUDA_HOME, CXX, MAX_JOBS.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
from build_environment import (  # noqa: E402
    ARCHITECTURES,
    CUTLASS_REQUIREMENT,
    find_cutlass,
    find_nvcc,
    find_torch,
    kernel_sources,
    nvcc_version,
    source_architectures,
    toolkit_folder,
    torch_version,
    uses_cutlass,
    wanted_architectures,
)

# The oldest torch whose stable ABI the library uses.
MINIMUM_TORCH = (2, 10)
TARGET_VERSION = f"0x{MINIMUM_TORCH[0]:02x}{MINIMUM_TORCH[1]:02x}000000000000"


class BuildLibrary(build_ext):
    """Compiles the operator library and writes down what it was built with."""

    def build_extension(self, ext: Extension) -> None:
        torch = find_torch()
        if torch is None:
            raise RuntimeError("torch >= 2.10 is needed to build; install it, or build without --no-build-isolation")
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(self.build_temp)
        temp.mkdir(parents=True, exist_ok=True)
        cxx = os.environ.get("CXX", "g++")
        nvcc = find_nvcc()
        architectures = wanted_architectures() if nvcc else []
        sources = [(s, source_architectures(s, architectures)) for s in kernel_sources()] if nvcc else []
        sources = [(source, archs) for source, archs in sources if archs]
        if not sources and os.environ.get("MOK_CUDA") == "1":
            raise RuntimeError(f"MOK_CUDA=1 asks for kernels, and there are none for MOK_ARCH={os.environ.get('MOK_ARCH', 'ALL')}")
        defines = [f"-DTORCH_TARGET_VERSION={TARGET_VERSION}", "-DUSE_CUDA"]
        includes = [f"-I{torch / 'include'}", f"-I{ROOT / 'csrc'}"]

        objects = [temp / "bindings.o"]
        flags = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", *defines, *includes]
        commands = [[cxx, *flags, "-c", str(ROOT / "csrc" / "bindings.cpp"), "-o", str(objects[0])]]
        for source, archs in sources:
            objects.append(temp / f"{source.stem}.o")
            commands.append(self.kernel_command(nvcc, source, archs, objects[-1]))
        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, commands))

        link = [cxx, "-shared", "-o", str(out), *map(str, objects), f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu"]
        if sources:
            link += [f"-L{toolkit_folder(nvcc) / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        run(link)
        compiler = subprocess.run([cxx, "-dumpfullversion"], check=True, capture_output=True, text=True).stdout.strip()
        info = {
            "version": self.distribution.get_version(),
            "torch": torch_version(torch),
            "minimum_torch": ".".join(map(str, MINIMUM_TORCH)),
            "cuda": nvcc_version(nvcc) if sources else None,
            "archs": sorted({ARCHITECTURES[arch] for _, archs in sources for arch in archs}, key=lambda a: int(a[:-1])),
            "compiler": f"{Path(cxx).name} {compiler}",
            "abi": "cp311-abi3",
            "cxx11_abi": True,
            "machine": os.uname().machine,
        }
        (out.parent / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")

    def copy_extensions_to_source(self) -> None:
        """The build record goes where the library goes, also in place and in editable installs."""
        super().copy_extensions_to_source()
        built = Path(self.build_lib) / "mok_megatron" / "_build_info.json"
        self.copy_file(str(built), str(ROOT / "mok_megatron" / built.name))

    def kernel_command(self, nvcc: str, source: Path, archs: list[str], target: Path) -> list[str]:
        command = [nvcc, "-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr", "-lineinfo"]
        command += [f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target), "--threads", "2"]
        if uses_cutlass():
            cutlass = find_cutlass()
            if cutlass is None:
                raise RuntimeError(f"CUTLASS headers are needed to build the kernels: pip install --no-deps {CUTLASS_REQUIREMENT}")
            command.append(f"-I{cutlass}")
        for arch in archs:
            number = ARCHITECTURES[arch]
            command.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        return command


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


setup(
    ext_modules=[Extension("mok_megatron._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
