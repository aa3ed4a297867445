"""``flag_gems.utils.pointwise_dynamic``: an elementwise operator from a function of one element.

A kernel is generated for each function: it loads the inputs, calls the function, and stores the
results. Tensors are first expanded to a common shape and made contiguous.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PointwiseDynamicFunction", "pointwise_dynamic"]

Promotion = tuple[Any, ...]

_BLOCK: Final = 1024


def pointwise_dynamic(
    f: Any = None,
    *,
    num_inputs: int | None = None,
    is_tensor: Sequence[bool] | None = None,
    dtypes: Sequence[type | None] | None = None,
    num_outputs: int | None = None,
    promotion_methods: Sequence[Promotion] | None = None,
    config: Any = None,
) -> Any:
    """A decorator for a jitted function of one element.

    Args:
        f: the function.
        num_inputs: the number of inputs; all parameters unless given.
        is_tensor: which of the inputs are tensors; all unless given.
        dtypes: of the inputs that are no tensors; unused.
        num_outputs: the number of results, if there are no promotion methods.
        promotion_methods: for each output the inputs that determine its dtype, and how.
        config: of code generation; unused.
    """

    def make(function: Any) -> PointwiseDynamicFunction:
        count = len(function.arg_names) if num_inputs is None else num_inputs
        tensors = tuple(is_tensor) if is_tensor is not None else (True,) * count
        methods = tuple(promotion_methods or ((*range(count), "DEFAULT"),) * (num_outputs or 1))
        return PointwiseDynamicFunction(function, tensors, methods)

    return make if f is None else make(f)


class PointwiseDynamicFunction:
    """An elementwise operator.

    Args:
        function: what it computes for one element.
        is_tensor: which of its inputs are tensors.
        methods: for each output the inputs that determine its dtype, and how.
    """

    def __init__(
        self, function: Any, is_tensor: tuple[bool, ...], methods: tuple[Promotion, ...]
    ) -> None:
        self._function = function
        self._is_tensor = is_tensor
        self._methods = methods
        self._kernel: Any = None
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.get(f"out{at}") for at in range(len(self._methods))]
        tensors = [it for it in args if isinstance(it, Tensor)]
        shape = torch.broadcast_shapes(*(it.shape for it in tensors))  # type: ignore[no-untyped-call]
        device = next((it.device for it in tensors if it.dim()), tensors[0].device)
        outputs = [
            torch.empty(shape, dtype=dtype, device=device) if out is None else out
            for out, dtype in zip(given, self._dtypes(args), strict=True)
        ]
        if any(out.shape != shape for out in outputs):
            raise ValueError(f"{self.__name__}: an output's shape must be {tuple(shape)}")
        written = [out if out.is_contiguous() else torch.empty_like(out) for out in outputs]
        size = outputs[0].numel()
        if size:
            self._made()[(triton.cdiv(size, _BLOCK),)](
                *self._inputs(args, shape, device), *written, size, BLOCK=_BLOCK
            )
        for out, dense in zip(outputs, written, strict=True):
            if out is not dense:
                out.copy_(dense)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _inputs(self, args: Sequence[Any], shape: Any, device: Any) -> Iterator[Any]:
        for value, tensor in zip(args, self._is_tensor, strict=True):
            if not tensor:
                yield value
            elif isinstance(value, Tensor):
                yield value.to(device).expand(shape).contiguous()
            else:
                yield torch.full(shape, value, device=device)

    def _dtypes(self, args: Sequence[Any]) -> Iterator[torch.dtype]:
        from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

        for *places, method in self._methods:
            kind = getattr(ELEMENTWISE_TYPE_PROMOTION_KIND, str(getattr(method, "name", method)))
            values = (args[it] for it in places)
            yield elementwise_dtypes(*values, type_promotion_kind=kind)[1]

    def _made(self) -> Any:
        if self._kernel is None:
            self._kernel = _compiled(self._source(), self.__name__, self._function)
        return self._kernel

    def _source(self) -> str:
        inputs = [f"in{at}" for at in range(len(self._is_tensor))]
        outputs = [f"out{at}" for at in range(len(self._methods))]
        values = [
            f"tl.load({name} + place, mask=inside)" if tensor else name
            for name, tensor in zip(inputs, self._is_tensor, strict=True)
        ]
        results = ", ".join(f"result{at}" for at in range(len(outputs)))
        stores = [
            f"    tl.store({name} + place, result{at}.to({name}.dtype.element_ty), mask=inside)"
            for at, name in enumerate(outputs)
        ]
        lines = [
            f"def kernel({', '.join((*inputs, *outputs))}, size, BLOCK: tl.constexpr):",
            "    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
            "    inside = place < size",
            f"    {results} = function({', '.join(values)})",
            *stores,
        ]
        return "\n".join(lines) + "\n"


def _compiled(source: str, name: str, function: Callable[..., Any]) -> Any:
    """The kernel; its source is put into ``linecache``, where Triton looks for it."""
    file = f"<pointwise {name} at {id(function):#x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"tl": tl, "function": function, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return triton.jit(names["kernel"])
