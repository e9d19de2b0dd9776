"""The benchmark of learned n-grams: what it measures is there, no times are judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.bench.ngram_store import main, measure, measure_whole


def test_it_measures_a_file_that_it_wrote(tmp_path: Path) -> None:
    cost = measure(2_000, tmp_path)
    assert cost.rows >= 1_900
    assert 18 <= cost.bytes_per_row < 19
    assert min(cost.known_us, cost.unknown_us, cost.load_ms, cost.merge_ms) > 0
    assert (tmp_path / "2000.ngrams").stat().st_size > cost.rows * 18


def test_it_measures_answers_kept_whole() -> None:
    cost = measure_whole(2_000)
    assert 1_500 < cost.tokens <= 2_000
    assert min(cost.sort_ms, cost.known_us, cost.unknown_us) > 0
    assert cost.bytes_per_token == 4


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "500", "1000"]) == 0
    for table in capsys.readouterr().out.split("\n\n"):
        lines = table.splitlines()
        assert len(lines) == 4
        assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("rows", ["99", "10000000", "many"])
def test_bad_sizes(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rows", rows])
    assert "--rows" in capsys.readouterr().err
