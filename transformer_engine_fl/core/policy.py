"""What the user wants: the selection policy, its sources and their order.

Sources, strongest first: ``with`` blocks, :func:`set_global_policy`, the environment,
the policy file, defaults. They are merged field by field: a stronger source wins, but what
any source rules out stays ruled out. The environment is read once, at first use, and again
after :func:`reset_global_policy`. selection.py chooses implementations under a policy.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, ParamSpec, Protocol, TypeVar

from transformer_engine_fl.core import log
from transformer_engine_fl.core.errors import ConfigurationError, suggestion
from transformer_engine_fl.core.late import load_attribute
from transformer_engine_fl.core.locks import ForkSafeLock
from transformer_engine_fl.core.tracing import in_compiled_code, refuse_block
from transformer_engine_fl.core.types import NAME, OP_NAME, TRAITS, BackendImplKind, Selector

__all__ = [
    "RESTRICTIONS",
    "ROOT",
    "VARIABLES",
    "DecoratingBlock",
    "EffectivePolicy",
    "Environment",
    "Scope",
    "SelectionPolicy",
    "active_scope",
    "effective_policy",
    "get_environment",
    "get_policy",
    "parse_environment",
    "policy_context",
    "policy_state",
    "reset_global_policy",
    "set_global_policy",
    "subscribe",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]

P = ParamSpec("P")
R = TypeVar("R")

_READER: Final = "transformer_engine_fl.core.policy_file:fields_of"
"""The reader of policy files: imported only where there is one."""

_EMPTY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({})


@dataclass(frozen=True)
class SelectionPolicy:
    """What the user wants; a field that is None leaves the choice to weaker sources.

    Args:
        prefer: a selector token; that kind, vendor or implementation is tried first.
        strict: the first admitted candidate must serve, or the call is an error.
        per_op_order: operator name -> exhaustive order of selector tokens.
        allow_vendors: no other vendors' implementations; an empty set allows no vendor's.
        deny_vendors: never these vendors' implementations, whatever else the policy says.
        require: traits that an implementation must claim.

    Raises:
        ConfigurationError: a value is malformed; names the field and the nearest spelling.
    """

    prefer: str | None = None
    strict: bool | None = None
    per_op_order: Mapping[str, tuple[str, ...]] | None = None
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] | None = None
    require: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.prefer is not None:
            _store(self, "prefer", _token(self.prefer, "prefer"))
        if self.strict is not None and not isinstance(self.strict, bool):
            raise ConfigurationError(f"strict: {self.strict!r} is not True or False")
        if self.per_op_order is not None:
            _store(self, "per_op_order", _orders(self.per_op_order, "per_op_order"))
        for field in ("allow_vendors", "deny_vendors"):
            if (names := getattr(self, field)) is not None:
                _store(self, field, _vendors(_listed(names, field), field))
        if self.require is not None:
            _store(self, "require", _traits(_listed(self.require, "require"), "require"))

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, field) for field in FIELDS)
        return SelectionPolicy, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    @property
    def key(self) -> str:
        """Canonical text: equal policies have equal keys."""
        return repr([(field, _plain(getattr(self, field))) for field in FIELDS])

    def over(self, weaker: SelectionPolicy) -> SelectionPolicy:
        """This policy's fields where they are set, those of ``weaker`` elsewhere.

        Restrictions add up: the vendors that either denies, the traits that either requires,
        and only the vendors that both allow.
        """
        mine = {field: value for field in FIELDS if (value := getattr(self, field)) is not None}
        for field in RESTRICTIONS:
            theirs: frozenset[str] | None = getattr(weaker, field)
            if field in mine and theirs is not None:
                own = mine[field]
                mine[field] = own & theirs if field == "allow_vendors" else own | theirs
        return dataclasses.replace(weaker, **mine)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as plain JSON values."""
        return {
            field: _plain(value) for field in FIELDS if (value := getattr(self, field)) is not None
        }

    def to_environment(self) -> dict[str, str]:
        """The environment variables that say the same.

        Raises:
            ConfigurationError: a field has a value no variable can express (``require``,
                or an empty list, since an empty variable counts as unset).
        """
        if self.require is not None:
            raise ConfigurationError("require: no environment variable expresses it")
        environment: dict[str, str] = {}
        if self.prefer is not None:
            environment["TE_FL_PREFER"] = self.prefer
        if self.strict is not None:
            environment["TE_FL_STRICT"] = "1" if self.strict else "0"
        if self.per_op_order is not None:
            orders = (f"{op}={'|'.join(order)}" for op, order in self.per_op_order.items())
            environment["TE_FL_PER_OP"] = ";".join(orders)
        for field in ("allow_vendors", "deny_vendors"):
            if (names := getattr(self, field)) is not None:
                environment[f"TE_FL_{field.upper()}"] = ",".join(sorted(names))
        for variable, value in environment.items():
            if not value:
                raise ConfigurationError(f"{variable}: an empty variable counts as unset")
        return environment


