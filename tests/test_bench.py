"""The bench: its workloads, its arithmetic on numbers made up here, and real runs on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import localspec
from localspec.bench import baseline
from localspec.bench.gap import key_gap
from localspec.bench.machine import cpu_model, weights_format
from localspec.bench.pairs import Difference, Pair, Run, first_difference
from localspec.bench.report import Report
from localspec.bench.run import encode, run_bench
from localspec.bench.summary import Spread, pool, summarize
from localspec.bench.workloads import choose_workloads, read_workloads
from localspec.engine import Engine
from localspec.errors import LocalspecError, SettingsError
from localspec.settings import Settings
from localspec.stats import DrafterStats, Stats
from localspec.tokens import Round

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> TokenizerWrapper:
    """One token per byte, and the two marks of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    fast.chat_template = template
    return TokenizerWrapper(fast)


def tiny_model(seed: int = 0) -> llama.Model:
    mx.random.seed(seed)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=258,
            tie_word_embeddings=True,
        )
    )
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), tiny_tokenizer(), name="tiny")


# Workloads


def test_every_kind_has_three_prompts_that_fit_a_small_context() -> None:
    workloads = read_workloads()
    assert [w.name for w in workloads] == ["open-chat", "code", "code-edit", "summary", "json", "quoting"]
    prompts = [prompt for workload in workloads for prompt in workload.prompts]
    assert all(len(workload.prompts) == 3 for workload in workloads)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 18
    assert len({prompt.name for prompt in prompts}) == 18
    for prompt in prompts:
        assert prompt.text == prompt.text.strip() != ""
        assert len(prompt.text) / 3 < 700, prompt.name  # tokenizers take three characters and more per token
        assert all(prompt.kind == workload.name for workload in workloads if prompt in workload.prompts)


def test_an_edit_gives_a_function_of_25_lines_and_a_summary_a_page() -> None:
    by_name = {workload.name: workload for workload in read_workloads()}
    for prompt in by_name["code-edit"].prompts:
        code = prompt.text.split("```")[1].strip().splitlines()[1:]
        assert len(code) >= 25, prompt.name
        assert "rename" in prompt.text.lower()
    for prompt in by_name["summary"].prompts:
        assert 200 <= len(prompt.text.split()) <= 300, prompt.name


def test_the_python_code_to_edit_compiles() -> None:
    workload = choose_workloads(["code-edit"])[0]
    sources = [prompt.text.split("```")[1] for prompt in workload.prompts]
    python = [source.removeprefix("python\n") for source in sources if source.startswith("python\n")]
    assert len(python) == 2
    for source in python:
        compile(source, "workload", "exec")


def test_choosing_workloads() -> None:
    assert choose_workloads(None) == read_workloads()
    assert [w.name for w in choose_workloads(["quoting", "code"])] == ["code", "quoting"]
    (one,) = choose_workloads(["code-edit/inventory"])
    assert [prompt.name for prompt in one.prompts] == ["inventory"]
    quick = choose_workloads(["quick"])
    assert [w.name for w in quick] == ["open-chat", "code-edit", "quoting"]
    assert all(len(w.prompts) == 1 for w in quick)
    both = choose_workloads(["quick", "code-edit"])
    assert [len(w.prompts) for w in both] == [1, 3, 1]


@pytest.mark.parametrize("names", [["poetry"], ["code", "code-edit/nothing"], [""]])
def test_an_unknown_workload_is_told_with_the_known_ones(names: list[str]) -> None:
    with pytest.raises(SettingsError, match="open-chat, code, code-edit, summary, json, quoting, quick"):
        choose_workloads(names)


def test_no_workload_at_all_is_an_error() -> None:
    with pytest.raises(SettingsError, match="at least one"):
        choose_workloads([])


# Arithmetic


def made_up_run(ids: list[int], wall_s: float, *rounds: tuple[int, int], prefill_s: float = 1.0) -> Run:
    """`rounds`: (drafted, accepted) of each pass; a pass emits one token more than it accepts."""
    stats = Stats(prefill_s=prefill_s, ttft_s=prefill_s, total_s=wall_s)
    for index, (drafted, accepted) in enumerate(rounds):
        drafter = "ngram" if drafted else None
        stats.book_round(Round(index, drafter, (7,) * drafted, accepted, accepted + 1, 0))
    return Run(tuple(ids), wall_s, stats)


