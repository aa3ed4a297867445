"""The benchmarks run and write what they promise; their figures are not judged here."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_engine_fl import ops as operators

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import each other by name

import measuring  # noqa: E402
import ops as suite  # noqa: E402
import performance_page  # noqa: E402
import plugin_costs  # noqa: E402
import report as reports  # noqa: E402
import scripts  # noqa: E402
from peers import DESCRIPTIONS, PEERS, Peer, Work, peers_of  # noqa: E402
from peers.eager import FORMULAS  # noqa: E402
from workloads import WORKLOADS, Workload, chosen  # noqa: E402

BF16 = torch.bfloat16


def sample_of(workload: Workload, *shape: int) -> Any:
    return workload.sample(shape or workload.tiny, BF16, "cpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


# ----------------------------------------------------------------------------- dispatch


def test_a_quick_run_writes_figures_and_a_plot(tmp_path: Path) -> None:
    done = run(str(BENCHMARKS / "dispatch_overhead.py"), "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "dispatch_overhead.json").read_text(encoding="utf-8"))
    cases = results["cases"]
    assert cases["direct call"]["added_us"] == 0.0
    # True on any machine: a dispatch costs something, and far less than custom_op.
    assert 0.0 < cases["manager.call"]["added_us"] < cases["torch.library.custom_op"]["added_us"]
    assert set(results["budgets"]) >= {"manager.call", "bound handle", "plan"}
    assert results["environment"].keys() >= {"device", "cpu", "python", "torch"}
    assert (tmp_path / "dispatch_overhead.png").read_bytes().startswith(b"\x89PNG")
    assert "manager.call" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("dispatch_overhead.py", "--rounds", "0"),
        ("dispatch_overhead.py", "--processes", "0"),
        ("dispatch_overhead.py", "--worker", "0"),
        ("plugin_costs.py", "--processes", "0"),
    ],
)
def test_no_rounds_and_no_processes_are_refused(arguments: tuple[str, ...]) -> None:
    script, *rest = arguments
    done = run(str(BENCHMARKS / script), *rest)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'0' is not an integer of at least 1" in done.stderr


@pytest.mark.parametrize("script", ["dispatch_overhead.py", "plugin_costs.py"])
def test_a_folder_that_results_cannot_go_to_is_refused_before_they_are_measured(
    script: str,
) -> None:
    done = run(str(BENCHMARKS / script), "--out", f"{__file__}/results")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{__file__} is not a folder" in done.stderr


def test_what_ends_a_measuring_process_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEFL_LOG_LEVEL", "LOUD")
    done = run(str(BENCHMARKS / "dispatch_overhead.py"), "--quick")
    assert done.returncode == 1
    assert "TEFL_LOG_LEVEL: 'LOUD' is not a level" in done.stderr


@pytest.mark.parametrize("script", ["benchmarks/performance_page.py", "docs/generate.py"])
def test_help_of_a_generator_is_shown_and_nothing_else_runs(script: str) -> None:
    done = run(str(BENCHMARKS.parent / script), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage:")


# ----------------------------------------------------------------------------- plugins


def test_twenty_plugins_cost_little_at_the_start_and_nothing_at_a_dispatch() -> None:
    """Allows three times the budget, in CPU time, as this machine may be slow and busy.

    Each process checks that the timed part loaded its plugins. The test does not require that
    plugins make a start longer: on a busy machine, starts differ by more than plugins cost.
    """
    results = plugin_costs.measure(processes=3)
    assert results["startup_cpu_ms"]["added"] < 3 * plugin_costs.STARTUP_BUDGET_MS
    for dispatch in results["dispatch_us"].values():
        assert dispatch["with"]["lowest"] < 2 * dispatch["without"]["lowest"]


def test_the_recorded_costs_of_plugins_are_within_their_budget() -> None:
    results = json.loads((plugin_costs.RESULTS / "plugin_costs.json").read_text(encoding="utf-8"))
    assert results["plugins"] == plugin_costs.PLUGINS == 20
    assert 0 < results["startup_cpu_ms"]["added"] < plugin_costs.STARTUP_BUDGET_MS
    for dispatch in results["dispatch_us"].values():
        assert abs(dispatch["added"]) < 0.05 * dispatch["without"]["median"]


# ---------------------------------------------------------------------------- workloads


def test_every_family_of_the_catalogue_is_in_a_standard_run() -> None:
    measured = {it.family for it in chosen([], [])}
    families = {contract.family for contract in operators.CATALOGUE.values()}
    assert measured == families, "add a standard workload in benchmarks/workloads"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_call_that_keeps_the_contract(name: str) -> None:
    workload = WORKLOADS[name]
    sample = sample_of(workload)
    workload.shapes_of(sample)  # raises what the contract's check raises
    assert workload.work(workload.tiny, sample) > 0
    assert workload.dispatch_dtype(sample) in workload.contracts[0].dtypes
    assert workload.roof in {"copy", "matmul", "scaled_mm"}
    assert (workload.roof == "copy") == (workload.flops is None)
    for shape in (*workload.shapes, *workload.wide):
        assert len(shape) == len(workload.tiny)
        assert workload.check_shape is None or len(workload.check_shape(shape)) == len(shape)


@pytest.mark.parametrize("name", ["cross_entropy fwd+bwd", "multi_tensor_adam", "dequantize nvfp4"])
def test_the_reference_keeps_within_what_is_expected_of_a_workload(name: str) -> None:
    workload = WORKLOADS[name]
    expected = workload.expected(sample_of(workload))
    sample = sample_of(workload)
    work = suite.own_work(workload, "reference.torch", sample)
    values = work.values(work.run())
    assert len(values) == len(expected)
    ratio = measuring.error_ratio(workload, workload.dispatch_dtype(sample), values, expected)
    assert ratio is not None
    assert ratio <= 1


R, C = 24, 256


@pytest.mark.parametrize(
    ("name", "shape", "bytes_by_hand"),
    [
        # 2-byte x and output, the weight, a float32 for each row
        ("rmsnorm_fwd", (R, C), 2 * R * C + 2 * C + 2 * R * C + 4 * R),
        ("swiglu", (R, C), 2 * R * 2 * C + 2 * R * C),
        ("dbias_dgelu", (R, C), 2 * 2 * R * C + 2 * R * C + 2 * C),
        # the mask is a bit for each element
        ("dropout_fwd", (R, C), 2 * R * C + 2 * R * C + R * C // 8),
        # logits, their gradient, int64 targets, float32 losses; lse is not an output
        ("cross_entropy fwd+bwd", (R, C), 2 * R * C + 8 * R + 2 * R * C + 4 * R),
        ("quantize 1x128", (128, C), 2 * 128 * C + 128 * C + 4 * 128 * C // 128),
        ("quantize nvfp4", (128, C), 2 * 2 * 128 * C + 128 * C // 2 + 128 * C // 16 + 4 + 4),
        # 36 of 64 elements (up to the diagonal) are read, all are written
        ("scaled_upper_triang_masked_softmax_forward", (2, 8, 8), 2 * 2 * 36 + 2 * 2 * 64),
        ("scaled_upper_triang_masked_softmax_backward", (2, 8, 8), 2 * 2 * 2 * 36 + 2 * 2 * 64),
        # float32: gradients read, parameters and two moments read and written
        ("multi_tensor_adam", (1, 8), 7 * 4 * (4 * 64 + 12 * 8)),
        ("multi_tensor_scale", (1, 8), 2 * 4 * (4 * 64 + 12 * 8)),
        ("multi_tensor_l2norm", (1, 8), 4 * (4 * 64 + 12 * 8) + 4),
        # bfloat16 gradients read, parameters written; float32 masters and moments read and written
        ("multi_tensor_adam bfloat16, float32 masters", (1, 8), 28 * (4 * 64 + 12 * 8)),
        # keys and values read and written, two times three int32 offsets read
        ("copy_to_kv_cache", (16, 2, 2, 8), 2 * 2 * 2 * 16 * 2 * 8 + 2 * 3 * 4),
    ],
)
def test_the_fewest_bytes_are_those_counted_by_hand(
    name: str, shape: tuple[int, ...], bytes_by_hand: int
) -> None:
    workload = WORKLOADS[name]
    assert workload.work(shape, sample_of(workload, *shape)) == bytes_by_hand
    assert workload.unit == "GB/s"


@pytest.mark.parametrize(
    ("name", "shape", "by_hand"),
    [
        ("generic_gemm", (16, 32, 48), 2 * 16 * 32 * 48),
        ("te_general_grouped_gemm", (4, 64, 16, 32), 2 * 64 * 16 * 32),
        ("te_general_grouped_gemm weights of one tensor", (4, 64, 16, 32), 2 * 64 * 16 * 32),
        # QK^T and PV; the causal mask leaves half of the keys
        ("fused_attn_fwd causal", (1, 4, 8, 16), 2 * 2 * 4 * 8 * 8 * 16 / 2),
        ("fused_attn_bwd without a mask", (1, 4, 8, 16), 5 * 2 * 4 * 8 * 8 * 16),
        ("fused_linear_cross_entropy fwd+bwd", (6, 8, 40), 3 * 2 * 6 * 8 * 40),
    ],
)
def test_the_operations_are_those_counted_by_hand(
    name: str, shape: tuple[int, ...], by_hand: float
) -> None:
    workload = WORKLOADS[name]
    assert workload.work(shape, sample_of(workload, *shape)) == by_hand
    assert workload.unit == "TFLOP/s"


def test_values_are_held_to_what_the_contract_allows() -> None:
    for name in ("fused_attn_bwd causal", "rmsnorm_fwd"):
        (contract,) = WORKLOADS[name].contracts
        assert WORKLOADS[name].tolerance("bfloat16") == contract.tolerance_for("bfloat16")


def test_an_operator_is_chosen_with_every_workload_it_has() -> None:
    assert {it.name for it in chosen(["generic_gemm"], [])} >= {
        "generic_gemm",
        "generic_gemm float8",
        "generic_gemm mxfp8",
    }
    assert [it.name for it in chosen(["generic_gemm bias"], [])] == ["generic_gemm bias"]


@pytest.mark.parametrize(("op", "family"), [(["no_such_op"], []), ([], ["no_such_family"])])
def test_what_has_no_workload_is_refused_with_those_that_are(
    op: list[str], family: list[str]
) -> None:
    with pytest.raises(LookupError, match=r"no_such_(op|family)'.*(rmsnorm_fwd|normalization)"):
        chosen(op, family)


def test_the_script_lists_what_it_can_measure_without_a_gpu() -> None:
    done = run(str(BENCHMARKS / "ops.py"), "--list")
    assert done.returncode == 0, done.stderr
    assert "* gemm: generic_gemm float8 (M x N x K: 8192x8192x8192" in done.stdout


def test_a_list_into_a_closed_pipe_shows_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(BENCHMARKS / "ops.py"), "--list"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.fixture
def run_ops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs ops.py for rmsnorm_fwd as if there were a GPU; ``row`` stands in for a measured row."""

    def ask(row: dict[str, Any], *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ops.py", "--op", "rmsnorm_fwd", "--quick", *arguments])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(suite, "environment", lambda: {"device": "none"})
        monkeypatch.setattr(suite, "roofs", dict)
        monkeypatch.setattr(suite, "copies", list)
        monkeypatch.setattr(suite, "measure", lambda *_: dict(row))
        return suite.main()

    return ask


NO_ROW = {"workload": "rmsnorm_fwd", "shape": [4, 8], "results": {}, "absent": {"it": "gone"}}
RESULT = {"us": 1.0, "rate": 1.0, "error_over_allowed": 0.5}
ROW = {**NO_ROW, "results": {"it": RESULT}, "unit": "GB/s", "dtype": "float32", "roof": "copy"}


def test_nothing_measured_is_an_exit_code(run_ops: Callable[..., int]) -> None:
    assert (run_ops(ROW), run_ops(NO_ROW)) == (0, 1)


@pytest.mark.parametrize(("error", "off"), [(None, True), (1.5, True), (1.0, False), (0.0, False)])
def test_a_result_outside_the_tolerance_is_marked_next_to_its_rate(
    run_ops: Callable[..., int], capsys: pytest.CaptureFixture[str], error: float | None, off: bool
) -> None:
    run_ops({**ROW, "results": {"it": {**RESULT, "error_over_allowed": error}}})
    assert ("it 1 (outside the tolerance)" in capsys.readouterr().out) is off


def test_a_report_that_cannot_be_written_leaves_the_one_before(
    run_ops: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "report.json"
    link = tmp_path / "link.json"
    link.symlink_to(path)
    assert run_ops(ROW, "--out", str(link)) == 0
    before = path.read_text(encoding="utf-8")
    assert [it["results"] for it in json.loads(before)["rows"]] == [{"it": RESULT}]
    whole = Path.write_text

    def full(file: Path, text: str, **more: Any) -> int:
        whole(file, text[:9], **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        run_ops(ROW, "--out", str(path))
    assert path.read_text(encoding="utf-8") == before
    assert list(path.parent.iterdir()) == [path]
    assert link.is_symlink()


# -------------------------------------------------------------------------------- peers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "swiglo"], "did you mean 'swiglu'?"),
        (["--op", "swiglu", "--shape", "8by64"], "'8by64' is not a shape; example: 8192x4096"),
        (["--op", "swiglu", "--shape", "8"], "8 is not a shape of swiglu, which takes rows x "),
        (["--dtype", "bf16"], "invalid choice: 'bf16'"),
        (["--prepare", "-2"], "'-2' is not an integer of at least 0"),
        (["--impl", "default.flago"], "did you mean 'default.flagos'?"),
        (["--out", f"{__file__}/a.json"], f"{__file__} is not a folder"),
        (["--markdown", str(BENCHMARKS)], f"'{BENCHMARKS}' is not a file"),
        (["--plot", f"{__file__}/a.png"], f"{__file__} is not a folder"),
        (["--plot", "a.xyz"], "'a.xyz' does not end in .png, .svg or .pdf"),
    ],
)
def test_wrong_arguments_are_refused_before_a_gpu_is_required(
    arguments: list[str], said: str
) -> None:
    done = run(str(BENCHMARKS / "ops.py"), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_picture_is_refused_where_nothing_can_draw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "installed", lambda module: module != "matplotlib")
    with pytest.raises(argparse.ArgumentTypeError, match="plots need matplotlib, not installed"):
        scripts.picture_file("a.png")


def test_peers_are_of_workloads_that_exist_and_each_is_described() -> None:
    assert set(DESCRIPTIONS) == set(PEERS)
    unknown = {name for table in PEERS.values() for name in table} - set(WORKLOADS)
    assert unknown == set()
    assert {op for it in WORKLOADS.values() for op in it.operators} <= set(operators.CATALOGUE)


def test_each_library_has_its_peers() -> None:
    assert {"liger-kernel", "quack", "flag_gems", "torch.eager", "torch.compile"} <= set(
        peers_of("rmsnorm_fwd")
    )
    assert {"SDPA cuDNN", "SDPA flash"} <= set(peers_of("fused_attn_bwd causal"))
    assert "torch._scaled_mm" in peers_of("generic_gemm float8")
    assert "torch._fused_adamw_" in peers_of("multi_tensor_adam")


def peer_error(peer: str, name: str) -> float | None:
    workload = WORKLOADS[name]
    expected = workload.expected(sample_of(workload))
    sample = sample_of(workload)
    work: Work = PEERS[peer][name].work(sample)
    values = work.values(work.run())
    return measuring.error_ratio(workload, workload.dispatch_dtype(sample), values, expected)


@pytest.mark.parametrize("name", FORMULAS)
def test_torch_in_its_own_words_does_what_the_operator_does(name: str) -> None:
    ratio = peer_error("torch.eager", name)
    # Rounding after every step gives several times the allowed error; a wrong formula, hundreds.
    assert ratio is not None
    assert ratio < 64


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("torch.matmul", "generic_gemm"),
        ("torch.matmul", "generic_gemm dgrad"),
        ("F.linear", "generic_gemm bias"),
        ("torch._fused_adamw_", "multi_tensor_adam"),
        ("torch._fused_sgd_", "multi_tensor_sgd"),
        ("torch._foreach_norm", "multi_tensor_l2norm"),
        ("torch._foreach_mul", "multi_tensor_scale"),
        ("SDPA flash", "fused_attn_fwd causal"),
        ("SDPA flash", "fused_attn_bwd causal, 4 query heads for each key head"),
    ],
)
def test_a_library_function_is_given_the_operators_arguments(peer: str, name: str) -> None:
    ratio = peer_error(peer, name)
    assert ratio is not None
    assert ratio <= 1


