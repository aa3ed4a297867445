"""te-fl demo: the model learns, variables steer it, and comparisons find wrong sets."""

from __future__ import annotations

import pytest
import torch

CPU = ("--device", "cpu")


def _served(document):
    return {it["op"]: (it["impl_id"], it["calls"]) for it in document["served"]}


def _sets(document):
    return {it["name"]: it for it in document["sets"]}


def test_training_lowers_the_loss_on_text_it_has_not_seen(te_fl):
    ran = te_fl("demo", "--steps", "15", *CPU, "--json", TE_FL_PREFER="reference")
    document = ran.document
    assert ran.code == 0
    assert document["loss_before"] == pytest.approx(5.545, abs=0.1)  # ln 256: untrained
    assert document["loss_after"] < document["loss_before"] - 1.5
    assert len(document["losses"]) == document["steps"] == 15
    assert document["tokens_per_second"] > 0


def test_counts_the_calls_of_each_operator_by_implementation(te_fl):
    document = te_fl("demo", "--steps", "2", *CPU, "--json", TE_FL_PREFER="reference").document
    # 4 layers of 2 RMS norms, a final layer norm; 2 steps, one evaluation before and one after
    assert _served(document) == {
        "rmsnorm_fwd": ("reference.torch", 8 * (2 + 2)),
        "rmsnorm_bwd": ("reference.torch", 8 * 2),
        "layernorm_fwd": ("reference.torch", 2 + 2),
        "layernorm_bwd": ("reference.torch", 2),
    }


def test_environment_moves_it_to_a_plugin_and_back(te_fl, acme):
    by = {}
    for prefer in ("vendor:acme", "reference"):
        ran = te_fl("demo", "--steps", "1", *CPU, "--json", TE_FL_PREFER=prefer)
        by[prefer] = {op: impl_id for op, (impl_id, _) in _served(ran.document).items()}
    assert by["vendor:acme"]["rmsnorm_fwd"] == by["vendor:acme"]["rmsnorm_bwd"] == "vendor.acme"
    assert set(by["reference"].values()) == {"reference.torch"}


def test_same_seed_same_losses_and_another_seed_others(te_fl):
    def losses(seed):
        ran = te_fl(
            "demo", "--steps", "2", "--seed", seed, *CPU, "--json", TE_FL_PREFER="reference"
        )
        return ran.document["losses"]

    assert losses("1") == losses("1")
    assert losses("1") != losses("2")


def test_text_ends_with_losses_speed_and_serving_implementations(te_fl):
    ran = te_fl("demo", "--steps", "2", *CPU, TE_FL_PREFER="reference", COLUMNS="80")
    assert "loss on held-out text: 5.5" in ran.out
    assert "tokens per second" in ran.out
    assert "layernorm_bwd  reference.torch" in ran.out
    assert "training" in ran.err  # the progress bar
    assert "training" not in ran.out


def test_right_sets_agree_and_each_served_its_run(te_fl, acme):
    ran = te_fl("demo", "--compare", "reference,acme", "--steps", "4", *CPU, "--json")
    assert ran.code == 0
    assert ran.document["agree"]
    sets = _sets(ran.document)
    assert len(sets["acme"]["run"]["losses"]) == 4
    assert _served(sets["acme"]["run"])["rmsnorm_fwd"] == ("vendor.acme", 8 * (4 + 2))
    assert sets["acme"]["served_by_others"] == {
        "layernorm_fwd": "reference.torch",
        "layernorm_bwd": "reference.torch",
    }
    assert sets["reference"]["served_by_others"] == {}


def test_wrong_gradient_is_a_disagreement(te_fl, wrong_acme):
    arguments = ("demo", "--compare", "reference,acme", "--steps", "5", *CPU)
    ran = te_fl(*arguments, "--json")
    assert ran.code == 1
    assert not ran.document["agree"]
    assert _sets(ran.document)["acme"]["difference"] > ran.document["tolerance"]


def test_losses_that_are_no_numbers_disagree_and_are_null_in_json(te_fl, install):
    install(
        "from transformer_engine_fl import OpImpl, ops\n"
        "def rmsnorm_fwd(input, weight, eps=1e-5):\n"
        "    output, rsigma = ops.rmsnorm_fwd.shapes(input, weight)\n"
        "    return output.fill_(float('nan')), rsigma.fill_(1)\n"
        "def register(registry):\n"
        "    registry.register_impl(\n"
        "        OpImpl('rmsnorm_fwd', 'vendor.acme', 'vendor', rmsnorm_fwd, 'acme')\n"
        "    )\n"
    )
    ran = te_fl("demo", "--compare", "reference,acme", "--steps", "1", *CPU, "--json")
    assert ran.code == 1
    acme = _sets(ran.document)["acme"]
    assert (acme["status"], acme["difference"]) == ("ran", None)
    assert acme["run"]["losses"] == [None]


