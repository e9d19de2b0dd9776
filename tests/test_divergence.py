"""The count of divergences, on models with planted ones."""

from __future__ import annotations

import json
from itertools import count as numbers

import pytest
from planted import Planted, by_size

import localspec.bench.divergence as bench
from localspec.bench.divergence import Tally, count, main
from localspec.engine import Engine
from localspec.rows import RowClass, RowClasses


def engine_of(error: float) -> Engine:
    engine = Engine(Planted(("plain", "window"), shift=by_size([1], [2, 3], [4, 5, 6, 7], error=error)), drafters=[])
    classes = (RowClass((1,), (1.0,)), RowClass((4, 5, 6, 7), (1.2, 1.2, 1.3, 1.3)))
    engine._exact._probed = RowClasses(classes, (), 1.0, (12, 1100), False, 10, 0.1)
    engine._exact._causal = True
    return engine


def tallied(exact: str, error: float) -> Tally:
    tally = Tally(exact, 0.8)
    count(engine_of(error), ([n % 40, 3, 1, 4] for n in numbers()), tally, tokens=150, seconds=1e9)
    return tally


def test_off_parts_and_starts_again_and_rows_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_ANSWER", 50)
    off, rows, alike = tallied("off", 0.3), tallied("rows", 0.3), tallied("off", 0.0)
    assert off.tokens == rows.tokens == alike.tokens == 150
    assert off.divergences > 3
    assert off.other_bits > off.divergences
    assert rows.divergences == rows.other_bits == alike.divergences == alike.other_bits == 0
    for tally in (off, rows, alike):
        assert 0 < tally.accepted < tally.drafted
    assert off.as_dict()["divergences_per_10000"] == pytest.approx(10_000 * off.divergences / 150)


def test_the_command_ends_with_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_ANSWER", 20)
    monkeypatch.setattr(bench, "_SIZES", {"1M": (64, 1, 128)})
    assert main(["--random", "1M", "--tokens", "20", "--exact", "rows", "--temperature", "0.8"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = document["runs"]
    assert run["tokens"] == 20
    assert run["divergences"] == run["other_bits"] == 0
    assert run["exactness"].startswith("bit for bit")
    assert document["classes"]["classes"]
    for bad in ([], ["smollm2", "--random", "1M"]):
        with pytest.raises(SystemExit):
            main(bad)
