"""E-T3 and E-T4: a library that does not fit what it meets says so, with both values, before any linker error or launch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mok_megatron
from mok_megatron import MoKBuildError, build

FOUND: dict[str, Any] = {"torch_version": "2.11.0+cu130", "torch_cuda": "13.0", "cxx11_abi": True, "machine": "x86_64"}
RECORD: dict[str, Any] = {
    "version": "0.1.0",
    "torch": "2.11.0+cu130",
    "minimum_torch": "2.10",
    "cuda": "13.0",
    "archs": ["90a"],
    "compiler": "g++ 12",
    "abi": "cp311-abi3",
    "cxx11_abi": True,
    "machine": "x86_64",
}


def test_e_t3_a_fitting_library_is_taken() -> None:
    build.check_build_fits(RECORD, **FOUND)
    build.check_build_fits(RECORD, **{**FOUND, "torch_version": "2.13.0+cpu", "torch_cuda": None})
    build.check_build_fits({**RECORD, "cuda": None}, **{**FOUND, "torch_cuda": "12.6"})


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        ({"torch_version": "2.9.1"}, ("2.10", "2.9.1")),
        ({"torch_version": "1.13.0"}, ("2.10", "1.13.0")),
        ({"torch_cuda": "12.8"}, ("13.0", "12.8")),
        ({"cxx11_abi": False}, ("cxx11_abi=True", "cxx11_abi=False")),
        ({"machine": "aarch64"}, ("x86_64", "aarch64")),
    ],
)
def test_e_t3_a_misfit_names_built_and_found(found: dict[str, Any], texts: tuple[str, str]) -> None:
    with pytest.raises(MoKBuildError, match="does not fit") as error:
        build.check_build_fits(RECORD, **{**FOUND, **found})
    assert isinstance(error.value, ImportError)
    for text in (*texts, "build it for this environment"):
        assert text in str(error.value)


def _import_a_copy(
    tmp_path: Path, change: dict[str, Any] | None, *, without: str = "", garbage: bool = False
) -> subprocess.CompletedProcess[str]:
    """Import the operators of a copy of the package: build record changed, a file removed, or the library overwritten."""
    package = tmp_path / "mok_megatron"
    shutil.copytree(Path(mok_megatron.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    record = package / "_build_info.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **(change or {})}))
    if garbage:
        (package / "_C.abi3.so").write_bytes(b"not a library")
    if without:
        (package / without).unlink()
    code = "import mok_megatron; print('package imported'); import mok_megatron.ops; print('operators loaded')"
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)


def test_e_t3_changed_record_stops_the_import_before_the_linker(tmp_path: Path) -> None:
    # The library holds bytes that no linker takes, as one that was built for another torch may: the record is what must be named.
    result = _import_a_copy(tmp_path, {"minimum_torch": "99.0", "cxx11_abi": False}, garbage=True)
    assert result.returncode != 0 and "package imported" in result.stdout
    assert "MoKBuildError" in result.stderr and "99.0" in result.stderr and "cxx11_abi" in result.stderr
    assert "OSError" not in result.stderr


@pytest.mark.parametrize("name", ["_C.abi3.so", "_build_info.json"])
def test_e_t3_missing_library_names_the_next_step(tmp_path: Path, name: str) -> None:
    result = _import_a_copy(tmp_path, None, without=name)
    assert result.returncode != 0
    assert "MoKBuildError" in result.stderr and name in result.stderr and "pip install" in result.stderr


def test_build_info_tells_what_the_library_was_built_with() -> None:
    info = mok_megatron.build_info()
    assert {"version", "torch", "cuda", "archs", "compiler", "abi"} <= set(info)
    assert info["version"] == mok_megatron.__version__ and info["abi"] == "cp311-abi3"


def test_e_t4_matching_architecture_is_named() -> None:
    record = {**RECORD, "archs": ["90a", "100a", "103a"]}
    assert [build.check_device_architecture(record, c) for c in ((9, 0), (10, 0), (10, 3))] == ["90a", "100a", "103a"]


@pytest.mark.parametrize(
    ("archs", "capability", "built"),
    [
        (["90a"], (10, 0), "sm_90a"),
        (["90a", "100a"], (10, 3), "sm_100a"),
        (["90"], (9, 0), "sm_90"),  # suffix dropped: wgmma is not in it
        (["100f"], (10, 0), "sm_100f"),
        (["90a"], (8, 0), "sm_90a"),
        ([], (9, 0), "host part only"),
    ],
)
def test_e_t4_other_architectures_are_refused(archs: list[str], capability: tuple[int, int], built: str) -> None:
    with pytest.raises(MoKBuildError) as error:
        build.check_device_architecture({**RECORD, "archs": archs}, capability)
    assert built in str(error.value) and f"{capability[0]}.{capability[1]}" in str(error.value)
