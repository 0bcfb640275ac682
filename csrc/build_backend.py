"""PEP 517 backend: setuptools, with build requirements that depend on the machine.

The library needs torch's headers only. When the interpreter that will run the package has torch already, those are used and no second torch
is downloaded into an isolated build environment. CUTLASS headers are asked for only where kernels that use them will be compiled.
"""

import os
import sys
from typing import Any

from setuptools import build_meta

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from build_environment import CUTLASS_REQUIREMENT, find_nvcc, find_torch, kernel_sources, uses_cutlass

prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
build_sdist = build_meta.build_sdist
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist


def _machine_requirements() -> list[str]:
    requirements = []
    if find_torch() is None:
        requirements.append("torch>=2.10")
    if kernel_sources() and find_nvcc() is not None and uses_cutlass():
        requirements.append(CUTLASS_REQUIREMENT)
    return requirements


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _machine_requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _machine_requirements()
