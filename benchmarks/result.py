"""The one result format of every benchmark command, and what each of its numbers was measured on.

    {"benchmark", "machine", "versions", "seed",
     "rows": [{…}, …], "checks": [{"name", "value", "required", "op", "ok"}]}

A requirement is a check. A check without a value has failed: what was not measured is not met.
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}
_PACKAGES = ("baton", "aiohttp", "numpy", "ray", "torch", "uvloop")


@dataclass(frozen=True, slots=True)
class Check:
    """`value op required`, e.g. `itl_max_ms: 83.1 <= 100`. `of`: which one of many it is the value of, if that tells.

    Raises ValueError for an operator we do not know.
    """

    name: str
    value: float | None
    op: str
    required: float
    of: str = ""

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise ValueError(f"op: expected one of {', '.join(_OPERATORS)} but got {self.op!r}")

    @property
    def is_ok(self) -> bool:
        if self.value is None or not math.isfinite(self.value):
            return False
        return _OPERATORS[self.op](self.value, self.required)

    def to_json(self) -> dict[str, Any]:
        value = self.value if self.value is not None and math.isfinite(self.value) else None
        verdict = {"required": self.required, "op": self.op, "ok": self.is_ok}
        return {"name": self.name, "value": value, **verdict, **({"of": self.of} if self.of else {})}

    def __str__(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.4g}"
        verdict = f"{self.name}: {shown} (required {self.op} {self.required:g})"
        return f"{'ok  ' if self.is_ok else 'FAIL'} {verdict}{f', {self.of}' if self.of else ''}"


@dataclass(slots=True)
class Result:
    """What one command measured."""

    benchmark: str
    seed: int | list[int]
    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    versions: dict[str, str] = field(default_factory=lambda: versions())

    @property
    def is_ok(self) -> bool:
        return all(check.is_ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "machine": self.machine,
            "versions": self.versions,
            "seed": self.seed,
            "rows": [_finite(row) for row in self.rows],
            "checks": [check.to_json() for check in self.checks],
        }

    def write(self, path: Path) -> None:
        """The file appears whole or not at all."""
        write_json(path, self.to_json())


def conclude(result: Result, json: Path | None, is_whole: bool = True, note: str = "") -> int:
    """The end of a command: write what was measured, `note` if it was stopped, and the exit status.

    0: all checks hold; 1: a check failed; 130: stopped before the end.
    """
    if json is not None:
        result.write(json)
    if is_whole:
        return 0 if result.is_ok else 1
    if note:
        print(note)
    return 130


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_result(path: Path) -> Result:
    """Raises ValueError for a file that is no result, or whose `ok` does not follow from its numbers."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a benchmark result but got {error!r}") from error


def _from_json(content: dict[str, Any]) -> Result:
    checks = [
        Check(item["name"], item["value"], item["op"], item["required"], item.get("of", ""))
        for item in content["checks"]
    ]
    for check, item in zip(checks, content["checks"], strict=True):
        if check.is_ok != item["ok"]:
            raise ValueError(f"check {check.name}: expected ok={check.is_ok} but got {item['ok']}")
    return Result(
        content["benchmark"],
        content["seed"],
        content["rows"],
        checks,
        content["machine"],
        content["versions"],
    )


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system, accelerators; no host or user name."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "gpus": _gpus(),
    }


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Installed ones of `packages`, and Python."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def text_table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """Aligned columns: the first to the left, others to the right. None is shown as a dash."""
    cells = [list(header), *[[_shown(value) for value in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _gpus() -> list[str]:
    """Names the driver reports; needs no CUDA library."""
    folder = Path("/proc/driver/nvidia/gpus")
    if not folder.is_dir():
        return []
    found = []
    for card in sorted(folder.iterdir()):
        for line in (card / "information").read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                found.append(line.partition(":")[2].strip())
    return found