def made_up_pair(kind: str, plain_s: float, speculative_s: float, *, same: bool = True) -> Pair:
    plain = made_up_run([1, 2, 3, 4], plain_s, (0, 0), (0, 0), (0, 0), (0, 0))
    speculative = made_up_run([1, 2, 3, 4] if same else [1, 2, 9, 4], speculative_s, (3, 2), (1, 0))
    return Pair(kind, "p", 0, "plain first", plain, speculative, first_difference(plain.ids, speculative.ids))


def test_speedups_leave_prompt_processing_out_and_in() -> None:
    pair = made_up_pair("a", 5.0, 3.0)
    assert pair.speedup == pytest.approx((5 - 1) / (3 - 1))
    assert pair.end_to_end_speedup == pytest.approx(5 / 3)
    assert pair.identical


def test_runs_of_different_lengths_are_compared_per_token() -> None:
    plain, speculative = made_up_run([1] * 8, 9.0, (0, 0)), made_up_run([1] * 4, 3.0, (0, 0))
    pair = Pair("a", "p", 0, "plain first", plain, speculative, first_difference(plain.ids, speculative.ids))
    assert pair.speedup == pytest.approx((8 / 8) / (2 / 4))
    assert not pair.identical


def test_an_answer_without_tokens_has_no_speedup() -> None:
    empty = made_up_run([], 1.0)
    pair = Pair("a", "p", 0, "plain first", empty, empty, None)
    assert pair.speedup is None
    summary = summarize("a", "a", [pair])
    assert summary.speedup is summary.total_speedup is summary.tokens_per_pass is summary.acceptance_rate is None
    json.dumps(summary.as_dict(), allow_nan=False)


def test_a_summary_takes_medians_over_pairs_and_pools_counts() -> None:
    pairs = [made_up_pair("a", 3.0, 2.0), made_up_pair("a", 9.0, 3.0), made_up_pair("a", 4.0, 4.0, same=False)]
    summary = summarize("a", "A", pairs)
    assert summary.speedup == Spread(2.0, 1.0, 4.0)
    assert summary.total_speedup == pytest.approx((2 + 8 + 3) / (1 + 2 + 3))
    assert summary.end_to_end_total_speedup == pytest.approx(16 / 9)
    assert summary.tokens_per_pass == pytest.approx(4 / 2)
    assert summary.acceptance_rate == pytest.approx(2 / 4)
    assert summary.mean_acceptance_length == pytest.approx(1 + 2 / 2)
    assert summary.acceptance_by_position == pytest.approx([1 / 2, 1, 0])
    assert summary.by_drafter["ngram"]["drafted"] == 12
    assert summary.plain_decode_tps == pytest.approx(3 / 3.0)
    assert summary.speculative_decode_tps == pytest.approx(3 / 2.0)
    assert summary.identical == 2


def test_pooled_counts_are_the_counts_of_one_long_generation() -> None:
    parts = [DrafterStats(), DrafterStats()]
    whole = DrafterStats()
    for index, (drafted, accepted) in enumerate([(3, 1), (1, 1), (5, 4), (2, 0)]):
        parts[index % 2].book(drafted, accepted)
        whole.book(drafted, accepted)
    assert pool(parts) == whole
    assert parts[0].drafted == 8  # pooling leaves its parts alone


@pytest.mark.parametrize(
    ("plain", "speculative", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], Difference(1, 2, 5)),
        ([1, 2, 3], [1, 2], Difference(2, 3, None)),
        ([], [4], Difference(0, None, 4)),
    ],
)
def test_the_first_difference(plain: list[int], speculative: list[int], expected: Difference | None) -> None:
    assert first_difference(plain, speculative) == expected