# --------------------------------------------------------------------------- measurement


def fake_medians(works: list[Callable[[], Any]], warmup: float, rep: float) -> list[float]:
    found = []
    for work in works:
        start = time.perf_counter()
        work()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def measured(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *impls: str,
    peers: tuple[str, ...] = (),
    timer: Callable[..., list[float]] = fake_medians,
) -> dict[str, Any]:
    """Measure a row on the CPU; its times are meaningless."""
    monkeypatch.setattr(suite, "medians_ms", timer)
    own = {peer: PEERS[peer][name] for peer in peers}
    monkeypatch.setattr(suite, "peers_of", lambda _: own)
    workload = WORKLOADS[name]
    args = suite.arguments().parse_args([it for impl in impls for it in ("--impl", impl)])
    return suite.measure(workload, workload.tiny, args, device="cpu")


def test_a_row_has_time_rate_and_error_of_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, "rmsnorm_fwd", "reference.torch", peers=("torch.eager",))
    assert list(row["results"]) == ["reference.torch", "torch.eager"]
    for result in row["results"].values():
        assert result["rate"] == pytest.approx(row["work"] / result["us"] / 1e3)
        assert 0 < result["error_over_allowed"] <= 1
    assert (row["family"], row["unit"], row["dtype"]) == ("normalization", "GB/s", "bfloat16")


