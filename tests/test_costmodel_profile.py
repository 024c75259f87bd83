"""HardwareProfile: what it refuses, what it keeps, what ships; the quality of a fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nanopd.costmodel import (
    FitQuality,
    HardwareProfile,
    StepFeatures,
    StepPoint,
    StepTimeModel,
    load_profile,
    own_profile,
    own_profile_path,
    preset,
    preset_names,
)
from nanopd.errors import ConfigError
from nanopd.ops.measure import recorded

PROFILE = HardwareProfile(
    device="NVIDIA Toy",
    model="qwen3-8b",
    dtype="bfloat16",
    alpha_ms_per_token=0.02,
    beta_ms=5,
    gamma_ms_per_token=0.0,
    batch_thresh=16.5,
    kv_bytes_per_token=147456,
    bandwidth_gb_s=None,
    link="shared pool",
    num_blocks=100,
    block_size=16,
    step_time={"whole device": StepTimeModel(4.0, 0.01), "sm=84": StepTimeModel(6.0)},
    quality={"alpha": FitQuality(5, 2, None, 0.01, 0.02, ("alpha: 預填充 is poor",))},
    points=(
        StepPoint(StepFeatures.decode(3, 300), 4.25, "decode"),
        StepPoint(StepFeatures.decode(3, 300).with_chunk(7, 9), 5.0, "random", "sm=84", True),
    ),
    environment={"gpu": "NVIDIA Toy", "date": "2026-11-29"},
    source="made up",
)


def test_json_keeps_everything(tmp_path: Path) -> None:
    assert HardwareProfile.from_json(PROFILE.to_json()) == PROFILE
    path = PROFILE.save(tmp_path / "new" / "profile.json")
    assert load_profile(path) == PROFILE
    assert json.loads(path.read_text())["format"] == "nanopd-hardware-profile-1"
    bare = replace(PROFILE, points=(), step_time={}, quality={})
    assert HardwareProfile.from_json(bare.to_json()) == bare


def test_one_line_per_point() -> None:
    assert sum('"decode"' in line for line in PROFILE.to_json().splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("alpha_ms_per_token", 0, "> 0"),
        ("beta_ms", -1.5, "> 0"),
        ("gamma_ms_per_token", -1, ">= 0"),
        ("gamma_ms_per_token", float("nan"), "finite"),
        ("batch_thresh", "16", "number"),
        ("bandwidth_gb_s", 0, "> 0"),
        ("kv_bytes_per_token", 1.5, "int >= 1"),
        ("num_blocks", 0, "int >= 1"),
        ("device", "", "non-empty"),
        ("num_blocks", 10**40, "at most"),
        ("link", 5, "texts"),
        ("source", None, "texts"),
        ("environment", {"gpu": 1}, "texts"),
        ("step_time", {"whole device": 1}, "step-time models"),
        ("quality", [1], "table"),
    ],
)
def test_values_out_of_range_name_field_value_and_limit(field: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(PROFILE, **{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert field in message and (repr(value) in message or isinstance(value, dict)) and limit in message


def test_a_number_that_no_float_holds_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"beta_ms .* got 1000.*\.\.\.$"):
        replace(PROFILE, beta_ms=10**400)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda d: d.pop("beta_ms"), "lacks .*beta_ms"),
        (lambda d: d.update(colour="red"), "unknown fields .*colour"),
        (lambda d: d.update(format="other"), '"format"'),
        (lambda d: d["step_time"].update(x={"base_ms": 1}), "missing or unknown"),
        (lambda d: d["points"][1].pop(), "damaged"),
        (lambda d: d.update(quality={"alpha": {"r2": 1}}), "damaged"),
        (lambda d: d.update(step_time=[1]), "step_time .* table, got .1"),
        (lambda d: d["step_time"].update(x=None), "step_time of 'x'.* got None"),
        (lambda d: d.update(points="x"), "points .* list of rows, got 'x'"),
        (lambda d: d.update(points=[["kind"]]), "columns must be"),
        (lambda d: d["points"][1].__setitem__(3, None), "point 1 .* got None"),
        (lambda d: d["points"][2].__setitem__(4, "5"), "point 2 .*prefill_tokens.* got '5'"),
        (lambda d: d["points"][1].__setitem__(2, 1), "point 1 .*held_out"),
        (lambda d: d["quality"]["alpha"].update(median_error=None), "'alpha' .*median_error.* got None"),
    ],
    ids=[
        "missing",
        "unknown",
        "format",
        "model",
        "point",
        "quality",
        "type",
        "no-model",
        "points",
        "columns",
        "ms",
        "feature",
        "held-out",
        "error",
    ],
)
def test_a_damaged_file_is_refused(change, names: str, tmp_path: Path) -> None:
    data = json.loads(PROFILE.to_json())
    change(data)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=names) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def test_what_is_no_profile_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="must be JSON"):
        load_profile(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"x\.json"):
        load_profile(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="must be JSON"):
        load_profile(path)
    path.write_text(PROFILE.to_json(), encoding="utf-8-sig")
    assert load_profile(path) == PROFILE
    with pytest.raises(ConfigError, match="got None"):
        load_profile(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"neither a file nor a hardware profile; there are .*h20"):
        load_profile("h2000")
    with pytest.raises(ConfigError, match="no hardware profile is called 'h2000'"):
        preset("h2000")


def test_every_preset_loads_and_is_what_its_name_says() -> None:
    assert {"rtx-4090", "h20"} <= set(preset_names())
    for name in preset_names():
        profile = preset(name)
        assert name.split("-")[-1].upper() in profile.device.upper()
        assert (profile.model, profile.kv_bytes_per_token) == ("qwen3-8b", 147456)
        assert profile.source
    assert load_profile("h20") == preset("h20")


def test_the_reader_s_own_profile_or_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path))
    assert own_profile("h20") == preset("h20")
    PROFILE.save(own_profile_path())
    assert own_profile("h20") == PROFILE
    own_profile_path().write_text("{}")
    with pytest.raises(ConfigError, match=r"profile\.json: a hardware profile is"):
        own_profile()


def test_the_published_values_are_exact() -> None:
    seed = {name: preset(name) for name in ("rtx-4090", "h20")}
    fields = ("alpha_ms_per_token", "beta_ms", "batch_thresh", "gamma_ms_per_token", "bandwidth_gb_s")
    assert [getattr(seed["rtx-4090"], f) for f in fields] == [0.124722, 51.5604, 16, 0.0869146, 12.8962]
    assert [getattr(seed["h20"], f) for f in fields] == [0.145180, 33.1031, 16, 0.130235, 392.154]


def test_step_model_by_place() -> None:
    assert PROFILE.step_model() is PROFILE.step_time["whole device"]
    assert PROFILE.step_model("sm=84").base_ms == 6.0
    with pytest.raises(ConfigError, match=r"'sm=1'; it has \['sm=84', 'whole device'\]"):
        PROFILE.step_model("sm=1")
    assert PROFILE.warnings == ("alpha: 預填充 is poor",)


def test_quality_counts_held_out_points_only() -> None:
    quality = FitQuality.of("x", [1.0, 2.0, 3.3, 4.4], [1.0, 2.0, 3.0, 4.0], [False, False, True, True])
    assert (quality.num_points, quality.num_held_out) == (2, 2)
    assert quality.median_error == pytest.approx(0.1) and quality.p90_error == pytest.approx(0.1)
    assert quality.r2 == pytest.approx(1 - (0.09 + 0.16) / 5)
    good = FitQuality.of("x", [1.0, 2.0], [1.0, 2.0])
    assert good.median_error == 0.0 and good.r2 == 1.0 and good.warnings == ()


def test_quality_says_in_words_what_is_poor() -> None:
    poor = FitQuality.of("x", [2.0, 2.0, 2.0], [1.0, 2.0, 3.0])
    assert len(poor.warnings) == 2 and "33%" in poor.warnings[0] and "R² = 0.00" in poor.warnings[1]
    assert FitQuality.of("x", [2.0, 2.0], [2.0, 2.0]).r2 is None, "nothing varies, so nothing is explained"


def test_the_record_of_the_h200_profile_is_the_presets() -> None:
    """Prose cites the record; the preset is what routers and simulations use."""
    record = recorded("profile")
    assert record is not None
    values, found = record["values"], preset("h200")
    assert values["num_points"] == len(found.points)
    assert set(values["places"]) == set(found.quality)
    for place, row in values["places"].items():
        quality = found.quality[place]
        assert row["median_error"] == pytest.approx(quality.median_error, abs=1e-5), place
        assert row["p90_error"] == pytest.approx(quality.p90_error, abs=1e-5), place
        assert row["held_out"] == quality.num_held_out
