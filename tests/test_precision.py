"""The choice of the weights' format: the rule, the measurement, the memory."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from localspec import precision
from localspec.precision import Shapes

TINY = Shapes(hidden=128, intermediate=128, heads=2, kv_heads=1, head_dim=32, layers=2, vocabulary=256)


def costs(float32: tuple[float, float], bfloat16: tuple[float, float]) -> precision.Costs:
    return {
        "float32": {"rows1_ms": float32[0], "rows4_ms": float32[1]},
        "bfloat16": {"rows1_ms": bfloat16[0], "rows4_ms": bfloat16[1]},
    }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quiet machine without Metal and with an empty memory."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(precision, "_quiet", lambda: True)
    return tmp_path / "home"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Shapes]:
    """The shapes that were measured; bfloat16 wins."""
    calls: list[Shapes] = []

    def measure(shapes: Shapes) -> precision.Costs:
        calls.append(shapes)
        return costs((100, 300), (50, 100))

    monkeypatch.setattr(precision, "measure", measure)
    return calls


def test_the_cheapest_plain_pass_wins() -> None:
    assert precision.pick(costs((100, 900), (110, 100))) == "float32"
    assert precision.pick(costs((110, 100), (100, 900))) == "bfloat16"


def test_near_ties_go_to_the_cheaper_wide_pass() -> None:
    assert precision.pick(costs((100, 400), (104, 200))) == "bfloat16"
    assert precision.pick(costs((104, 200), (100, 400))) == "float32"
    assert precision.pick(costs((100, 400), (106, 200))) == "float32"


def test_measured_once_and_remembered(home: Path, measured: list[Shapes]) -> None:
    assert precision.choose_dtype() == "bfloat16"
    assert precision.choose_dtype() == "bfloat16"
    assert measured == [Shapes()]
    report = precision.explain()
    assert report["measured"]["float32"]["rows1_ms"] == 100
    assert report["blas"]
    assert len(measured) == 1


def test_each_shape_has_its_own_choice(home: Path, measured: list[Shapes], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 256, "num_attention_heads": 4}))
    precision.choose_dtype()
    precision.choose_dtype(tmp_path)
    precision.choose_dtype(tmp_path)
    assert [shapes.hidden for shapes in measured] == [576, 256]


@pytest.mark.parametrize("content", ["{", "[]", '{"key": {"dtype": "int3", "measured": {}}}', '{"key": 1}', "\udcff"])
def test_a_broken_memory_is_set_aside(home: Path, measured: list[Shapes], content: str) -> None:
    home.mkdir()
    (home / "precision.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert precision.choose_dtype() == "bfloat16"
    assert (home / "precision.json.broken").exists()
    assert json.loads((home / "precision.json").read_text())
    assert precision.choose_dtype() == "bfloat16"
    assert len(measured) == 1


def test_the_first_of_two_processes_decides(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shapes: Shapes) -> precision.Costs:
        monkeypatch.setattr(precision, "measure", lambda shapes: costs((1, 1), (9, 9)))
        assert precision.choose_dtype() == "float32"  # the other process, meanwhile
        return costs((9, 9), (1, 1))

    monkeypatch.setattr(precision, "measure", measure)
    assert precision.choose_dtype() == "float32"


def test_a_home_that_cannot_be_written_is_no_obstacle(home: Path, measured: list[Shapes]) -> None:
    home.write_text("a file where the folder should be")
    assert precision.choose_dtype() == "bfloat16"


def test_a_busy_machine_is_not_measured(home: Path, measured: list[Shapes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_quiet", lambda: False)
    assert precision.choose_dtype() == "float32"
    assert "busy" in precision.explain()["reason"]
    assert not measured
    monkeypatch.setattr(precision, "_quiet", lambda: True)
    assert precision.choose_dtype() == "bfloat16"


@pytest.mark.parametrize(("idle", "quiet"), [(95, True), (50, False), (0, False)])
def test_quiet_is_mostly_idle(monkeypatch: pytest.MonkeyPatch, idle: int, quiet: bool) -> None:
    times = iter([(1000, 5000), (1000 + idle, 5100)])
    monkeypatch.setattr(precision, "_processor_times", lambda: next(times))
    assert precision._quiet() is quiet


def test_on_metal_weights_stay_as_stored(home: Path, measured: list[Shapes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert precision.choose_dtype() == "quantized"
    assert precision.explain()["dtype"] == "quantized"
    assert not measured


def test_shapes_from_a_config(tmp_path: Path) -> None:
    text = {"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
    text |= {"head_dim": 256, "num_hidden_layers": 18, "vocab_size": 262144}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": text, "quantization": {"bits": 8, "group_size": 64}})
    )
    shapes = Shapes.of(tmp_path)
    assert shapes == Shapes(640, 2048, 4, 1, 256, 18, 262144, 8, 64, True)
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert not Shapes.of(tmp_path).quantized


@pytest.mark.parametrize(
    "content", [None, "{", "[1]", "null", '{"hidden_size": "wide", "quantization": {"bits": null}}']
)
def test_a_strange_config_gives_plausible_shapes(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert Shapes.of(tmp_path).parameters > 0


def test_formats_that_do_not_fit_are_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = Shapes()
    monkeypatch.setattr(precision, "_memory", lambda: int(shapes.parameters * 3.5))
    assert precision._formats(shapes) == ["bfloat16", "quantized"]
    monkeypatch.setattr(precision, "_memory", lambda: 1)
    assert precision._formats(shapes) == ["quantized"]


@pytest.mark.parametrize(
    "shapes", [Shapes(), TINY, Shapes(4096, 14336, 32, 8, 128, 32, 128256), Shapes(640, 2048, 4, 1, 256, 18, 262144)]
)
def test_the_stand_in_is_small_and_in_proportion(shapes: Shapes) -> None:
    small, scale = precision._stand_in(shapes)
    assert small.parameters < 80_000_000
    assert small.parameters * scale == pytest.approx(shapes.parameters)
    assert small.intermediate / small.hidden == pytest.approx(shapes.intermediate / shapes.hidden, rel=0.2)


def test_measuring_times_every_format() -> None:
    found = precision.measure(TINY)
    assert list(found) == ["float32", "bfloat16", "quantized"]
    assert all(cost > 0 for figures in found.values() for cost in figures.values())
    assert precision.pick(found) in found