FIELDS: Final = tuple(field.name for field in dataclasses.fields(SelectionPolicy))

RESTRICTIONS: Final = ("allow_vendors", "deny_vendors", "require")
"""The fields that rule implementations out: of these, every source that sets one counts."""


def _store(policy: SelectionPolicy, field: str, value: object) -> None:
    object.__setattr__(policy, field, value)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {op: list(order) for op, order in sorted(value.items())}
    return value


# ------------------------------------------------------------------- validating values


def _token(text: object, where: str) -> str:
    if not isinstance(text, str):
        raise ConfigurationError(f"{where}: {text!r} is not a selector token (a string)")
    return str(Selector.parse(text, where))


def _listed(names: Any, where: str) -> tuple[Any, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"{where}: {names!r} is not a list of names")
    return tuple(names)  # an iterator can be gone through only once


def _vendors(names: Iterable[Any], where: str) -> frozenset[str]:
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            head, _, rest = str(name).partition(":")
            selector = head.strip().lower() == "vendor" and re.fullmatch(NAME, rest.strip())
            hint = f"; write {rest.strip()!r}, without 'vendor:'" if selector else ""
            variable = where in VARIABLES
            between = "names separated by commas" if variable else "one string for each name"
            raise ConfigurationError(
                f"{where}: {name!r} is not a vendor name "
                f"(letters, digits, '_', '.', '-', '+'; {between}){hint}"
            )
    return frozenset(name.lower() for name in names)


def _traits(names: Iterable[Any], where: str) -> frozenset[str]:
    for name in names:
        if not isinstance(name, str) or name not in TRAITS:
            raise ConfigurationError(
                f"{where}: {name!r} is not a trait; valid: {', '.join(sorted(TRAITS))}"
                f"{suggestion(str(name), TRAITS)}"
            )
    return frozenset(names)


def _orders(orders: object, where: str) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(orders, Mapping):
        raise ConfigurationError(f"{where}: {orders!r} is not a mapping from operator to tokens")
    parsed: dict[str, tuple[str, ...]] = {}
    for op, tokens in orders.items():
        _op_name(op, where)
        if isinstance(tokens, str):
            tokens = tokens.split("|")
        order = tuple(_token(token, f"{where}[{op}]") for token in _listed(tokens, where))
        if not order:
            raise ConfigurationError(f"{where}: {op!r} has an empty order; name at least one token")
        if len(set(order)) != len(order):
            twice = next(token for token in order if order.count(token) > 1)
            raise ConfigurationError(f"{where}: {op!r} lists {twice!r} twice")
        parsed[op] = order
    return MappingProxyType(parsed)


def _op_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(OP_NAME, name):
        raise ConfigurationError(f"{where}: {name!r} is not an operator name")


DEFAULTS: Final = SelectionPolicy(
    prefer=BackendImplKind.FLAGOS.value,
    strict=False,
    per_op_order=_EMPTY,
    deny_vendors=frozenset(),
    require=frozenset(),
)


# --------------------------------------------------------------------- the environment


@dataclass(frozen=True, slots=True)
class Environment:
    """Every setting that comes from environment variables and the policy file.

    Attributes:
        policy: the policy that they give together.
        origins: policy field -> the variable or the file's key that set it.
        plugin_modules: modules to load as plugins, or paths of vendors' folders.
        skip_cuda: the CUDA set is switched off.
        tuning_path: a tuning file, or a folder of them, that takes precedence over all others.
        repeat_calls: repeated calls of an operator may take a short path (dispatch.Repeats).
        log_level: level of the ``TE-FL`` logger, or None for the default.
    """

    policy: SelectionPolicy
    origins: Mapping[str, str]
    plugin_modules: tuple[str, ...] = ()
    skip_cuda: bool = False
    tuning_path: str | None = None
    repeat_calls: bool = True
    log_level: str | None = None


