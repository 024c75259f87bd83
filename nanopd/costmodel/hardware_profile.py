"""HardwareProfile: what a machine does with a model, as measured, in one JSON file.

It holds the few numbers of the analytical model, a step-time model for each place that was measured ("whole device",
"sm=84", …), the raw points behind them and how good each fit is. No torch: a router or a simulator needs only the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from nanopd.costmodel.checks import check_count, check_number, shown
from nanopd.costmodel.features import StepFeatures, StepPoint
from nanopd.costmodel.files import write_whole
from nanopd.costmodel.quality import FitQuality
from nanopd.costmodel.step_time import StepTimeModel
from nanopd.errors import ConfigError

FORMAT = "nanopd-hardware-profile-1"
WHOLE = "whole device"  # name of a place
BUSY = " beside a busy neighbour"  # ends the name of an SM partition measured while the other one was computing
_MOST = 1 << 40  # of blocks, of tokens in one, of bytes of a token: more is a slip of the pen
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
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{name} of a hardware profile must be a non-empty text, got {shown(value)}")
        for name in ("alpha_ms_per_token", "beta_ms", "batch_thresh", "bandwidth_gb_s"):
            value = getattr(self, name)
            if not (name == "bandwidth_gb_s" and value is None):
                check_number(f"{name} of a hardware profile", value, above=0.0)
        check_number("gamma_ms_per_token of a hardware profile", self.gamma_ms_per_token)
        for name in ("kv_bytes_per_token", "num_blocks", "block_size"):
            value = getattr(self, name)
            if not (value is None and name != "kv_bytes_per_token"):
                check_count(f"{name} of a hardware profile", value, least=1, most=_MOST)
        if not isinstance(self.source, str) or not (self.link is None or isinstance(self.link, str)):
            raise ConfigError(
                f"link and source of a hardware profile must be texts, got {shown(self.link)} and {shown(self.source)}"
            )
        _check_table("step_time", self.step_time, StepTimeModel, "step-time models")
        _check_table("quality", self.quality, FitQuality, "fit qualities")
        _check_table("environment", self.environment, str, "texts")

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
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: no text at all
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
        data["step_time"] = {k: _step_time(k, v) for k, v in _table("step_time", data).items()}
        data["quality"] = {k: _quality(k, v) for k, v in _table("quality", data).items()}
        data["points"] = _points(data.get("points", []))
        return cls(**data)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file, whole or not at all; its folder is made if need be."""
        return write_whole(path, [self.to_json()])


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
    if not isinstance(name_or_path, str | Path):
        raise ConfigError(f"a hardware profile is a name or a file, got {shown(name_or_path)}")
    path = Path(name_or_path)
    if str(name_or_path) in preset_names():
        return preset(str(name_or_path))
    if not path.is_file():
        raise ConfigError(
            f"{str(name_or_path)!r} is neither a file nor a hardware profile; there are {', '.join(preset_names())}"
        )
    try:
        return HardwareProfile.from_json(path.read_text("utf-8-sig"))  # editors on Windows begin a file with a mark
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


def _check_table(name: str, table: Any, kind: type, kinds: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} of a hardware profile must be a table of {kinds}, got {shown(table)}")
    for key, value in table.items():
        if not isinstance(key, str) or not key or not isinstance(value, kind):
            raise ConfigError(f"{name} of a hardware profile must be a table of {kinds}, got {key!r}: {shown(value)}")


def _table(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} of a hardware profile must be a table, got {shown(table)}")
    return table


def _step_time(place: str, data: Any) -> StepTimeModel:
    try:
        return StepTimeModel.from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"step_time of {place!r}: {error}") from error


def _quality(name: str, data: Any) -> FitQuality:
    try:
        return FitQuality(**{**data, "warnings": tuple(data.get("warnings", ()))})
    except (TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"quality of {name!r} in a hardware profile is damaged: {error}") from error


def _point_row(point: StepPoint) -> list[Any]:
    features = [getattr(point.features, f.name) for f in fields(StepFeatures)]
    return [point.kind, point.place, point.held_out, float(f"{point.ms:.6g}"), *features]


def _points(rows: Any) -> tuple[StepPoint, ...]:
    """The first row names the columns."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"points of a hardware profile must be a list of rows, got {shown(rows)}")
    if rows and (len(rows[0]) != len(_POINT_COLUMNS) or set(map(str, rows[0])) != set(_POINT_COLUMNS)):
        raise ConfigError(f"the points' columns must be {list(_POINT_COLUMNS)}, got {shown(rows[0])}")
    points = []
    for number, row in enumerate(rows[1:], 1):
        try:
            values = dict(zip(rows[0], row, strict=True))
            head = {name: values.pop(name) for name in ("kind", "place", "held_out", "ms")}
            points.append(StepPoint(StepFeatures(**values), **head))
        except ValueError as error:  # also too few or too many of them, and what the classes refuse
            raise ConfigError(f"point {number} of the hardware profile is damaged: {error}") from error
    return tuple(points)