def test_a_difference_says_what_it_may_be() -> None:
    assert Difference(3, 1, 2, 1e-5, 1e-3).near_tie is True
    assert Difference(3, 1, 2, 0.5, 1e-3).near_tie is False
    assert Difference(3, 1, None).near_tie is None
    assert "near-tie in the last bits" in Difference(3, 1, 2, 1e-5, 1e-3).sentence()
    assert "this is a bug" in Difference(3, 1, 2, 0.5, 1e-3).sentence()
    assert "or a bug, the gap" in Difference(3, 1, None).sentence()
    assert Difference(3, 1, 2, float("inf"), 1e-3).as_dict()["gap"] is None


# Reports


def made_up_report(pairs: list[Pair], *, identity_expected: bool = True, name: str = "tiny") -> Report:
    return Report(
        model={"name": name, "dtype": "float32", "context_length": 512, "drafters": ["ngram"]},
        settings={"temperature": 0.0, "seed": 3, "max_tokens": 4, "repeats": 1, "accept": "coupled"},
        versions={"python": "3.11"},
        machine={"backend": "cpu", "blas": "OpenBLAS 0.3.21 via preload, 2 threads", "cores": 2, "load_average": 0.4},
        pairs=pairs,
        kinds=[summarize("a", "open chat", pairs)],
        overall=summarize("overall", "overall", pairs),
        identity_expected=identity_expected,
    )


def test_the_table_fits_a_terminal_and_tells_identity() -> None:
    table = made_up_report([made_up_pair("a", 3.0, 2.0), made_up_pair("a", 9.0, 3.0)]).table()
    lines = table.splitlines()
    assert all(len(line) <= 100 for line in lines[2:-4])
    assert table.isascii()
    (row,) = [line for line in lines if line.startswith("open chat")]
    assert " ".join(row.split()) == "open chat 3.00x (2.00-4.00) 2.25x 2.00 50% 2.00 0.9 / 2.2 2/2"
    (total,) = [line for line in lines if line.startswith("overall")]
    assert total.split()[1:3] == ["3.33x", "2.40x"]
    assert "identical in every pair" in table


def test_one_pair_has_no_range() -> None:
    table = made_up_report([made_up_pair("a", 3.0, 2.0)]).table()
    (row,) = [line for line in table.splitlines() if line.startswith("open chat")]
    assert row.split()[2:4] == ["2.00x", "1.50x"]


def test_a_busy_machine_and_idle_drafters_are_told() -> None:
    assert made_up_report([made_up_pair("a", 3.0, 2.0)]).warnings == []
    plain = made_up_run([1, 2], 3.0, (0, 0), (0, 0))
    idle = made_up_report([Pair("a", "p", 0, "plain first", plain, plain, None)])
    assert ["Nothing was drafted in open chat" in warning for warning in idle.warnings] == [True]
    idle.machine["load_average"] = 3.1
    assert "load 3.1 on 2 cores" in idle.table()
    assert idle.as_dict()["warnings"] == idle.warnings
    assert all(warning in idle.markdown() for warning in idle.warnings)


def test_a_difference_is_shouted_only_where_identity_was_promised() -> None:
    pairs = [made_up_pair("a", 3.0, 2.0, same=False)]
    promised, free = made_up_report(pairs), made_up_report(pairs, identity_expected=False)
    assert not promised.identical
    assert "THE IDS WERE NOT IDENTICAL" in promised.table()
    assert "a/p, repeat 1: ids differ from token 2: plain has id 3, speculative has id 9" in promised.table()
    assert "NOT IDENTICAL" not in free.table()
    assert "as they may" in free.table()


def test_markdown_uses_the_metrics_names_and_escapes() -> None:
    text = made_up_report([made_up_pair("a", 3.0, 2.0)], name="my_model|<b>").markdown()
    lines = text.splitlines()
    assert lines[0] == r"# Plain against speculative: my\_model\|\<b\>"
    header = next(line for line in lines if line.startswith("| kind"))
    for name in ("tokens_per_pass", "acceptance_rate", "mean_acceptance_length", "decode_tps plain"):
        assert f"| {name} |" in header
    table = [line for line in lines if line.startswith("|")]
    assert table[2].count("|") == header.count("|")
    assert "| ngram | 4 | 2 | 50% | 2.00 |" in lines


# Real runs