VARIABLES: Final = (
    "TE_FL_PREFER",
    "TE_FL_PREFER_VENDOR",
    "TE_FL_STRICT",
    "TE_FL_ALLOW_VENDORS",
    "TE_FL_DENY_VENDORS",
    "TE_FL_PER_OP",
    "TE_FL_PLUGIN_MODULES",
    "TE_FL_SKIP_CUDA",
    "TE_FL_POLICY_FILE",
    "TE_FL_TUNING_PATH",
    "TE_FL_REPEAT_CALLS",
    "TEFL_LOG_LEVEL",
)
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_environment(environ: Mapping[str, str]) -> Environment:
    """Parse the variables of ``environ``; blank ones count as unset.

    Raises:
        ConfigurationError: names the variable, the offending part, what is valid and
            the nearest spelling.
    """
    given = {name: text for name in VARIABLES if (text := environ.get(name, "").strip())}
    said: dict[str, Any] = {}
    if "TE_FL_PREFER_VENDOR" in given and _switch(given, "TE_FL_PREFER_VENDOR"):
        said["prefer"] = ("vendor", "TE_FL_PREFER_VENDOR")
    if "TE_FL_PREFER" in given:
        said["prefer"] = (_token(given["TE_FL_PREFER"], "TE_FL_PREFER"), "TE_FL_PREFER")
    if "TE_FL_STRICT" in given:
        said["strict"] = (_switch(given, "TE_FL_STRICT"), "TE_FL_STRICT")
    if "TE_FL_PER_OP" in given:
        said["per_op_order"] = (_parse_per_op(given["TE_FL_PER_OP"]), "TE_FL_PER_OP")
    for field in ("allow_vendors", "deny_vendors"):
        variable = f"TE_FL_{field.upper()}"
        if variable in given:
            said[field] = (_vendors(_split(given[variable], ","), variable), variable)
    policy = SelectionPolicy(**{field: value for field, (value, _) in said.items()})
    origins = {field: f"{name}={given[name]}" for field, (_, name) in said.items()}
    if "TE_FL_POLICY_FILE" in given:
        path = given["TE_FL_POLICY_FILE"]
        weaker = load_policy_file(path)
        file = {it: f"{it} in {path} (TE_FL_POLICY_FILE)" for it in weaker.to_dict()}
        origins = _merge_origins(origins, file)
        policy = policy.over(weaker)
    return Environment(
        policy,
        MappingProxyType(origins),
        plugin_modules=_plugin_modules(given.get("TE_FL_PLUGIN_MODULES", "")),
        skip_cuda="TE_FL_SKIP_CUDA" in given and _switch(given, "TE_FL_SKIP_CUDA"),
        tuning_path=given.get("TE_FL_TUNING_PATH"),
        repeat_calls="TE_FL_REPEAT_CALLS" not in given or _switch(given, "TE_FL_REPEAT_CALLS"),
        log_level=_log_level(given.get("TEFL_LOG_LEVEL")),
    )


def _merge_origins(stronger: Mapping[str, str], weaker: Mapping[str, str]) -> dict[str, str]:
    """The source of each field: the stronger one, or both for a restriction that both set."""
    said = {**weaker, **stronger}
    for field in RESTRICTIONS:
        if field in stronger and field in weaker:
            said[field] = f"{stronger[field]}, and {weaker[field]}"
    return said


def load_policy_file(path: str | Path) -> SelectionPolicy:
    """Read a policy from a TOML file with the fields of :class:`SelectionPolicy`.

    Raises:
        ConfigurationError: the file cannot be read, is no TOML, has an unknown key or a
            value of the wrong kind; names the file and the key.
    """
    from transformer_engine_fl.core.policy_file import fields_of  # see _import_reader

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"cannot read {path}: it is not UTF-8 ({error}); save it as UTF-8"
        raise ConfigurationError(f"TE_FL_POLICY_FILE: {problem}") from None
    except (OSError, ValueError, RuntimeError) as error:  # also: not a path, or no such home folder
        raise ConfigurationError(f"TE_FL_POLICY_FILE: cannot read {path}: {error}") from None
    # Not with the codec utf-8-sig: it would be imported under our lock; see _import_reader.
    fields = fields_of(text.removeprefix("\N{BYTE ORDER MARK}"), str(path))
    try:
        return SelectionPolicy(**fields)
    except ConfigurationError as error:
        raise ConfigurationError(f"TE_FL_POLICY_FILE: {path}: {error}") from None


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator)]


