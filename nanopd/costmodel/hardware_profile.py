"""HardwareProfile: what a machine does with a model, as measured, in one JSON file.

It holds the few numbers of the analytical model, a step-time model for each place that was measured ("whole device",
"sm=84", …), the raw points behind them and how good each fit is. No torch: a router or a simulator needs only the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from nanopd.costmodel.features import StepFeatures, StepPoint
from nanopd.costmodel.quality import FitQuality
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.errors import ConfigError

FORMAT = "nanopd-hardware-profile-1"
WHOLE = "whole device"  # name of a place
BUSY = " beside a busy neighbour"  # ends the name of an SM partition measured while the other one was computing
_POINT_COLUMNS = (
    "kind",
    "place",
    "held_out",
    "ms",
    *(f.name for f in fields(StepFeatures)),
)


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Raises ConfigError, naming field, value and limit, for numbers that are out of range.

    ``bandwidth_gb_s`` (1e9 bytes/s) and ``link`` are of the path that transfers take; None: nothing has to be moved,
    since prefill and decode share a pool, or nobody measured it. ``quality`` is by fit: "alpha", "beta", "gamma", and
    the name of each place. ``environment``: GPU, driver, versions, date, command. ``source``: where the numbers
    come from, in a sentence.
    """

    device: str
    model: str
    dtype: str
    alpha_ms_per_token: float
    beta_ms: float
    gamma_ms_per_token: float
    batch_thresh: float
    kv_bytes_per_token: int
    bandwidth_gb_s: float | None = None
    link: str | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    step_time: Mapping[str, StepTimeModel] = field(default_factory=dict)
    quality: Mapping[str, FitQuality] = field(default_factory=dict)
    points: tuple[StepPoint, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("device", "model", "dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"{name} of a hardware profile must be a non-empty text, got {getattr(self, name)!r}")
        for name, positive in (
            ("alpha_ms_per_token", True),
            ("beta_ms", True),
            ("gamma_ms_per_token", False),
            ("batch_thresh", True),
            ("bandwidth_gb_s", True),
        ):
            value = getattr(self, name)
            if not (name == "bandwidth_gb_s" and value is None):
                _check_number(name, value, positive)
        for name in ("kv_bytes_per_token", "num_blocks", "block_size"):
            value = getattr(self, name)
            if value is None and name != "kv_bytes_per_token":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of a hardware profile must be an int >= 1, got {value!r}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Everything that a reader of these numbers should know."""
        return tuple(warning for quality in self.quality.values() for warning in quality.warnings)

    def step_model(self, place: str | None = None) -> StepTimeModel:
        """The step-time model of ``place``; None for that of the whole device. Raises ConfigError if there is none."""
        name = WHOLE if place is None else place
        if name not in self.step_time:
            raise ConfigError(
                f"the profile of {self.device} has no step-time model for {name!r}; it has {sorted(self.step_time)}"
            )
        return self.step_time[name]

    # --- JSON --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line per value, and one per point: readable, and small in a diff."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("step_time", "quality", "points")}
        data: dict[str, Any] = {"format": FORMAT, **head, "environment": dict(self.environment)}
        data["step_time"] = {place: model.as_dict() for place, model in self.step_time.items()}
        data["quality"] = {name: asdict(quality) for name, quality in self.quality.items()}
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
        rows = [json.dumps(list(_POINT_COLUMNS)), *(json.dumps(_point_row(point)) for point in self.points)]
        return text[:-2] + ',\n "points": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Raises ConfigError for text that is no profile, and for values out of range."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"a hardware profile must be JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ConfigError(f'a hardware profile is a JSON object with "format": "{FORMAT}"')
        names = {f.name for f in fields(cls)}
        required = {"device", "model", "dtype", "alpha_ms_per_token", "beta_ms", "gamma_ms_per_token"}
        required |= {"batch_thresh", "kv_bytes_per_token"}
        if missing := sorted(required - set(data)):
            raise ConfigError(f"the hardware profile lacks {missing}")
        if strange := sorted(set(data) - names):
            raise ConfigError(f"the hardware profile has unknown fields {strange}; known are {sorted(names)}")
        try:
            data["step_time"] = {k: StepTimeModel.from_dict(v) for k, v in data.get("step_time", {}).items()}
            data["quality"] = {k: _quality(v) for k, v in data.get("quality", {}).items()}
            data["points"] = _points(data.get("points", []))
        except (TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the hardware profile is damaged: {error}") from error
        return cls(**data)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file; its folder is made if need be."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path


# --- presets -----------------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """Profiles that ship with the package, such as "rtx-4090"."""
    folder = resources.files(__package__) / "presets"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def preset(name: str) -> HardwareProfile:
    """A profile that ships with the package. Raises ConfigError with the names there are."""
    if name not in preset_names():
        raise ConfigError(f"no hardware profile is called {name!r}; there are {', '.join(preset_names())}")
    return HardwareProfile.from_json((resources.files(__package__) / "presets" / f"{name}.json").read_text("utf-8"))


def load_profile(name_or_path: str | Path) -> HardwareProfile:
    """A preset by name, or a file that ``nanopd profile`` wrote. Raises ConfigError if it is neither."""
    path = Path(name_or_path)
    if str(name_or_path) in preset_names():
        return preset(str(name_or_path))
    if not path.is_file():
        raise ConfigError(
            f"{str(name_or_path)!r} is neither a file nor a hardware profile; there are {', '.join(preset_names())}"
        )
    try:
        return HardwareProfile.from_json(path.read_text("utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def own_profile_path() -> Path:
    """Where the reader's own profile is kept: ``$NANOPD_CACHE/profile.json``, else in ``~/.cache/nanopd``."""
    return Path(os.environ.get("NANOPD_CACHE") or "~/.cache/nanopd").expanduser() / "profile.json"


def own_profile(fallback: str = "h200") -> HardwareProfile:
    """The profile that notebook 07 saved on this machine, or else the preset ``fallback``. Raises ConfigError."""
    path = own_profile_path()
    return load_profile(path) if path.is_file() else preset(fallback)


# --- inside ------------------------------------------------------------------------------------------------------


def _check_number(name: str, value: Any, positive: bool) -> None:
    limit = "> 0" if positive else ">= 0"
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        raise ConfigError(f"{name} of a hardware profile must be a finite number {limit}, got {value!r}")


def _quality(data: Mapping[str, Any]) -> FitQuality:
    return FitQuality(**{**data, "warnings": tuple(data.get("warnings", ()))})


def _point_row(point: StepPoint) -> list[Any]:
    features = [getattr(point.features, f.name) for f in fields(StepFeatures)]
    return [point.kind, point.place, point.held_out, float(f"{point.ms:.6g}"), *features]


def _points(rows: list[list[Any]]) -> tuple[StepPoint, ...]:
    """The first row names the columns."""
    if not rows:
        return ()
    points = []
    for row in rows[1:]:
        values = dict(zip(rows[0], row, strict=True))
        head = {name: values.pop(name) for name in ("kind", "place", "held_out", "ms")}
        points.append(StepPoint(StepFeatures(**values), **head))
    return tuple(points)