def test_a_bench_on_a_real_engine(engine: Engine) -> None:
    said: list[str] = []
    names = ["code-edit/inventory", "open-chat/sky"]
    # A fixed length: whether `auto` drafts at all here is up to the clock.
    keywords: dict[str, Any] = {"repeats": 2, "max_tokens": 24, "seed": 5, "draft_length": 4}
    report = run_bench(engine, workloads=names, on_progress=said.append, **keywords)
    assert report.identical
    assert [kind.name for kind in report.kinds] == ["open-chat", "code-edit"]
    assert [(pair.kind, pair.repeat) for pair in report.pairs] == [
        ("open-chat", 0),
        ("open-chat", 1),
        ("code-edit", 0),
        ("code-edit", 1),
    ]
    assert [pair.order for pair in report.pairs] == ["plain first", "speculative first"] * 2
    assert len(said) == 5
    for pair in report.pairs:
        assert pair.plain.stats.drafted == 0
        assert pair.plain.stats.target_passes == pair.plain.stats.emitted == len(pair.plain.ids)
        assert pair.speculative.stats.emitted == len(pair.speculative.ids)
        assert pair.plain.stats.reused_tokens == pair.speculative.stats.reused_tokens == 0
        assert 0 < pair.plain.decode_s < pair.plain.wall_s
    assert report.overall.acceptance_rate is not None
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["identical"] is True
    assert document["model"]["dtype"] == "float32"
    assert set(document["versions"]) == {"python", "localspec", "mlx", "mlx-lm"}
    assert document["settings"]["workloads"] == ["open-chat/sky", "code-edit/inventory"]
    assert document["settings"]["seed"] == 5
    assert document["machine"]["cores"] >= 1
    assert len(document["pairs"]) == 4
    assert report.table()
    assert report.markdown()


def test_the_warm_up_is_not_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, int]] = []
    generate = Engine.generate

    def spy(self: Engine, prompt: Any, **settings: Any) -> Any:
        calls.append((settings["speculate"], settings["max_tokens"]))
        return generate(self, prompt, **settings)

    monkeypatch.setattr(Engine, "generate", spy)
    report = run_bench(engine, workloads=["open-chat/sky"], repeats=3, max_tokens=30)
    assert calls[:2] == [(False, 24), (True, 24)]
    assert [speculate for speculate, _ in calls[2:]] == [False, True, True, False, False, True]
    assert len(report.pairs) == 3


class _WrongEngine(Engine):
    """Speculates with another seed's noise."""

    def generate(self, prompt: Any, **settings: Any) -> Any:
        return super().generate(prompt, **{**settings, "seed": settings["seed"] + settings["speculate"]})


def test_wrong_ids_are_found_and_called_a_bug() -> None:
    wrong = _WrongEngine(tiny_model(), tiny_tokenizer(), name="wrong")
    report = run_bench(wrong, workloads=["open-chat/sky"], repeats=1, max_tokens=8, temperature=1.0, seed=1)
    assert not report.identical
    (pair,) = report.pairs
    assert pair.difference is not None
    assert pair.plain.ids[: pair.difference.index] == pair.speculative.ids[: pair.difference.index]
    assert pair.plain.ids[pair.difference.index] == pair.difference.plain_id
    assert pair.difference.near_tie is False
    assert "this is a bug" in report.table()


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_rules_that_keep_the_distribution_promise_no_identity_above_temperature_0(engine: Engine, accept: Any) -> None:
    keywords: dict[str, Any] = {"workloads": ["code-edit/inventory"], "repeats": 1, "max_tokens": 12}
    report = run_bench(engine, accept=accept, temperature=1.5, **keywords)
    assert not report.identity_expected
    assert all(pair.difference is None or pair.difference.gap is None for pair in report.pairs)
    assert report.identical or f"{accept} acceptance keeps the distribution" in report.table()
    assert run_bench(engine, accept=accept, temperature=0.0, **keywords).identity_expected