def _switch(given: Mapping[str, str], variable: str) -> bool:
    text = given[variable].lower()
    if text in _ON + _OFF:
        return text in _ON
    hint = suggestion(text, _ON + _OFF)
    if not hint and variable == "TE_FL_PREFER_VENDOR" and re.fullmatch(NAME, text):
        hint = f"; for one vendor: TE_FL_PREFER=vendor:{text}"
    raise ConfigurationError(
        f"{variable}: {given[variable]!r} is not a switch; "
        f"valid: {'/'.join(_ON)} or {'/'.join(_OFF)}{hint}"
    )


def _parse_per_op(text: str) -> Mapping[str, tuple[str, ...]]:
    """``op=token|token;op=token``."""
    orders: dict[str, tuple[str, ...]] = {}
    for part in _split(text.removesuffix(";"), ";"):
        op, equals, tokens = part.partition("=")
        op = op.strip()
        if not equals or not op:
            raise ConfigurationError(
                f"TE_FL_PER_OP: {part!r} is not of the form operator=token|token; "
                "separate operators with ';'"
            )
        if op in orders:
            raise ConfigurationError(f"TE_FL_PER_OP: operator {op!r} is given twice")
        orders.update(_orders({op: _split(tokens, "|")}, "TE_FL_PER_OP"))
    return orders


def _plugin_modules(text: str) -> tuple[str, ...]:
    modules = tuple(_split(text, ",")) if text else ()
    for name in modules:
        if "/" not in name and not all(part.isidentifier() for part in name.split(".")):
            raise ConfigurationError(
                f"TE_FL_PLUGIN_MODULES: {name!r} is neither a module name nor a path (a path "
                "contains '/'); separate modules with ','"
            )
    return tuple(dict.fromkeys(modules))


def _log_level(text: str | None) -> str | None:
    if text is None or text.upper() in log.LEVELS:
        return text.upper() if text else None
    raise ConfigurationError(
        f"TEFL_LOG_LEVEL: {text!r} is not a level; valid: {', '.join(log.LEVELS)}"
        f"{suggestion(text, log.LEVELS)}"
    )


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    for name in environ:
        if name.upper().startswith(("TE_FL_", "TEFL_")) and name not in VARIABLES:
            hint = suggestion(name, VARIABLES)
            log.logger.warning("unknown environment variable %s%s", name, hint)


# ------------------------------------------------------------------------ with blocks


class Scope:
    """The ``with`` blocks in force in a context, innermost last.

    Interned: entering equal blocks in the same order gives the same object while
    anything refers to it, so plans can be kept per scope by identity.

    ``ROOT.active`` is the scope of the running context. It is a property whose getter
    is ``ContextVar.get`` itself, with the root as the default: torch.compile cannot
    trace a ``ContextVar``, but it can read, and guard, a property implemented in C.
    """

    __slots__ = ("__weakref__", "_children", "block", "key", "overlay", "parent")

    def __init__(self, parent: Scope | None, block: SelectionPolicy) -> None:
        self.parent = parent
        self.block = block
        self.overlay: SelectionPolicy = block if parent is None else block.over(parent.overlay)
        self.key = self.overlay.key if parent is not None else ""
        self._children: weakref.WeakValueDictionary[str, Scope] = weakref.WeakValueDictionary()

    def child(self, block: SelectionPolicy) -> Scope:
        """The scope inside a further block."""
        with policy_state.lock:
            key = block.key
            found = self._children.get(key)
            if found is None:
                found = self._children[key] = Scope(self, block)
            return found

    def without(self, place: int) -> Scope:
        """The scope after the block that ``place`` others were entered after has ended.

        That is this scope's own block, unless a generator was suspended inside a block. Such a
        block stays in force for the generator's caller, and may end inside blocks that were
        entered later.
        """
        assert self.parent is not None, "a block that was not entered"  # an internal invariant
        return self.parent if place == 0 else self.parent.without(place - 1).child(self.block)

    active: property


ROOT: Final = Scope(None, SelectionPolicy())
"""The scope outside every ``with`` block."""

_scope: Final = contextvars.ContextVar("te_fl_scope", default=ROOT)
_entered: Final = contextvars.ContextVar[tuple["policy_context", ...]]("te_fl_blocks", default=())
"""The blocks that were entered here and in the contexts that this one is a copy of, innermost
first: those of the scope."""
Scope.active = property(_scope.get)

active_scope: Final[Callable[[], Scope]] = _scope.get
"""The ``with`` blocks in force here; :data:`ROOT` outside any."""


