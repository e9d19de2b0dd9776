"""The engine with kernels in use, emulated: the ids are those of the references, and nothing breaks when one fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from kernels import Using
from metal.emulator import emulated
from tiny import ScriptDrafter, tiny_llama

from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.kernels import launch, truncation, verify
from localspec.kernels.launch import MOST_THREADS
from localspec.transaction import Transaction

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]
TOKENS = 24
ALL = ("verify", "verify-greedy", "verify-rejection", "truncation")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "filtered": {"temperature": 1.1, "top_p": 0.9, "min_p": 0.01, "top_k": 20},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
    "processed": {"temperature": 0.7, "logits_processors": (lambda tokens, logits: logits * 0.9,)},
    "rejection": {"temperature": 1.0, "accept": "rejection"},
    "rejection, filtered": {"temperature": 0.9, "accept": "rejection", "top_p": 0.8},
}


def run(case: str, *kernels: str, drafters: Sequence[Any] | None = None, **settings: Any) -> Any:
    chosen = [ModelDrafter(tiny_llama(7, scale=2.0))] if drafters is None else drafters
    engine = Engine(tiny_llama(scale=2.0), drafters=chosen, kernels=Using(*kernels))
    return engine.generate(PROMPT, max_tokens=TOKENS, seed=11, draft_length=3, **{**CASES[case], **settings})


@pytest.mark.parametrize("case", CASES)
def test_ids_with_emulated_kernels_are_those_of_the_references(case: str) -> None:
    expected = run(case)
    with emulated(check=False) as device:
        found = run(case, *ALL)
    assert found.ids == expected.ids
    assert [t.source for t in found.tokens] == [t.source for t in expected.tokens]
    for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
        assert (ours.p, ours.logprob) == pytest.approx((theirs.p, theirs.logprob), rel=1e-4, abs=1e-5)
    ran = {dispatch.kernel.split("localspec_")[1].split("_float")[0].split("_0")[0] for dispatch in device.dispatches}
    assert any(name.startswith("verify_rejection" if "rejection" in case else "verify_coupled") for name in ran)
    assert any(name.startswith("truncation") for name in ran) == ("filtered" in case)


@pytest.mark.parametrize("case", ["greedy", "warm", "filtered", "penalised"])
def test_speculation_changes_no_id_with_kernels_in_use(case: str) -> None:
    with emulated(check=False):
        plain = run(case, *ALL, speculate=False)
        script = ScriptDrafter(PROMPT + plain.ids, wrong={len(PROMPT) + 4, len(PROMPT) + 11})
        drafted = run(case, *ALL, drafters=[script])
    assert drafted.ids == plain.ids
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


@pytest.mark.parametrize(
    "settings",
    [{"xtc_probability": 0.5}, {"accept": "block"}, {"accept": "rejection", "temperature": 0.0}],
    ids=["xtc", "block", "greedy rejection"],
)
def test_what_the_kernels_do_not_know_is_left_to_the_references(settings: dict[str, Any]) -> None:
    expected = run("warm", **settings)
    with emulated(check=False) as device:
        found = run("warm", *ALL, **settings)
    assert found.ids == expected.ids
    assert not any(dispatch.grid[0] > MOST_THREADS for dispatch in device.dispatches)  # single rows at most


@pytest.mark.parametrize("case", ["greedy", "filtered", "rejection"])
def test_alternatives_come_with_the_kernels_tokens(case: str) -> None:
    expected = run(case, logprobs=2)
    with emulated(check=False) as device:
        found = run(case, *ALL, logprobs=2)
        assert found.ids == run(case, *ALL).ids == expected.ids
    assert device.dispatches
    for ours, theirs in zip(found.tokens, expected.tokens, strict=True):
        assert [id_ for id_, _ in ours.top_logprobs] == [id_ for id_, _ in theirs.top_logprobs]
        assert dict(ours.top_logprobs) == pytest.approx(dict(theirs.top_logprobs), abs=1e-4)


def test_what_a_round_costs_has_no_test_of_a_kernel_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    using, asked, decided = Using(*ALL), [], []
    right, forward = using.decision, Transaction.forward

    def decision(name: str) -> Any:
        asked.append(name)
        return right(name)

    def pass_of_rows(self: Transaction, ids: mx.array) -> mx.array:
        decided.append(set(asked))
        return forward(self, ids)

    monkeypatch.setattr(using, "decision", decision)
    monkeypatch.setattr(Transaction, "forward", pass_of_rows)
    engine = Engine(tiny_llama(scale=2.0), drafters=[], kernels=using)
    with emulated(check=False):
        engine.generate(PROMPT, max_tokens=2, seed=11, exact="off", speculate=False, **CASES["filtered"])
    assert set(asked) == decided[0]


def test_noise_of_another_position_in_the_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("warm")
    right = verify._words
    monkeypatch.setattr(verify, "_words", lambda noise, position: right(noise, position + 1))
    with emulated(check=False):
        assert run("warm", "verify").ids != expected.ids


def test_a_kernel_that_fails_in_use_is_replaced_in_the_middle_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("warm")
    calls = 0
    right = verify.coupled

    def failing(logits: mx.array, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += logits.shape[0] > 1
        if calls == 3:
            raise RuntimeError("[metal::Device] Unable to build metal library")
        return right(logits, *args, **options)

    monkeypatch.setattr(verify, "coupled", failing)
    engine = Engine(
        tiny_llama(scale=2.0), drafters=[ModelDrafter(tiny_llama(7, scale=2.0))], kernels=(using := Using("verify"))
    )
    with emulated(check=False):
        found = engine.generate(PROMPT, max_tokens=TOKENS, seed=11, draft_length=3, temperature=0.8)
    assert found.ids == expected.ids
    assert calls == 3
    assert len(using.told) == 1
    assert "verify kernel failed" in using.told[0]


def broken(shape: tuple[int, ...]) -> mx.array:
    """Fails when it is evaluated, which is when MLX builds and runs a kernel."""
    return mx.broadcast_to(mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0], shape)


@pytest.mark.parametrize("case", ["warm", "filtered", "rejection, filtered"])
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("part", ["verify", "truncation"])
def test_a_kernel_that_fails_where_it_is_evaluated_is_replaced(
    case: str, speculate: bool, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(case, speculate=speculate)

    def failing(right: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found = right(*args, **options)
            if part == "truncation":
                return replace(found, threshold=broken(found.threshold.shape))
            return found._replace(log_p=broken(found.log_p.shape))

        return call

    if part == "verify":
        monkeypatch.setattr(verify, "coupled", failing(verify.coupled))
        monkeypatch.setattr(verify, "rejection", failing(verify.rejection))
    elif "filtered" in case:
        monkeypatch.setattr(truncation, "cutoff", failing(truncation.cutoff))
    # A kernel is built in the thread that asks for it; what stands for it here would fail in another, sooner or later.
    monkeypatch.setattr(mx, "async_eval", mx.eval)
    using = Using(*ALL)
    drafters = [ModelDrafter(tiny_llama(7, scale=2.0))]
    engine = Engine(tiny_llama(scale=2.0), drafters=drafters, kernels=using)
    with emulated(check=False):
        settings = {**CASES[case], "speculate": speculate}
        found = engine.generate(PROMPT, max_tokens=TOKENS, seed=11, draft_length=3, **settings)
    assert found.ids == expected.ids
    failed = part == "verify" or "filtered" in case
    acting = "verify-rejection" if speculate and "rejection" in case else "verify"
    assert using.uses(acting) != failed
    assert any(f"{acting} kernel failed" in line for line in using.told) == failed


def test_kernels_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    with emulated(check=False):
        emulator: Any = mx.fast.metal_kernel

        def counted(**options: Any) -> Any:
            built.append(options["name"])
            return emulator(**options)

        monkeypatch.setattr(mx.fast, "metal_kernel", counted)
        run("warm", "verify")
        monkeypatch.undo()
    launch.built.cache_clear()
    assert built == ["localspec_verify_coupled"]
