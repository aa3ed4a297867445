"""What the emulation of kernels detects, each shown by a kernel that does it."""

from __future__ import annotations

from pathlib import Path

import cuda_emulation
import pytest
import torch
from cuda_emulation import EmulationError

from transformer_engine_fl.backends.vendor.cuda import _compile
from transformer_engine_fl.backends.vendor.cuda._launch import Geometry

MISSING = cuda_emulation.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def test_inline_assembly_is_used_only_where_the_emulation_replaces_it() -> None:
    assert cuda_emulation.uses_assembly() == []


class Run:
    """Runs a kernel with the given body, which writes ``out``; returns what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, body: str, blocks: int = 1, size: int = 64, **geometry: object) -> list[int]:
        through_memory = "together" in geometry
        own = ", unsigned long long first_epoch, FlaggedSlot* slots" if through_memory else ""
        text = (
            '#include "cluster.cuh"\n#include "memory.cuh"\nusing namespace te_fl;\n'
            f'extern "C" __global__ void kernel(int* out, int size{own}) {{\n'
            "const int i = threadIdx.x; (void)i;\n"
            f"{body}\n}}\n"
        )
        (self.folder / "written.cu").write_text(text)
        fields = {"threads": 64, "arguments": "PiPP" if through_memory else "Pi", **geometry}
        kernel = cuda_emulation.Kernel(
            _compile.Specialisation("written", "kernel"),
            Geometry(**fields),  # type: ignore[arg-type]
        )
        out = torch.zeros(size, dtype=torch.int32)
        kernel.launch(blocks, 1, out.data_ptr(), size, *((3,) if through_memory else ()))
        return out.tolist()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    cuda_emulation.prepare()  # from the set's own headers
    monkeypatch.setattr(_compile, "FOLDER", tmp_path)
    return Run(tmp_path)


FAULTS = {
    "returns while others wait": (
        "if (i == 3) return; __syncthreads();",
        "63 threads wait for ever, the first at __syncthreads; 1 have returned",
    ),
    "a lane is missing": (
        "if (i < 31) out[i] = __shfl_xor_sync(0xffffffffu, i, 1);",
        "wait for ever",
    ),
    "a lane outside its mask": (
        "out[i] = __shfl_xor_sync(0xffffu, i, 1);",
        "not in its own mask",
    ),
    "an index outside shared memory": (
        "__shared__ int values[64]; values[i + 1] = i; __syncthreads(); out[i] = values[i];",
        "thread 63 of block .* index 64 is outside its array",
    ),
    "a write behind what the launch asked for": (
        "extern __shared__ int values[]; values[i] = 0;",
        "written after its end",
    ),
    "an access that is not aligned": (
        "*reinterpret_cast<int4*>(out + 1) = int4();",
        "is not aligned",
    ),
    "a read that is not aligned": (
        "int piece[4]; read_piece<16>(piece, out + 1);",
        "16 bytes .* is not aligned",
    ),
    "an early write to another block": (
        "__shared__ float own; store_remote(&own, 1, 0.0f);",
        "block 1, which may not have begun",
    ),
    "a late write to another block": (
        "cluster_arrive(); cluster_wait(); if (cluster_rank() == 0) return;"
        "for (int turn = 0; turn < 3; ++turn) __syncthreads();"
        "__shared__ float own; store_remote(&own, 0, 0.0f);",
        "block 0, which has ended",
    ),
}

# A cluster of two; each block has a counter of the bytes that the other block sends to it.
COUNTED = (
    "using Counter = unsigned long long; __shared__ Counter counter; __shared__ float sent;"
    "if (i == 0) prepare_arrivals(&counter, 1); cluster_join(); cluster_wait();"
    "const int other = 1 - cluster_rank();"
)
FAULTS |= {
    "a slot that no block posts": (
        "const int places[] = {i / 2}; unsigned found[1][1];"
        "wait_for_slots(reinterpret_cast<FlaggedSlot*>(out), places, 7, found);",
        "wait for ever, the first at a slot of another block",
    ),
    "more is expected than another block sends": (
        COUNTED + "if (i == 0) { expect_bytes(&counter, 8); send(&sent, other, 1.0f, &counter); }"
        "wait_for(&counter, 0);",
        "wait for ever, the first at bytes from the cluster",
    ),
    "another block is sent to that waits for nothing": (
        COUNTED + "if (i == 0) send(&sent, other, 1.0f, &counter);",
        "sent to blocks that had ended",
    ),
    "another block is sent to that waits for something else": (
        COUNTED + "if (cluster_rank()) return; if (i == 0) { expect_bytes(&counter, 4);"
        "send(&sent, other, 1.0f, &counter); } wait_for(&counter, 0);",
        "block 1, which has ended|sent to block 1 came too late",
    ),
    "phases of another block's counter overlap": (
        COUNTED + "if (i == 0) { expect_bytes(&counter, 8); expect_bytes(&counter, 8); }",
        "a phase that has begun",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_launch(fault: str, run: Run) -> None:
    body, said = FAULTS[fault]
    many = {"blocks": 2, "cluster": 2} if "another block" in fault else {}
    found = []
    for _ in range(2):  # threads run first to last, then last to first
        try:
            run(body, **many)  # type: ignore[arg-type]
        except EmulationError as error:
            found.append(str(error))
    assert found
    with pytest.raises(EmulationError, match=said):
        raise EmulationError("\n".join(found))
    assert run("out[i] = __shfl_xor_sync(0xffffffffu, i, 1);")[:3] == [1, 0, 3]


def test_a_dependent_launch_must_wait(run: Run) -> None:
    run("wait_for_predecessor();", dependent=True)
    with pytest.raises(EmulationError, match="never waits"):
        run("release_dependents();", dependent=True)


def test_parameters_of_other_sizes_are_refused(run: Run) -> None:
    with pytest.raises(EmulationError, match=r"\[8, 4\] bytes, not 'Pq'"):
        run("", arguments="Pq")


def test_shared_memory_that_is_not_written_is_poison(run: Run) -> None:
    assert set(run("__shared__ int values[64]; out[i] = values[i];")) == {-1}


def test_a_copy_is_there_only_after_it_was_waited_for(run: Run) -> None:
    copy = (
        "__shared__ int values[256]; out[i] = i; __syncwarp();"
        "copy_async_piece<4, kOnce>(values + i, 0, out + i, true); commit_copies();"
        "copy_async_piece<4, kOnce>(values, (64 + i) * 4, out + i, false); commit_copies();"
    )
    read = "out[i] = values[i] - values[64 + i];"
    assert run(copy + "wait_copies<0>();" + read) == list(range(64))
    assert run(copy + "wait_copies<1>(); out[i] = values[i];") == list(range(64))
    assert set(run(copy + "wait_copies<1>(); out[i] = values[64 + i];")) == {-1}
    assert set(run(copy + "out[i] = values[i];")) == {-1}


def test_a_copy_of_half_a_piece_reads_all_of_it(run: Run) -> None:
    given = torch.ones(8, dtype=torch.int32)
    body = (
        "extern __shared__ int kept[];"
        f"const int* given = reinterpret_cast<const int*>({given.data_ptr()}ull);"
        "if (i == 0) copy_async_piece<16, kOnce>(kept, 0, given, 8);"
        "commit_copies(); wait_copies<0>(); __syncthreads(); if (i < 4) out[i] = kept[i];"
    )
    behind = given.data_ptr() + 8
    assert run(body, shared_bytes=16)[:4] == [1, 1, 0, 0]
    with cuda_emulation.forbidden([(behind + 8, 16)]):
        assert run(body, shared_bytes=16)[:4] == [1, 1, 0, 0]
    with (
        cuda_emulation.forbidden([(behind, 8)]),
        pytest.raises(EmulationError, match=r"16 bytes are read at .*, outside of a tensor"),
    ):
        run(body, shared_bytes=16)
    assert run(body, shared_bytes=16)[:4] == [1, 1, 0, 0]


def test_a_result_that_depends_on_the_order_of_threads_changes(run: Run) -> None:
    race = "__shared__ int last; last = i; __syncthreads(); out[i] = last;"
    assert {run(race)[0] for _ in range(2)} == {0, 63}


def test_each_block_has_its_own_memory_and_each_cluster_its_own_blocks(run: Run) -> None:
    body = (
        "__shared__ float sum[2];"
        "cluster_arrive(); cluster_wait();"
        "const int own = cluster_rank();"
        "if (i < 2) store_remote(sum + own, i, float(blockIdx.x + 1));"
        "cluster_arrive(); cluster_wait();"
        "if (i == 0) out[blockIdx.x] = int(sum[0] * 10 + sum[1]);"
    )
    assert run(body, blocks=4, cluster=2)[:4] == [12, 12, 34, 34]


def test_blocks_that_run_at_once_find_the_slots_of_the_others(run: Run) -> None:
    body = (
        "if (i == 0) post_slot(slots + blockIdx.x, first_epoch, blockIdx.x + 1);"
        "const int own = i % gridDim.x, places[] = {own, 3 - own}; unsigned found[2][1];"
        "wait_for_slots(slots, places, first_epoch, found);"
        "if (blockIdx.x == 1) out[i] = 10 * found[0][0] + found[1][0];"
    )
    # Again, with the slots of the first launch still in memory.
    for _ in range(2):
        assert run(body, blocks=4, together=4)[:6] == [14, 23, 32, 41, 14, 23]


def test_two_slots_at_a_place_are_waited_for_together(run: Run) -> None:
    body = (
        "if (i < 2) post_slot(slots + 2 * blockIdx.x + i, first_epoch, 10 * blockIdx.x + i);"
        "const int places[] = {2 * (i % 4)}; unsigned found[1][2];"
        "wait_for_slots(slots, places, first_epoch, found);"
        "if (blockIdx.x == 1) out[i] = 100 * found[0][0] + found[0][1];"
    )
    assert run(body, blocks=4, together=4)[:4] == [1, 1011, 2021, 3031]


def test_a_slot_that_a_block_waits_for_is_not_written_again(run: Run) -> None:
    body = (
        "const int places[] = {0, 1}; unsigned found[2][1];"
        "if (blockIdx.x == 1) { for (int step = 0; step < 9; ++step) {"
        "if (i == 0 && step == 0) post_slot(slots, first_epoch, 1);"
        "if (i == 0 && step == 4) post_slot(slots, first_epoch + 4, 2);"
        "if (i == 0 && step == 8) post_slot(slots + 1, first_epoch, 3);"
        "__syncthreads(); } return; }"
        "wait_for_slots(slots, places, first_epoch, found);"
    )
    for _ in range(2):
        with pytest.raises(EmulationError, match="is written again too early"):
            run(body, blocks=2, together=2)


def test_more_blocks_than_run_at_once_are_not_launched_together(run: Run) -> None:
    with pytest.raises(EmulationError, match="80 blocks do not run at once"):
        run("", blocks=80, together=2)


def test_what_is_sent_is_there_only_when_all_of_it_was_waited_for(run: Run) -> None:
    send = COUNTED + (
        "if (i == 0) { expect_bytes(&counter, 4);"
        "send(&sent, other, float(blockIdx.x + 1), &counter); }"
    )
    late = "const bool there = sent == sent; wait_for(&counter, 0);"
    write = "if (i == 0) { out[2 * blockIdx.x] = there; out[2 * blockIdx.x + 1] = int(sent); }"
    assert run(send + late + write, blocks=2, cluster=2)[:4] == [0, 2, 0, 1]
    # In phases; a block may expect the bytes before or after they are sent.
    phases = COUNTED + (
        "int sum = 0;"
        "for (int phase = 0; phase < 5; ++phase) {"
        "  if (i == 63) send(&sent, other, float(phase + blockIdx.x), &counter);"
        "  if (i == 0) expect_bytes(&counter, 4);"
        "  wait_for(&counter, phase % 2); sum = sum * 10 + int(sent);"
        "  cluster_arrive(); cluster_wait();"
        "} if (i == 0) out[blockIdx.x] = sum;"
    )
    assert run(phases, blocks=2, cluster=2)[:2] == [12345, 1234]


def test_lanes_exchange_as_the_guide_says(run: Run) -> None:
    everyone = "0xffffffffu"
    bodies = {
        f"__shfl_sync({everyone}, i, 5, 8)": lambda i: i // 8 * 8 + 5,
        f"__shfl_up_sync({everyone}, i, 2)": lambda i: i - 2 if i % 32 >= 2 else i,
        f"__shfl_down_sync({everyone}, i, 2, 16)": lambda i: i + 2 if i % 16 < 14 else i,
        f"int(__ballot_sync({everyone}, i % 32 < 3))": lambda i: 7,
        f"__any_sync({everyone}, i == 40)": lambda i: int(i >= 32),
        f"__all_sync({everyone}, i >= 32)": lambda i: int(i >= 32),
        f"int(__match_any_sync({everyone}, i % 32 / 30))": lambda i: (
            -(2**30) if i % 32 >= 30 else 2**30 - 1
        ),
        f"__reduce_add_sync({everyone}, i)": lambda i: 496 + 1024 * (i >= 32),
        "__syncthreads_count(i < 10)": lambda i: 10,
        "__syncthreads_or(i == 63)": lambda i: 1,
        "__syncthreads_and(i < 63)": lambda i: 0,
        "int(__byte_perm(0x03020100u, 0x07060504u, 0x6420u))": lambda i: 0x06040200,
        "__float2int_rn(i + 0.5f)": lambda i: i + i % 2,
    }
    for body, expected in bodies.items():
        assert run(f"out[i] = {body};") == [expected(i) for i in range(64)], body


def test_products_are_fused_with_sums_unless_they_are_kept_apart(run: Run) -> None:
    if not cuda_emulation.fuses():
        pytest.skip("this processor has no fused multiplication and addition")
    # The square of 1 + 2^-13 is rounded to 1 + 2^-12.
    numbers = "float x = 1.0f + float(size) * 0x1p-19f; float y = 1.0f + float(size) * 0x1p-18f;"
    for body, expected in (("x * x - y", True), ("__fmul_rn(x, x) - y", False)):
        found = run(f"{numbers} out[i] = {body} != 0.0f;")
        assert found == [int(expected)] * 64