class DecoratingBlock:
    """A ``with`` block that also decorates functions: each call then runs inside the block.

    Not a ``contextlib.ContextDecorator``: torch.compile treats that as a kind of context manager
    that it knows, so that a block in compiled code would not raise our error with its advice.
    """

    __slots__ = ()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, run inside this block.

        Raises:
            ConfigurationError: it is a coroutine or generator function, whose work goes on after
                the call; or a class, which would become a function; or not callable.
        """
        if isinstance(function, type) or not callable(function):
            is_class = isinstance(function, type)
            found = f"the class {function.__qualname__!r}" if is_class else repr(function)
            raise ConfigurationError(
                f"{type(self).__name__} can decorate functions only, got {found}; "
                "decorate its methods, or put a with block around the call"
            )
        kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        called: Any = function
        while isinstance(called, functools.partial):
            called = called.func
        ways = called, getattr(type(called), "__call__", None)  # noqa: B004 - its body is wanted
        if any(is_kind(way) for is_kind in kinds for way in ways):
            name = getattr(called, "__qualname__", type(called).__qualname__)
            raise ConfigurationError(
                f"{type(self).__name__} cannot decorate coroutine or generator functions; "
                f"put a with block inside {name!r} instead"
            )
        block: Any = self

        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with block:
                return function(*args, **kwargs)

        return within


class policy_context(DecoratingBlock):  # noqa: N801 - used like the functions of contextlib
    """``with policy_context(prefer="vendor", strict=True): ...``

    Applies to this thread or asyncio task, until the block ends. May be nested, entered
    again, and shared, and decorates functions. Takes a :class:`SelectionPolicy` or its
    fields; they replace those of an outer block, but what that rules out stays ruled out.
    A generator that is suspended inside such a block must be closed in the same thread or
    task: closed elsewhere, it leaves the block in force where it was suspended, and ends none
    of the blocks there.

    Raises:
        ConfigurationError: a value is malformed.
    """

    __slots__ = ("policy",)

    def __init__(self, policy: SelectionPolicy | None = None, /, **fields: Any) -> None:
        if policy is not None and not isinstance(policy, SelectionPolicy):
            raise ConfigurationError(
                f"policy_context: {policy!r} is not a SelectionPolicy; "
                "pass one, or its fields as keywords"
            )
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise ConfigurationError(
                f"policy_context: unknown field {unknown[0]!r}; valid: {', '.join(FIELDS)}"
                f"{suggestion(unknown[0], FIELDS)}"
            )
        said = SelectionPolicy(**fields)
        self.policy = said if policy is None else said.over(policy)

    @in_compiled_code(lambda self: refuse_block())
    def __enter__(self) -> SelectionPolicy:
        _scope.set(_scope.get().child(self.policy))
        _entered.set((self, *_entered.get()))
        return self.policy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = _entered.get()
        place = next((place for place, it in enumerate(entered) if it is self), None)
        if place is not None:  # otherwise it was entered elsewhere
            _scope.set(_scope.get().without(place))
            _entered.set(entered[:place] + entered[place + 1 :])


def with_preference(prefer: str) -> policy_context:
    """A block that tries ``prefer`` (a selector token) first."""
    return policy_context(prefer=prefer)


def with_strict_mode(strict: bool = True) -> policy_context:
    """A block in which the first admitted candidate must serve."""
    return policy_context(strict=strict)


def with_allowed_vendors(*vendors: str) -> policy_context:
    """A block that admits no vendors but these; without arguments, none."""
    return policy_context(allow_vendors=vendors)


def with_denied_vendors(*vendors: str) -> policy_context:
    """A block that admits none of these vendors."""
    return policy_context(deny_vendors=vendors)


# ----------------------------------------------------------------- the policy in force


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """A complete policy, and the source of each of its fields.

    Attributes:
        policy: the merged policy.
        origins: policy field -> every source that determined it.
        sources: each source's policy, and its origin by field; strongest first.
    """

    policy: SelectionPolicy
    origins: Mapping[str, str]
    sources: tuple[tuple[SelectionPolicy, Mapping[str, str]], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        sources = tuple((policy, dict(origins)) for policy, origins in self.sources)
        return EffectivePolicy, (self.policy, dict(self.origins), sources)

    def origin(self, field: str, word: str, *, listed: bool = True) -> str:
        """The strongest source whose list in ``field`` has ``word``, or lacks it if not ``listed``.

        Every source that determined the field, if there is none.
        """
        for policy, origins in self.sources:
            words: frozenset[str] | None = getattr(policy, field)
            if words is not None and (word in words) is listed:
                return origins[field]
        return self.origins[field]


class PolicyListener(Protocol):
    """Called after the global policy or what was read of the environment has changed."""

    def policy_changed(self) -> None: ...


class _State:
    """Global state: the policy set by code, and the environment as it was read."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.policy: SelectionPolicy | None = None
        self.environment: Environment | None = None
        self.listeners: weakref.WeakSet[PolicyListener] = weakref.WeakSet()
        self.key = ""

    def renew_key(self) -> None:
        """Put the policies outside ``with`` blocks into one text, which compiled code guards.

        An environment that is still to be read counts already, so that a reset which changes
        nothing causes no recompilation.
        """
        environment = self.environment
        if environment is None:
            with contextlib.suppress(ConfigurationError):
                environment = parse_environment(os.environ)
        said = (self.policy, environment and environment.policy)
        self.key = " / ".join(policy.key if policy else "" for policy in said)
        if environment is not None and environment.skip_cuda:
            self.key += " / skip_cuda"


