"""What the documents say, checked against what the code says."""

from __future__ import annotations

import argparse
import importlib.util
import re
from types import ModuleType

import pytest

from mok_megatron import MoKConfig
from tests.cli.conftest import ROOT


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_feature_table_is_up_to_date() -> None:
    script = load_script("feature_table")
    assert script.TARGET.read_text() == script.render(), "run python scripts/feature_table.py"


def test_feature_table_tells_names_that_are_no_flags() -> None:
    arguments = pytest.importorskip("megatron.training.arguments", reason="this megatron-core has no parser")
    flags = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    script = load_script("feature_table")
    named = {feature.flag for feature in script.FEATURES} - {"PYTORCH_ALLOC_CONF"}
    assert {name for names in script.NO_FLAGS.values() for name in names} == named - set(flags)


def test_readme_names_every_knob() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in MoKConfig().to_dict():
        assert f"`--mok-{name.replace('_', '-')}`" in readme


@pytest.mark.parametrize("document", ["README.md", "docs/performance.md", "docs/feature-table.md"])
def test_links_of_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link
