"""Discovery of plugins by module and entry point, and what follows if a plugin fails."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from core_helpers import SCALE, StubTensor, impl

from transformer_engine_fl import (
    OpManager,
    OpRegistry,
    RegistrationError,
    UnknownOperatorError,
    get_default_manager,
    reset_global_policy,
)
from transformer_engine_fl.core import discovery
from transformer_engine_fl.core.discovery import PLUGIN_API, SourceReport, find_sources

Plugin = Callable[..., str]

_count = itertools.count()

GOOD = """
from core_helpers import impl

def register(registry):
    registry.register_many([impl("{name}.one"), impl("{name}.two")])
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Writes a module and returns its name, which replaces ``{name}`` in the source."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str = GOOD) -> str:
        name = f"te_fl_test_plugin_{next(_count)}"
        text = textwrap.dedent(source).replace("{name}", name)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture
def distribution(tmp_path: Path) -> Callable[..., None]:
    """Installs a distribution's metadata with these entry points in the group te_fl.plugin."""

    def write(project: str, **points: str) -> None:
        info = tmp_path / f"{project}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {value}\n" for name, value in points.items()]
        (info / "entry_points.txt").write_text("[te_fl.plugin]\n" + "".join(lines))

    return write


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets ``TE_FL_PLUGIN_MODULES``."""

    def name(*names: str) -> None:
        monkeypatch.setenv("TE_FL_PLUGIN_MODULES", ", ".join(names))
        reset_global_policy()

    return name


def started(registry: OpRegistry | None = None) -> OpManager:
    manager = OpManager(registry or OpRegistry({"scale": SCALE}), builtins=False)
    manager.ensure_initialized()
    return manager


def ids(manager: OpManager) -> list[str]:
    return [it.impl_id for it in manager.registry.get_implementations("scale")]


def report(manager: OpManager, name: str) -> SourceReport:
    (found,) = (it for it in manager.plugins if it.name == name)
    return found


# --------------------------------------------------------------------- what is a plugin

FORMS = {
    "register": GOOD,
    "te_fl_register": GOOD.replace("def register", "def te_fl_register"),
    "both": GOOD + "def te_fl_register(registry): raise AssertionError\n",
    "its API version stated": GOOD + f"TE_FL_PLUGIN_API = {PLUGIN_API}\n",
    "one by one": """
        from core_helpers import impl

        def register(registry):
            registry.register_impl(impl("{name}.one"))
            assert len(registry.get_implementations("scale")) == 1
            registry.register_impl(impl("{name}.two"))
    """,
}


@pytest.mark.parametrize("source", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("found_by", ["module", "entry point"])
def test_a_plugin_registers(
    source: str,
    found_by: str,
    plugin: Plugin,
    distribution: Callable[..., None],
    modules: Callable[..., None],
) -> None:
    name = plugin(source)
    if found_by == "module":
        modules(name)
        known, origin = f"module {name}", "TE_FL_PLUGIN_MODULES"
    else:
        distribution("acme-kernels", acme=name)
        known, origin = "entry point acme", "acme-kernels"
    manager = started()
    assert ids(manager) == [f"{name}.one", f"{name}.two"]
    said = report(manager, known)
    assert (said.origin, said.error, said.traceback) == (origin, None, None)
    assert said.registered == (f"scale/{name}.one", f"scale/{name}.two")


def test_an_entry_point_may_name_the_function_itself(
    plugin: Plugin, distribution: Callable[..., None]
) -> None:
    name = plugin(GOOD.replace("def register", "def anything"))
    distribution("acme-kernels", acme=f"{name}:anything")
    assert ids(started()) == [f"{name}.one", f"{name}.two"]


def test_the_version_of_a_function_is_that_of_its_module(
    plugin: Plugin, distribution: Callable[..., None]
) -> None:
    name = plugin(GOOD + f"TE_FL_PLUGIN_API = {PLUGIN_API + 1}\n")
    distribution("acme-kernels", acme=f"{name}:register")
    manager = started()
    assert ids(manager) == []
    assert "plugin API" in str(report(manager, "entry point acme").error)


def test_a_plugin_that_states_no_version_is_of_the_first(
    plugin: Plugin, modules: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PLUGIN_API", 2)
    name = plugin()
    modules(name)
    manager = started()
    assert ids(manager) == []
    assert "written for plugin API 1, this version has 2" in str(
        report(manager, f"module {name}").error
    )


def test_an_unknown_operator_may_be_one_that_was_left_out(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    name = plugin("raise OSError('libacme.so')")
    modules(name)
    manager = started()
    said = f"unknown operator 'fused'.*; module {name} left out: `te-fl doctor` says why"
    with pytest.raises(UnknownOperatorError, match=said):
        manager.call("fused", None)


@pytest.mark.parametrize("value", ["acme-kernels", "acme kernels:register", ":register", ""])
def test_an_entry_point_that_names_no_module_is_left_out_alone(
    value: str, plugin: Plugin, distribution: Callable[..., None]
) -> None:
    name = plugin()
    distribution("acme-kernels", acme=value, zeta=name)
    manager = started()
    assert set(ids(manager)) == {f"{name}.one", f"{name}.two"}
    said = str(report(manager, "entry point acme").error)
    assert f"its entry point is {value!r}; it must be 'module' or 'module:function'" in said


@pytest.mark.parametrize("metadata", [None, b"", b"\xff\xfe", b"Metadata-Version: 2.1\n"])
def test_a_plugin_of_a_distribution_with_broken_metadata_registers(
    metadata: bytes | None, plugin: Plugin, distribution: Callable[..., None], tmp_path: Path
) -> None:
    """An interrupted installation leaves such metadata."""
    name = plugin()
    distribution("acme-kernels", acme=name)
    file = tmp_path / "acme-kernels-1.0.dist-info" / "METADATA"
    file.unlink()
    if metadata is not None:
        file.write_bytes(metadata)
    manager = started()
    assert set(ids(manager)) == {f"{name}.one", f"{name}.two"}
    assert report(manager, "entry point acme").origin == name


@pytest.mark.parametrize("text", [b"[console_scripts]\nacme\n", b"[x]\nna\xefve = acme\n"])
def test_unreadable_entry_points_of_a_distribution_do_not_affect_other_plugins(
    text: bytes,
    plugin: Plugin,
    distribution: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = plugin()
    distribution("broken")
    distribution("zeta-kernels", zeta=name)
    (tmp_path / "broken-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    assert ids(started()) == [f"{name}.one", f"{name}.two"]
    said = f"{tmp_path / 'broken-1.0.dist-info'}: its entry points cannot be read: "
    assert [it.getMessage().startswith(said) for it in caplog.records] == [True]


def test_plugins_of_the_same_name_from_two_distributions_both_register(
    plugin: Plugin, distribution: Callable[..., None]
) -> None:
    first, second = plugin(), plugin()
    distribution("acme-kernels", kernels=first)
    distribution("zeta-kernels", kernels=second)
    manager = started()
    assert set(ids(manager)) == {f"{it}.{n}" for it in (first, second) for n in ("one", "two")}
    ours = [it for it in manager.plugins if it.name == "entry point kernels"]
    assert {it.origin for it in ours} == {"acme-kernels", "zeta-kernels"}


def test_a_module_that_is_also_an_entry_point_registers_once(
    plugin: Plugin, distribution: Callable[..., None], modules: Callable[..., None]
) -> None:
    name = plugin()
    distribution("acme-kernels", acme=name)
    modules(name)
    manager = started()
    assert ids(manager) == [f"{name}.one", f"{name}.two"]
    assert [it.error for it in manager.plugins] == [None] * len(manager.plugins)


def test_several_modules_register_in_their_order(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    first, second = plugin(), plugin()
    modules(second, first)
    assert ids(started()) == [f"{it}.{n}" for it in (second, first) for n in ("one", "two")]


def test_looking_for_plugins_imports_none(
    plugin: Plugin, distribution: Callable[..., None], modules: Callable[..., None]
) -> None:
    distribution("acme-kernels", acme=plugin("raise AssertionError('imported')"))
    modules(plugin("raise AssertionError('imported')"))
    found = {source.name for source in find_sources(builtins=False)}
    assert "entry point acme" in found


def test_a_manager_with_plugins_disabled_loads_none(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    modules(plugin("raise AssertionError('imported')"))
    manager = OpManager(OpRegistry({"scale": SCALE}), builtins=False, plugins=False)
    manager.ensure_initialized()
    assert manager.plugins == ()


def test_managers_that_share_a_registry_share_its_plugins(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    name = plugin()
    modules(name)
    first = started()
    second = started(first.registry)
    assert ids(second) == [f"{name}.one", f"{name}.two"]
    assert second.plugins == first.plugins


@pytest.mark.parametrize(("vendor", "warnings"), [("acme", 0), ("acne", 1)])
def test_a_vendor_that_registers_later_is_not_unknown(
    vendor: str,
    warnings: int,
    plugin: Plugin,
    modules: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = plugin(
        """
        from transformer_engine_fl import OpImpl, get_default_manager

        def register(registry):
            assert get_default_manager().get_selected_impl_id("rmsnorm_fwd")
            registry.register_impl(OpImpl("op", "acme", "vendor", lambda x: x, vendor="acme"))
        """
    )
    monkeypatch.setenv("TE_FL_PREFER", f"vendor:{vendor}")
    modules(name)
    assert get_default_manager().call("op", 7) == 7
    assert caplog.text.count("unknown vendor") == warnings


def test_a_plugin_may_ask_the_default_manager_while_it_registers(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    """The manager answers from what is registered so far; the plugin does not wait for itself."""
    name = plugin(
        """
        from transformer_engine_fl import OpImpl, get_default_manager

        def register(registry):
            import torch

            assert get_default_manager().get_selected_impl_id("rmsnorm_fwd")
            registry.register_impl(OpImpl("acme_op", "acme", "reference", lambda x: x))
        """
    )
    modules(name)
    assert get_default_manager().call("acme_op", 7) == 7
    assert report(get_default_manager(), f"module {name}").error is None


# ---------------------------------------------------------------------------- breakage

BROKEN = {
    "breaks when imported": ("raise OSError('libacme.so')", "OSError: libacme.so"),
    "is no Python": ("def register(", "SyntaxError"),
    "has no register": ("x = 1", r"PluginError: .*\.py: has neither register"),
    "misspells register": (
        "def registre(registry): ...\n",
        "has neither register.*; did you mean its 'registre'",
    ),
    "another API version": (
        GOOD + f"TE_FL_PLUGIN_API = {PLUGIN_API + 1}\n",
        f"PluginError: .* written for plugin API {PLUGIN_API + 1}, this version has {PLUGIN_API}",
    ),
    "an API version that is no number": (
        GOOD + "TE_FL_PLUGIN_API = '1'\n",
        f"TE_FL_PLUGIN_API is '1', not an integer; this version has plugin API {PLUGIN_API}",
    ),
    "raises half-way": (GOOD + "    raise KeyError('half-way')\n", "KeyError: 'half-way'"),
    "registers nonsense half-way": (
        GOOD + "    registry.register_impl('nonsense')\n",
        "RegistrationError: .* expected an OpImpl",
    ),
    "registers one as many": (
        GOOD + "    registry.register_many(impl('three'))\n",
        r"takes several implementations, got one \(scale/three\); register_impl takes one",
    ),
    "registers an id twice": (
        GOOD + "    registry.register_impl(impl('{name}.one'))\n",
        "DuplicateImplError",
    ),
    "takes an id that is taken": (
        GOOD + "    registry.register_impl(impl('taken'))\n",
        "DuplicateImplError",
    ),
    "does not fit": (
        GOOD + "    registry.register_impl(impl('{name}.three', fn=lambda y: y))\n",
        "SignatureMismatchError",
    ),
    "raises what is no Exception": (
        "class Skipped(BaseException): ...\nraise Skipped('no licence')",
        "Skipped: no licence",
    ),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "raises an error that tells of vendors in a way of its own": (
        "class Unlicensed(Exception):\n    vendors = None\nraise Unlicensed('acme')",
        "Unlicensed: acme",
    ),
    "yields what it should register": (
        "from core_helpers import impl\ndef register(registry):\n    yield impl('lost')\n",
        "returned a generator and registered nothing.* registry.register_impl",
    ),
    "returns what it should register": (
        "from core_helpers import impl\ndef register(registry):\n    return [impl('lost')]\n",
        "returned a list and registered nothing",
    ),
}


@pytest.mark.parametrize("found_by", ["module", "entry point"])
@pytest.mark.parametrize(("source", "error"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_reported_once_and_the_others_register(
    source: str,
    error: str,
    found_by: str,
    plugin: Plugin,
    distribution: Callable[..., None],
    modules: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = plugin(source), plugin()
    if found_by == "module":
        modules(broken, good)
        known = f"module {broken}"
    else:
        distribution("acme-kernels", acme=broken)
        modules(good)
        known = "entry point acme"
    registry = OpRegistry({"scale": SCALE})
    registry.register_impl(impl("taken"))
    for manager in (started(registry), started(registry)):
        assert ids(manager) == ["taken", f"{good}.one", f"{good}.two"], "nothing of the broken one"
        said = report(manager, known)
        assert said.registered == ()
        assert said.error is not None
        assert said.traceback is not None
        assert said.traceback.startswith("Traceback (most recent call last)")
        assert said.error.partition(":")[0] in said.traceback
        assert re.search(error, said.error)
        assert report(manager, f"module {good}").error is None
    warned = [it.getMessage() for it in caplog.records if known in it.getMessage()]
    assert len(warned) == 1
    assert "te-fl doctor" in warned[0]


HELD = """
from transformer_engine_fl import OpImpl, OpRegistry