policy_state: Final = _State()


def _import_reader() -> None:
    """Import the reader of policy files, if there is such a file, before our lock is taken.

    Imports hold :data:`LOADING`, so that a fork finds no module half imported. A thread that
    holds :data:`LOADING` may wait for our lock, so :data:`LOADING` must not be taken under it.
    """
    loaded = hasattr(sys.modules.get(_READER.partition(":")[0]), "fields_of")
    if not loaded and os.environ.get("TE_FL_POLICY_FILE", "").strip():
        load_attribute(_READER)


def get_environment() -> Environment:
    """The environment's settings, read at the first call.

    Raises:
        ConfigurationError: a variable is malformed (again at each call until mended).
    """
    environment = policy_state.environment
    if environment is None:
        _import_reader()
        with policy_state.lock:
            environment = policy_state.environment
            if environment is None:
                environment = parse_environment(os.environ)
                log.set_level(environment.log_level)
                _warn_of_unknown(os.environ)
                policy_state.environment = environment
                policy_state.renew_key()
    return environment


def effective_policy(scope: Scope | None = None) -> EffectivePolicy:
    """The complete policy in force in ``scope`` (this context's unless given)."""
    scope = active_scope() if scope is None else scope
    environment, code = get_environment(), policy_state.policy or SelectionPolicy()
    policy = scope.overlay.over(code).over(environment.policy).over(DEFAULTS)
    sources = (
        (scope.overlay, dict.fromkeys(scope.overlay.to_dict(), "with block")),
        (code, dict.fromkeys(code.to_dict(), "set_global_policy")),
        (environment.policy, environment.origins),
    )
    origins: dict[str, str] = {}
    for _, said in sources:
        origins = _merge_origins(origins, said)
    origins = dict.fromkeys(FIELDS, "default") | origins
    return EffectivePolicy(policy, MappingProxyType(origins), sources)


def get_policy() -> SelectionPolicy:
    """The complete policy in force here."""
    return effective_policy().policy


def set_global_policy(policy: SelectionPolicy | None) -> SelectionPolicy | None:
    """Set the process-wide policy; returns the one before it (None if none was set).

    Clears every manager's quarantine. The very next call, in any thread, sees the new policy.
    """
    if policy is not None and not isinstance(policy, SelectionPolicy):
        raise ConfigurationError(f"set_global_policy: {policy!r} is not a SelectionPolicy")
    _import_reader()
    with policy_state.lock:
        before, policy_state.policy = policy_state.policy, policy
        policy_state.renew_key()
    _changed()
    return before


def reset_global_policy() -> None:
    """Forget the policy set by code, and read the environment again at the next use.

    Change the environment before: compiled code uses it as it is now until something reads it.
    """
    _import_reader()
    with policy_state.lock:
        policy_state.policy = policy_state.environment = None
        policy_state.renew_key()
    _changed()


def _changed() -> None:
    """Call the listeners, outside our lock: one may hold its own while it calls us."""
    with policy_state.lock:
        listeners = list(policy_state.listeners)
    for listener in listeners:
        listener.policy_changed()


def subscribe(listener: PolicyListener) -> None:
    """Call ``listener``, which is held weakly, after every change."""
    with policy_state.lock:
        policy_state.listeners.add(listener)
