"""The fault table: what follows from each way in which an implementation can fail.

Every row runs by every route, with and without a guard in front of the candidates.
"""

from __future__ import annotations

import errno
import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import core_faults
import pytest
import torch
from core_faults import GUARDS, ROUTES, Kernel, KernelError, arrive, in_quarantine, world
from core_helpers import impl, make_manager
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_engine_fl.core.manager as manager_module
from transformer_engine_fl import (
    AllCandidatesFailedError,
    ArgumentError,
    ConfigurationError,
    NoImplementationError,
    NotSupportedError,
    OpImpl,
    OpManager,
    OpRegistry,
    PartialMutationError,
    SelectionPolicy,
    StrictModeError,
    set_global_policy,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.core.errors import NotStartedError
from transformer_engine_fl.ops._tensors import TorchTensors

EVERY_WAY = [
    pytest.param(route, guarded, id=f"{route}-{'guarded' if guarded else 'direct'}")
    for route, guarded in itertools.product(ROUTES, GUARDS)
]
every_way = pytest.mark.parametrize(("route", "guarded"), EVERY_WAY)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpManager]:
    """Makes a :func:`world` and makes it the default manager, for calls of operator objects."""

    def make(*args: Any, **fields: Any) -> OpManager:
        manager = world(*args, **fields)
        monkeypatch.setattr(manager_module, "_default", manager)
        return manager

    return make


def ones() -> torch.Tensor:
    return torch.ones(4)


def cuda_error(text: str) -> Callable[[], Exception]:
    return lambda: RuntimeError(f"CUDA error: {text}\nSearch for `cudaError' in the manual.")


def because(cause: Exception) -> Exception:
    """An error raised from ``cause``, as by an implementation that catches and rewords it."""
    try:
        raise ValueError("the workspace could not be had") from cause
    except ValueError as error:
        return error


def declined() -> Exception:
    return NotSupportedError("only even lengths")


class SpeechlessError(KernelError):
    """An error whose ``str()`` raises, because it expects arguments that it has not been given."""

    def __str__(self) -> str:
        return str(self.args[7])


class SpeechlessDeclineError(NotSupportedError, SpeechlessError):
    pass


@dataclass(frozen=True)
class Row:
    """One fault, and what must follow from it.

    Attributes:
        fault: makes the exception that the first candidate raises.
        op_name: ``scale`` returns a tensor, ``scale_`` writes its argument.
        in_place: whether the first candidate has written half of its argument when it fails.
        raises: the exception that the caller gets; None if the second candidate serves.
        quarantined: whether the first candidate is put into quarantine.
        args: makes the arguments; valid ones by default.
    """

    name: str
    fault: Callable[[], Exception]
    raises: type[Exception] | None = None
    op_name: str = "scale"
    in_place: bool = False
    quarantined: bool = False
    args: Callable[[], tuple[Any, ...]] = lambda: (ones(),)


def wrong() -> tuple[Any, ...]:
    return (torch.ones(2, 2),)


