"""The bench of choices of layers: its arithmetic on numbers made up here, and a run on a tiny model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny import tiny_llama, tiny_tokenizer

import localspec
from localspec.bench.layer_skip import Choice, choices, main, table
from localspec.engine import Engine


def test_the_best_length_weighs_what_is_right_against_what_it_costs() -> None:
    choice = Choice("2 first", (0, 1), cost=0.1, proposals=10, right=[9, 8, 1])
    assert choice.at_least == [0.9, 0.8, 0.1]
    assert choice.best([1.0, 1.1, 1.2, 1.3]) == (2, pytest.approx(2.7 / 1.4))
    choice.cost = 1.0
    assert choice.best([1.0, 1.1, 1.2, 1.3]) == (0, 1.0)
    assert Choice("2 first", (0, 1)).best([1.0, 1.1]) == (0, 1.0)


def test_choices_have_so_many_layers_and_are_told_apart() -> None:
    found = choices(12, [4, 6])
    assert {len(choice.layers) for choice in found} == {4, 6}
    assert len({choice.layers for choice in found}) == len(found) >= 6
    assert (0, 1, 2, 11) in {choice.layers for choice in found}


def test_the_command_prints_a_table_and_json_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny_tokenizer()

    def load(name: str, **keywords: Any) -> Engine:
        return Engine(tiny_llama(vocabulary=len(words), layers=4), words, drafters=keywords["drafters"], name=name)

    monkeypatch.setattr(localspec, "load", load)
    arguments = ["tiny", "--workload", "open-chat/sky", "--tokens", "12", "--draft-length", "2", "--layers", "2", "4"]
    assert main(arguments) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert len(document["passes"]) == 3
    whole = next(one for one in document["found"] if one["layers"] == [0, 1, 2, 3])
    assert whole["at_least"] == [1.0, 1.0]  # all layers are the model
    assert whole["proposals"] == 3
    assert sum(line.startswith("| ") for line in shown) == len(document["found"]) + 1
    for wrong in (["--stride", "0"], ["--workload", "nonsense"], ["--layers", "9"]):
        assert main(["tiny", *wrong]) == 1
        assert capsys.readouterr().err.startswith("localspec: ")


def test_a_choice_without_proposals_has_no_shares() -> None:
    assert table([Choice("1 first", (0,))], [1.0]).splitlines()[-1] == "| 1 first | 0.00 |  | 0 | 1.00 |"
