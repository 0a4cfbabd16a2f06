"""How numbers, times and names read on a page. Pure; the clock is an argument."""

from __future__ import annotations

import math
from datetime import UTC, datetime

#: What a page prints for a number that was not measured.
MISSING = "–"

ISA_TITLES = {"amx": "AMX", "vnni": "AVX512-VNNI", "avx512": "AVX512", "avx2": "AVX2", "native": "Native"}
ISA_ORDER = ("amx", "vnni", "avx512", "avx2", "native")
ENGINE_ORDER = ("int8", "torchao", "openvino", "onnxruntime", "ctranslate2")
RECIPE_ORDER = (
    "fp32",
    "bf16",
    "sq-static",
    "sq-dynamic",
    "static",
    "dynamic",
    "llm-int8",
    "llm-int8-offline",
    "absmax",
    "zeropoint",
    "rowwise",
    "vectorwise",
    "auto",
)


def rank(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    """Sort key: known names in their order, then the others by name."""
    return (order.index(name), name) if name in order else (len(order), name)


def isa_title(isa: str) -> str:
    """The ISA as a heading."""
    return ISA_TITLES.get(isa, isa)


def significant(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and thousands separators: 0.0123, 4.57, 1,240."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    return f"{rounded:,.{max(places, 0)}f}".replace("-", "−")


def count(value: float | None) -> str:
    """A whole number with thousands separators; what is none keeps three significant digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{int(value):,}".replace("-", "−") if float(value).is_integer() else significant(value)


def joined(words: list[str]) -> str:
    """Words as a list in a sentence: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 2 else words)


def giga(value: float | None) -> str:
    """A rate in billions a second: 3,810."""
    return significant(None if value is None else value / 1e9)


def ratio(value: float | None) -> str:
    """A speed-up: 3.42×, 0.87×, 12.4×."""
    if value is None:
        return MISSING
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def ratio_interval(interval: tuple[float, float] | None) -> str:
    """The interval of a speed-up: 3.31–3.52."""
    if interval is None:
        return "interval unknown"
    digits = 2 if interval[1] < 10 else 1
    return f"{interval[0]:.{digits}f}–{interval[1]:.{digits}f}"


def percent(value: float | None, places: int = 1) -> str:
    """A fraction as a percentage."""
    return MISSING if value is None or not math.isfinite(value) else f"{100 * value:.{places}f} %".replace("-", "−")


def points(value: float | None, places: int = 2) -> str:
    """A difference of fractions in percentage points, always with its sign: +0.10 pp, −0.35 pp."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{100 * value:+.{places}f} pp"
    return text.replace("-", "−")


def points_interval(interval: tuple[float, float] | None, places: int = 2) -> str:
    """An interval of differences in percentage points: −0.61 to +0.12 pp."""
    if interval is None:
        return "interval unknown"
    return f"{100 * interval[0]:+.{places}f} to {100 * interval[1]:+.{places}f} pp".replace("-", "−")


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it: 812 µs, 41.7 ms, 3.20 s, 2 min 5 s."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{significant(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{significant(seconds * 1e3)} ms"
    if seconds < 100:
        return f"{significant(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def size(count: int | None) -> str:
    """Bytes in binary units: 86.7 MiB."""
    if count is None:
        return MISSING
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{significant(value)} {unit}"
        value /= 1024
    return MISSING


def moment(seconds: float) -> datetime:
    """Unix seconds as UTC; a time that no calendar has becomes its start, so that one bad header spoils no site."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)


def date(seconds: float) -> str:
    """2026-11-30 04:12 UTC."""
    return moment(seconds).strftime("%Y-%m-%d %H:%M UTC")


def day(seconds: float) -> str:
    """2026-11-30."""
    return moment(seconds).strftime("%Y-%m-%d")


def iso(seconds: float) -> str:
    """RFC 3339, as feeds and ``<time>`` want it."""
    return moment(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(seconds: float) -> str:
    """How long ago: just now, 5 hours, 3 days."""
    if seconds < 90:
        return "just now"
    for limit, unit, name in ((90 * 60, 60, "minute"), (48 * 3600, 3600, "hour"), (math.inf, 86400, "day")):
        if seconds < limit:
            count = round(seconds / unit)
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return MISSING


def short_commit(commit: str | None) -> str:
    """The first ten digits of a commit."""
    return commit[:10] if commit else "unknown"


def scenario_title(scenario: str) -> tuple[str, str]:
    """A scenario in words: its kind and its sizes; what cannot be parsed is shown as it is."""
    kind, _, rest = scenario.partition(":")
    sizes = {part[:1]: part[1:] for part in rest.split(":") if part[1:].isdigit()}
    words = {"offline": "Throughput", "single": "Latency, batch 1", "multi": "Instances"}
    if kind not in words or not sizes:
        return scenario, ""
    shown = []
    if kind == "multi":
        shown.append(rest.split(":")[0].replace("x", " × ") + " threads")
    if "b" in sizes:
        shown.append(f"batch {sizes['b']}")
    if "s" in sizes:
        shown.append(f"{sizes['s']} tokens")
    return words[kind], ", ".join(shown)


def flat(value: object) -> str:
    """A value of the fingerprint as text."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {flat(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(flat(item) for item in value) or "none"
    return str(value)
