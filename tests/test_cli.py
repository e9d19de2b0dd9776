"""`localspec chat` and what all commands share: options, streams, exit codes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from scripted_engine import ESCAPE, Scripted, run

import localspec
from localspec.commands import chat
from localspec.commands.process import Process
from localspec.commands.root import cli
from localspec.errors import ModelNotFoundError, NumericsError
from localspec.stats import Stats
from localspec.tokens import Token

# -- one answer -------------------------------------------------------------------------------------------------------


def test_a_piped_prompt_gives_just_the_answer(scripted: Scripted) -> None:
    outcome = run("chat", stdin="Name two colours\n")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "Red, green.\n", "")
    assert scripted.sent == ["Name two colours"]
    assert scripted.loads[0][0] == "smollm2"
    assert scripted.generation is not None
    assert scripted.generation.closed


def test_prompt_option(scripted: Scripted) -> None:
    assert run("chat", "some-model", "-p", "Hi").stdout == "Red, green.\n"
    assert scripted.sent == ["Hi"]
    assert scripted.loads[0][0] == "some-model"


def test_what_is_piped_in_beside_a_prompt_is_attached(scripted: Scripted) -> None:
    run("chat", "-p", "Summarise:", stdin="line one\r\nline two\n")
    assert scripted.sent == ["Summarise:\n\nline one\nline two"]


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [((), ""), ((), " \n\t\n"), (("-p", ""), ""), (("-p", "  "), None), (("--json",), "")],
)
def test_an_empty_prompt_is_wrong_usage(scripted: Scripted, arguments: tuple[str, ...], stdin: str | None) -> None:
    outcome = run("chat", *arguments, stdin=stdin)
    assert outcome.exit_code == 2
    assert "the prompt is empty" in outcome.stderr
    assert not scripted.loads


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["a\n\n", "\n"], "a\n"),
        (["a\n", "\nb", "\n"], "a\n\nb\n"),
        (["\n\n a"], "\n\n a\n"),
        ([], "\n"),
        (["", ""], "\n"),
        (["[/", "[bold]", "\\n"], "[/[bold]\\n\n"),
    ],
)
def test_the_answer_ends_in_one_newline(scripted: Scripted, pieces: list[str], text: str) -> None:
    scripted.pieces = pieces
    assert run("chat", "-p", "Hi").stdout == text


def test_piped_output_is_the_exact_text(scripted: Scripted) -> None:
    scripted.pieces = ["a\x1b[31mb", "\u202e", "\r", "é中🙂"]
    assert run("chat", "-p", "Hi").stdout_bytes.decode() == "a\x1b[31mb\u202e\ré中🙂\n"


def test_on_a_terminal_the_answer_cannot_drive_it(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.pieces = ["a\x1b", "[31mb\x07", "\tc\n"]
    monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
    outcome = run("chat", "-p", "Hi")
    assert outcome.stdout == "a[31mb\tc\n"
    assert "seed 77" in outcome.stderr  # stderr counts as a terminal here, so the notes are shown


def test_settings_reach_the_engine(scripted: Scripted) -> None:
    run(
        *("chat", "-p", "Hi", "--system", "Be brief", "-t", "0.5", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1"),
        *("--seed", "18446744073709551615", "--max-tokens", "9", "--stop", "x", "--stop", "y", "--no-speculation"),
        *("--accept", "rejection", "--draft-length", "3", "--draft", "small", "--dtype", "bfloat16"),
    )
    assert scripted.settings == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "max_tokens": 9,
        "stop": ("x", "y"),
        "speculate": False,
        "accept": "rejection",
        "draft_length": 3,
    }
    assert scripted.system == "Be brief"
    ((_, keywords),) = scripted.loads
    assert keywords["draft"] == "small"
    assert keywords["dtype"] == "bfloat16"


def test_penalties_and_log_probabilities_reach_the_engine(scripted: Scripted) -> None:
    run(
        *("chat", "-p", "Hi", "--json", "--logprobs", "4", "--xtc-probability", "0.5", "--xtc-threshold", "0.2"),
        *("--repetition-penalty", "1.2", "--repetition-context-size", "0", "--presence-penalty", "-0.5"),
        *("--presence-context-size", "3", "--frequency-penalty", "1", "--frequency-context-size", "64"),
        *("--logit-bias", "198=-inf", "--logit-bias", "7=2.5"),
    )
    assert scripted.settings == {
        "max_tokens": 1024,
        "speculate": True,
        "logprobs": 4,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "repetition_penalty": 1.2,
        "repetition_context_size": 0,
        "presence_penalty": -0.5,
        "presence_context_size": 3,
        "frequency_penalty": 1.0,
        "frequency_context_size": 64,
        "logit_bias": {198: -math.inf, 7: 2.5},
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--logit-bias", "abc"], "'abc' is not a token id"),
        (["--logit-bias", "5"], "'5' is not a token id"),
        (["--logit-bias", "5=much"], "'5=much' is not a token id"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "a token id is given twice"),
        (["--logit-bias", "-5=1"], "integer of at least 0, not -5"),
        (["--logit-bias", "5=inf"], "logit_bias of token 5 must be a number from -inf to 3e+38, not inf"),
        (["--repetition-penalty", "-1"], "-1.0 is not in the range"),
        (["--presence-penalty", "nan"], "presence_penalty must be a number"),
        (["--frequency-penalty", "often"], "'often' is not a valid float"),
        (["--frequency-context-size", "-1"], "-1 is not in the range"),
        (["--xtc-probability", "2"], "not in the range"),
        (["--xtc-threshold", "0.6"], "not in the range"),
        (["--logprobs", "3"], "add --json"),
        (["--logprobs", "-3", "--json"], "-3 is not in the range"),
    ],
)
def test_wrong_sampling_options_are_told_in_one_line(scripted: Scripted, arguments: list[str], reason: str) -> None:
    outcome = run("chat", "-p", "Hi", *arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert reason in outcome.stderr.splitlines()[-1]
    assert not scripted.loads


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
def test_every_acceptance_rule_can_be_chosen(scripted: Scripted, accept: str) -> None:
    run("chat", "-p", "Hi", "--accept", accept)
    assert scripted.settings["accept"] == accept


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def test_a_grammar_reaches_the_engine(scripted: Scripted, tmp_path: Path) -> None:
    from localspec import grammar

    path = tmp_path / "schema.json"
    path.write_text("\ufeff" + SCHEMA, "utf-8")
    run("chat", "-p", "Hi", "--json-schema", str(path))
    assert scripted.settings["grammar"] == grammar.json_schema(SCHEMA)
    run("chat", "-p", "Hi", "--json-schema", "-", stdin=SCHEMA)
    assert scripted.settings["grammar"] == grammar.json_schema(SCHEMA)
    assert scripted.sent[-1] == "Hi"  # the schema is not read as its attachment
    run("chat", "-p", "Hi", "--regex", "a|b")
    assert scripted.settings["grammar"] == grammar.regex("a|b")


def test_nothing_is_read_before_the_program_starts_itself_over(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    monkeypatch.setattr(chat, "use_fast_blas", lambda *_: left.append(sys.stdin.read()))
    for arguments in (["-p", "Hi", "--json-schema", "-"], ["-p", "Hi"], []):
        run("chat", *arguments, stdin=SCHEMA)
    assert left == [SCHEMA] * 3


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--regex", "("], "unclosed group"),
        (["--regex", "a", "--json-schema", "-"], "exclude each other"),
        (["--json-schema", "no/such/file"], "no/such/file"),
        (["--json-schema", "{folder}"], "cannot read"),
        (["--json-schema", "{folder}/latin1"], "UTF-8"),
        (["--json-schema", "{folder}/text"], "not JSON"),
        (["--json-schema", "{folder}/bad"], "objekt"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_wrong_usage(
    scripted: Scripted, tmp_path: Path, arguments: list[str], hint: str
) -> None:
    (tmp_path / "latin1").write_bytes(b'{"const": "\xe9"}')
    (tmp_path / "text").write_text("schema", "utf-8")
    (tmp_path / "bad").write_text('{"type": "objekt"}', "utf-8")
    outcome = run("chat", "-p", "Hi", *(argument.replace("{folder}", str(tmp_path)) for argument in arguments))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert hint in outcome.stderr
    assert not scripted.loads


def test_defaults_are_those_of_settings(scripted: Scripted) -> None:
    run("chat", "-p", "Hi", "--draft-length", "auto")
    assert scripted.settings == {"max_tokens": 1024, "speculate": True, "draft_length": "auto"}
    assert scripted.loads[0][1]["dtype"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        *(["-t", "-1"], ["-t", "nan"], ["-t", "hot"], ["--top-p", "1.5"], ["--top-k", "-1"], ["--min-p", "2"]),
        *(["--seed", "-1"], ["--seed", "18446744073709551616"], ["--max-tokens", "0"], ["--stop", ""]),
        *(["--draft-length", "33"], ["--draft-length", "many"], ["--accept", "maybe"], ["--dtype", "int3"]),
        *(["--blas", "fast"], ["--nonsense"], ["model", "another"]),
    ],
)
def test_wrong_usage_is_exit_code_2(scripted: Scripted, arguments: list[str]) -> None:
    outcome = run("chat", "-p", "Hi", *arguments)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr
    assert not scripted.loads


def test_json_lines(scripted: Scripted) -> None:
    scripted.pieces = ["R\u2028", "中", ""]
    *tokens, result = [json.loads(line) for line in run("chat", "-p", "Hi", "--json").stdout.split("\n")[:-1]]
    assert [token["text"] for token in tokens] == scripted.pieces
    assert set(tokens[0]) == set(Token.__slots__)
    assert tokens[0]["logprob"] is None  # minus infinity, which JSON has not
    assert tokens[0]["top_logprobs"] == [[5, -0.5], [6, None]]
    assert result["finish_reason"] == "stop"
    assert result["seed"] == 77
    assert result["text"] == "R\u2028中"
    assert set(Stats().as_dict()) == set(result["stats"])


def test_notes_are_for_terminals_and_verbose(scripted: Scripted) -> None:
    quiet, verbose = run("chat", "-p", "Hi"), run("chat", "-p", "Hi", "--verbose")
    assert quiet.stderr == ""
    assert verbose.stdout == quiet.stdout
    assert "seed 77" in verbose.stderr


# -- how it ends ------------------------------------------------------------------------------------------------------


def test_an_error_is_one_line(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **keywords: Any) -> None:
        raise ModelNotFoundError(f"no model\nnamed {ESCAPE}[31m{name}")

    monkeypatch.setattr(localspec, "load", load)
    outcome = run("chat", "smolm", "-p", "Hi")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (1, "", "localspec: no model named [31msmolm\n")


def test_an_error_in_the_middle_keeps_what_was_printed(scripted: Scripted) -> None:
    scripted.pieces = ["half", NumericsError("not a number at step 1")]
    outcome = run("chat", "-p", "Hi")
    assert (outcome.exit_code, outcome.stdout) == (1, "half\n")
    assert outcome.stderr == "localspec: not a number at step 1\n"


def test_ctrl_c_keeps_what_was_printed(scripted: Scripted) -> None:
    scripted.pieces = ["half", KeyboardInterrupt()]
    outcome = run("chat", "-p", "Hi")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (130, "half\n", "")
    assert scripted.generation is not None
    assert scripted.generation.closed
    scripted.pieces = ["half", KeyboardInterrupt()]
    last = json.loads(run("chat", "-p", "Hi", "--json").stdout.splitlines()[-1])
    assert last["finish_reason"] is None
    assert last["text"] == "half"


def test_ctrl_c_while_loading(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(localspec, "load", load)
    outcome = run("chat", "-p", "Hi")
    assert (outcome.exit_code, outcome.output) == (130, "")


def test_ctrl_c_whose_exception_got_lost(scripted: Scripted) -> None:
    scripted.pieces = ["a", "b", "c"]
    outcome = run("chat", "-p", "Hi", obj=Process(interrupted=True))
    assert (outcome.exit_code, outcome.stdout) == (130, "\n")


def test_stdin_that_is_not_text(scripted: Scripted) -> None:
    outcome = run("chat", stdin=b"abc\xff\xfe")
    assert outcome.exit_code == 1
    assert outcome.stderr == "localspec: stdin is not UTF-8 text (at byte 3); convert it first\n"


def test_an_error_of_the_system_is_one_line(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **keywords: Any) -> None:
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr(localspec, "load", load)
    outcome = run("chat", "-p", "Hi")
    assert (outcome.exit_code, outcome.stderr) == (1, "localspec: /some/file: No space left on device\n")


def test_a_fault_of_the_program_is_not_hidden(scripted: Scripted) -> None:
    scripted.pieces = [ZeroDivisionError()]
    assert isinstance(CliRunner().invoke(cli, ["chat", "-p", "Hi"]).exception, ZeroDivisionError)


def test_every_command_has_examples() -> None:
    def walk(command: click.Command, path: list[str]) -> Iterator[list[str]]:
        yield path
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, [*path, name])

    paths = list(walk(cli, []))
    assert ["models", "list"] in paths
    for path in paths:
        outcome = run(*path, "--help")
        assert outcome.exit_code == 0
        assert "Examples:\n  " in outcome.stdout
    assert "130  interrupted" in run("--help").stdout


# -- on a terminal ----------------------------------------------------------------------------------------------------


def test_on_a_terminal_the_chat_opens(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def run_chat(open_conversation: Callable[[], Any], *, title: str, settings: dict[str, Any], **more: Any) -> None:
        events.append((title, settings))
        assert not scripted.loads  # the app's own thread loads
        open_conversation()

    monkeypatch.setattr("localspec.tui.app.run_chat", run_chat)
    monkeypatch.setattr(chat, "fetch", lambda *names: events.append(names))
    monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
    outcome = run("chat", "big", "--draft", "small", "--seed", "3", "--system", "Be brief")
    assert outcome.exit_code == 0
    assert events == [("big", "small"), ("big", {"seed": 3, "max_tokens": 1024, "speculate": True})]
    assert scripted.loads[0][0] == "big"
    assert scripted.system == "Be brief"


def test_no_chat_into_a_file(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "is_terminal", lambda stream: stream is sys.stdin)
    outcome = run("chat")
    assert outcome.exit_code == 2
    assert "needs a terminal" in outcome.stderr