COUNTING = """
import os, pathlib
from transformer_engine_fl import OpImpl


def silu(input):
    (pathlib.Path(__file__).parent / f"{os.getpid()}-{len(input)}").touch()
    return input


def register(registry):
    registry.register_impl(
        OpImpl(op_name="silu", impl_id="vendor.counting", kind="vendor", vendor="counting", fn=silu)
    )
"""


def test_everything_is_run_once_elsewhere_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "counting")
    arguments = ["--prepare", "2", "--impl", "no.such", "--impl", "vendor.counting", "--no-peers"]
    plan = [(WORKLOADS["silu"], (4, 8)), (WORKLOADS["silu"], (6, 8))]
    suite.prepare(plan, suite.arguments().parse_args(arguments), device="cpu")
    found = dict(reversed(path.name.split("-")) for path in tmp_path.glob("*-*"))
    assert set(found) == {"4", "6"}
    assert str(os.getpid()) not in found.values()
    assert "prepared 2 of 2" in capsys.readouterr().out


def test_another_implementation_is_not_measured_under_the_name_of_one_that_declines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impls = ("vendor.cuda", "no.such")
    row = measured(monkeypatch, "rmsnorm_fwd", *impls)
    assert row["results"] == {}
    assert set(row["absent"]) == set(impls)
    assert row["absent"]["no.such"] == "does not implement the operator"


