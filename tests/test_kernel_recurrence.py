"""Replay of the gated delta rule: right against float64, with mlx-lm's bits, planted faults found, and in use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import architectures
import mlx.core as mx
import numpy as np
import pytest
from kernels import Using
from metal.emulator import MetalError, emulated
from mlx_lm.models import gated_delta
from test_kernel_matmul import LEAST, SCHEDULES, UNIT, float64, planted
from tiny import ScriptDrafter

from localspec.caches.leaves import SnapshotLeaf
from localspec.engine import Engine
from localspec.kernels import launch, recurrence, traffic_matmul
from localspec.target import Target
from localspec.transaction import Transaction

ROUNDING = 2.0**-24


@pytest.fixture(autouse=True)
def _built_anew() -> Iterator[None]:
    yield
    launch.built.cache_clear()


def build_theirs(patch: pytest.MonkeyPatch) -> None:
    """Have mlx-lm's kernels built inside `emulated`, as if there were Metal. For itself only: MLX knows better."""
    metal = SimpleNamespace(is_available=lambda: True)
    seen = SimpleNamespace(**{name: getattr(mx, name) for name in dir(mx) if not name.startswith("__")})
    seen.metal, seen.default_device = metal, lambda: mx.gpu
    patch.setattr(gated_delta, "mx", seen)
    for name, make in (
        ("_gated_delta_kernel", lambda: gated_delta._make_gated_delta_kernel()),
        ("_gated_delta_kernel_vec", lambda: gated_delta._make_gated_delta_kernel(vectorized=True)),
        ("_gated_delta_kernel_xtree", gated_delta._make_gated_delta_kernel_xtree),
        ("_gated_delta_kernel_packed", gated_delta._make_gated_delta_packed_kernel),
    ):
        patch.setattr(gated_delta, name, make())


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulated(check=False):
        build_theirs(monkeypatch)
        yield