TABLE = [
    Row("raises before touching", lambda: KernelError("no image"), quarantined=True),
    Row("TypeError of its own", lambda: TypeError("bad"), quarantined=True),
    Row("an error without a text", SpeechlessError, quarantined=True),
    Row(
        "an error without a text, in place",
        SpeechlessError,
        PartialMutationError,
        "scale_",
        in_place=True,
        quarantined=True,
    ),
    Row("an argument error in other words", lambda: ArgumentError("odd"), quarantined=True),
    Row("no kernel for the device", cuda_error("no kernel image is available"), quarantined=True),
    Row(
        "raises before touching what it may write",
        lambda: KernelError("no image"),
        PartialMutationError,
        "scale_",
        quarantined=True,
    ),
    Row(
        "raises after half a mutation",
        lambda: KernelError("half way"),
        PartialMutationError,
        "scale_",
        in_place=True,
        quarantined=True,
    ),
    Row("is broken, and says so", lambda: NotStartedError("no image"), quarantined=True),
    Row(
        "is broken, and says so before it writes",
        lambda: NotStartedError("no image"),
        op_name="scale_",
        quarantined=True,
    ),
    Row("wrong arguments", lambda: KernelError("shapes"), ArgumentError, args=wrong),
    Row(
        "wrong arguments, in place",
        lambda: KernelError("shapes"),
        ArgumentError,
        "scale_",
        args=wrong,
    ),
    Row("wrong arguments, declined", declined, ArgumentError, args=wrong),
    Row("out of memory", lambda: torch.OutOfMemoryError("40 GiB"), torch.OutOfMemoryError),
    Row(
        "out of memory, in place",
        lambda: torch.OutOfMemoryError("40 GiB"),
        torch.OutOfMemoryError,
        "scale_",
        in_place=True,
    ),
    Row("out of host memory", MemoryError, MemoryError),
    Row(
        "out of memory in a group",
        lambda: ExceptionGroup("both", [ValueError(), torch.OutOfMemoryError("40 GiB")]),
        ExceptionGroup,
    ),
    Row("out of memory in words", cuda_error("out of memory"), RuntimeError),
    *(
        Row(f"out of memory as {type(fault()).__name__} {place}", fault, type(fault()))
        for place, fault in enumerate(
            (
                lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
                cuda_error("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
                lambda: because(torch.OutOfMemoryError("40 GiB")),
                lambda: because(cuda_error("an illegal memory access was encountered")()),
                lambda: because(because(MemoryError())),
            )
        )
    ),
    Row("a file that is not there", lambda: because(FileNotFoundError(2, "a")), quarantined=True),
    Row("device lost", cuda_error("an illegal memory access was encountered"), RuntimeError),
    *(
        Row(f"device lost, {text.split()[0]}", cuda_error(text), RuntimeError)
        for text in (
            "the launch timed out and was terminated",
            "operation not supported on global/shared address space",
            "uncorrectable NVLink error detected during the execution",
            "Invalid access of peer GPU memory over nvlink or a hardware error",
        )
    ),
    Row("device assert", cuda_error("device-side assert triggered"), RuntimeError),
    Row(
        "device lost and wrong arguments",
        cuda_error("unspecified launch failure"),
        RuntimeError,
        args=wrong,
    ),
    Row("a malformed setting", lambda: ConfigurationError("TE_FL_X"), ConfigurationError),
    Row(
        "a malformed setting, before it writes",
        lambda: ConfigurationError("TE_FL_X"),
        ConfigurationError,
        "scale_",
    ),
    Row("says not these arguments", declined),
    Row("says not these arguments, in place", declined, op_name="scale_"),
    Row("says not these arguments, without a text", SpeechlessDeclineError),
]


@every_way
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name.replace(" ", "-"))
def test_each_fault_has_its_documented_outcome(
    row: Row,
    route: str,
    guarded: bool,
    install: Callable[..., OpManager],
    caplog: pytest.LogCaptureFixture,
) -> None:
    raised: list[Exception] = []

    def fault() -> Exception:
        raised.append(row.fault())
        return raised[-1]

    first = Kernel(fault, in_place=row.in_place)
    second = Kernel(in_place=row.op_name == "scale_")
    manager = install(row.op_name, first, second, guarded=guarded)
    args = row.args()
    if row.raises is None:
        result = arrive(manager, row.op_name, route)(*args)
        assert torch.equal(result, torch.full((4,), 2.0))
        assert second.runs == 1
    else:
        with pytest.raises(row.raises) as caught:
            arrive(manager, row.op_name, route)(*args)
        assert second.runs == 0, "nothing else may run"
        if row.raises is type(raised[0]):
            assert caught.value is raised[0], "raised as it is"
    assert first.runs == 1
    aside = {(row.op_name, "impl.0", "cpu", "float32")} if row.quarantined else set()
    assert in_quarantine(manager) == aside
    warned = [it for it in caplog.records if it.levelno >= logging.WARNING]
    assert len(warned) == (row.quarantined and row.raises is None)