def test_each_candidate_of_an_operator_in_place_has_arguments_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A second step on the same parameters would exceed the allowed error.
    row = measured(
        monkeypatch, "multi_tensor_adam", "reference.torch", peers=("torch._fused_adamw_",)
    )
    assert len(row["results"]) == 2
    assert all(it["error_over_allowed"] <= 1 for it in row["results"].values())


def test_compute_bound_candidates_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def together(works: list[Callable[[], Any]], warmup: float, rep: float) -> list[float]:
        assert (warmup, rep) == (20, 80)
        for work in works:
            work()
        return [1.0, 2.0, 3.0]

    names = "reference.torch", "torch.matmul", "torch.eager"
    monkeypatch.setitem(PEERS["torch.eager"], "generic_gemm", PEERS["torch.matmul"]["generic_gemm"])
    row = measured(monkeypatch, "generic_gemm", names[0], peers=names[1:], timer=together)
    assert row["in_turns"]
    assert {name: it["us"] for name, it in row["results"].items()} == {
        "reference.torch": 1e3,
        "torch.matmul": 2e3,
        "torch.eager": 3e3,
    }


def test_a_memory_bound_candidate_is_measured_before_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    make = suite.own_work

    def noted(workload: Workload, impl_id: str, sample: Any) -> Work:
        events.append(impl_id)
        return make(workload, "reference.torch", sample)

    def timed(works: list[Callable[[], Any]], warmup: float, rep: float) -> list[float]:
        events.append("timed")
        return [1.0]

    monkeypatch.setattr(suite, "own_work", noted)
    row = measured(monkeypatch, "rmsnorm_fwd", "a", "b", timer=timed)
    assert events == ["a", "timed", "b", "timed"]
    assert not row["in_turns"]


