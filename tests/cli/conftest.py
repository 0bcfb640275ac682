"""Runs the command in a process of its own, as a user does, with folders of stand-ins in front of its path."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n-- stdout\n{self.out}\n-- stderr\n{self.err}"


@pytest.fixture
def mok(tmp_path: Path) -> Callable[..., Result]:
    """``mok("doctor", "--json")`` runs the command in an empty folder; ``path=`` goes before the Python path."""
    folder = tmp_path / "cwd"
    folder.mkdir()

    def run(*arguments: str, path: tuple[Path, ...] = (), env: dict[str, str] | None = None, timeout: float = 120) -> Result:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
        done = subprocess.run(
            [sys.executable, "-m", "mok_megatron.cli", *arguments],
            capture_output=True, text=True, cwd=folder, env=environment, timeout=timeout,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr)

    return run


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Writes ``files`` (path: text) under ``folder``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
