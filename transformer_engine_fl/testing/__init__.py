"""The conformance kit: what a vendor runs to know that an implementation is right.

>>> from transformer_engine_fl import testing
>>> for case in testing.cases("vendor.acme"):  # doctest: +SKIP
...     outcome = case.run()
...     if outcome.declined:
...         print(case.name, "was not served:", outcome.declined)

Every failure is a :class:`ConformanceError`. What an implementation declines is neither a
failure nor a pass, and the outcome says so; the typical sample of each dtype that it
claims it must serve.

An operator that writes arguments (``Contract.mutates``) has an oracle that writes
nothing: after the outputs it returns, in float64, what each argument named in ``mutates``
must hold afterwards, in that order.
"""

from transformer_engine_fl.testing.allocation import Guarded
from transformer_engine_fl.testing.cases import Case, cases
from transformer_engine_fl.testing.comparison import Worst, compare
from transformer_engine_fl.testing.outcome import ConformanceError, Outcome

__all__ = ["Case", "ConformanceError", "Guarded", "Outcome", "Worst", "cases", "compare"]