def test_a_candidate_that_fails_at_the_measured_shape_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, runs = suite.own_work, itertools.count()

    def failing_second(*args: Any) -> Work:
        work = make(*args)

        def run() -> Any:
            if next(runs) == 1:
                raise RuntimeError("out of memory")
            return work.run()

        return Work(run, work.values)

    monkeypatch.setattr(suite, "own_work", failing_second)
    row = measured(monkeypatch, "generic_gemm", "reference.torch", peers=("torch.matmul",))
    assert row["absent"] == {"reference.torch": "RuntimeError: out of memory"}
    assert list(row["results"]) == ["torch.matmul"]


def test_candidates_that_cannot_be_timed_together_are_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(works: list[Callable[[], Any]], warmup: float, rep: float) -> list[float]:
        raise RuntimeError("the device is lost")

    impl, peer = "reference.torch", "torch.matmul"
    row = measured(monkeypatch, "generic_gemm", impl, peers=(peer,), timer=failing)
    assert row["absent"] == dict.fromkeys((impl, peer), "RuntimeError: the device is lost")
    assert not row["results"]


def test_a_peer_that_is_not_installed_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", None)
    row = measured(monkeypatch, "rmsnorm_bwd", "reference.torch", peers=("quack", "torch.eager"))
    assert list(row["results"]) == ["reference.torch", "torch.eager"]
    assert row["absent"]["quack"].startswith("ModuleNotFoundError")