def test_comparison_is_shown_step_by_step(te_fl, wrong_acme):
    ran = te_fl("demo", "--compare", "reference,acme", "--steps", "4", *CPU, COLUMNS="80")
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["step", "reference", "acme"] in rows
    assert [row[0] for row in rows if len(row) == 3][1:] == ["before", *"1234", "after"]
    assert "the losses do not agree" in ran.out
    assert "layernorm_fwd (reference.torch)" in " ".join(ran.out.split())


def test_interpreted_triton_agrees_in_a_small_run_that_says_so(te_fl_process):
    if torch.cuda.is_available():
        pytest.skip("Triton's kernels are compiled here")
    ran = te_fl_process(
        "demo", "--compare", "reference,flagos", "--steps", "2", "--json", TRITON_INTERPRET=None
    )
    assert ran.code == 0, ran.err
    assert any("TRITON_INTERPRET=1 was set" in note for note in ran.document["notes"])
    assert any("small model" in note for note in ran.document["notes"])
    flagos = _sets(ran.document)["flagos"]
    assert {it["impl_id"] for it in flagos["run"]["served"]} == {"default.flagos"}


def test_set_that_the_machine_lacks_is_named_and_the_others_decide(te_fl, acme):
    ran = te_fl(
        *("demo", "--compare", "reference,cuda,acme", "--steps", "2", *CPU, "--json"),
        TE_FL_SKIP_CUDA="1",
    )
    assert ran.code == 0
    cuda = _sets(ran.document)["cuda"]
    assert (cuda["status"], cuda["run"]) == ("lacking", None)
    assert "TE_FL_SKIP_CUDA" in cuda["reason"]


def test_denied_vendor_is_unavailable_even_if_it_is_named(te_fl, acme):
    ran = te_fl(
        *("demo", "--compare", "reference,acme", "--steps", "1", *CPU, "--json"),
        TE_FL_DENY_VENDORS="acme",
    )
    assert ran.code == 1  # no set is left to compare with the reference
    assert "TE_FL_DENY_VENDORS" in _sets(ran.document)["acme"]["reason"]


def test_implementation_that_raises_fails_its_run_without_fallback(te_fl, install):
    install(
        "def register(registry):\n"
        "    from transformer_engine_fl import OpImpl\n"
        "    fn = lambda input, weight, eps=1e-5: 1 / 0\n"
        "    registry.register_impl(OpImpl('rmsnorm_fwd', 'vendor.acme', 'vendor', fn, 'acme'))\n"
    )
    ran = te_fl("demo", "--compare", "reference,acme", "--steps", "2", *CPU, "--json")
    assert ran.code == 1
    acme = _sets(ran.document)["acme"]
    assert (acme["status"], acme["run"]) == ("failed", None)
    assert "ZeroDivisionError" in acme["reason"]


def test_per_operator_order_of_the_environment_does_not_mix_a_comparison(te_fl, acme):
    ran = te_fl(
        *("demo", "--compare", "reference,vendor:acme", "--steps", "1", *CPU, "--json"),
        TE_FL_PER_OP="rmsnorm_fwd=reference",
    )
    acme_run = _sets(ran.document)["vendor:acme"]["run"]
    assert _served(acme_run)["rmsnorm_fwd"][0] == "vendor.acme"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--compare", "reference,refrence"), "did you mean 'reference'?"),
        (("--compare", "reference"), "name two or more"),
        (("--compare", "reference,"), "a name is empty"),
        (("--compare", "reference,reference"), "given twice"),
        (("--compare", "reference,vendor:"), "is not a selector"),
        (("--device", "toaster"), "'toaster' cannot be used"),
        (("--device", "meta"), "meta"),
    ],
)
def test_mistake_is_one_message(te_fl, arguments, said):
    ran = te_fl("demo", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--steps", "many"), ("--seed", "-1")])
def test_bad_number_is_a_message_that_names_the_option(te_fl, arguments):
    ran = te_fl("demo", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert arguments[0] in ran.err
    assert "Traceback" not in ran.err