def register(registry):
"""

NAMED = {
    "raises when imported": "x = 1\nraise OSError('libacme.so')  # HERE",
    "raises in what it imports": "import no_such_module_of_ours  # HERE",
    "is no Python": "x = 1\ndef register(:  # HERE",
    "raises when it registers": GOOD + "    raise KeyError('half-way')  # HERE\n",
    "raises in torch when it registers": GOOD + "    import torch\n    torch.ones(-1)  # HERE\n",
    "registers an id twice": GOOD + "    registry.register_impl(impl('{name}.one'))  # HERE\n",
    "does not fit": GOOD
    + "    registry.register_impl(impl('{name}.three', fn=lambda y: y))  # HERE\n",
    "an unknown kind": HELD + "    OpImpl('scale', 'acme', 'vendr', len, vendor='acme')  # HERE\n",
    "a vendor without a name": HELD + "    OpImpl('scale', 'acme', 'vendor', len)  # HERE\n",
    "an unknown trait": HELD
    + "    OpImpl('scale', 'acme', 'reference', len, traits={'quick'})  # HERE\n",
    "a register of other parameters": "x = 1\ndef register():  # HERE\n    pass\n",
    "no OpImpl": HELD + "    registry.register_impl('nonsense')  # HERE\n",
}


@pytest.mark.parametrize("source", NAMED.values(), ids=NAMED)
def test_what_breaks_is_named_with_its_file_and_line(
    source: str,
    plugin: Plugin,
    tmp_path: Path,
    modules: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = plugin(source), plugin()
    modules(broken, good)
    manager = started()
    file = tmp_path / f"{broken}.py"
    line = next(n for n, it in enumerate(file.read_text().splitlines(), 1) if "HERE" in it)
    warned = [it.getMessage() for it in caplog.records if broken in it.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith(f"module {broken} (TE_FL_PLUGIN_MODULES) is left out: ")
    assert f"{file}:{line}" in warned[0]
    assert f"{file}:{line}" in str(report(manager, f"module {broken}").error)
    assert ids(manager) == [f"{good}.one", f"{good}.two"]


def test_direct_registrations_of_a_plugin_that_is_left_out_are_named(
    plugin: Plugin, modules: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    past = (
        "from core_helpers import impl\nfrom transformer_engine_fl import get_default_manager\n"
        "get_default_manager().registry.register_impl(impl('{name}.past'))\n"
    )
    names = [plugin(past), plugin(past + "def register(registry):\n    raise KeyError('no')\n")]
    clean = plugin("raise KeyError('no')")
    modules(*names, clean)
    manager = get_default_manager()
    manager.ensure_initialized()
    for name in names:
        said = f"registered directly, outside register(registry), and kept: scale/{name}.past"
        assert said in str(report(manager, f"module {name}").error)
        assert sum(said in it.getMessage() for it in caplog.records) == 1
        assert f"{name}.past" in ids(manager)
    assert "kept" not in str(report(manager, f"module {clean}").error)


def test_what_is_registered_after_register_has_ended_is_refused_and_not_lost(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    keeping = "def register(registry):\n    global later\n    later = registry\n"
    kept, broken = plugin(keeping), plugin(keeping + "    raise KeyError('no')\n")
    modules(kept, broken)
    started()
    for name in (kept, broken):
        with pytest.raises(
            RegistrationError, match=r"scale/acme: .* has returned; .* get_default_m"
        ):
            sys.modules[name].later.register_impl(impl("acme"))


def test_a_duplicate_names_both_places(plugin: Plugin, modules: Callable[..., None]) -> None:
    taken = "from core_helpers import impl\ndef register(registry):\n    registry.register_impl("
    first, second = (plugin(taken + "impl('acme'))") for _ in range(2))
    modules(first, second)
    manager = started()
    assert ids(manager) == ["acme"]
    said = str(report(manager, f"module {second}").error)
    assert said.startswith("DuplicateImplError: scale/acme is registered twice: at ")
    assert f"{first}.py:3" in said
    assert f"{second}.py:3" in said


LATE = """
from transformer_engine_fl import OpImpl

