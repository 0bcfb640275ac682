"""MoKConfig: each rule is enforced with the knob, its value and the rule in the text; YAML is read strictly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mok_megatron import MoKArgumentError, MoKConfig


@pytest.mark.parametrize(
    ("knob", "value", "text"),
    [
        ("fwd_num_comm_sms", -1, ">= 0"),
        ("bwd_num_comm_sms", 1.5, "integer"),
        ("fwd_num_comm_sms", True, "integer"),
        ("sm_reserve", -2, ">= 0"),
        ("sm_reserve", None, "integer"),
        ("minibatch_size", 100, "multiple of 128"),
        ("minibatch_size", 0, "multiple of 128"),
        ("minibatch_size", -128, "multiple of 128"),
        ("macrobatch_size", 192, "multiple of 128"),
        ("macrobatch_size", "256", "integer"),
        ("schedule_capacity_multiplier", 0.0, r"\(0, 1\]"),
        ("schedule_capacity_multiplier", 1.01, r"\(0, 1\]"),
        ("schedule_capacity_multiplier", float("nan"), "finite"),
        ("timeout_seconds", 0, "positive"),
        ("timeout_seconds", float("inf"), "finite"),
        ("timeout_seconds", "soon", "number"),
        ("timeout_seconds", 1e15, "at most 604800"),
        ("timeout_seconds", 604801, "at most 604800"),
        ("timeout_seconds", 10**400, "at most 604800"),
        ("minibatch_size", 2**40, r"below 2\^31"),
        ("macrobatch_size", 2**36, r"below 2\^31"),
        ("sm_reserve", 2**31, r"below 2\^31"),
        ("fwd_num_comm_sms", 2**70, r"below 2\^31"),
    ],
)
def test_a_bad_knob_is_named_with_its_value_and_rule(knob: str, value: Any, text: str) -> None:
    with pytest.raises(MoKArgumentError, match=f"{knob}=.*{text}") as error:
        MoKConfig(**{knob: value})
    assert str(value) in str(error.value)
    assert isinstance(error.value, ValueError)


def test_the_ring_must_hold_whole_minibatches() -> None:
    with pytest.raises(MoKArgumentError, match=r"macrobatch_size=384.*minibatch_size=256"):
        MoKConfig(minibatch_size=256, macrobatch_size=384)
    assert MoKConfig(minibatch_size=128, macrobatch_size=384).macrobatch_size == 384


def test_good_values_at_the_edges_are_taken() -> None:
    config = MoKConfig(fwd_num_comm_sms=0, schedule_capacity_multiplier=1, timeout_seconds=604800, minibatch_size=2**31 - 128)
    assert MoKConfig.from_mapping(config.to_dict()) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sm_reserve = 3  # type: ignore[misc]


@pytest.mark.parametrize("head", ["", "mok:\n", "model: a\nhidden_size: 64\nmok:\n"])
def test_yaml_is_read_with_and_without_a_section(tmp_path: Path, head: str) -> None:
    indent = "  " if head else ""
    path = tmp_path / "knobs.yaml"
    path.write_text(head + "".join(f"{indent}{line}\n" for line in ("minibatch_size: 256", "timeout_seconds: 7.5")))
    assert MoKConfig.from_yaml(path) == MoKConfig(minibatch_size=256, timeout_seconds=7.5)


def test_an_empty_yaml_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    for text in ("", "mok:\n"):
        path.write_text(text)
        assert MoKConfig.from_yaml(path) == MoKConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"minibatch: 256", "minibatch=256: no such knob"),
        (b"minibatch_size: 100", "minibatch_size=100"),
        (b"- 1\n- 2", "must hold a mapping"),
        (b"mok: 3", "section mok: must hold a mapping of knobs, holds 3"),
        (b"mok: 0", "section mok: must hold a mapping of knobs, holds 0"),
        (b"mok: false", "must hold a mapping"),
        (b"mok: ''", "must hold a mapping"),
        (b"mok: []", "must hold a mapping"),
        (b"0", "must hold a mapping"),
        (b"a: [1", "cannot be read"),
        (b"a: 1\n---\nb: 2", "cannot be read"),
        (b"\xff\xfe bad", "bad.yaml.*cannot be read.*utf-8"),
        (b"sm_reserve: \x01", "cannot be read"),
        (b"sm_reserve: 2026-13-45", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"timeout_seconds: 5\ntimeout_seconds: 6", "line 2: the key 'timeout_seconds' is given twice"),
        (b"mok:\n  sm_reserve: 1\n  'sm_reserve': 1", "line 3: the key 'sm_reserve' is given twice"),
        (b"mok:\n  sm_reserve: 1\nmok:\n  minibatch_size: 128", "the key 'mok' is given twice"),
        (b"mok:\n  minibatch_size: 128\nminibatch_size: 256", "minibatch_size=256 stands beside the section mok"),
        (b"mok:\ntimeout_seconds: 3", "timeout_seconds=3 stands beside the section mok"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_bad_yaml_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(MoKArgumentError, match=message):
        MoKConfig.from_yaml(path)


def test_a_key_may_stand_in_several_mappings(tmp_path: Path) -> None:
    path = tmp_path / "knobs.yaml"
    path.write_text("base: &base {sm_reserve: 1}\nother: {sm_reserve: 2}\nmok: {<<: *base, minibatch_size: 128}\n")
    assert MoKConfig.from_yaml(path) == MoKConfig(sm_reserve=1, minibatch_size=128)


def test_a_missing_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(MoKArgumentError, match=r"nowhere\.yaml"):
        MoKConfig.from_yaml(tmp_path / "nowhere.yaml")
