"""A program that compiles a family's kernels for a target: ``compile_kernels.py sm_90 rope``.

Of targets that take turns it compiles every third case, and the first of each kernel; with
``every`` all. The kernels are compiled as the operators launch them: ``compiled/`` calls the
operators with a recorder in place of the launch, and what it recorded is compiled. It is a program
of its own because that replaces every launch of its process. Prints a report as JSON.
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
# name -> backend, architecture, warp size, shared memory of a program
TARGETS = {
    "sm_80": ("cuda", 80, 32, 166_912),
    "sm_90": ("cuda", 90, 32, 232_448),
    "sm_100": ("cuda", 100, 32, 232_448),
    "gfx942": ("hip", "gfx942", 64, 65_536),
    # With little shared memory: for what would use nearly all of it.
    "sm_120": ("cuda", 120, 32, 101_376),
}
USUAL = ("sm_80", "sm_90", "sm_100", "gfx942")
IN_TURN = ("sm_80", "sm_100", "gfx942")
"""Those whose code no test looks at: together they compile each case of one of them about once."""


class Recorder:
    """Stands in for the launch: keeps what would be compiled, once each."""

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
                # In a tuple there are integers that need 64 bits.
                several = ("i64",) * len(number) if isinstance(number, tuple) else None
                signature[parameter.name] = several or parameter.annotation_type
                continue
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        case = (kernel, signature, constants, launch._options)
        self.kernels.add((kernel.module, kernel.__name__))
        self.cases[repr((kernel.module, kernel.__name__, *case[1:]))] = case


def kernels() -> dict[str, list[str]]:
    """The kernels of each module: what is given to Triton's jit, or Gluon's, and none calls."""
    jitted: dict[str, list[ast.FunctionDef]] = {}
    for path in FLAGOS.glob("*.py"):
        jitted[path.stem] = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
            and any(_JIT.search(ast.unparse(it)) for it in node.decorator_list)
        ]
    # By others, or by a warp that one of them gives its own work.
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
                # elements, where a kernel has them laid out in vectors itself
                "vector": constants.get((names.index("VEC"),)) if "VEC" in names else None,
                # elements that lie side by side in each of a row's tensors
                "run": constants[(names.index("RUN"),)] if aligned else None,
                "binary": len(compiled.asm["cubin" if backend == "cuda" else "hsaco"]),
                "shared": compiled.metadata.shared,
                "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*0x10", ptx)),
                # that do not ask L2 to give up their lines last
                "plain loads": len(re.findall(r"ld\.global(?!\S*L2::cache_hint)\S*\.v4\.b32", ptx)),
                "wide stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
                "products": len(re.findall(r"wgmma\.mma_async", ptx)),
                # from shared memory, by the tensor memory accelerator
                "bulk stores": len(re.findall(r"cp\.async\.bulk\.tensor\S*\.global\.shared", ptx)),
                # of barriers that the kernel makes itself, in which bulk copies count
                "unfenced": kernel.is_gluon() and "cp.async.bulk.tensor" in ptx and _unfenced(ptx),
                # for the launch before
                "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
                # lets the launch that follows start
                "lets": len(re.findall(r"griddepcontrol\.launch_dependents", ptx)),
                # one 2-byte element at a time
                "narrow accesses": len(re.findall(r"(?:ld|st)\.global(?!\S*\.v4)\S*\.b16", ptx)),
                # slots of other programs for which a lane waits at once
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
    """Whether nothing stands between the last barrier that is made and the first bulk copy."""
    made = ptx.rindex("mbarrier.init") if "mbarrier.init" in ptx else 0
    return "fence.proxy.async" not in ptx[made : ptx.index("cp.async.bulk.tensor")]


if __name__ == "__main__":
    target, family, *more = sys.argv[1:]
    print(json.dumps(compile_for(target, family, every=more == ["every"])))
