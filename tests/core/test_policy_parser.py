"""Any text in a variable gives a policy that round-trips, or a ConfigurationError."""

from __future__ import annotations

import contextlib
import re

import hypothesis.strategies as st
from hypothesis import given, settings

from transformer_engine_fl import ConfigurationError
from transformer_engine_fl.core.policy import VARIABLES, Environment, parse_environment

STRINGS = 10_500
AT_ONCE = 5

_name = st.text("abAB19_.+-", min_size=1, max_size=4)
_bad_name = st.sampled_from(["", "a b", "é", "a:b", "a/b"])
_token = st.one_of(
    st.sampled_from(["flagos", "vendor", "reference", "VENDOR", " Flagos "]),
    st.builds("{}:{}".format, st.sampled_from(["vendor", "impl", "Vendor", " impl "]), _name),
)
_bad_token = st.one_of(
    st.sampled_from(["vendro", "", "vendor:", "imp:x", ":", "flagos vendor"]),
    st.builds("impl:{}".format, _bad_name),
)
_operator = st.builds(
    "{}{}".format, st.sampled_from(["op", "_", "aten::gelu", "aten::add."]), _name
)
_order = st.builds(
    "{}{}{}".format,
    _operator,
    st.sampled_from(["=", " = ", "=", "=", ":"]),
    st.lists(_token, min_size=1, max_size=3).map("|".join),
)


def _joined(part: st.SearchStrategy[str], separators: list[str]) -> st.SearchStrategy[str]:
    return st.builds(
        lambda separator, parts: separator.join(parts),
        st.sampled_from(separators),
        st.lists(part, min_size=1, max_size=3),
    )


_switch = st.sampled_from(["1", "0", "true", "FALSE", "yes", "No", "on", "off", "2", "ture", "-"])
_files = st.sampled_from(["/dev/null", "/", ".", "~", "no/such/file", "a\0b"])
_modules = st.sampled_from(["a", "a.b", "_x", "a..b", "1", ""])
_level = st.sampled_from(["debug", "INFO", "Warning", "warn", "10", "CRITICAL"])
_grammar: dict[str, st.SearchStrategy[str]] = {
    "TE_FL_PREFER": st.one_of(_token, _token, _bad_token),
    "TE_FL_PREFER_VENDOR": _switch,
    "TE_FL_STRICT": _switch,
    "TE_FL_SKIP_CUDA": _switch,
    "TE_FL_REPEAT_CALLS": _switch,
    "TE_FL_ALLOW_VENDORS": _joined(st.one_of(_name, _name, _name, _bad_name), [",", ", ", ";"]),
    "TE_FL_DENY_VENDORS": _joined(st.one_of(_name, _name, _name, _bad_name), [",", " ,", ",,"]),
    "TE_FL_PER_OP": _joined(
        st.one_of(_order, _order, st.builds("{}={}".format, _operator, _bad_token)),
        [";", "; ", ";", ","],
    ),
    "TE_FL_PLUGIN_MODULES": _joined(_modules, [",", ", ", " "]),
    "TE_FL_POLICY_FILE": _files,
    "TE_FL_TUNING_PATH": _files,
    "TEFL_LOG_LEVEL": _level,
}


@st.composite
def setting_of_one_variable(draw: st.DrawFn) -> tuple[str, str]:
    """A variable and a text for it: well formed, nearly so (:data:`_grammar`), or arbitrary."""
    rich = ("TE_FL_PREFER", "TE_FL_ALLOW_VENDORS", "TE_FL_DENY_VENDORS", "TE_FL_PER_OP")
    variable = draw(st.sampled_from(VARIABLES + 4 * rich))
    near = _grammar[variable]
    return variable, draw(st.one_of(near, near, near, st.text(max_size=20)))


# The grammar, independent of the parser's code: a text is valid if and only if it matches.
_NAME = r"[A-Za-z0-9_.+-]+"
_TOKEN = rf"(?:(?ai:flagos|vendor|reference)|(?ai:vendor|impl)\s*:\s*{_NAME})"
_OPERATOR = r"[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z0-9_]+)?(?:\.[A-Za-z0-9_]+)?"
_ORDER = rf"{_OPERATOR}\s*=\s*{_TOKEN}(?:\s*\|\s*{_TOKEN})*"
_SWITCH = r"(?ai:1|true|yes|on|0|false|no|off)"
_VENDORS = rf"{_NAME}(?:\s*,\s*{_NAME})*"
GRAMMAR = {
    "TE_FL_PREFER": _TOKEN,
    "TE_FL_PREFER_VENDOR": _SWITCH,
    "TE_FL_STRICT": _SWITCH,
    "TE_FL_SKIP_CUDA": _SWITCH,
    "TE_FL_REPEAT_CALLS": _SWITCH,
    "TE_FL_ALLOW_VENDORS": _VENDORS,
    "TE_FL_DENY_VENDORS": _VENDORS,
    "TE_FL_PER_OP": rf"{_ORDER}(?:\s*;\s*{_ORDER})*(?:\s*;)?",
    "TEFL_LOG_LEVEL": r"(?ai:debug|info|warning|error|critical)",
}


