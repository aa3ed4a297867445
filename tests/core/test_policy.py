"""The policy's sources: variables and the policy file, their precedence, what they refuse."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_helpers import impl, make_manager, one_of_each, order

from transformer_engine_fl import (
    ConfigurationError,
    SelectionPolicy,
    get_policy,
    policy_context,
    reset_global_policy,
    set_global_policy,
)
from transformer_engine_fl.core.policy import (
    FIELDS,
    effective_policy,
    get_environment,
    parse_environment,
)

# ----------------------------------------------------------------- variables, well formed


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TE_FL_PREFER", "flagos", "prefer", "flagos"),
        ("TE_FL_PREFER", "vendor", "prefer", "vendor"),
        ("TE_FL_PREFER", " Reference ", "prefer", "reference"),
        ("TE_FL_PREFER", "vendor:NVIDIA", "prefer", "vendor:nvidia"),
        ("TE_FL_PREFER", "Vendor: acme", "prefer", "vendor:acme"),
        ("TE_FL_PREFER", "impl:vendor.Acme-2+x", "prefer", "impl:vendor.Acme-2+x"),
        ("TE_FL_PREFER_VENDOR", "1", "prefer", "vendor"),
        ("TE_FL_PREFER_VENDOR", "0", "prefer", None),
        ("TE_FL_ALLOW_VENDORS", "acme", "allow_vendors", {"acme"}),
        ("TE_FL_ALLOW_VENDORS", "Acme , ZETA,acme", "allow_vendors", {"acme", "zeta"}),
        ("TE_FL_DENY_VENDORS", "acme,zeta", "deny_vendors", {"acme", "zeta"}),
        ("TE_FL_PER_OP", "a=flagos", "per_op_order", {"a": ("flagos",)}),
        ("TE_FL_PER_OP", "a=flagos;", "per_op_order", {"a": ("flagos",)}),
        (
            "TE_FL_PER_OP",
            " a = vendor:Acme | impl:x.y ; aten::gelu.out=reference ",
            "per_op_order",
            {"a": ("vendor:acme", "impl:x.y"), "aten::gelu.out": ("reference",)},
        ),
    ],
)
def test_a_variable_sets_its_field_and_no_other(
    variable: str, text: str, field: str, value: object
) -> None:
    environment = parse_environment({variable: text})
    said = {name: getattr(environment.policy, name) for name in FIELDS}
    assert said == dict.fromkeys(FIELDS) | {field: value}
    origin = {} if value is None else {field: f"{variable}={text.strip()}"}
    assert environment.origins == origin


@pytest.mark.parametrize(
    "variable", ["TE_FL_STRICT", "TE_FL_PREFER_VENDOR", "TE_FL_SKIP_CUDA", "TE_FL_REPEAT_CALLS"]
)
@pytest.mark.parametrize(
    ("text", "on"),
    [(text, True) for text in ("1", "true", "yes", "on", "TRUE", "Yes", " On ")]
    + [(text, False) for text in ("0", "false", "no", "off", "FALSE", "No", " oFf ")],
)
def test_a_switch_knows_eight_words_in_any_case(variable: str, text: str, on: bool) -> None:
    environment = parse_environment({variable: text})
    policy = environment.policy
    found = {
        "TE_FL_STRICT": policy.strict,
        "TE_FL_PREFER_VENDOR": policy.prefer == "vendor",
        "TE_FL_SKIP_CUDA": environment.skip_cuda,
        "TE_FL_REPEAT_CALLS": environment.repeat_calls,
    }
    assert found[variable] is on


def test_settings_that_are_no_policy_are_read_too() -> None:
    environment = parse_environment(
        {"TE_FL_PLUGIN_MODULES": "acme.te, zeta,acme.te", "TEFL_LOG_LEVEL": "debug"}
    )
    assert environment.plugin_modules == ("acme.te", "zeta")
    assert environment.log_level == "DEBUG"


def test_prefer_outranks_prefer_vendor() -> None:
    environment = parse_environment({"TE_FL_PREFER": "reference", "TE_FL_PREFER_VENDOR": "1"})
    assert environment.policy.prefer == "reference"
    assert environment.origins["prefer"] == "TE_FL_PREFER=reference"


ALL_VARIABLES = (
    "TE_FL_PREFER",
    "TE_FL_PREFER_VENDOR",
    "TE_FL_STRICT",
    "TE_FL_ALLOW_VENDORS",
    "TE_FL_DENY_VENDORS",
    "TE_FL_PER_OP",
    "TE_FL_PLUGIN_MODULES",
    "TE_FL_SKIP_CUDA",
    "TE_FL_REPEAT_CALLS",
    "TE_FL_POLICY_FILE",
    "TEFL_LOG_LEVEL",
)


@pytest.mark.parametrize("variable", ALL_VARIABLES)
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_variable_counts_as_unset(variable: str, text: str) -> None:
    assert parse_environment({variable: text}) == parse_environment({})


# ------------------------------------------------------------------ variables, malformed


@pytest.mark.parametrize(
    ("variable", "text", "wrong", "valid", "nearest"),
    [
        ("TE_FL_PREFER", "vendro", "'vendro'", "flagos, vendor, reference", "'vendor'"),
        ("TE_FL_PREFER", "flag_os", "'flag_os'", "vendor:NAME, impl:ID", "'flagos'"),
        ("TE_FL_PREFER", "vendro:acme", "'vendro:acme'", "vendor:NAME", "'vendor:acme'"),
        ("TE_FL_PREFER", "imp:acme", "'imp:acme'", "impl:ID", "'impl:acme'"),
        ("TE_FL_PREFER", "vendor:", "'vendor:'", "vendor:NAME", None),
        ("TE_FL_PREFER", "vendor:a b", "'a b'", "vendor:NAME", None),
        ("TE_FL_PREFER", "flagos,vendor", "'flagos,vendor'", "flagos, vendor", "'vendor'"),
        ("TE_FL_PREFER_VENDOR", "yse", "'yse'", "1/true/yes/on or 0/false/no/off", "'yes'"),
        ("TE_FL_PREFER_VENDOR", "acme", "'acme'", "1/true/yes/on", None),
        ("TE_FL_STRICT", "ture", "'ture'", "1/true/yes/on or 0/false/no/off", "'true'"),
        ("TE_FL_STRICT", "2", "'2'", "1/true/yes/on", None),
        ("TE_FL_STRICT", "maybe", "'maybe'", "1/true/yes/on", None),
        ("TE_FL_SKIP_CUDA", "flase", "'flase'", "0/false/no/off", "'false'"),
        ("TE_FL_ALLOW_VENDORS", "acme,,zeta", "''", "names separated by commas", None),
        ("TE_FL_ALLOW_VENDORS", "acme zeta", "'acme zeta'", "names separated by commas", None),
        ("TE_FL_DENY_VENDORS", "acme;zeta", "'acme;zeta'", "names separated by commas", None),
        ("TE_FL_DENY_VENDORS", "vendor:acme", "'vendor:acme'", "letters, digits", None),
        ("TE_FL_PER_OP", "a", "'a'", "operator=token|token", None),
        ("TE_FL_PER_OP", ";", "''", "operator=token|token", None),
        ("TE_FL_PER_OP", "=flagos", "'=flagos'", "operator=token|token", None),
        ("TE_FL_PER_OP", "a=flagos,b=vendor", "'flagos,b=vendor'", "flagos, vendor", "'vendor'"),
        ("TE_FL_PER_OP", "a=flagos;;b=vendor", "''", "separate operators with ';'", None),
        ("TE_FL_PER_OP", "a=flagos|vendro", "'vendro'", "flagos, vendor", "'vendor'"),
        ("TE_FL_PER_OP", "b=flagos;a=", "[a]: ''", "flagos, vendor", None),
        ("TE_FL_PER_OP", "a=flagos|", "[a]: ''", "flagos, vendor", None),
        ("TE_FL_PER_OP", "a b=flagos", "'a b'", "operator name", None),
        ("TE_FL_PER_OP", "a=flagos;a=vendor", "'a'", "twice", None),
        ("TE_FL_PER_OP", "a=vendor:X|vendor:x", "'vendor:x'", "twice", None),
        ("TE_FL_PLUGIN_MODULES", "acme te", "'acme te'", "separate modules with ','", None),
        ("TE_FL_PLUGIN_MODULES", "acme,", "''", "module name", None),
        ("TE_FL_PLUGIN_MODULES", "acme-te.py", "'acme-te.py'", "module name", None),
        ("TEFL_LOG_LEVEL", "inof", "'inof'", "DEBUG, INFO, WARNING, ERROR, CRITICAL", "'INFO'"),
        ("TEFL_LOG_LEVEL", "17", "'17'", "DEBUG, INFO", None),
    ],
)
def test_a_malformed_value_is_named_with_what_is_valid(
    variable: str, text: str, wrong: str, valid: str, nearest: str | None
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_environment({variable: text})
    message = str(caught.value)
    assert message.startswith(variable)
    assert wrong in message
    assert valid in message
    if nearest:
        assert message.endswith(f"did you mean {nearest}?")
    else:
        assert "did you mean" not in message


def test_the_error_of_a_vendor_as_a_switch_names_the_right_variable() -> None:
    with pytest.raises(ConfigurationError, match="for one vendor: TE_FL_PREFER=vendor:nvidia"):
        parse_environment({"TE_FL_PREFER_VENDOR": "nvidia"})


@pytest.mark.parametrize(
    ("variable", "text", "meant"),
    [
        ("TE_FL_PREFER", "acme", "; for a vendor, write 'vendor:acme'"),
        ("TE_FL_PER_OP", "a=flagos|acme", "; for a vendor, write 'vendor:acme'"),
        ("TE_FL_DENY_VENDORS", "nvidia,vendor:acme", "; write 'acme', without 'vendor:'"),
    ],
)
def test_the_error_of_a_vendor_written_wrongly_shows_the_right_form(
    variable: str, text: str, meant: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_environment({variable: text})
    assert str(caught.value).endswith(meant)


def test_a_malformed_variable_is_refused_even_where_another_outranks_it() -> None:
    with pytest.raises(ConfigurationError, match="TE_FL_PREFER_VENDOR"):
        parse_environment({"TE_FL_PREFER": "flagos", "TE_FL_PREFER_VENDOR": "maybe"})


# ----------------------------------------------------------------------- the policy file

WriteFile = Callable[[str], dict[str, str]]


@pytest.fixture
def policy_file(tmp_path: Path) -> WriteFile:
    """Writes a policy file; returns the environment that names it."""

    def write(text: str) -> dict[str, str]:
        path = tmp_path / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return {"TE_FL_POLICY_FILE": str(path)}

    return write


def test_a_policy_file_may_set_every_field(policy_file: WriteFile) -> None:
    environ = policy_file(
        """
        prefer = "vendor:Acme"
        strict = true
        allow_vendors = ["Acme"]
        deny_vendors = []
        require = ["deterministic"]
        [per_op_order]
        rmsnorm_fwd = ["flagos", "impl:x"]
        """
    )
    environment = parse_environment(environ)
    assert environment.policy == SelectionPolicy(
        prefer="vendor:acme",
        strict=True,
        per_op_order={"rmsnorm_fwd": ("flagos", "impl:x")},
        allow_vendors=frozenset({"acme"}),
        deny_vendors=frozenset(),
        require=frozenset({"deterministic"}),
    )
    path = environ["TE_FL_POLICY_FILE"]
    assert environment.origins["strict"] == f"strict in {path} (TE_FL_POLICY_FILE)"


def test_a_policy_file_may_be_named_from_the_home(
    policy_file: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_file("strict = true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_environment({"TE_FL_POLICY_FILE": "~/policy.toml"}).policy.strict
    with pytest.raises(ConfigurationError, match=r"cannot read ~no such user/policy\.toml"):
        parse_environment({"TE_FL_POLICY_FILE": "~no such user/policy.toml"})


def test_a_policy_file_may_begin_with_a_byte_order_mark(policy_file: WriteFile) -> None:
    """Some editors write one into every file that they save as UTF-8."""
    environ = policy_file('\N{BYTE ORDER MARK}prefer = "reference"\n')
    assert str(parse_environment(environ).policy.prefer) == "reference"


def test_the_error_of_a_policy_file_in_another_encoding_names_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('prefer = "vendor"\n', encoding="utf-16")
    with pytest.raises(ConfigurationError, match=r"policy\.toml: it is not UTF-8 .*; save it"):
        parse_environment({"TE_FL_POLICY_FILE": str(path)})


def test_the_environment_outranks_the_file_field_by_field(policy_file: WriteFile) -> None:
    environ = policy_file('prefer = "reference"\nstrict = true\ndeny_vendors = ["acme"]\n')
    environment = parse_environment(
        environ | {"TE_FL_STRICT": "0", "TE_FL_DENY_VENDORS": "zeta", "TE_FL_ALLOW_VENDORS": "x"}
    )
    assert environment.policy == SelectionPolicy(
        prefer="reference", strict=False, deny_vendors={"acme", "zeta"}, allow_vendors={"x"}
    )
    assert environment.origins["strict"] == "TE_FL_STRICT=0"
    assert environment.origins["prefer"].startswith("prefer in ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefer = vendor", ["is not valid TOML", "line 1"]),
        ("strict = true\nstrict = false", ["is not valid TOML", "overwrite a value"]),
        (f"x = {'9' * 5000}", ["is not valid TOML"]),
        (f"x = {'[' * 50_000}", ["is not valid TOML"]),
        ("preffer = 'vendor'", ["unknown key 'preffer'", "valid: prefer,", "mean 'prefer'?"]),
        ("[policy]\nprefer = 'vendor'", ["unknown key 'policy'", "valid: prefer,"]),
        ("strict = 'yes'", ["'strict'", "boolean", "'yes'"]),
        ("strict = 1", ["'strict'", "boolean", "got 1"]),
        ("prefer = 3", ["'prefer'", "string", "got 3"]),
        ("allow_vendors = 'acme'", ["'allow_vendors'", "list", "'acme'"]),
        ("allow_vendors = ['acme', 7]", ["'allow_vendors.1'", "string", "got 7"]),
        ("per_op_order = ['a']", ["'per_op_order'", "dictionary"]),
        ("per_op_order.a = 'flagos'", ["'per_op_order.a'", "list", "'flagos'"]),
        ("prefer = 'vendro'", ["prefer: 'vendro'", "valid: flagos", "mean 'vendor'?"]),
        ("prefer = ''", ["prefer: ''", "valid: flagos"]),
        ("deny_vendors = ['a b']", ["deny_vendors: 'a b'", "vendor name"]),
        ("require = ['deterministc']", ["'deterministc'", "valid:", "mean 'deterministic'?"]),
        ("per_op_order.a = []", ["per_op_order: 'a'", "empty order"]),
        ("per_op_order.a = ['vendro']", ["per_op_order[a]", "'vendro'", "mean 'vendor'?"]),
        ("per_op_order.'a b' = ['flagos']", ["'a b'", "not an operator name"]),
    ],
)
def test_a_bad_policy_file_is_named_with_the_key_at_fault(
    text: str, said: list[str], policy_file: WriteFile
) -> None:
    environ = policy_file(text)
    with pytest.raises(ConfigurationError) as caught:
        parse_environment(environ)
    for part in ["TE_FL_POLICY_FILE", environ["TE_FL_POLICY_FILE"], *said]:
        assert part in str(caught.value)


def test_the_file_is_named_even_if_its_name_is_a_word_of_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefer").write_text("prefer = 'vendro'", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="TE_FL_POLICY_FILE: prefer: prefer: 'vendro'"):
        parse_environment({"TE_FL_POLICY_FILE": "prefer"})


def test_an_unreadable_policy_file_is_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"prefer = '\xe9'")
    for path in (tmp_path / "missing.toml", tmp_path, latin, "a\0b"):
        with pytest.raises(ConfigurationError) as caught:
            parse_environment({"TE_FL_POLICY_FILE": str(path)})
        assert str(caught.value).startswith(f"TE_FL_POLICY_FILE: cannot read {path}: ")


# --------------------------------------------------------------------- which source wins


def test_sources_are_merged_field_by_field_strongest_first(
    policy_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = policy_file('prefer = "impl:file"\nstrict = true\nrequire = ["graph_safe"]\n')
    environ |= {"TE_FL_PREFER": "impl:env", "TE_FL_DENY_VENDORS": "env"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    reset_global_policy()
    assert get_policy().prefer == "impl:env"
    set_global_policy(SelectionPolicy(prefer="impl:code", allow_vendors={"code"}))
    assert get_policy().prefer == "impl:code"
    with policy_context(prefer="impl:block"):
        found = effective_policy()
    assert found.policy == SelectionPolicy(
        prefer="impl:block",
        strict=True,
        per_op_order={},
        allow_vendors={"code"},
        deny_vendors={"env"},
        require={"graph_safe"},
    )
    path = environ["TE_FL_POLICY_FILE"]
    assert found.origins == {
        "prefer": "with block",
        "strict": f"strict in {path} (TE_FL_POLICY_FILE)",
        "per_op_order": "default",
        "allow_vendors": "set_global_policy",
        "deny_vendors": "TE_FL_DENY_VENDORS=env",
        "require": f"require in {path} (TE_FL_POLICY_FILE)",
    }


def test_what_one_source_rules_out_no_other_brings_back(
    policy_file: WriteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = policy_file('deny_vendors = ["file"]\nallow_vendors = ["acme", "zeta", "file"]\n')
    path = environ["TE_FL_POLICY_FILE"]
    environ |= {"TE_FL_DENY_VENDORS": "acme", "TE_FL_ALLOW_VENDORS": "acme,zeta"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    reset_global_policy()
    manager = make_manager(*one_of_each())
    set_global_policy(SelectionPolicy(prefer="vendor", deny_vendors={"code"}))
    assert manager.call("scale", None) == "vendor.zeta"
    with policy_context(deny_vendors=["block"], allow_vendors=["acme"], require=["graph_safe"]):
        found = effective_policy()
        reasons = [it.reason for it in manager.explain("scale").verdicts]
    assert found.policy.deny_vendors == {"file", "acme", "code", "block"}
    assert found.policy.allow_vendors == {"acme"}
    assert found.origins["deny_vendors"] == (
        "with block, and set_global_policy, and TE_FL_DENY_VENDORS=acme, and "
        f"deny_vendors in {path} (TE_FL_POLICY_FILE)"
    )
    assert (
        f"vendor 'Acme' is denied (TE_FL_DENY_VENDORS=acme, and deny_vendors in {path} "
        in (reasons[0])
    )
    assert reasons[1:3] == [
        "vendor 'zeta' is not allowed (with block)",
        "does not claim 'graph_safe' (with block)",
    ]


def test_the_default_prefers_flagos_and_is_not_strict() -> None:
    assert get_policy() == SelectionPolicy(
        prefer="flagos", strict=False, per_op_order={}, deny_vendors=(), require=()
    )


def test_set_global_policy_returns_the_one_before_it() -> None:
    first, second = SelectionPolicy(strict=True), SelectionPolicy(prefer="vendor")
    assert set_global_policy(first) is None
    assert set_global_policy(second) is first
    assert set_global_policy(None) is second
    assert get_policy().prefer == "flagos"


def test_set_global_policy_takes_nothing_but_a_policy() -> None:
    with pytest.raises(ConfigurationError, match="'vendor' is not a SelectionPolicy"):
        set_global_policy("vendor")  # type: ignore[arg-type]


def test_a_global_policy_is_seen_by_the_next_call() -> None:
    manager = make_manager(*one_of_each())
    bound = manager.bind("scale")
    for prefer, expected in (("vendor", "vendor.acme"), ("reference", "reference.torch")):
        set_global_policy(SelectionPolicy(prefer=prefer))
        assert manager.call("scale", None) == bound(None) == expected


def test_the_environment_is_read_once_and_again_after_a_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager(*one_of_each())
    assert manager.get_selected_impl_id("scale") == "default.flagos"
    monkeypatch.setenv("TE_FL_PREFER", "reference")
    assert manager.get_selected_impl_id("scale") == "default.flagos"
    set_global_policy(SelectionPolicy(strict=False))
    assert manager.get_selected_impl_id("scale") == "default.flagos"
    reset_global_policy()
    assert manager.get_selected_impl_id("scale") == "reference.torch"


def test_reset_forgets_the_policy_set_by_code() -> None:
    set_global_policy(SelectionPolicy(prefer="reference"))
    reset_global_policy()
    assert get_policy().prefer == "flagos"


def test_a_bad_environment_raises_on_each_call_until_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = make_manager(*one_of_each())
    bound = manager.bind("scale")
    assert manager.call("scale", None) == bound(None) == "default.flagos"
    monkeypatch.setenv("TE_FL_PREFER", "vendro")
    reset_global_policy()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="TE_FL_PREFER: 'vendro'"):
            manager.call("scale", None)
        with pytest.raises(ConfigurationError, match="TE_FL_PREFER: 'vendro'"):
            bound(None)
        with pytest.raises(ConfigurationError, match="TE_FL_PREFER: 'vendro'"):
            make_manager(*one_of_each()).call("scale", None)
    monkeypatch.setenv("TE_FL_PREFER", "vendor")
    assert manager.call("scale", None) == bound(None) == "vendor.acme"


# ------------------------------------------------------------------------ unknown names


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TE_FL_PERFER", "TE_FL_PREFER"),
        ("TE_FL_DENY_VENDOR", "TE_FL_DENY_VENDORS"),
        ("TE_FL_LOG_LEVEL", "TEFL_LOG_LEVEL"),
        ("TEFL_STRICT", "TE_FL_STRICT"),
        ("te_fl_strict", "TE_FL_STRICT"),
    ],
)
def test_an_unknown_variable_gets_one_warning_with_the_nearest_name(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "")
    for _ in range(2):
        get_environment()
    assert _warnings(caplog) == [f"unknown environment variable {name}; did you mean {nearest!r}?"]


def test_a_bad_environment_does_not_repeat_the_warning_of_an_unknown_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TE_FL_PERFER", "vendor")
    monkeypatch.setenv("TE_FL_STRICT", "perhaps")
    for _ in range(3):
        with pytest.raises(ConfigurationError):
            get_environment()
    monkeypatch.setenv("TE_FL_STRICT", "1")
    get_environment()
    assert len(_warnings(caplog)) == 1


def test_the_log_level_is_in_force_before_the_first_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TE_FL_PERFER", "vendor")
    monkeypatch.setenv("TEFL_LOG_LEVEL", "ERROR")
    get_environment()
    assert _warnings(caplog) == []


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"per_op_order": {"scael": ("flagos",)}},
            "set_global_policy: unknown operator 'scael'; did you mean 'scale'?",
        ),
        (
            {"per_op_order": {"scale": ("vendor:acne", "flagos")}},
            "set_global_policy: unknown vendor 'acne'; did you mean 'acme'?",
        ),
        (
            {"deny_vendors": ("ZETTA",)},
            "set_global_policy: unknown vendor 'zetta'; did you mean 'zeta'?",
        ),
        ({"allow_vendors": ("qqqq",)}, "set_global_policy: unknown vendor 'qqqq'"),
        (
            {"prefer": "vendor:acmee"},
            "set_global_policy: unknown vendor 'acmee'; did you mean 'acme'?",
        ),
        (
            {"deny_vendors": ("made",)},
            "set_global_policy: unknown vendor 'made'; its name is 'ZETA'",
        ),
        (
            {"prefer": "impl:reference.trch"},
            "set_global_policy: unknown implementation 'reference.trch'; "
            "did you mean 'reference.torch'?",
        ),
        (
            {"per_op_order": {"scale": ("flagos",), "fused_scale": ("vendor",)}},
            "set_global_policy: 'fused_scale' is an alias of 'scale'; "
            "the order for 'scale' is used",
        ),
    ],
)
def test_an_unknown_name_gets_one_warning_with_the_nearest(
    policy: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(*one_of_each(), impl("vendor.made", "vendor", vendor="ZETA"))
    set_global_policy(SelectionPolicy(**policy))
    for _ in range(2):
        manager.explain("scale")
        with policy_context(strict=True):
            manager.explain("scale")
    assert _warnings(caplog) == [message]


def test_names_that_are_known_get_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(*one_of_each())
    set_global_policy(
        SelectionPolicy(
            prefer="impl:reference.torch",
            allow_vendors=("ACME",),
            deny_vendors=("zeta",),
            per_op_order={"fused_scale": ("vendor:Acme", "flagos")},
        )
    )
    manager.explain("scale")
    assert _warnings(caplog) == []


def test_a_vendor_that_registers_later_is_known_then(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(*one_of_each())
    set_global_policy(SelectionPolicy(prefer="vendor:late"))
    assert order(manager)[0] == "vendor.acme"
    manager.registry.register_impl(impl("vendor.late", "vendor", vendor="Late"))
    assert order(manager)[0] == "vendor.late"
    assert len(_warnings(caplog)) == 1


# --------------------------------------------------------------------- a policy as a value

FULL = SelectionPolicy(
    prefer="vendor:acme",
    strict=True,
    per_op_order={"b": ("flagos",), "a": ("impl:x", "vendor")},
    allow_vendors=("acme", "zeta"),
    deny_vendors=(),
    require=("deterministic",),
)


def test_equal_policies_are_equal_and_hash_alike_however_they_were_written() -> None:
    same = SelectionPolicy(
        prefer=" VENDOR:ACME",
        strict=True,
        per_op_order={"a": ["impl:x", "VENDOR"], "b": "flagos"},  # type: ignore[dict-item]
        allow_vendors=["Zeta", "ACME", "acme"],  # type: ignore[arg-type]
        deny_vendors=frozenset(),
        require=iter(["deterministic"]),  # type: ignore[arg-type]
    )
    assert same == FULL
    assert hash(same) == hash(FULL)
    assert same.key == FULL.key


@pytest.mark.parametrize(
    "fields",
    [
        {"prefer": "vendor"},
        {"strict": False},
        {"strict": None},
        {"per_op_order": {"a": ("vendor", "impl:x"), "b": ("flagos",)}},
        {"allow_vendors": ()},
        {"allow_vendors": None},
        {"deny_vendors": None},
        {"require": ("graph_safe",)},
    ],
)
def test_policies_that_differ_in_one_field_differ(fields: dict[str, Any]) -> None:
    other = SelectionPolicy(**fields).over(FULL) if None not in fields.values() else None
    if other is None:
        other = SelectionPolicy(**{name: getattr(FULL, name) for name in FIELDS} | fields)
    assert other != FULL
    assert other.key != FULL.key


def test_a_policy_survives_pickle_and_copy() -> None:
    for policy in (FULL, SelectionPolicy()):
        for other in (
            pickle.loads(pickle.dumps(policy)),
            copy.copy(policy),
            copy.deepcopy(policy),
        ):
            assert other == policy
            assert hash(other) == hash(policy)


def test_a_policy_does_not_change() -> None:
    orders = {"a": ("flagos",)}
    policy = SelectionPolicy(per_op_order=orders)
    orders["a"] = ("vendor",)
    assert policy.per_op_order == {"a": ("flagos",)}
    with pytest.raises(TypeError):
        policy.per_op_order["a"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        policy.prefer = "vendor"  # type: ignore[misc]


def test_an_iterator_of_names_is_read_in_full() -> None:
    policy = SelectionPolicy(
        allow_vendors=(name for name in ["acme"]),  # type: ignore[arg-type]
        require=(name for name in ["graph_safe"]),  # type: ignore[arg-type]
    )
    assert policy == SelectionPolicy(allow_vendors={"acme"}, require={"graph_safe"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefer": "vendro"}, "prefer: 'vendro'.*mean 'vendor'"),
        ({"prefer": ""}, "prefer: ''"),
        ({"prefer": "vendr: acme"}, r"mean 'vendor:acme'\?$"),
        ({"prefer": "vendr:a b"}, "'a b' after the colon is not a valid name$"),
        ({"prefer": "flagos:acme"}, "impl:ID$"),
        ({"prefer": "impl"}, "write its id after 'impl:'$"),
        ({"prefer": 3}, "prefer: 3 is not a selector token"),
        ({"strict": 1}, "strict: 1 is not True or False"),
        ({"strict": "yes"}, "strict: 'yes' is not True or False"),
        ({"allow_vendors": "acme"}, "allow_vendors: 'acme' is not a list"),
        ({"allow_vendors": 3}, "allow_vendors: 3 is not a list"),
        ({"deny_vendors": [None]}, "deny_vendors: None is not a vendor name"),
        ({"deny_vendors": ["a,b"]}, "deny_vendors: 'a,b' is not .*one string for each name"),
        ({"require": ["deterministc"]}, "require: 'deterministc'.*mean 'deterministic'"),
        ({"require": [["deterministic"]]}, r"require: \['deterministic'\] is not a trait"),
        ({"per_op_order": [("a", "flagos")]}, "per_op_order: .* is not a mapping"),
        ({"per_op_order": {3: ["flagos"]}}, "per_op_order: 3 is not an operator name"),
        ({"per_op_order": {"a": 3}}, "per_op_order: 3 is not a list"),
        ({"per_op_order": {"a": [None]}}, r"per_op_order\[a\]: None is not a selector token"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SelectionPolicy(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"require": ["graph_safe"]}, "require"),
        ({"allow_vendors": []}, "TE_FL_ALLOW_VENDORS"),
        ({"per_op_order": {}}, "TE_FL_PER_OP"),
    ],
)
def test_what_no_variable_can_say_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SelectionPolicy(**fields).to_environment()


def test_a_policy_as_json_values_makes_the_same_policy() -> None:
    assert SelectionPolicy(**FULL.to_dict()) == FULL
    assert SelectionPolicy().to_dict() == {}