def scale(y):
    return y

def scaled(x, factor=1.0, *, mode="plain"):
    raise RuntimeError("no image")  # HERE

def register(registry):
    registry.register_impl(OpImpl("scale", "acme.misfit", "vendor", "{name}:scale", vendor="acme"))
    registry.register_impl(OpImpl("scale", "acme.gone", "vendor", "{name}:gone", vendor="acme"))
    registry.register_impl(
        OpImpl(
            "scale", "acme.away", "vendor", "{name}:scaled", vendor="acme", devices={"npu"},
            is_available=lambda: "torch sees no 'npu' device here",
        )
    )
    registry.register_impl(OpImpl("scale", "acme.raises", "vendor", scaled, vendor="acme"))
"""


def test_what_breaks_at_the_first_call_is_named_and_the_next_serves(
    plugin: Plugin, modules: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A signature that does not fit, a missing name, an absent device, a kernel that raises: each
    is reported with its reason, and the last candidate serves."""
    name = plugin(LATE)
    modules(name, plugin())
    manager = started()
    assert str(manager.call("scale", StubTensor())).endswith(".one")
    file = tmp_path / f"{name}.py"
    line = next(n for n, it in enumerate(file.read_text().splitlines(), 1) if "HERE" in it)
    (warned,) = [it.getMessage() for it in caplog.records if "acme.raises" in it.getMessage()]
    assert f"RuntimeError: no image (at {file}:{line})" in warned
    for impl_id, reason in (
        ("acme.misfit", "the signature does not"),
        ("acme.gone", "cannot import"),
    ):
        (warned,) = [it.getMessage() for it in caplog.records if impl_id in it.getMessage()]
        assert reason in warned
        assert f"registered for 'scale' at {file}:" in warned
    assert "acme.away" not in caplog.text, "to be absent is no fault"
    said = str(manager.explain("scale", StubTensor()))
    assert "the signature does not fit the contract" in said
    assert f"registered at  {file}:" in said
    assert f"cannot import {name}:gone: AttributeError" in said
    assert "torch sees no 'npu' device here" in said