def test_wrong_bits_of_exact_outputs_are_an_infinite_error() -> None:
    workload = WORKLOADS["quantize delayed scaling"]
    sample = sample_of(workload)
    data, scale_inv, *_ = workload.expected(sample)
    data, scale_inv = data.to(torch.float8_e4m3fn), scale_inv.float()
    expected = workload.expected(sample)
    assert measuring.error_ratio(workload, "bfloat16", (data, scale_inv), expected) == 0
    other = scale_inv.nextafter(torch.ones(()))
    assert measuring.error_ratio(workload, "bfloat16", (data, other), expected) is None
    assert measuring.error_ratio(workload, "bfloat16", (data, None), expected) == 0


def test_outputs_that_are_not_there_are_an_infinite_error_of_an_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = WORKLOADS["rmsnorm_fwd"]
    expected = workload.expected(sample_of(workload))
    output, rsigma = (it.to(BF16) for it in expected)
    ratio = functools.partial(measuring.error_ratio, workload, "bfloat16", expected=expected)
    for found in ((output[:0], rsigma), (output, rsigma[:1]), (output[:1, :1], rsigma)):
        assert ratio(found) is None
    for found in ((), (output,), (output, None), (output, rsigma, rsigma)):
        assert ratio(found) is not None
        assert ratio(found, whole=True) is None
    work = Work(lambda: output)
    monkeypatch.setattr(suite, "own_work", lambda *given: work)
    monkeypatch.setitem(PEERS, "somebody", {"rmsnorm_fwd": Peer(lambda *given: work)})
    row = measured(monkeypatch, "rmsnorm_fwd", "vendor.acme", peers=("somebody",))
    assert row["results"]["vendor.acme"]["error_over_allowed"] is None
    assert row["results"]["somebody"]["error_over_allowed"] <= 1


