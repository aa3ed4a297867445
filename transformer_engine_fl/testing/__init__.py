"""The conformance kit: what a vendor runs to know that an implementation is right.

``pytest --te-fl-impl vendor.acme`` and ``te-fl verify vendor.acme`` run it whole. In code:

>>> from transformer_engine_fl import testing
>>> for case in testing.cases("vendor.acme"):  # doctest: +SKIP
...     outcome = case.run()
...     if outcome.declined:
...         print(case.name, "was not served:", outcome.declined)

Every failure is a :class:`ConformanceError`. A sample that an implementation declines is
neither a failure nor a pass, and the outcome says so. The typical sample of each dtype that
an implementation claims must be served.

An operator that writes arguments (``Contract.mutates``) has an oracle that writes
nothing: after the outputs it returns, in float64, what each argument named in ``mutates``
must hold afterwards, in that order.

Importing this package does not import torch: pytest imports it on every run, for its plugin.
"""

from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.late import load_attribute

if TYPE_CHECKING:
    from transformer_engine_fl.testing.allocation import Guarded
    from transformer_engine_fl.testing.case import Case, cases, devices
    from transformer_engine_fl.testing.comparison import Worst, compare
    from transformer_engine_fl.testing.outcome import ConformanceError, Outcome
    from transformer_engine_fl.testing.running import verify
    from transformer_engine_fl.testing.sanitizing import sanitize
    from transformer_engine_fl.testing.scorecard import Scorecard

__all__ = [
    "Case",
    "ConformanceError",
    "Guarded",
    "Outcome",
    "Scorecard",
    "Worst",
    "cases",
    "compare",
    "devices",
    "sanitize",
    "verify",
]

_HOMES = {
    "Case": "case",
    "ConformanceError": "outcome",
    "Guarded": "allocation",
    "Outcome": "outcome",
    "Scorecard": "scorecard",
    "Worst": "comparison",
    "cases": "case",
    "compare": "comparison",
    "devices": "case",
    "sanitize": "sanitizing",
    "verify": "running",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = load_attribute(f"{__name__}.{_HOMES[name]}:{name}")
    return value
