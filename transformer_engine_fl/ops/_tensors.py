"""What dispatch must know about torch tensors; ``core`` itself does not import torch."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from transformer_engine_fl.core.blame import INTERMEDIATE_FILES, error_text, exception_chain
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.core.tensors import ALL_FACTS, Facts

__all__ = ["TorchTensors", "facts_of", "first_tensor", "is_transformed"]

# Frames between a call and its implementation, which may be decorated with one of torch's
# contexts, compiled, or run by autograd.
INTERMEDIATE_FILES.update(
    str(Path(torch.__file__).parent / file)
    for file in ("utils/_contextlib.py", "_dynamo/eval_frame.py", "autograd/function.py")
)

# What torch's messages say when a device is lost or its context is corrupt. Such errors are
# sticky: every later call on the device fails as well.
_LOST = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "hardware stack error",
    "invalid program counter",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "invalid access of peer gpu memory",
    "not supported on global/shared address space",
    "the launch timed out and was terminated",
    "device is lost",
    # The CUDA driver's names for the same errors.
    "cuda_error_illegal_address",
    "cuda_error_assert",
    "cuda_error_launch_failed",
    "cuda_error_misaligned_address",
    "cuda_error_illegal_instruction",
    "cuda_error_hardware_stack_error",
    "cuda_error_invalid_pc",
    "cuda_error_invalid_address_space",
    "cuda_error_launch_timeout",
    "cuda_error_contained",
    "cuda_error_ecc_uncorrectable",
    "cuda_error_nvlink_uncorrectable",
    "cuda_error_device_unavailable",
)

# What torch and the libraries below it say when memory runs out, on the device or the host.
_NO_MEMORY = (
    "out of memory",
    "cuda_error_out_of_memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSPARSE
    "allocation_failed",
)


class TorchTensors:
    """Answers dispatch's questions about torch tensors."""

    key = staticmethod(attrgetter("device", "dtype", "__class__"))

    def facts(self, value: torch.Tensor) -> Facts:
        """Device type, dtype and architecture of a tensor."""
        if isinstance(value, FakeTensor):
            return facts_of(value.device, value.dtype, fake=True)
        return facts_of(value.device, value.dtype, _unusual(value))

    def opaque(self, entry: Entry) -> Callable[..., Any] | None:
        """The ``torch.library`` operator that runs this implementation, if it has a contract."""
        if entry.contract is None:
            return None
        from transformer_engine_fl.ops import _library

        return partial(_library.operator(entry.contract), impl=_library.reference_to(entry))

    def is_tensor(self, value: object) -> bool:
        """Whether the value is a torch tensor."""
        return isinstance(value, torch.Tensor)

    def is_ordinary(self, value: torch.Tensor) -> bool:
        """Whether it is strided, not a subclass that handles operators itself, not in a torch
        transform and not a batch of gradients: what fails on any other may well serve such tensors.
        """
        return not (
            _unusual(value)
            or value.is_nested
            or value.layout is not torch.strided
            or is_transformed(value)
        )

    def is_fatal(self, error: Exception) -> bool:
        """Whether it is out of memory or a sticky device error, or was caused by one."""
        return any(_is_fatal_itself(it) for it in exception_chain(error))

    def no_fallback(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """Why a failure must be raised rather than fall back: capture, tracing or fake tensors."""
        if torch.compiler.is_compiling():
            return "torch.compile is tracing"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return "the tensors are fake"
        return None


def facts_of(
    device: torch.device | None,
    dtype: torch.dtype | None,
    unusual: str | None = None,
    fake: bool = False,
) -> Facts:
    """The facts that dispatch decides by, for a tensor of this device and dtype (None: none)."""
    return Facts(
        device=device.type if device else None,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        arch=_arch(device) if device else None,
        unusual=unusual,
        fake=fake,
        judged=ALL_FACTS,
    )


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor among the values and in the lists among them; None if there is none."""
    for value in values:
        found = first_tensor(value) if isinstance(value, list | tuple) else value
        if isinstance(found, torch.Tensor):
            return found
    return None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it is wrapped by one of torch's transforms, or a batch of gradients."""
    functorch = torch._C._functorch
    return bool(
        functorch.is_functorch_wrapped_tensor(tensor)
        or functorch.is_legacy_batchedtensor(tensor)  # made by is_grads_batched
    )


def _is_fatal_itself(error: BaseException) -> bool:
    """Whether the error itself, regardless of its causes, forbids trying another implementation."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = error_text(error).lower()
    return any(phrase in text for phrase in (*_NO_MEMORY, *_LOST))


def _unusual(value: torch.Tensor) -> str | None:
    """Why a raw kernel cannot take a tensor, if it has no memory that a pointer could refer to."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return None
    if value.device.type == "meta":
        return "a meta tensor has no data"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__} has its own __torch_dispatch__"
    return None


@cache
def _arch(device: torch.device) -> str | None:
    """``"sm_90"`` or ``"gfx942"`` for a GPU, None for what has no architecture name."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