@every_way
def test_half_written_data_is_never_touched_again(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    first, second = Kernel(lambda: KernelError("half way"), in_place=True), Kernel(in_place=True)
    manager = install("scale_", first, second, guarded=guarded)
    x = ones()
    with pytest.raises(PartialMutationError, match="may have partly written x") as caught:
        arrive(manager, "scale_", route)(x)
    assert caught.value.tensors == ("x",)
    assert isinstance(caught.value.__cause__, KernelError)
    assert x.tolist() == [2, 2, 1, 1]
    again = ones()
    arrive(manager, "scale_", route)(again)
    assert again.tolist() == [2, 2, 2, 2]
    assert (first.runs, second.runs) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {},
            r"may have partly written any of #1, #2: the operator has no contract, .*mutates=\(\)",
        ),
        ({"mutates": ("y",)}, "failed and may have partly written y;"),
        ({"mutates": ()}, None),
    ],
)
def test_where_no_contract_says_what_is_written_the_implementation_does(
    fields: dict[str, Any], said: str | None
) -> None:
    def fails(x: Any, y: Any) -> Any:
        raise KernelError("half way")

    manager = make_manager(
        impl("first", op_name="fused", fn=fails, priority=2, **fields),
        impl("second", op_name="fused", fn=lambda x, y: "served", mutates=()),
        tensors=TorchTensors(),
    )
    if said is None:
        assert manager.call("fused", ones(), ones()) == "served"
    else:
        with pytest.raises(PartialMutationError, match=said):
            manager.call("fused", ones(), ones())
        assert manager.call("fused", ones(), ones()) == "served"


@pytest.mark.parametrize("before", [NotStartedError("no compiler"), NotSupportedError("odd")])
@every_way
def test_what_has_failed_or_declined_before_is_no_other_candidate(
    route: str, guarded: bool, before: Exception, install: Callable[..., OpManager]
) -> None:
    """Half-written data ends each call; the operator stays usable once it is well again."""
    first = Kernel(lambda: before)
    second = Kernel(lambda: KernelError("half way"), in_place=True)
    manager = install("scale_", first, second, guarded=guarded)
    for runs in (1, 2):
        with pytest.raises(PartialMutationError, match=r"will use 'impl\.1' again"):
            arrive(manager, "scale_", route)(ones())
        assert second.runs == runs
    second.error = None
    assert arrive(manager, "scale_", route)(ones()).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("before", [NotStartedError("no compiler"), NotSupportedError("odd")])
def test_half_written_data_names_the_candidate_that_serves_next(before: Exception) -> None:
    first = Kernel(lambda: before)
    second = Kernel(lambda: KernelError("half way"), in_place=True)
    manager = world("scale_", first, second, Kernel(in_place=True))
    with pytest.raises(PartialMutationError, match=r"will use 'impl\.2'"):
        manager.call("scale_", ones())
    assert manager.call("scale_", ones()).tolist() == [2, 2, 2, 2]
    assert second.runs == 1


@pytest.mark.parametrize("into", [None, torch.zeros(4), [torch.zeros(4)]])
@every_way
def test_a_call_that_passes_nothing_to_write_falls_back(
    route: str, guarded: bool, into: Any, install: Callable[..., OpManager]
) -> None:
    """The argument that the operator writes is optional: without it, a failure has no effect."""

    def failing(x: Any, factor: float = 2.0, *, into: Any = None) -> Any:
        raise KernelError("kernel")

    def well(x: Any, factor: float = 2.0, *, into: Any = None) -> Any:
        assert into is None, "nothing else may run"
        return x * factor

    manager = install("scale_into", failing, well, guarded=guarded)
    run = arrive(manager, "scale_into", route)
    if into is None:
        assert run(ones()).tolist() == [2, 2, 2, 2]
    else:
        with pytest.raises(PartialMutationError) as caught:
            run(ones(), into=into)
        assert caught.value.tensors == ("into",)
    assert in_quarantine(manager) == {("scale_into", "impl.0", "cpu", "float32")}