def exact(
    state: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, kept: int
) -> tuple[np.ndarray, np.ndarray]:
    """The state in float64, and how far from it the kernel may be: an error that is there is carried on, and each
    operation adds its own, PER_LANE + 5 additions in the sum over Dk included."""
    new, keys, values, gates, betas = (float64(a) for a in (state, k, v, g, beta))
    keys = np.repeat(keys, state.shape[1] // k.shape[2], axis=2)
    gates = gates[..., None] if g.ndim == 3 else gates
    off = np.zeros_like(new)
    u, additions = ROUNDING, state.shape[-1] // 32 + 5 + 2
    for t in range(kept):
        key = keys[:, t, :, None, :]
        new, off = new * gates[:, t, :, None, :], off * np.abs(gates[:, t, :, None, :])
        off = off + u * np.abs(new)
        known = (new * key).sum(-1)
        known_off = (off * np.abs(key)).sum(-1) + additions * u * (np.abs(new * key) + off * np.abs(key)).sum(-1)
        wide = betas[:, t, :, None]
        delta = (values[:, t] - known) * wide
        delta_off = np.abs(wide) * known_off + 3 * u * (np.abs(delta) + np.abs(wide) * known_off)
        new = new + key * delta[..., None]
        moved = np.abs(key) * np.abs(delta)[..., None]
        off = off + np.abs(key) * delta_off[..., None]
        off = off + 3 * u * (np.abs(new) + moved + off)
    last = UNIT[state.dtype]
    return new, off * (1 + last) + last * np.abs(new) + LEAST[state.dtype]


def check(operands: tuple[mx.array, ...], kept: int, **how: Any) -> mx.array:
    """The kernel's state is near float64's; returned."""
    state, k, v, g, beta = operands
    with emulated(**how):
        out = recurrence.replay(state, k, v, g, beta, kept)
        mx.eval(out)
    assert (out.shape, out.dtype) == (state.shape, state.dtype)
    value, bound = exact(state, k, v, g, beta, kept)
    off = np.abs(float64(out) - value)
    assert (off <= bound).all(), f"off by {np.max(off / bound)} bounds"
    return out


def batch(
    rows: int, heads: tuple[int, int], widths: tuple[int, int], dtype: mx.Dtype, scalar: bool, **options: Any
) -> tuple[mx.array, ...]:
    """Two sequences: state, k, v, g, beta."""
    several = [recurrence.example(rows + n, *heads, *widths, dtype, scalar, **options) for n in (0, 1)]
    _, *parts, state = (
        mx.concatenate([a[:, :rows] if a.ndim != 4 or i != 5 else a for a in both])
        for i, both in enumerate(zip(*several, strict=True))
    )
    return (state, *parts)


# The kernel


@pytest.mark.parametrize("scalar", [True, False], ids=["one gate", "a gate per number"])
@pytest.mark.parametrize("dtype", recurrence.DTYPES, ids=lambda dtype: str(dtype).removeprefix("mlx.core."))
def test_all_kinds_of_rows_and_states_are_right(dtype: mx.Dtype, scalar: bool) -> None:
    """All numbers of kept rows; each state is the one that a pass of these rows alone leaves."""
    for state_dtype in {mx.float32, dtype}:
        operands = batch(3, (1, 2), (5, 64), dtype, scalar, state_dtype=state_dtype)
        for kept, schedule in zip(range(4), SCHEDULES, strict=True):
            out = check(operands, kept, schedule=schedule)
            if kept == 0:
                assert mx.array_equal(out, operands[0]).item()
            else:
                alone = operands[0], *(mx.contiguous(a[:, :kept]) for a in operands[1:])
                assert mx.array_equal(out, check(alone, kept)).item()


def test_shapes() -> None:
    for heads, widths in (((1, 1), (1, 32)), ((2, 2), (4, 96)), ((2, 6), (9, 128)), ((1, 3), (3, 256))):
        check(batch(2, heads, widths, mx.float32, True), 2)
        check(batch(2, heads, widths, mx.float32, False), 1)


def test_inputs_in_another_order_and_extreme_ones() -> None:
    state, k, v, g, beta = batch(3, (2, 4), (6, 32), mx.float16, True)
    turned = [mx.swapaxes(mx.contiguous(mx.swapaxes(a, 1, 2)), 1, 2) for a in (k, v, g, beta)]
    expected = check((state, k, v, g, beta), 2)
    assert mx.array_equal(check((state, *turned), 2), expected).item()
    for factor in (1e-30, 1e30):
        check((state * factor, *(a.astype(mx.float32) for a in (k, v)), g, beta), 3)
    check((state, k * 0, v, g, beta), 3)
    check((state, k, v, g * 0, beta), 3)
    check((state * 0, k, v, g, beta * 0), 3)


@pytest.mark.usefixtures("theirs")
def test_the_bits_are_those_of_the_kernel_that_ran_the_pass() -> None:
    for dtype, scalar, width in ((mx.float32, True, 64), (mx.bfloat16, True, 128), (mx.bfloat16, False, 128)):
        q, k, v, g, beta, state = recurrence.example(5, 2, 4, 16, width, dtype, scalar)
        for kept in (1, 2, 5):
            first = [a[:, :kept] for a in (q, k, v, g, beta)]
            ours = recurrence.replay(state, k, v, g, beta, kept)
            passes = [gated_delta.gated_delta_kernel]
            if scalar:
                passes += [gated_delta.gated_delta_kernel_unpacked, gated_delta.gated_delta_kernel_xtree]
            for run in passes:
                assert mx.array_equal(ours, run(*first, state)[1]).item(), (dtype, scalar, width, kept)


def test_the_reference_is_right() -> None:
    for dtype, scalar in product(recurrence.DTYPES, (True, False)):
        operands = batch(3, (2, 4), (5, 64), dtype, scalar, state_dtype=dtype)
        for kept in range(4):
            value, _ = exact(*operands, kept)
            off = np.abs(float64(recurrence.reference(*operands, kept)) - value)
            assert off.max() <= recurrence.error_bound(operands[0], operands[2], kept).item()


@pytest.mark.usefixtures("theirs")
def test_the_self_test_agrees_and_so_do_the_heats() -> None:
    """The self-test on two of its kinds: a device runs them all."""
    for dtype, scalar, width in ((mx.float32, True, 128), (mx.bfloat16, False, 64)):
        assert recurrence.difference(dtype, scalar, width) is None
    (heat,) = recurrence.heats()
    (ours,), (other,) = heat.ours(), heat.theirs()
    assert mx.array_equal(ours, other).item()


def test_traffic_is_what_is_counted() -> None:
    _, k, v, g, beta, state = recurrence.example(4, 2, 4, 8, 64, mx.bfloat16)
    with emulated() as device:
        mx.eval(recurrence.replay(state, k, v, g, beta, 4))
    moved = device.dispatches[-1].traffic
    counted = traffic_matmul.replay(4, 2, 4, 8, 64)
    assert moved["state_in"].read == moved["state_out"].written == state.nbytes
    assert (
        counted.minimum_bytes
        == counted.kernel_bytes
        == 2 * state.nbytes + sum(array.nbytes for array in (k, v, g, beta))
    )


# Planted faults

FAULTS: dict[str, tuple[str, str]] = {
    "one row too many": ("t < rows;", "t <= rows;"),
    "all rows whatever is kept": ("min(int(kept), recorded)", "recorded"),
    "the gate behind the update": (
        "state[i] = state[i] + static_cast<float>(keys[i]) * delta;",
        "state[i] = state[i] / static_cast<float>(gates[GATES > 1 ? i : 0]) * static_cast<float>(gates[GATES > 1 ? i : "
        "0]) + static_cast<float>(keys[i]) * delta * static_cast<float>(gates[GATES > 1 ? i : 0]);",
    ),
    "no gate": ("state[i] = state[i] * static_cast<float>(gates[GATES > 1 ? i : 0]);", ""),
    "no beta": (" * static_cast<float>(betas[0]);", ";"),
    "beta of the first row": ("betas += Hv;", ""),
    "the gate of the first row": ("gates += Hv * GATES;", ""),
    "gates of the first lane": ("(GATES > 1 ? first : 0)", "0"),
    "keys of the next head": ("keys += Hk * Dk;", "keys += Dk;"),
    "key heads in turn": ("value_head / (Hv / Hk)", "value_head % Hk"),
    "every sequence the first": ("v + (size_t(batch) * recorded", "v + (size_t(0) * recorded"),
    "a shuffle left out": ("known += simd_shuffle_xor(known, 16);", ""),
    "a shuffle twice": ("simd_shuffle_xor(known, 8)", "simd_shuffle_xor(known, 4)"),
    "the sum not started anew": ("float known = 0.0f;", "float known = t > 0 ? state[0] : 0.0f;"),
    "the state's end not written": ("state_out[place + i] =", "if (i + 1 < PER_LANE) state_out[place + i] ="),
    "the state of the next row": ("state_in[place + i]", "state_in[place + Dk + i]"),
    "the state rounded at every row": (
        "values += Hv * Dv;",
        "values += Hv * Dv; for (int i = 0; i < PER_LANE; ++i) { state[i] = float(half(state[i])); }",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, recurrence, *FAULTS[fault])
    with pytest.raises((AssertionError, MetalError)):  # noqa: PT012
        for scalar in (True, False):
            check(batch(3, (2, 4), (5, 64), mx.float32, scalar), 2)


def test_other_orders_of_the_same_sums_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are near enough, and have other bits: only the comparison with mlx-lm's kernel tells."""
    with emulated(check=False):
        build_theirs(monkeypatch)
        for old, new in (
            (
                "known += simd_shuffle_xor(known, 1);\n      known += simd_shuffle_xor(known, 2);",
                "known += simd_shuffle_xor(known, 2);\n      known += simd_shuffle_xor(known, 1);",
            ),
            (
                "known += state[i] * static_cast<float>(keys[i]);",
                "known = fma(state[i], static_cast<float>(keys[i]), known);",
            ),
        ):
            with monkeypatch.context() as patch:
                planted(patch, recurrence, old, new)
                said = recurrence.difference(mx.float32, True, 128)
                assert said is not None
                assert "other bits than mlx-lm's kernel" in said


# In use


def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gated delta layers wide enough for mlx-lm's kernels, and attention."""
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        monkeypatch.setitem(architectures.COMMON, name, 32)
    return architectures.build("qwen3_next")


def states(transaction: Transaction) -> list[mx.array]:
    return [mx.array(a) for leaf in transaction._leaves if isinstance(leaf, SnapshotLeaf) for a in leaf.arrays()]


def test_states_after_rejected_rows_are_those_of_the_kept_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With mlx-lm's kernels for the passes and ours for the replay, all emulated; and by MLX's operations alone."""
    model, prompt, rows = hybrid(monkeypatch), [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5]
    replays: list[int] = []

    def counted(*args: Any) -> mx.array:
        replays.append(args[-1])
        return original(*args)

    original = recurrence.replay
    monkeypatch.setattr(recurrence, "replay", counted)
    before = gated_delta.gated_delta_kernel

    def compare(emulate: bool) -> None:
        transaction = Transaction(Target(model, replay_kernel=True))
        transaction.prefill(prompt)
        for kept in range(1, len(rows)):
            transaction.forward(mx.array(rows))
            assert transaction.rollback == "record"
            transaction.rewind(len(prompt) + kept)
            alone = Transaction(Target(model))
            alone.prefill(prompt)
            alone.forward(mx.array(rows[:kept]))
            assert all(map(mx.array_equal, states(transaction), states(alone)))
            transaction.rewind(len(prompt))
        layers = len(states(transaction)) // 2  # each has a state, and the rows of its convolution
        assert replays == ([kept for kept in range(1, len(rows)) for _ in range(layers)] if emulate else [])
        assert gated_delta.gated_delta_kernel is before

    compare(emulate=False)
    with emulated(check=False):
        build_theirs(monkeypatch)
        compare(emulate=True)


@pytest.mark.usefixtures("theirs")
def test_the_hook_is_for_replays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(recurrence, "replay", lambda *args: calls.append(args[-1]) or args[0])
    q, k, v, g, beta, state = recurrence.example(3, 1, 2, 4, 32, mx.float32)
    before = gated_delta.gated_delta_kernel
    y, new = gated_delta.gated_delta_kernel(q, k, v, g, beta, state)
    for error in (ValueError("a model's"), KeyboardInterrupt()):
        with pytest.raises(type(error)), recurrence.replaying():  # noqa: PT012
            out = gated_delta.gated_delta_kernel(q, k, v, g, beta, state)
            assert mx.array_equal(out[0], y).item()  # outputs are right, should anybody ask
            raise error
        assert gated_delta.gated_delta_kernel is before
    assert calls == [3, 3]
    recurrence._wrappers.enter()  # another thread's replay, or an interrupt kept the wrapper there
    assert mx.array_equal(gated_delta.gated_delta_kernel(q, k, v, g, beta, state)[1], new).item()
    recurrence._wrappers.leave()
    assert calls == [3, 3]
    assert gated_delta.gated_delta_kernel is before


def test_the_engine_rolls_back_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, replays = hybrid(monkeypatch), [3, 1, 4, 1, 5], []
    original = recurrence.replay
    monkeypatch.setattr(recurrence, "replay", lambda *args: replays.append(args[-1]) or original(*args))
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 3, "temperature": 0.7}
    with emulated(check=False):
        build_theirs(monkeypatch)
        plain = Engine(model, drafters=[]).generate(prompt, **settings)
        assert not replays
        drafter = ScriptDrafter(prompt + plain.ids, wrong={7, 12})
        drafted = Engine(model, drafters=[drafter], kernels=Using("replay")).generate(
            prompt, draft_length=3, **settings
        )
    assert drafted.ids == plain.ids
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    assert len(replays) > 1