# ------------------------------------------------------------------------------- reports


@pytest.fixture
def several_families(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    rows = [
        measured(monkeypatch, name, "reference.torch", "vendor.cuda", peers=peers)
        for name, peers in (
            ("rmsnorm_fwd", ("torch.eager",)),
            ("swiglu", ("torch.eager",)),
            ("dswiglu", ()),
            ("generic_gemm", ("torch.matmul",)),
            ("cross_entropy fwd+bwd", ("torch.eager",)),
        )
    ]
    rows[1]["results"]["torch.eager"]["error_over_allowed"] = None
    return {
        "environment": {
            "device": "a device",
            "date": "2026-01-02",
            "torch": "2.x",
            "triton": "3.x",
        },
        "roofs": {
            "copy": {"value": 1000.0, "unit": "GB/s", "what": "a copy"},
            "matmul": {"value": 1.0, "unit": "TFLOP/s", "what": "a product"},
            "scaled_mm": {"value": None, "unit": "TFLOP/s", "what": "not on this device"},
        },
        "peers": {name: DESCRIPTIONS[name] for name in ("torch.eager", "torch.matmul")},
        "rows": rows,
        "host_us": {"direct": 1.0},
        "failed": [["fused_attn_fwd causal", [1, 2, 3, 4], "OutOfMemoryError: no"]],
    }


def test_a_report_goes_through_json_to_a_table(several_families: dict[str, Any]) -> None:
    table = reports.markdown(json.loads(json.dumps(several_families, allow_nan=False)))
    assert "| generic_gemm | 16x32x48 | bfloat16 | torch.matmul | " in table
    assert " TFLOP/s | " in table
    assert " | inf |\n" in table
    assert "scaled_mm not measured" in table


def test_a_report_becomes_a_picture_of_all_and_one_of_each_family(
    several_families: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "ops.png"
    reports.overview(several_families, path, "digest")
    assert b"digest" in path.read_bytes()
    for family, rows in performance_page.families(several_families).items():
        picture = performance_page.family_picture(path, family)
        reports.panels(several_families, rows, picture, "digest")
        assert b"digest" in picture.read_bytes()
    assert len(list(tmp_path.iterdir())) == 5


def test_the_page_has_a_section_for_each_family(several_families: dict[str, Any]) -> None:
    path = Path("ops_device.json")
    page = performance_page.page([(path, several_families)], performance_page.load_dispatch())
    for family in ("normalization", "activation", "gemm", "loss"):
        assert f"\n### {family}\n" in page
        assert f"results/ops_device_{family}.png" in page
    words = " ".join(page.split())
    assert "roof: matmul 1 TFLOP/s; cold L2" in words
    assert "Measured on 2026-01-02. Versions: torch 2.x, triton 3.x." in words
    assert "are therefore timed in turns" in words
    assert "torch.eager `swiglu` (not the required bits)" in words
    assert "- Counted in `generic_gemm`: 2 M N K" in words
    assert "- torch.eager in `cross_entropy fwd+bwd`: F.cross_entropy of float32 logits" in words
    assert "- all candidates, fused_attn_fwd causal 1x2x3x4: `OutOfMemoryError: no`" in words
