"""Settings are checked before anything runs, with the allowed range in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import chat_engine

from localspec.errors import LocalspecError, SettingsError
from localspec.settings import MAX_DRAFT_LENGTH, MAX_SEED, Settings

BAD: list[tuple[str, Any, str]] = [
    ("max_tokens", -1, "at least 0"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", True, "integer"),
    ("max_tokens", "10", "integer"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "at least 0"),
    ("temperature", math.inf, "at least 0"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("temperature", None, "number"),
    ("top_p", -0.01, "from 0 to 1"),
    ("top_p", 1.01, "from 0 to 1"),
    ("top_p", math.nan, "from 0 to 1"),
    ("top_k", -1, "at least 0"),
    ("top_k", 2.0, "integer"),
    ("min_p", -1, "from 0 to 1"),
    ("min_p", 2, "from 0 to 1"),
    ("temperature", 10**400, "at least 0"),
    ("top_p", 10**400, "from 0 to 1"),
    ("xtc_probability", -0.1, "from 0 to 1"),
    ("xtc_probability", 1.1, "from 0 to 1"),
    ("xtc_probability", None, "number"),
    ("xtc_threshold", 0.51, "from 0 to 0.5"),
    ("xtc_threshold", math.nan, "from 0 to 0.5"),
    ("repetition_penalty", -1, "from 0 to"),
    ("repetition_penalty", math.inf, "from 0 to"),
    ("repetition_penalty", "1.1", "number"),
    ("repetition_penalty", True, "number"),
    ("presence_penalty", math.nan, "from -3e+38 to 3e+38"),
    ("presence_penalty", -1e300, "from -3e+38 to 3e+38"),
    ("frequency_penalty", math.inf, "from -3e+38 to 3e+38"),
    ("frequency_penalty", [1], "number"),
    ("repetition_context_size", -1, "at least 0"),
    ("presence_context_size", None, "integer"),
    ("frequency_context_size", 2.0, "integer"),
    ("logit_bias", [3], "map token ids to numbers"),
    ("logit_bias", {"3": 1.0}, "integer of at least 0"),
    ("logit_bias", {-1: 1.0}, "integer of at least 0"),
    ("logit_bias", {True: 1.0}, "integer of at least 0"),
    ("logit_bias", {3: math.nan}, "token 3 must be a number from -inf"),
    ("logit_bias", {3: math.inf}, "token 3 must be a number from -inf"),
    ("logit_bias", {3: 1e39}, "token 3 must be a number from -inf"),
    ("logit_bias", {3: "x"}, "token 3 must be a number from -inf"),
    ("logprobs", -1, "at least 0"),
    ("logprobs", True, "integer"),
    ("logprobs", None, "integer"),
    ("seed", -1, "from 0"),
    ("seed", MAX_SEED + 1, "from 0"),
    ("seed", 1.0, "integer"),
    ("stop", ("",), "non-empty"),
    ("stop", (5,), "non-empty"),
    ("logits_processors", (3,), "callables"),
    ("speculate", 1, "True or False"),
    ("speculate", "no", "True or False"),
    ("accept", "blocks", "coupled, rejection, block"),
    ("accept", None, "coupled, rejection, block"),
    ("draft_length", -1, "from 0 to"),
    ("draft_length", MAX_DRAFT_LENGTH + 1, "from 0 to"),
    ("draft_length", "AUTO", "from 0 to"),
    ("draft_length", True, "from 0 to"),
]


@pytest.mark.parametrize(("name", "value", "hint"), BAD, ids=str)
def test_bad_values_name_the_setting_and_its_range(name: str, value: Any, hint: str) -> None:
    with pytest.raises(SettingsError, match=name) as caught:
        Settings(**{name: value})
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, LocalspecError)


@pytest.mark.parametrize(("name", "value", "hint"), BAD, ids=str)
def test_bad_values_are_refused_before_anything_runs(name: str, value: Any, hint: str) -> None:
    engine = chat_engine()
    for ask in (engine.stream, engine.generate, engine.conversation().send):
        with pytest.raises(SettingsError, match=name):
            ask("hello", **{name: value})


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens"), ("seeds", "seed")],
)
def test_unknown_settings_name_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown setting '{wrong}'; did you mean '{near}'"):
        Settings.from_keywords(**{wrong: 1})


def test_unknown_settings_far_from_any_list_all() -> None:
    with pytest.raises(SettingsError, match="known: max_tokens, temperature"):
        Settings.from_keywords(zzzzzz=1)


@given(
    max_tokens=st.none() | st.integers(0, 10**9),
    temperature=st.floats(0, 1e300) | st.integers(0, 5),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 10**9),
    min_p=st.floats(0, 1),
    xtc_probability=st.floats(0, 1),
    xtc_threshold=st.floats(0, 0.5),
    repetition_penalty=st.none() | st.floats(0, 3e38),
    repetition_context_size=st.integers(0, 10**9),
    presence_penalty=st.none() | st.floats(-3e38, 3e38),
    frequency_penalty=st.none() | st.integers(-5, 5),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.just(-math.inf) | st.floats(-3e38, 3e38), max_size=3),
    logprobs=st.integers(0, 10**9),
    seed=st.none() | st.integers(0, MAX_SEED),
    draft_length=st.just("auto") | st.integers(0, MAX_DRAFT_LENGTH),
)
def test_good_values_are_taken_as_they_are(**keywords: Any) -> None:
    settings = Settings.from_keywords(**keywords)
    assert {name: getattr(settings, name) for name in keywords} == keywords


def test_lists_and_single_strings_are_taken() -> None:
    def processor(_: Any, logits: Any) -> Any:
        return logits

    assert Settings.from_keywords(stop="x").stop == ("x",)
    assert Settings.from_keywords(stop=["x", "yz"]).stop == ("x", "yz")
    assert Settings.from_keywords(stop=None).stop == ()
    assert Settings.from_keywords(logits_processors=[processor]).logits_processors == (processor,)
    assert Settings.from_keywords(logits_processors=None).logits_processors == ()


def test_defaults_are_plain_greedy_with_speculation() -> None:
    settings = Settings()
    assert (settings.temperature, settings.top_p, settings.top_k, settings.min_p) == (0, 1, 0, 0)
    assert (settings.speculate, settings.accept, settings.draft_length, settings.seed) == (
        True,
        "coupled",
        "auto",
        None,
    )
    assert not settings.changes_logits
    assert (settings.xtc_probability, settings.logprobs) == (0, 0)


def test_defaults_are_those_of_mlx_lm() -> None:
    import inspect

    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    theirs = {**inspect.signature(make_sampler).parameters, **inspect.signature(make_logits_processors).parameters}
    ours = Settings()
    shared = [name for name in theirs if hasattr(ours, name)]
    assert len(shared) == 12
    for name in shared:
        default = theirs[name].default
        if name == "top_p":  # 0 and 1 are both off
            assert (ours.top_p, default) == (1, 0)
        else:
            assert getattr(ours, name) == (default if name != "logit_bias" else {})


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
def test_every_seed_can_be_used_and_is_reported(seed: int) -> None:
    generation = chat_engine().generate([1, 5, 7], max_tokens=4, temperature=1.0, seed=seed)
    assert generation.seed == generation.settings.seed == seed


def test_unknown_drafters_are_refused() -> None:
    with pytest.raises(SettingsError, match="unknown drafter 'magic'; known: ngram"):
        chat_engine(drafters=["magic"])
