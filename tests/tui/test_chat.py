"""The chat: streaming, stopping, the input, commands, and ways out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from driving import answered, blocks, drive, lines, say, until
from scripted import ScriptedConversation, record, wait_forever
from textual import events
from textual.pilot import Pilot

from localspec.errors import ModelNotFoundError, NumericsError
from localspec.tui.app import ChatApp, run_chat

HELLO = record("Hel", "lo", (" there", "ngram"), (",", "resampled"), " friend", ".")


def test_an_answer_streams_from_one_thread_and_turns_follow_each_other() -> None:
    conversation = ScriptedConversation([HELLO, record("Again.")])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        await say(pilot, app, "And?")
        await answered(pilot, app)
        assert blocks(app) == [
            ("user", "Hi"),
            ("answer", "Hello there, friend."),
            ("user", "And?"),
            ("answer", "Again."),
        ]
        assert app.transcript.tokens == [*HELLO, *record("Again.")]
        assert "  Hello there, friend." in lines(app.transcript)
        assert app.prompt.text == ""

    drive(test, conversation)
    assert conversation.threads == {"localspec-decoder"}


def test_tokens_show_while_the_answer_is_being_written() -> None:
    gate = threading.Semaphore(3)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(app.transcript.tokens) == 3)
        assert app.busy
        assert "  Hello there▍" in lines(app.transcript)
        gate.release(10)
        await answered(pilot, app)
        assert "  Hello there, friend." in lines(app.transcript)

    drive(test, ScriptedConversation([HELLO], gate=gate))


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_stopping_keeps_the_partial_answer_and_the_next_message_works(key: str) -> None:
    gate = threading.Semaphore(2)
    conversation = ScriptedConversation([HELLO], gate=gate)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(app.transcript.tokens) == 2)
        await pilot.press(key)
        assert "stopping…" in lines(app.status)[0]
        gate.release()
        await answered(pilot, app)
        # What was yielded is what is shown: the token that came after the key is part of the conversation.
        kept = conversation.generations[0].text
        assert blocks(app) == [("user", "Hi"), ("answer", kept), ("note", "stopped")]
        assert kept == "Hello there"
        assert conversation.generations[0].closed_in == "localspec-decoder"
        gate.release(20)
        await say(pilot, app, "Go on")
        await answered(pilot, app)
        assert blocks(app)[-1] == ("answer", "Hello there, friend.")
        assert app.is_running

    drive(test, conversation)


def test_stopping_while_the_prompt_is_read() -> None:
    gate = threading.Semaphore(1)
    conversation = ScriptedConversation([HELLO], gate=gate, prompt_chunks=4)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "A long text")
        await until(pilot, lambda: "12 / 48" in app.status.state)
        await pilot.press("escape")
        gate.release()
        await answered(pilot, app)
        note = "stopped before the answer began; the message is not part of the chat"
        assert blocks(app) == [("user", "A long text"), ("note", note)]
        gate.release(30)
        await say(pilot, app, "Again")
        await answered(pilot, app)
        assert blocks(app)[-1] == ("answer", "Hello there, friend.")

    drive(test, conversation)


def test_an_escape_in_the_palette_stops_nothing() -> None:
    gate = threading.Semaphore(2)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(app.transcript.tokens) == 2)
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press("escape")
        gate.release(20)
        await answered(pilot, app)
        assert blocks(app)[-1] == ("answer", "Hello there, friend.")

    drive(test, ScriptedConversation([HELLO], gate=gate))


def test_the_second_ctrl_c_leaves() -> None:
    gate = threading.Semaphore(2)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(app.transcript.tokens) == 2)
        await pilot.press("ctrl+c", "ctrl+c")
        await until(pilot, lambda: not app.is_running)
        gate.release(20)

    app = drive(test, ScriptedConversation([HELLO], gate=gate))
    assert app.worker.join(10)


@pytest.mark.parametrize("key", ["ctrl+c", "ctrl+q", "ctrl+d"])
def test_ways_out_of_an_idle_chat(key: str) -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await pilot.press(key)
        await until(pilot, lambda: not app.is_running)

    app = drive(test, ScriptedConversation([HELLO]))
    assert app.worker.join(10)


def test_ctrl_d_deletes_while_there_is_text() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        app.prompt.text = "abc"
        await pilot.press("ctrl+d")
        assert app.prompt.text == "bc"
        assert app.is_running

    drive(test, ScriptedConversation([HELLO]))


def test_the_length_limit_and_errors_are_said() -> None:
    conversation = ScriptedConversation([HELLO, NumericsError("step 3:\nnot a number"), HELLO], finish_reason="length")

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        for text in ("one", "two", "three"):
            await say(pilot, app, text)
            await answered(pilot, app)
        limit = ("note", "length limit reached; /max sets it")
        answer = ("answer", "Hello there, friend.")
        assert blocks(app) == [
            ("user", "one"),
            answer,
            limit,
            ("user", "two"),
            ("error", "step 3: not a number"),
            ("user", "three"),
            answer,
            limit,
        ]

    drive(test, conversation)


def test_a_message_sent_while_the_model_loads_is_answered() -> None:
    opening = threading.Event()

    def load() -> ScriptedConversation:
        opening.wait(20)
        return ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        assert lines(app.status)[0].strip() == "loading smollm2…"
        await say(pilot, app, "Hi")
        opening.set()
        await until(pilot, lambda: len(app.transcript.tokens) == len(HELLO) and not app.busy)
        assert [block.kind for block in app.transcript.blocks] == ["note", "user", "answer"]
        assert "  Hello there, friend." in lines(app.transcript)

    drive(test, load, loaded=False)


def test_a_failed_load_shows_its_line_and_can_be_left() -> None:
    def load() -> ScriptedConversation:
        raise ModelNotFoundError("no model named [smol]; did you mean smollm2?")

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await until(pilot, lambda: app.failure is not None)
        assert "✗ no model named [smol]; did you mean smollm2?" in lines(app.transcript)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.is_running)

    app = drive(test, load, loaded=False)
    assert isinstance(app.failure, ModelNotFoundError)


def test_quitting_during_a_load_does_not_wait_for_it() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await pilot.press("ctrl+q")
        await until(pilot, lambda: not app.is_running)

    app = drive(test, wait_forever, loaded=False)
    assert not app.worker.join(0)


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", program], cwd=here, timeout=240, capture_output=True, text=True, check=False
    )


def test_a_process_ends_though_its_load_never_does() -> None:
    program = textwrap.dedent("""
        from localspec.tui import app
        from scripted import wait_forever

        run = app.ChatApp.run
        leave = lambda pilot: pilot.press("ctrl+q")
        app.ChatApp.run = lambda self: run(self, headless=True, auto_pilot=leave)
        app.PATIENCE_S = 0.1
        app.LEARNING_S = 3600
        app.run_chat(wait_forever, title="endless", settings={}, learns=True, at_end=lambda: print("amiss", end=""))
    """)
    ended = run_program(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "amiss"


@pytest.mark.parametrize("learns", [True, False])
def test_what_an_answer_teaches_is_saved_before_the_process_ends(learns: bool, tmp_path: Path) -> None:
    # Another process holds the file; here it lets go once the app has left the screen, and never where nobody waits.
    program = textwrap.dedent(f"""
        import threading
        from pathlib import Path
        from driving import say, until
        from localspec.ngrams.file import NgramFile, lock_of
        from localspec.ngrams import file as file_module
        from localspec.ngrams.lock import locked
        from localspec.tui import app
        from scripted import ScriptedConversation, ScriptedGeneration, record

        path, tries = Path({str(tmp_path)!r}) / "learned.ngrams", threading.Semaphore(0)
        file_module.PATIENCE = 3600
        kept = NgramFile(path, "f" * 64)
        go = threading.Event()

        def close(generation):
            tries.release()
            kept.learn([([1, 2, 3], 0)])
            print("saved", flush=True)

        async def leave(pilot):
            await until(pilot, lambda: pilot.app.conversation is not None)
            await say(pilot, pilot.app, "Hi")
            await until(pilot, lambda: bool(conversation.generations))
            gate.release()
            await until(pilot, lambda: bool(pilot.app.transcript.tokens))
            await pilot.press("ctrl+q")
            gate.release()
            tries.acquire()  # it learns

        def at_lock():
            with locked(lock_of(path), 0):
                held.set()
                go.wait()

        ScriptedGeneration.close = close
        run = app.ChatApp.run
        join = app.DecodingWorker.join

        def joined(worker, timeout):
            if timeout == app.LEARNING_S:
                go.set()
            return join(worker, timeout)

        app.DecodingWorker.join = joined
        app.ChatApp.run = lambda self: run(self, headless=True, auto_pilot=leave)
        app.PATIENCE_S, app.LEARNING_S = 0.1, 3600
        gate, held = threading.Semaphore(0), threading.Event()
        threading.Thread(target=at_lock, daemon=True).start()
        held.wait()
        conversation = ScriptedConversation([record("a", "b")], gate=gate)
        app.run_chat(lambda: conversation, title="t", settings={{}}, learns={learns}, at_end=lambda: print("end"))
    """)
    ended = run_program(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ("saved\nend\n" if learns else "end\n")
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"learned.ngrams.lock", *(["learned.ngrams"] if learns else [])}


def test_enter_sends_and_other_keys_make_lines() -> None:
    conversation = ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert app.prompt.text == "a\nb\nc"
        await pilot.press("enter")
        await answered(pilot, app)
        assert conversation.messages[0]["content"] == "a\nb\nc"

    drive(test, conversation)


def test_keys_that_come_all_at_once_are_taken_in_their_order() -> None:
    conversation = ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        for key in ("H", "i", "enter", "x"):
            app.post_message(events.Key(key, "\r" if key == "enter" else key))
        await until(pilot, lambda: bool(conversation.messages) and not app.busy)
        assert conversation.messages[0]["content"] == "Hi"
        assert app.prompt.text == "x"

    drive(test, conversation)


def test_a_paste_is_kept_whole_without_its_control_codes() -> None:
    conversation = ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        app.prompt.post_message(events.Paste("line one\r\nline two\n\x1b[31mline\tthree\x07"))
        await pilot.pause()
        assert app.prompt.text == "line one\nline two\n[31mline\tthree"
        await pilot.press("enter")
        await answered(pilot, app)
        assert conversation.messages[0]["content"] == "line one\nline two\n[31mline\tthree"

    drive(test, conversation)


def test_the_input_grows_to_six_lines() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        heights = []
        for count in (1, 3, 6, 40):
            app.prompt.text = "\n".join(["x"] * count)
            await pilot.pause()
            heights.append(app.prompt.content_size.height)
        assert heights == [1, 3, 6, 6]

    drive(test, ScriptedConversation([HELLO]))


def test_history_at_the_edges_of_the_input() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        for text in ("first", "second\nof two lines"):
            await say(pilot, app, text)
            await answered(pilot, app)
        app.prompt.text = "new"
        await pilot.press("up")
        assert app.prompt.text == "second\nof two lines"
        await pilot.press("up")  # within the text
        assert app.prompt.text == "second\nof two lines"
        await pilot.press("up")
        assert app.prompt.text == "first"
        await pilot.press("up")
        assert app.prompt.text == "first"
        await pilot.press("down", "down")
        assert app.prompt.text == "new"

    drive(test, ScriptedConversation([HELLO]))


def test_a_message_is_not_lost_while_an_answer_runs() -> None:
    gate = threading.Semaphore(1)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await say(pilot, app, "too early")
        assert app.prompt.text == "too early"
        assert app.legend.notice == "still answering; Esc stops"
        gate.release(20)
        await answered(pilot, app)

    drive(test, ScriptedConversation([HELLO], gate=gate))


def test_commands_change_what_the_next_answer_uses() -> None:
    conversation = ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        for line in ("/temp 0.8", "/seed 42", "/max 99", "/speculate off"):
            await say(pilot, app, line)
            assert app.prompt.text == ""
        assert lines(app.query_one("#title"))[0].endswith("temp 0.8 · seed 42 · speculation off")
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        assert conversation.sent_settings == [
            {"top_k": 5, "temperature": 0.8, "seed": 42, "max_tokens": 99, "speculate": False}
        ]
        await say(pilot, app, "/seed off")
        assert app.settings["seed"] is None

    drive(test, conversation, settings={"top_k": 5})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hlep", "no command /hlep; did you mean /help?"),
        ("/xyzzy", "no command /xyzzy; /help lists them"),
        ("/temp warm", "/temp takes a number of at least 0, as in /temp 0.8"),
        ("/temp -1", "temperature must be a number of at least 0, not -1.0"),
        ("/seed 1.5", "/seed takes a whole number or off, as in /seed 42"),
        ("/quit now", "/quit takes nothing after it"),
        ("/speculate maybe", "/speculate takes on or off"),
    ],
)
def test_a_wrong_command_is_one_line_and_stays_to_be_mended(line: str, said: str) -> None:
    conversation = ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, line)
        assert said in lines(app.legend)[0]
        assert app.prompt.text == line
        assert not conversation.messages

    drive(test, conversation)


def test_a_path_is_a_message() -> None:
    conversation = ScriptedConversation([HELLO])

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "/etc/hosts is what?")
        await answered(pilot, app)
        assert conversation.messages[0]["content"] == "/etc/hosts is what?"

    drive(test, conversation)


def test_clear_starts_over_even_in_the_middle() -> None:
    gate = threading.Semaphore(2)
    conversation = ScriptedConversation([HELLO], gate=gate)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(app.transcript.tokens) == 2)
        await say(pilot, app, "/clear")
        gate.release(20)
        await answered(pilot, app)
        assert app.transcript.blocks == []
        assert app.transcript.tokens == []
        assert conversation.messages == []
        assert conversation.threads == {"localspec-decoder"}

    drive(test, conversation)


def test_help_and_quit() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "/help")
        shown = "\n".join(lines(app.transcript))
        assert all(word in shown for word in ("/clear", "/temp [0.8]", "/seed [42|off]", "resampled", "Ctrl+J"))
        await say(pilot, app, "/quit")
        await until(pilot, lambda: not app.is_running)

    drive(test, ScriptedConversation([HELLO]), size=(100, 40))


def test_typing_in_the_transcript_goes_to_the_input() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        app.transcript.focus()
        await pilot.press("h", "i")
        assert app.prompt.text == "hi"

    drive(test, ScriptedConversation([HELLO]))


def test_a_fault_of_the_program_ends_the_app_and_is_not_swallowed() -> None:
    def load() -> ScriptedConversation:
        raise ZeroDivisionError("a fault")

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await until(pilot, lambda: not app.is_running)

    assert isinstance(drive(test, load, loaded=False).failure, ZeroDivisionError)


@pytest.mark.parametrize("error", [ZeroDivisionError("a fault"), ModelNotFoundError("no such model")])
def test_run_chat_raises_what_kept_the_chat_from_beginning(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> ScriptedConversation:
        raise error

    async def leave(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: pilot.app.failure is not None)  # type: ignore[attr-defined]
        pilot.app.exit()

    run = ChatApp.run
    monkeypatch.setattr(ChatApp, "run", lambda self: run(self, headless=True, auto_pilot=leave))
    with pytest.raises(type(error), match=str(error)):
        run_chat(load, title="none", settings={})
