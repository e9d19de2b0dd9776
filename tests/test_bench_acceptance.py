"""The comparison of acceptance rules: its formulas against enumeration and draws, and the command."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_block import BLOCK, outcome, tables, token_rule
from tiny import TableModel, random_table, tiny_llama, tiny_tokenizer

import localspec
from localspec.bench.acceptance import RULES, Kept, keep_chances, main, measure, rounded, table
from localspec.drafters import ModelDrafter, NgramDrafter
from localspec.engine import Engine
from localspec.noise import Stream, bits, gumbel


def test_chances_add_up_to_the_drafts_that_enumeration_keeps() -> None:
    for seed in range(5):
        case = tables(seed)
        expected = dict.fromkeys(RULES, 0.0)
        for draft, chance in case.drafts():
            p, q = (mx.array(rows) for rows in case.rows(draft))
            for rule, kept in keep_chances(p, q, mx.array(draft, mx.uint32)).items():
                expected[rule] += chance * sum(kept)
        assert expected["block"] == pytest.approx(outcome(case, BLOCK)[1], abs=1e-5)
        assert expected["rejection"] == pytest.approx(token_rule(case), abs=1e-5)
        assert expected["coupled"] < expected["rejection"] < expected["block"]


def test_the_coupled_chance_is_that_of_draws_with_shared_noise() -> None:
    """200,000 draws; each draft that came up often, within six standard deviations: odds of a false alarm 2e-9 each."""
    p, q = (mx.softmax(mx.random.normal((8,), key=mx.random.key(seed)) * 1.5) for seed in (1, 2))
    noise = gumbel(bits(5, Stream.GUMBEL, range(200_000), 8))
    target, draft = (np.array(mx.argmax(mx.log(row) + noise, axis=-1)) for row in (p, q))
    tried = 0
    for x in range(8):
        agreed = target[draft == x] == x
        (chance,) = keep_chances(p[None], q[None], mx.array([x], mx.uint32))["coupled"]
        if len(agreed) > 2000:
            tried += 1
            assert agreed.mean() == pytest.approx(chance, abs=6 * math.sqrt(0.25 / len(agreed)))
    assert tried > 4


def test_a_deterministic_draft_and_an_impossible_one() -> None:
    p = mx.array([[0.2, 0.8, 0.0], [0.5, 0.25, 0.25]])
    drafts = mx.array([1, 0], mx.uint32)
    for chances in keep_chances(p, None, drafts).values():
        assert chances == pytest.approx([0.8, 0.4])
    for q in (None, mx.full((2, 3), 1 / 3)):
        for chances in keep_chances(p, q, mx.array([2, 0], mx.uint32)).values():
            assert chances == [0.0, 0.0]
    for chances in keep_chances(p, p, drafts).values():
        assert chances == pytest.approx([1.0, 1.0])


def test_measured_on_tables() -> None:
    engine = Engine(TableModel(random_table(1, 6)), drafters=[])
    drafters = {"model": ModelDrafter(TableModel(random_table(2, 6))), "n-gram": NgramDrafter()}
    model, ngram = measure(
        engine, [[1, 2, 3], [4, 1, 2]], drafters, draft_length=3, tokens=60, stride=2, temperature=1.0, seed=1
    )
    assert model.proposals == 60
    assert 20 < ngram.proposals <= 60
    for rule in RULES:
        shares = model.at_least(rule)
        assert all(0 <= share <= 1 for share in shares)
        assert rule == "block" or all(a >= b for a, b in pairwise(shares))
        assert model.mean(rule) == pytest.approx(sum(shares))
        assert ngram.at_least(rule) == pytest.approx(ngram.at_least("block"), abs=1e-6)
    assert model.at_least("coupled")[0] < model.at_least("rejection")[0]
    assert model.at_least("rejection")[0] == pytest.approx(model.at_least("block")[0], abs=1e-6)
    assert model.mean("rejection") < model.mean("block")
    assert 0 < model.error("block", "rejection") < model.error("block")


def test_the_draft_is_judged_by_the_rows_of_its_own_path() -> None:
    """The target as its own draft: everything is kept, whatever was drawn."""
    model = TableModel(random_table(3, 6))
    drafters = {"itself": ModelDrafter(model)}
    (kept,) = measure(Engine(model, drafters=[]), [[1, 2, 3]], drafters, tokens=30, stride=3, temperature=1.0, seed=4)
    assert kept.proposals == 10
    for rule in RULES:
        assert kept.mean(rule) == pytest.approx(4, abs=1e-4)


def test_rounded_weights_are_near_and_the_model_is_left_alone() -> None:
    model = tiny_llama(vocabulary=64)
    before = model.model.layers[0].mlp.down_proj.weight.tolist()
    copy = rounded(model, 3)
    near, was = copy.model.layers[0].mlp.down_proj.weight, model.model.layers[0].mlp.down_proj.weight
    assert was.tolist() == before
    assert len(np.unique(np.array(near[0]))) <= 8 < len(np.unique(np.array(was[0])))
    assert 0 < mx.abs(near - was).max().item() < 0.2 * (was.max() - was.min()).item()


def test_the_command_prints_a_table_and_json_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tiny_tokenizer()
    loads: list[dict[str, Any]] = []

    def load(name: str, **keywords: Any) -> Engine:
        loads.append(keywords)
        return Engine(tiny_llama(vocabulary=len(words)), words, drafters=keywords["drafters"], name=name)

    monkeypatch.setattr(localspec, "load", load)
    arguments = ["tiny", "--workload", "open-chat/sky", "--tokens", "12", "--bits", "4", "--draft-length", "2"]
    assert main(arguments) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert [one["drafter"] for one in document["found"]] == ["itself in 4 bits", "n-gram"]
    assert document["found"][0]["proposals"] == 3
    assert set(document["found"][0]["rules"]) == set(RULES)
    assert sum(line.startswith("| itself in 4 bits | 3 | ") for line in shown) == 3
    assert loads == [{"dtype": "float32", "drafters": []}]
    for wrong in (["--temperature", "0"], ["--stride", "0"], ["--workload", "nonsense"]):
        assert main(["tiny", *wrong]) == 1
        assert capsys.readouterr().err.startswith("localspec: ")


def test_a_drafter_without_proposals_is_shown_as_such() -> None:
    empty = Kept("n-gram", 2)
    assert table([empty]).splitlines()[-1] == "| n-gram | 0 | n/a | n/a | n/a | n/a |"
    assert empty.as_dict() == {"drafter": "n-gram", "proposals": 0, "rules": {}}
