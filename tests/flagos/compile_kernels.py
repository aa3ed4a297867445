"""A program that compiles a family's kernels for a target: ``compile_kernels.py sm_90 rope``.

For targets that take turns it compiles every third case, and the first of each kernel; with
``every``, all cases. The kernels are compiled as the operators launch them: ``compiled/`` calls the
operators while a recorder replaces the launch, and the recorded launches are compiled. It is a
program of its own because it replaces every launch of its process. Prints a report as JSON.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGOS = ROOT / "transformer_engine_fl" / "backends" / "flagos"
_JIT = re.compile(r"\b(?:triton|gluon)\.jit\b")
# name -> backend, architecture, warp size, bytes of shared memory for a program
TARGETS = {
    "sm_80": ("cuda", 80, 32, 166_912),
    "sm_90": ("cuda", 90, 32, 232_448),
    "sm_100": ("cuda", 100, 32, 232_448),
    "gfx942": ("hip", "gfx942", 64, 65_536),
    # Little shared memory: for kernels that would use nearly all of it.
    "sm_120": ("cuda", 120, 32, 101_376),
}
USUAL = ("sm_80", "sm_90", "sm_100", "gfx942")
IN_TURN = ("sm_80", "sm_100", "gfx942")
"""Targets whose code no test inspects; together they compile each case about once."""


class Recorder:
    """Replaces the launch: keeps what would be compiled, without duplicates."""

    def __init__(self) -> None:
        self.kernels: set[tuple[str, str]] = set()
        self.cases: dict[str, tuple[Any, dict[str, Any], dict[Any, Any], dict[str, Any]]] = {}

    def record(
        self, launch: Any, grid: tuple[int, int], tensors: Any, numbers: tuple[Any, ...]
    ) -> None:
        from triton.runtime.jit import mangle_type

        kernel = launch._kernel
        signature, constants = {}, {}
        for place, parameter in enumerate(kernel.params):
            if parameter.is_constexpr:
                value = launch._constants[parameter.name]
            elif place < len(tensors):
                value = tensors[place]
                if value is not None:
                    signature[parameter.name] = mangle_type(value)
                    continue
            else:
                number = numbers[place - len(tensors)]
                # Integers in a tuple need 64 bits.
                several = ("i64",) * len(number) if isinstance(number, tuple) else None
                signature[parameter.name] = several or parameter.annotation_type
                continue
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        case = (kernel, signature, constants, launch._options)
        self.kernels.add((kernel.module, kernel.__name__))
        self.cases[repr((kernel.module, kernel.__name__, *case[1:]))] = case


def kernels() -> dict[str, list[str]]:
    """The kernels of each module: functions given to Triton's or Gluon's jit, and not called."""
    jitted: dict[str, list[ast.FunctionDef]] = {}
    for path in FLAGOS.glob("*.py"):
        jitted[path.stem] = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
            and any(_JIT.search(ast.unparse(it)) for it in node.decorator_list)
        ]
    # Called by other kernels, or by a warp to which a kernel gives its own work.
    called = {
        name.id
        for function in itertools.chain(*jitted.values())
        for statement in function.body
        for name in ast.walk(statement)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)
    }
    names = {module: [it.name for it in found] for module, found in jitted.items()}
    return {
        module: [name for name in found if name not in called]
        for module, found in names.items()
        if set(found) - called
    }


def compile_for(name: str, family: str, every: bool) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from transformer_engine_fl.backends.flagos import _launch

    backend, arch, warp_size, shared = TARGETS[name]
    limits = _launch.Limits(
        132, shared, warp_size, *((65536, arch) if backend == "cuda" else (0, 0))
    )
    recorder = Recorder()
    _launch.limits = lambda device: limits  # type: ignore[assignment]
    _launch.unsupported_device = lambda device: None
    _launch.has_ptx = lambda: backend == "cuda"
    _launch.Launch.load = lambda *call: None  # type: ignore[method-assign]
    _launch.Launch.__call__ = lambda *call: recorder.record(*call)  # type: ignore[method-assign]
    calls = importlib.import_module(f"flagos.compiled.{family}")
    calls.launch()
    recorded = list(recorder.cases.values())
    cases, seen = [], set()
    for number, (kernel, signature, constants, options) in enumerate(recorded):
        in_turn = name not in IN_TURN or IN_TURN[number % len(IN_TURN)] == name
        if not (every or in_turn) and kernel in seen:
            continue
        seen.add(kernel)
        attributes = {
            (place,): [["tt.divisibility", 16]]
            for place, kind in enumerate(signature.values())
            if kind[0] == "*"
        }
        compiled = triton.compile(
            (GluonASTSource if kernel.is_gluon() else ASTSource)(
                kernel, signature, constants, attributes
            ),
            target=GPUTarget(backend, arch, warp_size),
            options=options,
        )
        ptx, names = compiled.asm.get("ptx", ""), kernel.arg_names
        aligned = "ALIGNED" in names and constants[(names.index("ALIGNED"),)]
        cases.append(
            {
                "kernel": kernel.__name__,
                "dtype": next(iter(signature.values()))[1:],
                "constants": str(constants),
                # the names of its tensors
                "tensors": [name for name, kind in signature.items() if kind[0] == "*"],
                # elements of a vector, where the kernel itself lays out vectors
                "vector": constants.get((names.index("VEC"),)) if "VEC" in names else None,
                # rows and columns of a tile, where the kernel has them as constants
                "tile": [
                    constants.get((names.index(it),)) for it in ("ROWS", "COLUMNS") if it in names
                ],
                # elements that are contiguous in each of a row's tensors
                "run": constants[(names.index("RUN"),)] if aligned else None,
                "binary": len(compiled.asm["cubin" if backend == "cuda" else "hsaco"]),
                "shared": compiled.metadata.shared,
                "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*0x10", ptx)),
                # without an L2 policy to evict their lines last
                "plain loads": len(re.findall(r"ld\.global(?!\S*L2::cache_hint)\S*\.v4\.b32", ptx)),
                "wide stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
                "products": len(re.findall(r"wgmma\.mma_async", ptx)),
                # from shared memory, by the Tensor Memory Accelerator
                "bulk stores": len(re.findall(r"cp\.async\.bulk\.tensor\S*\.global\.shared", ptx)),
                # no fence after the kernel initialises the barriers that count bytes of bulk copies
                "unfenced": kernel.is_gluon() and "cp.async.bulk.tensor" in ptx and _unfenced(ptx),
                # for the preceding launch
                "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
                # lets the following launch start
                "lets": len(re.findall(r"griddepcontrol\.launch_dependents", ptx)),
                # one 2-byte element at a time
                "narrow accesses": len(re.findall(r"(?:ld|st)\.global(?!\S*\.v4)\S*\.b16", ptx)),
                # slots of other programs that a lane reads in each turn of a waiting loop
                "slots": [it.count("ld.") for it in re.findall(r"again:(.*?)vote", ptx, re.S)],
                # one byte at a time
                "byte loads": len(re.findall(r"ld\.global(?!\S*\.v)\S*\.b8", ptx)),
            }
        )
    missing = [
        f"{module}.{name}"
        for module in calls.MODULES
        for name in kernels()[module]
        if (f"{_launch.__package__}.{module}", name) not in recorder.kernels
    ]
    return {"cases": cases, "never launched": missing}


def _unfenced(ptx: str) -> bool:
    """Whether there is no fence between the last barrier's initialisation and the first copy."""
    made = ptx.rindex("mbarrier.init") if "mbarrier.init" in ptx else 0
    return "fence.proxy.async" not in ptx[made : ptx.index("cp.async.bulk.tensor")]


if __name__ == "__main__":
    target, family, *more = sys.argv[1:]
    print(json.dumps(compile_for(target, family, every=more == ["every"])))