def test_the_gap_is_the_distance_to_the_top(engine: Engine) -> None:
    context = list(b"once upon a time")
    logits = engine.target.forward(mx.array(context), engine.target.new_caches())[-1].tolist()
    assert isinstance(logits, list)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    for temperature, scale in ((0.0, 1.0), (0.5, None)):
        settings = Settings(temperature=temperature, seed=2)
        gap, tolerance = key_gap(engine, context, settings, order[0], order[3])
        if scale is not None:
            assert gap == pytest.approx(logits[order[0]] - logits[order[3]], abs=1e-4)
            assert tolerance == 1e-3
        else:
            assert tolerance == 2e-3
            drawn = engine.generate(context, temperature=temperature, seed=2, max_tokens=1).ids[0]
            assert key_gap(engine, context, settings, drawn, drawn)[0] == pytest.approx(0, abs=1e-4)


def test_a_model_without_a_chat_template_gets_the_prompts_raw(engine: Engine) -> None:
    prompt = choose_workloads(["open-chat/sky"])[0].prompts[0]
    raw = Engine(tiny_model(), tiny_tokenizer(template=None))
    assert raw.tokenizer.decode(encode(raw, prompt)) == prompt.text
    with_template = engine.tokenizer.decode(encode(engine, prompt))
    assert with_template.startswith("<|im_start|>user\n")
    assert with_template.endswith("<|im_start|>assistant\n")


def test_nothing_to_compare_is_one_clear_line() -> None:
    with pytest.raises(LocalspecError, match="no drafters"):
        run_bench(Engine(tiny_model(), tiny_tokenizer(), drafters=()))
    with pytest.raises(SettingsError, match="needs a tokenizer"):
        run_bench(Engine(tiny_model()))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"repeats": 0}, "repeats"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"draft_length": 0}, "draft_length 0"),
        ({"draft_length": 99}, "draft_length"),
        ({"temperature": -1.0}, "temperature"),
        ({"accept": "always"}, "accept"),
        ({"workloads": ["poetry"]}, "poetry"),
    ],
)
def test_bad_settings_are_told_before_anything_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(SettingsError, match=words):
        run_bench(engine, **keywords)


def test_the_weights_format_is_that_of_most_bytes() -> None:
    import mlx.nn as nn

    model = tiny_model()
    assert weights_format(model) == "float32"
    model.set_dtype(mx.bfloat16)
    assert weights_format(model) == "bfloat16"
    nn.quantize(model, group_size=32, bits=4)
    assert weights_format(model) == "4-bit"
    assert cpu_model()


# The baseline


def test_the_baseline_pairs_alternate_and_agree(engine: Engine) -> None:
    found = baseline.compare(engine, pairs=3, max_tokens=20)
    assert [pair.order for pair in found.pairs] == ["mlx-lm", "localspec", "mlx-lm"]
    assert found.identical == 3
    assert found.ratio is not None
    assert found.ratio.low <= found.ratio.median <= found.ratio.high
    for pair in found.pairs:
        assert 2 <= len(pair.localspec.ids) <= 20
    with pytest.raises(SettingsError):
        baseline.compare(engine, pairs=0)


def test_the_baseline_ends_both_at_the_end_token() -> None:
    probe = Engine(tiny_model(), tiny_tokenizer())
    prompt = encode(probe, choose_workloads([baseline.PROMPT])[0].prompts[0])
    plain = list(baseline.localspec_ids(probe, prompt, 30))
    tokenizer = tiny_tokenizer()
    tokenizer.add_eos_token(str(plain[7]))
    ending = Engine(tiny_model(), tokenizer)
    stop = plain.index(plain[7]) + 1
    assert list(baseline.localspec_ids(ending, prompt, 30)) == plain[:stop]
    assert list(baseline.mlx_lm_ids(ending, prompt, 30)) == plain[:stop]


def test_the_baseline_prints_a_table_and_one_json_line_last(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        localspec, "load", lambda name, dtype, draft: engine if draft == "none" else None, raising=False
    )
    assert baseline.main(["tiny", "--pairs", "2", "--tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert document["identical"] == 2
    assert len(document["pairs"]) == 2
    assert any(line.startswith("mlx-lm's time / localspec's: median") for line in lines)


def test_the_bench_loads_no_mlx_before_it_runs() -> None:
    code = "import sys, localspec.bench.run as run; run.choose_workloads(None); print('mlx' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
