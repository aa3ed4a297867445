"""Every error this package raises on purpose, and how it words them.

An error says what was asked, what was found and what to do next. Each class
also derives from the builtin a caller would guess (``ValueError`` for a bad
setting, ``TypeError`` for bad arguments), so code that does not know this
package can still handle it. Deciding *when* to raise is left to the callers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_engine_fl.core.selection import Decision

__all__ = [
    "AllCandidatesFailedError",
    "ArgumentError",
    "ConfigurationError",
    "DuplicateImplError",
    "NoImplementationError",
    "NotStartedError",
    "NotSupportedError",
    "PartialMutationError",
    "PluginError",
    "RegistrationError",
    "SignatureMismatchError",
    "StrictModeError",
    "TeFlError",
    "UnknownOperatorError",
    "nearest",
    "suggestion",
]


class TeFlError(Exception):
    """Base class of every error of this package."""


class ConfigurationError(TeFlError, ValueError):
    """A setting (environment variable, policy file, keyword) is malformed."""


class RegistrationError(TeFlError, ValueError):
    """An implementation cannot be registered as it was described."""


class DuplicateImplError(RegistrationError):
    """The operator already has an implementation with that ``impl_id``."""


class SignatureMismatchError(RegistrationError):
    """An implementation's signature does not fit the operator's contract."""


class PluginError(TeFlError, RuntimeError):
    """A plugin could not be loaded, or speaks another version of the plugin API.

    Attributes:
        vendors: the vendors it would have registered, as far as known when it failed.
    """

    vendors: tuple[str, ...] = ()


class UnknownOperatorError(TeFlError, LookupError):
    """No operator of that name is registered or has a contract."""


class ArgumentError(TeFlError, TypeError, ValueError):
    """A call's arguments do not satisfy the operator's contract.

    Args:
        op_name: the operator that was called.
        argument: the argument at fault.
        given: what was passed.
        expected: what the contract asks for.
    """

    # No __init__ of its own: torch.compile can follow a raise only without one.

    @property
    def op_name(self) -> str:
        """The operator that was called."""
        return str(self.args[0])

    @property
    def argument(self) -> str:
        """The argument at fault."""
        return str(self.args[1])

    def __str__(self) -> str:
        if len(self.args) != 4:  # raised by other code, with its own message: show that
            return super().__str__()
        op_name, argument, given, expected = self.args
        return f"{op_name}: argument {argument!r} is {given}; the contract expects {expected}"


class NotSupportedError(TeFlError, NotImplementedError):
    """Raised by an implementation, before it touches anything: "not these arguments".

    Dispatch takes it as a decline, not as a fault, and tries the next candidate.
    """


class NotStartedError(TeFlError, RuntimeError):
    """Raised by an implementation that is broken, before it touches anything.

    A fault, unlike :class:`NotSupportedError`; but the arguments that the operator writes are
    unchanged, so the next candidate may run on them.
    """


class _DecisionError(TeFlError, RuntimeError):
    """An error that carries the decision it came from.

    Attributes:
        decision: every candidate with the reason it was rejected or failed. None in a
            copy that was pickled, which keeps only the text.
    """

    def __init__(self, message: str, decision: Decision | None) -> None:
        super().__init__(message)
        self.decision = decision

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}\n{self.decision}" if self.decision is not None else message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), None)


class NoImplementationError(_DecisionError):
    """No candidate is admitted by the policy, the machine and the arguments."""


class StrictModeError(_DecisionError):
    """Strict mode: the first candidate of the policy did not serve."""


class AllCandidatesFailedError(_DecisionError):
    """Every admitted candidate was tried, and each one failed or declined."""


class PartialMutationError(_DecisionError):
    """An implementation failed inside an operator that writes its arguments.

    The named tensors may be half written, so nothing else ran on them.

    Attributes:
        tensors: names of the arguments that may be half written.
    """

    def __init__(self, message: str, decision: Decision | None, tensors: tuple[str, ...]) -> None:
        super().__init__(message, decision)
        self.tensors = tensors

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), None, self.tensors)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The spelling in ``known`` closest to ``word``, or None if none is close."""
    import difflib

    by_folded = {candidate.casefold(): candidate for candidate in known}
    # Half the letters may agree by chance, as in 'maybe' and 'yes'.
    found = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.55)
    return by_folded[found[0]] if found else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known spelling, or an empty string."""
    close = nearest(word, known)
    return f"; did you mean {close!r}?" if close else ""
