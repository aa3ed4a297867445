"""Choice: a tunable decision of a kernel family, and the best value known for it.

``lookup.py`` finds values; ``te-fl tune`` measures them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from transformer_engine_fl.backends.flagos.tuning import lookup
from transformer_engine_fl.core.errors import RegistrationError

if TYPE_CHECKING:
    import torch

__all__ = ["CHOICES", "Choice", "Key", "forget"]

T = TypeVar("T")
Key = tuple[int, ...]

CHOICES: dict[str, Choice[Any]] = {}
"""Every choice of the families that are loaded, by name."""

_MOST_ANSWERS = 1024


class _Plans(Protocol):
    """A family's cache of plans."""

    def clear(self) -> None: ...


class Choice(Generic[T]):
    """A tunable decision for a kernel: a small set of values, one of which is best for each key.

    Called as ``choice(device, *key)`` when a launch is planned. Where an operator claims
    ``batch_invariant``, rows of one call must not differ in their key.

    Args:
        name: its name in files: that of the operator or kernel it is for.
        value: the type of the values, a NamedTuple of numbers.
        key: names of the numbers that a value is measured for.
        rounded: the key's names that are rounded up to a power of two; or a mapping from name to
            the number of equal steps between a power of two and the next.
        candidates: ``candidates(*key)``, the values to be measured.
        heuristic: ``heuristic(device, *key)``, the value where nothing was measured.
        wrong: what is wrong with a value from a file or a vendor, or None. A right value need
            not be a candidate, but a kernel must be able to run with it.
        plans: plans made with its answers, cleared when these change.

    Raises:
        RegistrationError: another choice has that name.
    """

    def __init__(
        self,
        name: str,
        value: type[T],
        *,
        key: Sequence[str],
        rounded: Sequence[str] | Mapping[str, int] = (),
        candidates: Callable[..., Iterable[T]],
        heuristic: Callable[..., T],
        wrong: Callable[[T], str | None] = lambda value: None,
        plans: Iterable[_Plans] = (),
    ) -> None:
        other = CHOICES.get(name)
        if other is not None and other.heuristic.__module__ != heuristic.__module__:
            raise RegistrationError(
                f"choice {name!r} already exists in {other.heuristic.__module__}; "
                f"rename the one in {heuristic.__module__}"
            )
        self.name = name
        self.value = value
        self.key = tuple(key)
        self._steps = dict(rounded) if isinstance(rounded, Mapping) else dict.fromkeys(rounded, 1)
        self.candidates = candidates
        self.heuristic: Callable[..., T] = heuristic
        self.wrong = wrong
        self._plans = tuple(plans)
        self._answers: dict[object, T] = {}
        self._trial: _Trial[T] | None = None
        CHOICES[name] = self

    def __call__(self, device: torch.device, *key: int) -> T:
        """The value for a key on a device.

        Raises:
            ConfigurationError: the file that TE_FL_TUNING_PATH names is broken.
        """
        if self._trial is not None:
            return self._trial.answer(device, self.round(key))
        cache_key = (device, rounded := self.round(key))
        answer = self._answers.get(cache_key)  # which another thread may forget
        if answer is None:
            answer = lookup.value(self, device, rounded)
            if answer is None:
                answer = self.heuristic(device, *rounded)
            if len(self._answers) >= _MOST_ANSWERS:
                self._answers.clear()
            self._answers[cache_key] = answer
        return answer

    def round(self, key: Key) -> Key:
        """The key, with its rounded fields rounded up."""
        pairs = zip(self.key, key, strict=True)
        return tuple([self.rounded(name, number) for name, number in pairs])

    def rounded(self, name: str, number: int) -> int:
        """A number of the key's field ``name``, rounded up if that field is."""
        steps = self._steps.get(name)
        return number if steps is None else rounded_up(number, steps)

    def unmeasured(self, device: torch.device, key: Key) -> T:
        """The value by rule: the vendor's heuristic, or the family's own."""
        found = lookup.by_rule(self, device, key)
        return self.heuristic(device, *key) if found is None else found

    def forget(self) -> None:
        """Forget every answer, and the plans made with them."""
        self._answers.clear()
        for plans in self._plans:
            plans.clear()
        from transformer_engine_fl.backends import _repeats  # it loads torch

        _repeats.forget()

    @contextlib.contextmanager
    def trial(self, value: T | None = None) -> Iterator[set[Key]]:
        """Within the block the answer is ``value``, or the one by rule if ``value`` is None.

        For measuring, while nothing else runs. Yields the set of keys that are asked for.
        """
        self.forget()
        self._trial = trial = _Trial(self, value)
        try:
            yield trial.keys
        finally:
            self._trial = None
            self.forget()


class _Trial(Generic[T]):
    """One value in place of every answer."""

    def __init__(self, choice: Choice[T], value: T | None) -> None:
        self.keys: set[Key] = set()
        self._choice = choice
        self._value = value

    def answer(self, device: torch.device, key: Key) -> T:
        self.keys.add(key)
        return self._choice.unmeasured(device, key) if self._value is None else self._value


def rounded_up(number: int, steps: int) -> int:
    """Round up to a power of two, or one of ``steps - 1`` equal steps between two of them."""
    power = 1 << max(number - 1, 0).bit_length()
    step = max(1, power // (2 * steps))
    return max(1, -(-number // step) * step)


def forget() -> None:
    """Forget files and choices: both, and the environment, are read again at the next plan."""
    lookup.forget()
    for choice in CHOICES.values():
        choice.forget()