def repeats(text: str) -> bool:
    """Whether a well-formed TE_FL_PER_OP names an operator twice, or a token in an order."""
    parts = [part.partition("=") for part in re.sub(r"\s", "", text).rstrip(";").split(";")]
    operators = [operator for operator, _, _ in parts]
    orders = [[_folded(token) for token in tokens.split("|")] for _, _, tokens in parts]
    return any(len(set(it)) < len(it) for it in [operators, *orders])


def _folded(token: str) -> str:
    head, colon, name = token.partition(":")
    return head.lower() + colon + (name if head.lower() == "impl" else name.lower())


def said(environment: Environment, variable: str) -> object:
    """The setting that an environment has from a variable; None if it has none."""
    policy = environment.policy
    return {
        "TE_FL_PREFER": policy.prefer,
        "TE_FL_PREFER_VENDOR": policy.prefer,
        "TE_FL_STRICT": policy.strict,
        "TE_FL_ALLOW_VENDORS": policy.allow_vendors,
        "TE_FL_DENY_VENDORS": policy.deny_vendors,
        "TE_FL_PER_OP": policy.per_op_order,
        "TE_FL_PLUGIN_MODULES": environment.plugin_modules or None,
        "TE_FL_SKIP_CUDA": environment.skip_cuda,
        "TE_FL_REPEAT_CALLS": environment.repeat_calls,
        "TE_FL_TUNING_PATH": environment.tuning_path,
        "TEFL_LOG_LEVEL": environment.log_level,
    }[variable]


def is_off(variable: str, text: str) -> bool:
    """Whether the text switches TE_FL_PREFER_VENDOR off: valid, but no preference results."""
    off = text.strip().lower() in ("0", "false", "no", "off")
    return variable == "TE_FL_PREFER_VENDOR" and off


def check_parsed(variable: str, text: str, environment: Environment) -> None:
    """Assert that an accepted text is well formed, has taken effect, and round-trips."""
    if not text.strip():
        assert environment == parse_environment({})
        return
    if variable == "TE_FL_POLICY_FILE":
        assert text.strip() == "/dev/null"  # an empty file; the other texts name no readable file
        return
    if variable in GRAMMAR:
        assert re.fullmatch(GRAMMAR[variable], text.strip())
    assert (said(environment, variable) is None) == is_off(variable, text)
    again = parse_environment(environment.policy.to_environment())
    assert again.policy == environment.policy


def check_refused(variable: str, text: str, message: str) -> None:
    """Assert that a refused text is not well formed, and that the error names its variable."""
    assert text.strip()
    assert message.startswith(variable)
    if variable in GRAMMAR and re.fullmatch(GRAMMAR[variable], text.strip()):
        assert variable == "TE_FL_PER_OP"
        assert repeats(text.strip())


def test_every_text_is_a_policy_that_round_trips_or_the_documented_error() -> None:
    outcomes = {"accepted": 0, "refused": 0}

    @settings(max_examples=STRINGS // AT_ONCE, deadline=None, database=None)
    @given(st.lists(setting_of_one_variable(), min_size=AT_ONCE, max_size=AT_ONCE))
    def check(given: list[tuple[str, str]]) -> None:
        for variable, text in given:
            try:
                environment = parse_environment({variable: text})
            except ConfigurationError as error:
                outcomes["refused"] += 1
                check_refused(variable, text, str(error))
            else:
                outcomes["accepted"] += 1
                check_parsed(variable, text, environment)

    check()
    assert sum(outcomes.values()) >= 10_000
    assert min(outcomes.values()) >= 2_000  # the strategy generates enough of both


@settings(max_examples=300, deadline=None, database=None)
@given(st.fixed_dictionaries({}, optional=_grammar))
def test_variables_together_say_what_each_says_alone(environ: dict[str, str]) -> None:
    valid = {}
    for variable, text in environ.items():
        if not text.strip():
            continue
        with contextlib.suppress(ConfigurationError):
            valid[variable] = parse_environment({variable: text})
    together = parse_environment({variable: environ[variable] for variable in valid})
    if "TE_FL_PREFER" in valid:
        valid.pop("TE_FL_PREFER_VENDOR", None)  # TE_FL_PREFER outranks it
    valid.pop("TE_FL_POLICY_FILE", None)  # an empty file
    for variable, alone in valid.items():
        assert said(together, variable) == said(alone, variable)
