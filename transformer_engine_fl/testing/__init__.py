"""The conformance kit: what a vendor runs to know that an implementation is right.

>>> from transformer_engine_fl import testing
>>> for case in testing.cases("vendor.acme"):  # doctest: +SKIP
...     case.run()
"""

from transformer_engine_fl.testing.allocation import Guarded
from transformer_engine_fl.testing.comparison import Worst, compare
from transformer_engine_fl.testing.conformance import Case, ConformanceError, cases

__all__ = ["Case", "ConformanceError", "Guarded", "Worst", "cases", "compare"]