@every_way
def test_wrong_arguments_get_one_error_that_names_them(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    first, second = Kernel(lambda: KernelError("shapes")), Kernel(lambda: KernelError("shapes"))
    manager = install("scale", first, second, guarded=guarded)
    with pytest.raises(ArgumentError) as caught:
        arrive(manager, "scale", route)(torch.ones(2, 2))
    error = caught.value
    assert (error.op_name, error.argument) == ("scale", "x")
    assert str(error) == "scale: argument 'x' is of 2 dimensions; the contract expects 1 dimension"
    assert error.__cause__ is None
    assert error.__suppress_context__, "one error, not a chain of them"


@every_way
def test_no_tensor_where_one_is_expected_is_the_callers_mistake(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    manager = install("scale", Kernel(lambda: TypeError("int")), Kernel(), guarded=guarded)
    with pytest.raises(ArgumentError, match="argument 'x' is int; the contract expects a tensor"):
        arrive(manager, "scale", route)(3)
    assert not in_quarantine(manager)


@pytest.mark.parametrize(
    ("args", "kwargs", "argument", "given"),
    [
        ((), {}, "x", "missing"),
        ((1,), {"facter": 2.0}, "facter", "did you mean 'factor'"),
        ((1,), {"x": 1}, "x", "passed twice"),
        ((1, 2.0, "plain"), {}, "#3", "one too many"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_the_callers_mistake(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: str, given: str
) -> None:
    manager = world("scale", Kernel(), Kernel())
    with pytest.raises(ArgumentError, match=given) as caught:
        manager.call("scale", *args, **kwargs)
    assert caught.value.argument == argument
    assert not in_quarantine(manager)


@every_way
def test_wrong_arguments_are_named_also_when_every_candidate_declined(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    kernels = Kernel(), Kernel()
    manager = install(
        "scale",
        *kernels,
        guarded=guarded,
        supports=lambda x, factor=2.0, *, mode="plain": "one dimension only",
    )
    with pytest.raises(ArgumentError, match="1 dimension"):
        arrive(manager, "scale", route)(torch.ones(2, 2))
    with pytest.raises(NoImplementationError, match="one dimension only"):
        arrive(manager, "scale", route)(ones())
    assert [kernel.runs for kernel in kernels] == [0, 0]


@every_way
def test_when_all_fail_the_error_carries_every_reason(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    manager = install(
        "scale",
        Kernel(lambda: KernelError("no image")),
        Kernel(declined),
        Kernel(lambda: ValueError("no luck")),
        guarded=guarded,
    )
    with pytest.raises(AllCandidatesFailedError) as caught:
        arrive(manager, "scale", route)(ones())
    verdicts = caught.value.decision.verdicts
    assert [(it.cause, re.sub(r":\d+\)", ":N)", it.reason)) for it in verdicts] == [
        ("failed", f"failed: KernelError: no image (at {core_faults.__file__}:N)"),
        ("supports", "declined: NotSupportedError: only even lengths"),
        ("failed", f"failed: ValueError: no luck (at {core_faults.__file__}:N)"),
    ]
    for verdict in verdicts:
        assert verdict.reason in str(caught.value)
    assert not in_quarantine(manager), "nobody else has served: nothing is proven"


@every_way
@pytest.mark.parametrize(
    "fault", [lambda: KernelError("kernel"), declined], ids=["fault", "decline"]
)
@pytest.mark.parametrize("state", ["fake tensors", "capture", "tracing"])
def test_nothing_falls_back_where_the_first_failure_must_be_seen(
    state: str,
    fault: Callable[[], Exception],
    route: str,
    guarded: bool,
    install: Callable[..., OpManager],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Kernel(fault), Kernel()
    manager = install("scale", first, second, guarded=guarded)
    x = FakeTensorMode().from_tensor(ones()) if state == "fake tensors" else ones()
    run = arrive(manager, "scale", route)
    if state == "capture":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if state == "tracing":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(type(fault())):
        run(x)
    assert (first.runs, second.runs) == (1, 0)
    assert not in_quarantine(manager)


def test_wrong_arguments_are_named_under_fake_tensors_too() -> None:
    manager = world("scale", Kernel(lambda: KernelError("kernel")), Kernel())
    with pytest.raises(ArgumentError, match="1 dimension"):
        manager.call("scale", FakeTensorMode().from_tensor(torch.ones(2, 2)))


@pytest.mark.parametrize("guarded", GUARDS)
@pytest.mark.parametrize("route", ["call", "handle", "pin"])
@pytest.mark.parametrize("mutates", [None, ("x",), ()])
def test_without_a_contract_an_operator_is_taken_to_mutate_unless_it_says_it_does_not(
    mutates: tuple[str, ...] | None, route: str, guarded: bool
) -> None:
    first, second = Kernel(lambda: KernelError("kernel")), Kernel()
    manager = world("acme_scale", first, second, guarded=guarded, mutates=mutates)
    run = arrive(manager, "acme_scale", route)
    if mutates == ():
        assert run(ones()).tolist() == [2, 2, 2, 2]
        assert second.runs == 1
    else:
        with pytest.raises(PartialMutationError) as caught:
            run(ones())
        assert caught.value.tensors == (mutates or ("#1",))
        assert second.runs == 0
    assert in_quarantine(manager) == {("acme_scale", "impl.0", "cpu", "float32")}


@pytest.mark.parametrize("guarded", GUARDS)
@pytest.mark.parametrize("route", ["call", "pin"])
def test_without_a_contract_a_call_that_never_got_inside_is_no_fault(
    route: str, guarded: bool
) -> None:
    """A wrong number or name of arguments raises before the body runs, so nothing was written."""
    first, second = Kernel(), Kernel()
    manager = world("acme_scale", first, second, guarded=guarded)
    for args, kwargs in (((ones(),), {"facter": 2.0}), ((ones(), 2.0, 3.0), {})):
        with pytest.raises(TypeError, match="argument"):
            arrive(manager, "acme_scale", route)(*args, **kwargs)
    assert (first.runs, second.runs) == (0, 0)
    assert not in_quarantine(manager)


@every_way
def test_a_pin_and_a_handle_keep_the_rules_when_the_policy_has_changed_since(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    """A pin keeps its implementation, whose failures follow the same rules; a handle follows the
    new policy.
    """
    first, second = Kernel(lambda: KernelError("half way"), in_place=True), Kernel(in_place=True)
    manager = install("scale_", first, second, guarded=guarded)
    with with_preference("impl:impl.0"):
        run = arrive(manager, "scale_", route)
    with with_preference("impl:impl.1"):
        if route != "pin":
            assert run(ones()).tolist() == [2, 2, 2, 2]
            assert first.runs == 0
            return
        with pytest.raises(ArgumentError, match="1 dimension"):
            run(torch.ones(2, 2))
        with pytest.raises(PartialMutationError):
            run(ones())
    assert (first.runs, second.runs) == (2, 0)


@pytest.mark.parametrize("guarded", GUARDS)
def test_a_pin_recovers_as_its_own_block_says(guarded: bool) -> None:
    first, second = Kernel(lambda: KernelError("kernel")), Kernel()
    manager = world("scale", first, second, guarded=guarded)
    with with_strict_mode():
        strict = manager.pin("scale")
    free = manager.pin("scale")
    with pytest.raises(StrictModeError):
        strict(ones())
    with with_strict_mode():
        assert free(ones()).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("guarded", GUARDS)
def test_a_pin_keeps_the_rules_when_the_global_policy_has_changed_since(guarded: bool) -> None:
    first = Kernel(lambda: KernelError("kernel"))
    second = Kernel()
    manager = world("scale", first, second, guarded=guarded)
    run = manager.pin("scale")
    set_global_policy(SelectionPolicy(prefer="impl:impl.1"))
    with pytest.raises(ArgumentError, match="1 dimension"):
        run(torch.ones(2, 2))
    assert run(ones()).tolist() == [2, 2, 2, 2]
    assert (first.runs, second.runs) == (2, 1)


def test_a_broken_availability_probe_is_a_reason_and_a_warning_and_no_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def probe() -> bool:
        raise OSError("driver not loaded")

    asked = []

    def working() -> bool:
        asked.append(1)
        return True

    first, second = Kernel(), Kernel()
    manager = world("scale", second, is_available=working)
    manager.registry.register_impl(
        OpImpl("scale", "broken", "reference", first, priority=9, is_available=probe)  # type: ignore[arg-type]
    )
    for _ in range(3):
        manager.call("scale", ones())
    assert (first.runs, second.runs) == (0, 3)
    assert asked == [1], "the machine is asked once"
    (warned,) = [it.getMessage() for it in caplog.records]
    assert "broken: is_available() raised OSError: driver not loaded" in warned
    verdict = manager.explain("scale").verdicts[0]
    assert verdict.cause == "available"
    assert verdict.reason.startswith(
        f"not available: is_available() raised OSError: driver not loaded (at {__file__}:"
    )
    assert not in_quarantine(manager)


def test_a_probe_that_raised_is_asked_again_after_a_reset() -> None:
    answers: list[Any] = [OSError("driver not loaded"), True]

    def probe() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    first, second = Kernel(), Kernel()
    manager = world("scale", second)
    manager.registry.register_impl(
        OpImpl("scale", "late", "reference", first, priority=9, is_available=probe)  # type: ignore[arg-type]
    )
    manager.call("scale", ones())
    manager.call("scale", ones())
    assert (first.runs, second.runs) == (0, 2)
    for _ in range(2):
        manager.reset_quarantine()
        manager.call("scale", ones())
    assert (first.runs, second.runs) == (2, 2)
    assert not answers, "and once more, not at each reset"


@pytest.mark.parametrize(
    ("answer", "said"), [(False, "says no"), (None, "says no"), ("needs a licence", "a licence")]
)
def test_an_availability_probe_may_only_say_true_to_be_believed(answer: Any, said: str) -> None:
    kernel = Kernel()
    manager = world("scale", kernel, is_available=lambda: answer)
    with pytest.raises(NoImplementationError, match=said):
        manager.call("scale", ones())
    assert kernel.runs == 0


@every_way
def test_a_broken_predicate_declines_and_is_no_fault(
    route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> bool:
        raise KeyError("layout")

    first, second = Kernel(), Kernel()
    manager = install("scale", second, guarded=guarded)
    manager.registry.register_impl(
        OpImpl("scale", "picky", "reference", first, priority=9, supports=broken)  # type: ignore[arg-type]
    )
    arrive(manager, "scale", route)(ones())
    assert (first.runs, second.runs) == (0, 1)
    verdict = manager.explain("scale", ones()).verdicts[0]
    assert verdict.cause == "supports"
    assert verdict.reason == "supports() raised KeyError: 'layout'"
    assert not in_quarantine(manager)


def test_a_broken_predicate_is_warned_of_once_and_a_wrong_call_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(x: Any, factor: float = 2.0, *, mode: str = "plain") -> bool:
        return bool(x.shape[0] % x.no_such_attribute)

    manager = world("scale", Kernel())
    for impl_id in ("picky.a", "picky.b"):
        manager.registry.register_impl(
            OpImpl("scale", impl_id, "reference", Kernel(), priority=9, supports=broken)  # type: ignore[arg-type]
        )
    manager.call("scale", 3)  # no tensor: the predicate fails, the kernel does not
    assert not caplog.records
    for _ in range(3):
        manager.call("scale", ones())
        manager.explain("scale", ones())
    said = [it.getMessage() for it in caplog.records]
    assert len(said) == 2
    for line, impl_id in zip(said, ("picky.a", "picky.b"), strict=True):
        assert line.startswith(f"{impl_id}: supports() raised AttributeError")
        assert f"(at {__file__}:" in line


@every_way
@pytest.mark.parametrize(
    "fault",
    [
        lambda: torch.OutOfMemoryError("40 GiB"),
        lambda: ConfigurationError("TE_FL_X"),
        cuda_error("an illegal memory access was encountered"),
    ],
)
def test_a_predicate_does_not_hide_what_ends_a_call(
    fault: Callable[[], Exception], route: str, guarded: bool, install: Callable[..., OpManager]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> bool:
        raise fault()

    kernel = Kernel()
    manager = install("scale", kernel, guarded=guarded)
    manager.registry.register_impl(
        OpImpl("scale", "picky", "reference", Kernel(), priority=9, supports=broken)  # type: ignore[arg-type]
    )
    with pytest.raises(type(fault())):
        arrive(manager, "scale", route)(ones())
    assert kernel.runs == 0


def test_a_contract_check_that_raises_does_not_hide_the_kernels_failure() -> None:
    def check(op: str, x: Any, **arguments: Any) -> None:
        raise RuntimeError("Internal error: this tensor has no sizes")

    contract = core_faults.contract_of(core_faults.scale, check=check)
    registry = OpRegistry({"scale": contract})
    registry.register_impl(
        OpImpl("scale", "impl.0", "reference", Kernel(lambda: KernelError("no image")))  # type: ignore[arg-type]
    )
    manager = OpManager(registry, builtins=False, plugins=False)
    with pytest.raises(AllCandidatesFailedError, match="KernelError: no image"):
        manager.call("scale", ones())


def test_an_error_whose_str_raises_is_reported_by_its_class() -> None:
    def broken(*args: Any, **kwargs: Any) -> bool:
        raise SpeechlessError

    manager = world("scale", Kernel(SpeechlessError), is_available=lambda: True)
    manager.registry.register_many(
        OpImpl("scale", f"broken.{field}", "reference", Kernel(), **{field: broken})  # type: ignore[arg-type]
        for field in ("supports", "is_available")
    )
    with pytest.raises(AllCandidatesFailedError) as raised:
        manager.call("scale", ones())
    told = "raised SpeechlessError, whose str() raised IndexError"
    assert f"supports() {told}" in str(raised.value)
    assert f"is_available() {told}" in str(raised.value)
    assert "failed: SpeechlessError, whose str() raised IndexError" in str(raised.value)


def test_an_argument_error_that_others_raise_keeps_its_words() -> None:
    assert str(ArgumentError("odd sizes")) == "odd sizes"


@pytest.mark.parametrize("answer", [False, None, 1, ""])
def test_a_predicate_may_only_say_true_to_be_believed(answer: Any) -> None:
    kernel = Kernel()
    manager = world("scale", kernel, supports=lambda *args, **kwargs: answer)
    with pytest.raises(NoImplementationError, match="supports\\(\\) returned"):
        manager.call("scale", ones())
    assert kernel.runs == 0


def test_an_implementation_that_cannot_be_imported_is_passed_over() -> None:
    kernel = Kernel()
    manager = world("scale", kernel)
    for place, fn in enumerate(("no_such_module_of_ours:fn", "math:no_such_name", "math:pi")):
        manager.registry.register_impl(
            OpImpl("scale", f"late.{place}", "reference", fn, priority=9 - place)  # type: ignore[arg-type]
        )
    manager.call("scale", ones())
    assert kernel.runs == 1
    reasons = [it.reason for it in manager.explain("scale").verdicts[:3]]
    assert "cannot import no_such_module_of_ours:fn: ModuleNotFoundError" in reasons[0]
    assert "cannot import math:no_such_name: AttributeError" in reasons[1]
    assert "math:pi is not callable" in reasons[2]


def test_a_module_that_raises_a_plugin_error_without_a_word_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "te_fl_speechless.py").write_text(
        "from transformer_engine_fl import PluginError\nraise PluginError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    manager = world("scale", kernel := Kernel())
    late = OpImpl("scale", "late", "reference", "te_fl_speechless:fn", priority=9)  # type: ignore[arg-type]
    manager.registry.register_impl(late)
    assert manager.registry.entries("scale")[-1].load() == "PluginError"
    manager.call("scale", ones())
    assert kernel.runs == 1


def _ends(*args: Any, **kwargs: Any) -> Any:
    raise SystemExit(0)


def _interrupted(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("field", ["switched_off", "is_available", "supports", "fn"])
@pytest.mark.parametrize("ended_by", ["SystemExit", "KeyboardInterrupt"])
def test_system_exit_is_an_implementations_failure_but_ctrl_c_is_not(
    ended_by: str,
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"ends_by_{ended_by.lower()}"
    (tmp_path / f"{name}.py").write_text(f"raise {ended_by}(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = _ends if ended_by == "SystemExit" else _interrupted
    first, second = Kernel(), Kernel()
    manager = world("scale", second)
    given = {"fn": first, field: f"{name}:fn" if field == "fn" else asked}
    manager.registry.register_impl(
        OpImpl("scale", "ends", "reference", priority=9, **given)  # type: ignore[arg-type]
    )
    if ended_by == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):
            manager.call("scale", ones())
        assert (first.runs, second.runs) == (0, 0)
        return
    for _ in range(3):
        manager.call("scale", ones())
    assert (first.runs, second.runs) == (0, 3)
    verdict = manager.explain("scale", ones()).verdicts[0]
    assert "SystemExit: 0" in verdict.reason
    assert verdict.cause == ("supports" if field == "supports" else "available")
    (warned,) = [it.getMessage() for it in caplog.records]
    assert f"(at {tmp_path / name}.py:1)" in warned or f"(at {__file__}:" in warned
    assert not in_quarantine(manager)


def test_a_kernel_that_ends_the_program_ends_it() -> None:
    manager = world("scale", Kernel(SystemExit), Kernel())
    with pytest.raises(SystemExit):
        manager.call("scale", ones())
    assert not in_quarantine(manager)


def test_a_bad_environment_is_an_error_at_each_call_until_it_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel()
    manager = world("scale", kernel)
    monkeypatch.setenv("TE_FL_STRICT", "perhaps")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="TE_FL_STRICT"):
            manager.call("scale", ones())
    assert kernel.runs == 0
    monkeypatch.setenv("TE_FL_STRICT", "1")
    manager.call("scale", ones())
    assert kernel.runs == 1
    assert manager.explain("scale").policy.policy.strict is True


def test_initialisation_that_failed_is_tried_again_and_registers_all() -> None:
    """The first attempt ends after one source of implementations is installed."""
    from transformer_engine_fl.core import discovery

    manager = OpManager(plugins=False)
    original, calls = discovery.install, []

    def install_once_broken(registry: Any, source: Any) -> Any:
        calls.append(source.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(registry, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "install", install_once_broken)
        with pytest.raises(KeyboardInterrupt):
            manager.call("rmsnorm_fwd", torch.ones(2, 4), torch.ones(4))
        manager.call("rmsnorm_fwd", torch.ones(2, 4), torch.ones(4))
    reference = manager.registry.get_implementation("rmsnorm_fwd", "reference.torch")
    assert reference.kind == "reference"
    assert [report.error for report in manager.plugins] == [None] * len(manager.plugins)