def test_one_broken_module_behind_many_operators_is_reported_once(
    plugin: Plugin, modules: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = plugin("raise OSError('libacme.so')  # HERE\n")
    name = plugin(
        f"""
        from transformer_engine_fl import OpImpl

        def register(registry):
            registry.register_many(
                OpImpl(f"acme_{{n}}", "acme.late", "reference", "{kernels}:op", mutates=())
                for n in range(3)
            )
            registry.register_many(
                OpImpl(f"acme_{{n}}", "acme.plain", "reference", abs, mutates=()) for n in range(3)
            )
        """
    )
    modules(name)
    manager = started()
    assert [manager.call(f"acme_{n}", -1) for n in range(3)] == [1, 1, 1]
    (warned,) = [it.getMessage() for it in caplog.records if "acme.late" in it.getMessage()]
    assert f"OSError: libacme.so (at {tmp_path / kernels}.py:1)" in warned


def test_a_module_that_does_not_exist_is_reported(modules: Callable[..., None]) -> None:
    modules("no_such_module_of_ours")
    manager = started()
    said = report(manager, "module no_such_module_of_ours")
    missing = "No module named 'no_such_module_of_ours'; searched sys.path"
    assert str(said.error).startswith(f"ModuleNotFoundError: {missing}")


def test_an_entry_point_that_names_nothing_is_reported(
    plugin: Plugin, distribution: Callable[..., None]
) -> None:
    distribution("acme-kernels", acme=f"{plugin()}:nothing")
    assert "AttributeError" in str(report(started(), "entry point acme").error)


def test_the_calls_go_on_when_a_plugin_is_broken(
    plugin: Plugin, modules: Callable[..., None]
) -> None:
    import torch

    modules(plugin("raise OSError('libacme.so')"))
    manager = OpManager()
    output, _ = manager.call("rmsnorm_fwd", torch.full((1, 4), 2.0), torch.ones(4), 0.0)
    assert output.tolist() == [[1.0] * 4]


def test_in_tree_sets_are_found_by_their_folders() -> None:
    names = {source.name for source in find_sources(plugins=False)}
    assert "set reference" in names
    assert "set vendor" not in names, "the folder of vendors is no set"
