"""The results of every case of a set: as plain values, and as a page to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformer_engine_fl.testing.case import Case
from transformer_engine_fl.testing.comparison import Worst
from transformer_engine_fl.testing.outcome import Outcome

__all__ = ["Failure", "Row", "Scorecard", "shown"]


@dataclass(slots=True)
class Row:
    """The results of an operator's cases for one dtype on a device.

    Attributes:
        operator, family, device, dtype: which cases.
        passed, declined, failed: numbers of cases.
        worst: the largest errors of its comparisons; None if nothing was compared.
        at: the case with the largest error relative to what is allowed.
        reasons: why samples were declined, and how many.
    """

    operator: str
    family: str
    device: str
    dtype: str
    passed: int = 0
    declined: int = 0
    failed: int = 0
    worst: Worst | None = None
    at: str | None = None
    reasons: dict[str, int] | None = None

    def count(self, case: Case, outcome: Outcome | None, worst: Worst | None) -> None:
        """Count a case with this outcome; None is a failure."""
        if outcome is None:
            self.failed += 1
        elif outcome.declined is not None:
            self.declined += 1
            self.reasons = self.reasons or {}
            self.reasons[outcome.declined] = self.reasons.get(outcome.declined, 0) + 1
        else:
            self.passed += 1
        if worst is None:
            return
        if self.worst is None or worst.ratio > self.worst.ratio:
            self.at = case.name
        self.worst = worst if self.worst is None else self.worst.and_of(worst)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; the errors are null where nothing was compared."""
        worst = self.worst
        return {
            "operator": self.operator,
            "family": self.family,
            "device": self.device,
            "dtype": self.dtype,
            "passed": self.passed,
            "declined": self.declined,
            "failed": self.failed,
            "ulps": worst.ulps if worst else None,
            "relative": worst.relative if worst else None,
            "of_allowed": worst.ratio if worst else None,
            "worst_case": self.at,
            "declined_because": dict(self.reasons or {}),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that does not hold.

    Attributes:
        case, device: the case's name, and the device.
        said: what is wrong.
        traceback: of the implementation's exception; None if it raised none.
        reproduce: a command that runs this case alone.
    """

    case: str
    device: str
    said: str
    traceback: str | None
    reproduce: str


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The results of every case of a set.

    Attributes:
        impl_id: the set.
        source: the set or plugin that registered it.
        date: when, in UTC.
        seconds: how long it took.
        every: one case in so many of each operator and dtype was run.
        versions, devices: what it ran with.
        rows: by operator, device and dtype.
        failures: every case that does not hold.
        switched_off: operators that serve nowhere, and were not tested, each with its reason.
        missing: operators of the catalogue that the set does not implement; None if only
            some operators were asked for.
    """

    impl_id: str
    source: str
    date: str
    seconds: float
    every: int
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    switched_off: dict[str, str]
    missing: tuple[str, ...] | None

    @property
    def passed(self) -> bool:
        """Whether everything holds."""
        return not self.failures

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that were tested."""
        return tuple(dict.fromkeys(row.operator for row in self.rows))

    def total(self, what: str) -> int:
        """How many cases ``passed``, were ``declined`` or ``failed``."""
        return sum(getattr(row, what) for row in self.rows)

    def verdict(self) -> str:
        """The result in a line."""
        total = sum(map(self.total, ("passed", "declined", "failed")))
        declined = self.total("declined")
        said = (
            f"{self.total('failed')} of {total} cases fail"
            if self.failures
            else (f"all {self.total('passed')} cases hold")
        )
        more = f", {declined} declined" if declined else ""
        some = f"; 1 case in {self.every} was run" if self.every > 1 else ""
        return f"{self.impl_id}: {said}{more}; operators: {len(self.operators)}{some}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "impl_id": self.impl_id,
            "source": self.source,
            "date": self.date,
            "seconds": round(self.seconds, 3),
            "every": self.every,
            "versions": self.versions,
            "devices": self.devices,
            "passed": self.passed,
            "cases": {what: self.total(what) for what in ("passed", "declined", "failed")},
            "operators": list(self.operators),
            "switched_off": self.switched_off,
            "missing": None if self.missing is None else list(self.missing),
            "results": [row.to_dict() for row in self.rows],
            "failures": [
                {name: getattr(failure, name) for name in Failure.__slots__}
                for failure in self.failures
            ],
        }

    def to_markdown(self) -> str:
        """As a page."""
        return "\n".join([f"# Scorecard of {self.impl_id}", "", *_body(self, "##")])

    def to_section(self) -> str:
        """As a part of a page about the set, which says itself what the set implements."""
        whole = dataclasses.replace(self, missing=None)
        return "\n".join(_body(whole, "###"))


# --------------------------------------------------------------------------- as a page


def _body(card: Scorecard, heading: str) -> Iterator[str]:
    yield f"**{card.verdict()}.**"
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    yield f"| source | {card.source} |"
    yield f"| date | {card.date} |"
    for it in card.devices:
        named = ", ".join(str(it[key]) for key in ("name", "arch") if it[key])
        yield f"| {it['device']} | {named} |"
    for name, version in card.versions.items():
        yield f"| {name} | {version or 'not installed'} |"
    yield ""
    yield f"{heading} Operators"
    yield ""
    yield "The largest errors against float64: in units in the last place of the output's dtype,"
    yield "relative to the root mean square of the output, and as a part of what the contract"
    yield "allows (above 1 is a failure). `-` stands where nothing was compared."
    yield ""
    headings = ("operator", "device", "dtype", "passed", "declined", "failed")
    yield f"| {' | '.join((*headings, 'ulps', 'relative', 'of allowed'))} |"
    yield f"| --- | --- | --- |{' ---: |' * 6}"
    for row in card.rows:
        counts = f"{row.passed} | {row.declined} | {row.failed}"
        errors = " | ".join(shown(row.worst))
        yield f"| `{row.operator}` | {row.device} | {row.dtype} | {counts} | {errors} |"
    yield from _failures(card, heading)
    yield from _declined(card, heading)
    if card.switched_off:
        yield from ("", f"{heading} Switched off", "", "| operator | reason |", "| --- | --- |")
        for name, reason in card.switched_off.items():
            yield f"| `{name}` | {_cell(reason)} |"
    if card.missing:
        yield from ("", f"{heading} Not implemented", "")
        yield ", ".join(f"`{name}`" for name in card.missing)
    yield ""


def shown(worst: Worst | None) -> tuple[str, str, str]:
    """The largest errors as text: ulps, relative, part of what is allowed."""
    if worst is None:
        return "-", "-", "-"
    return f"{worst.ulps:.3g}", f"{worst.relative:.2g}", f"{worst.ratio:.2g}"


def _failures(card: Scorecard, heading: str) -> Iterator[str]:
    if not card.failures:
        return
    yield from ("", f"{heading} Failures")
    for failure in card.failures:
        yield from ("", f"{heading}# `{failure.case}` on {failure.device}", "")
        yield from ("```", failure.said, "```", "", "```sh", failure.reproduce, "```")


def _cell(text: str) -> str:
    """A text escaped for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _declined(card: Scorecard, heading: str) -> Iterator[str]:
    reasons: dict[tuple[str, str], int] = {}
    for row in card.rows:
        for reason, count in (row.reasons or {}).items():
            key = (row.operator, _cell(reason))
            reasons[key] = reasons.get(key, 0) + count
    if not reasons:
        return
    yield from (
        "",
        f"{heading} Declined",
        "",
        "| operator | cases | reason |",
        "| --- | ---: | --- |",
    )
    for (operator, reason), count in reasons.items():
        yield f"| `{operator}` | {count} | {reason} |"
