"""Which kernels are used: self-test, race, record, what the user says, and what happens when something goes wrong."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from kernels import MAC, Bench, Clock, bench
from scripted_engine import Scripted, run
from tiny import tiny_llama

from localspec.engine import Engine
from localspec.errors import KernelWarning, SettingsError
from localspec.kernels import place, records, registry, selection
from localspec.kernels.choice import choices, parse
from localspec.kernels.kernel import Heat
from localspec.kernels.place import Place
from localspec.kernels.race import MOST_PAIRS, SECONDS, WARM_UPS, Lap, Race, race
from localspec.kernels.records import Record, Records
from localspec.kernels.selection import Kernels, Status

__all__ = ["bench"]  # the fixture

# -- the race ---------------------------------------------------------------------------------------------------------


def heat(clock: Clock, ours: float, theirs: float, name: str = "all", **keywords: Any) -> Heat:
    return Heat(name, functools.partial(clock.spend, ours), functools.partial(clock.spend, theirs), **keywords)


def test_a_race_times_both_sides_and_takes_about_a_second() -> None:
    clock = Clock()
    result = race([heat(clock, 0.004, 0.01, "one"), heat(clock, 0.01, 0.02, "two")], clock)
    assert [lap.name for lap in result.laps] == ["one", "two"]
    assert [round(lap.ratio, 6) for lap in result.laps] == [2.5, 2.0]
    assert (round(result.laps[0].ours_ms, 6), round(result.laps[0].theirs_ms, 6)) == (4, 10)
    assert result.won
    assert clock.now - 100 == pytest.approx(SECONDS, abs=0.2)


def test_few_pairs_of_long_work_and_no_more_than_enough_of_short() -> None:
    clock = Clock()
    assert race([heat(clock, 3, 4)], clock).laps[0].pairs == 5
    assert race([heat(clock, 1e-6, 2e-6)], clock).laps[0].pairs == MOST_PAIRS


def test_neither_side_always_goes_first() -> None:
    clock, order = Clock(), []

    def work(side: str) -> list[mx.array]:
        order.append(side)
        return clock.spend(0.5)

    race([Heat("all", lambda: work("o"), lambda: work("t"))], clock)
    assert "".join(order[2 * WARM_UPS :]) == "ottoottoot"


def test_one_slow_moment_decides_nothing() -> None:
    clock, runs = Clock(), 0

    def ours() -> list[mx.array]:
        nonlocal runs
        runs += 1
        return clock.spend(5.0 if runs in (1, 6) else 0.01)

    assert race([Heat("all", ours, functools.partial(clock.spend, 0.02))], clock).ratio == pytest.approx(2)


def laps(*ratios: float, least: float = 0.95) -> Race:
    return Race(tuple(Lap(str(n), ratio, least, 1, ratio, 5) for n, ratio in enumerate(ratios)))


@pytest.mark.parametrize(
    ("ratios", "won"),
    [
        ((1.5,), True),
        ((1.03,), True),
        ((1.0,), False),  # a tie is MLX's
        ((0.96, 1.2, 1.3), True),
        ((0.94, 1.2, 1.3), False),  # clearly slower somewhere
        ((1.0, 1.02, 3.0), False),  # one good heat is not enough
        ((float("nan"),), False),
    ],
)
def test_won(ratios: tuple[float, ...], won: bool) -> None:
    assert laps(*ratios).won is won


def test_a_heat_says_what_it_may_cost() -> None:
    clock = Clock()
    many = [heat(clock, 0.01, 0.02, "4 rows"), heat(clock, 0.01, 0.02, "8 rows")]
    assert not race([heat(clock, 0.01, 0.0092, "1 row"), *many], clock).won
    assert race([heat(clock, 0.01, 0.0092, "1 row", least=0.9), *many], clock).won
    assert not race([heat(clock, 0.01, 0.0085, "1 row", least=0.9), *many], clock).won


def test_the_work_is_evaluated() -> None:
    """A lazy graph that cannot be computed fails in the race, not later."""

    def broken() -> list[mx.array]:
        return [mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)]

    broken()  # lazy: nothing happens yet
    with pytest.raises(RuntimeError):
        race([Heat("all", broken, lambda: [mx.array(1)])])


def test_a_race_without_heats_is_an_error() -> None:
    with pytest.raises(ValueError, match="heat"):
        race([])


# -- what the user says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "good", "slow"),
    [
        ("auto", "auto", "auto"),
        ("on", "on", "on"),
        (" OFF ", "off", "off"),
        ("good=on", "on", "auto"),
        ("off,good=on", "on", "off"),
        ("good = off , slow=on", "off", "on"),
        ("slow=auto,on", "on", "auto"),
    ],
)
def test_parse(bench: Bench, text: str, good: str, slow: str) -> None:
    found = parse(text)
    assert (found.of("good"), found.of("slow")) == (good, slow)


@pytest.mark.parametrize("text", ["", "yes", "goood=on", "good=1", "=on", "on,", "good", 1])
def test_what_is_not_a_choice_is_one_clear_line(bench: Bench, text: Any) -> None:
    with pytest.raises(SettingsError, match=r"auto, on, off or NAME=on.*good, bad, slow") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "own", "good", "slow"),
    [
        ("off", "auto", "off", "off"),
        ("off", "on", "on", "on"),
        ("off", "good=on", "on", "off"),
        ("off,good=on", "slow=on", "on", "on"),
        ("good=off", "on", "on", "on"),
        ("", "auto", "auto", "auto"),
    ],
)
def test_what_is_asked_here_wins_over_the_environment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, environment: str, own: str, good: str, slow: str
) -> None:
    monkeypatch.setenv("LOCALSPEC_KERNELS", environment)
    found = choices(own)
    assert (found.of("good"), found.of("slow")) == (good, slow)


def test_a_wrong_environment_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_KERNELS", "onn")
    with pytest.raises(SettingsError, match="LOCALSPEC_KERNELS: 'onn'"):
        Engine(tiny_llama(), drafters=[])


@pytest.mark.parametrize("command", ["chat", "bench", "verify"])
def test_the_option_is_checked_before_anything_is_loaded(bench: Bench, scripted: Scripted, command: str) -> None:
    outcome = run(command, "--kernels", "goood=on")
    assert outcome.exit_code == 2
    assert "'goood=on' is not auto, on, off" in outcome.stderr
    assert not scripted.loads


def test_the_option_and_its_notices_reach_the_engine(bench: Bench, scripted: Scripted, capsys: Any) -> None:
    run("chat", "-p", "Hi", "--kernels", "off,bad=on")
    kernels = scripted.loads[0][1]["kernels"]
    assert (kernels.choices.of("good"), kernels.choices.of("bad")) == ("off", "on")
    kernels.uses("bad")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("localspec: the bad kernel disagrees")
    assert err.count("\n") == 1


# -- the decision -----------------------------------------------------------------------------------------------------


def test_auto_uses_what_agreed_and_won(bench: Bench) -> None:
    kernels = bench.kernels()
    assert [kernels.uses(name) for name in ("good", "bad", "slow")] == [True, False, False]
    assert [kernels.decision(name).status for name in ("good", "bad", "slow")] == [
        Status.IN_USE, Status.DISAGREES, Status.LOST,
    ]  # fmt: skip
    assert bench.ran == ["good test", "good race", "bad test", "slow test", "slow race"]
    assert len(bench.said) == 1
    assert "the bad kernel disagrees" in bench.said[0]
    assert "row 3: 0.5 instead of 0.25" in bench.said[0]


def test_tests_run_once_for_all_engines_of_a_machine(bench: Bench) -> None:
    first = [bench.kernels().uses(name) for name in ("good", "bad", "slow")]
    ran = list(bench.ran)
    assert [bench.kernels().uses(name) for name in ("good", "bad", "slow")] == first
    assert bench.ran == ran


@pytest.mark.parametrize(
    "change", [{"device": "Apple M8"}, {"macos": "27.2"}, {"mlx": "0.33.0"}, {"mlx_lm": "0.33.0"}, {"sources": "e"}]
)
def test_a_record_holds_for_its_place_alone(bench: Bench, change: dict[str, str]) -> None:
    bench.kernels().uses("good")
    bench.at(replace(MAC, **change))
    bench.add("good", "now it differs")
    assert not bench.kernels().uses("good")
    bench.at(MAC)
    assert bench.kernels().uses("good")
    assert bench.ran == ["good test", "good race", "good test"]


def test_off_runs_nothing(bench: Bench) -> None:
    kernels = bench.kernels("off")
    assert not kernels.uses("good")
    assert kernels.decision("good").status is Status.OFF
    assert (bench.ran, bench.said, bench.file.exists()) == ([], [], False)


def test_forced_on_skips_the_race_and_never_the_self_test(bench: Bench) -> None:
    kernels = bench.kernels("on")
    assert [kernels.uses(name) for name in ("good", "bad", "slow")] == [True, False, True]
    assert bench.ran == ["good test", "bad test", "slow test"]
    assert len(bench.said) == 1  # one line for the one that was wanted and is not used


def test_forced_on_uses_a_loser_and_not_what_was_found_to_disagree(bench: Bench) -> None:
    for name in ("bad", "slow"):
        bench.kernels().uses(name)
    bench.ran.clear()
    bench.said.clear()
    kernels = bench.kernels("on")
    assert [kernels.uses(name) for name in ("bad", "slow")] == [False, True]
    assert not bench.ran
    assert len(bench.said) == 1


def test_a_forced_kernel_still_has_its_race_to_run(bench: Bench) -> None:
    assert bench.kernels("on").uses("slow")
    assert not bench.kernels("auto").uses("slow")
    assert bench.ran == ["slow test", "slow test", "slow race"]
    assert bench.kernels("on").uses("slow")
    assert len(bench.ran) == 3


def test_without_metal_the_references_run(bench: Bench) -> None:
    bench.at(None)
    kernels = bench.kernels()
    assert not kernels.uses("good")
    assert kernels.decision("good").status is Status.NO_METAL
    assert (bench.ran, bench.said) == ([], [])
    forced = bench.kernels("on")
    assert not any(forced.uses(name) for name in ("good", "bad", "slow"))
    assert len(bench.said) == 1
    assert "no Metal here" in bench.said[0]


def test_metal_is_where_mlx_computes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Available but not the default device: the arrays live elsewhere."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert place.here() is None
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M9"})
    here = place.here()
    assert here is not None
    assert (here.device, here.mlx, here.mlx_lm) == ("Apple M9", version("mlx"), version("mlx-lm"))
    assert here.sources == place.sources_digest()
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert place.here() is None


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("[metal::Device] Unable to build\nmetal library"),
        ValueError("x"),
        MemoryError(),
        OSError("gone"),
        AttributeError("another mlx-lm"),
        ImportError("another mlx-lm"),
        TypeError("another mlx-lm"),
    ],
)
@pytest.mark.parametrize("where", ["self-test", "race"])
def test_what_cannot_be_built_or_run_is_not_used(bench: Bench, fault: Exception, where: str) -> None:
    bench.add("odd", fault if where == "self-test" else None, fault if where == "race" else 2.0)
    kernels = bench.kernels()
    assert not kernels.uses("odd")
    assert kernels.decision("odd").status is Status.FAILED
    assert len(bench.said) == 1
    assert "\n" not in bench.said[0]
    assert where in bench.said[0]
    ran = list(bench.ran)
    assert not bench.kernels("on").uses("odd")  # on record, and not tried at every start
    assert bench.ran == ran


def test_ctrl_c_in_a_test_decides_nothing(bench: Bench) -> None:
    bench.add("odd", KeyboardInterrupt())
    kernels = bench.kernels()
    with pytest.raises(KeyboardInterrupt):
        kernels.uses("odd")
    bench.add("odd")
    assert kernels.uses("odd")


def test_an_unknown_kernel_is_a_fault_of_the_program(bench: Bench) -> None:
    with pytest.raises(KeyError):
        bench.kernels().uses("goood")


def test_a_library_user_is_warned(bench: Bench) -> None:
    with pytest.warns(KernelWarning, match="bad kernel disagrees"):
        Kernels(clock=bench.clock).uses("bad")


def test_a_strict_user_gets_the_warning_as_an_error_once(bench: Bench) -> None:
    kernels = Kernels(clock=bench.clock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KernelWarning):
            kernels.uses("bad")
        assert not kernels.uses("bad")


# -- one decision for an engine's life --------------------------------------------------------------------------------


def test_an_engine_decides_once(bench: Bench) -> None:
    engine = Engine(tiny_llama(), drafters=[], kernels=bench.kernels())
    assert engine.kernels.uses("good")
    assert not engine.kernels.uses("slow")
    # Everything that the decision came from changes, and the engine's does not.
    bench.add("good", "now it differs")
    bench.add("slow", ratio=3.0)
    for name in ("good", "slow"):
        bench.kernels().test(name)
    assert [engine.kernels.uses(name) for name in ("good", "slow")] == [True, False]
    bench.at(None)
    assert [engine.kernels.uses(name) for name in ("good", "slow")] == [True, False]
    bench.at(MAC)
    after = Engine(tiny_llama(), drafters=[], kernels=bench.kernels())
    assert [after.kernels.uses(name) for name in ("good", "slow")] == [False, True]


def test_an_engine_takes_the_words_too(bench: Bench) -> None:
    assert Engine(tiny_llama(), drafters=[], kernels="off").kernels.choices.of("good") == "off"
    assert Engine(tiny_llama(), drafters=[]).kernels.choices.of("good") == "auto"


def test_many_threads_get_one_decision_from_one_test(bench: Bench) -> None:
    engines = [bench.kernels() for _ in range(3)]
    answers: list[bool] = []
    self_test = registry.kernel("good").self_test

    def slow_test() -> str | None:
        time.sleep(0.05)  # the others arrive meanwhile
        return self_test()

    sys.modules["fake_good"].KERNEL = replace(registry.kernel("good"), self_test=slow_test)
    threads = [threading.Thread(target=lambda e=e: answers.append(e.uses("good"))) for e in engines * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 12
    assert bench.ran == ["good test", "good race"]


def test_later_calls_look_nothing_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = bench.kernels()
    kernels.uses("good")
    monkeypatch.setattr(selection, "Records", None)
    monkeypatch.setattr(place, "here", None)
    assert kernels.uses("good")
    with pytest.raises(TypeError):  # the plant works: a first call would notice
        kernels.uses("slow")


# -- failures in use --------------------------------------------------------------------------------------------------


def broken() -> mx.array:
    return mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)  # fails when it is evaluated, as a kernel's build does


def test_a_kernel_that_fails_in_use_gives_way_to_its_reference(bench: Bench) -> None:
    kernels = bench.kernels()
    assert kernels.run("good", lambda: (mx.array(1),), lambda: (mx.array(2),))[0].item() == 1
    assert kernels.run("good", lambda: (broken(),), lambda: (mx.array(2),))[0].item() == 2
    assert kernels.run("good", lambda: (mx.array(1),), lambda: (mx.array(2),))[0].item() == 2  # from now on
    assert kernels.decision("good").status is Status.FAILED
    assert len(bench.said) == 1
    assert "the good kernel failed" in bench.said[0]
    assert bench.kernels().uses("good")  # another engine may have more luck: memory may have been short


def test_a_fault_that_the_reference_has_too_is_not_the_kernels(bench: Bench) -> None:
    kernels = bench.kernels()
    with pytest.raises(RuntimeError):
        kernels.run("good", lambda: [broken()], lambda: [broken()])
    assert kernels.uses("good")
    assert not bench.said


def test_a_kernel_that_is_not_used_is_not_run(bench: Bench) -> None:
    def never() -> mx.array:
        raise AssertionError

    assert bench.kernels().run("slow", never, lambda: mx.array(2)).item() == 2


# -- the record -------------------------------------------------------------------------------------------------------


def record(kernel: str = "good", where: Place = MAC, **fields: Any) -> Record:
    made = Record(kernel, where, "agreed", "", laps(2.0, 1.5), "2026-11-30T07:00:00+00:00")
    return replace(made, **fields)


def test_a_record_comes_back_as_it_was(bench: Bench) -> None:
    store = Records(bench.said.append)
    kept = [record(), record("bad", outcome="disagreed", detail="é\n", race=None), record(where=replace(MAC, mlx="1"))]
    for one in kept:
        assert store.keep(one) == one
    assert [store.find(one.kernel, one.place) for one in kept] == kept
    assert store.find("good", replace(MAC, mlx="2")) is None
    assert bench.file.stat().st_mode & 0o777 == 0o600
    document = json.loads(bench.file.read_text())
    assert document["version"] == records.VERSION
    assert document["records"][0]["race"]["won"] is True


def test_a_win_on_file_is_judged_again_and_not_believed(bench: Bench) -> None:
    bench.kernels().uses("slow")
    bench.file.write_text(bench.file.read_text().replace('"won": false', '"won": true'))
    assert not bench.kernels().uses("slow")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"version": 2, "records": []}',
        b'{"version": 1}',
        b'{"version": 1, "records": [{}]}',
        b'{"version": 1, "records": 5}',
        b"[" * 100_000,
        "race",
        "outcome",
        "place",
        "detail",
        "no place",
        "pairs",
    ],
)
def test_a_damaged_or_foreign_file_is_set_aside_and_rebuilt(bench: Bench, content: bytes | str) -> None:
    if isinstance(content, str):  # one field of a real record is wrong
        bench.kernels().uses("good")
        document = json.loads(bench.file.read_text())
        wrong: dict[str, Any] = {"race": {"laps": []}, "place": {"device": 5}, "no place": [], "pairs": math.inf}
        first = document["records"][0]
        part = first["race"]["laps"][0] if content == "pairs" else first
        part[content.removeprefix("no ")] = wrong.get(content, 7)
        content = json.dumps(document).encode()
        bench.ran.clear()
    bench.file.parent.mkdir(exist_ok=True)
    bench.file.write_bytes(content)
    assert bench.kernels().uses("good")
    assert bench.ran == ["good test", "good race"]
    assert bench.file.with_name("kernels.json.broken").read_bytes() == content
    assert len(bench.said) == 1
    assert "moved to kernels.json.broken" in bench.said[0]
    assert bench.kernels().uses("good")
    assert len(bench.ran) == 2


def test_a_file_that_another_process_mended_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Records(bench.said.append)
    store.keep(record())
    good = bench.file.read_text()
    bench.file.write_text("{")
    lock = store._lock

    def mended() -> Any:
        bench.file.write_text(good)
        return lock()

    monkeypatch.setattr(store, "_lock", mended)
    assert store.find("good", MAC) == record()
    assert not bench.said
    assert bench.file.read_text() == good


@pytest.mark.parametrize("where", ["a file in place of the folder", "a folder in place of the file"])
def test_where_nothing_can_be_kept_kernels_are_used_all_the_same(bench: Bench, where: str) -> None:
    if where.startswith("a file"):
        bench.file.parent.write_text("")
    else:
        (bench.file / "x").mkdir(parents=True)
        (bench.file.parent / "kernels.json.broken").write_text("in the way")
    kernels = bench.kernels()
    assert kernels.uses("good")
    assert kernels.uses("good")
    assert not kernels.uses("slow")
    assert 1 <= len(bench.said) <= 2  # said once, not once for each kernel
    assert bench.ran == ["good test", "good race", "slow test", "slow race"]


def test_the_first_of_two_processes_decides(bench: Bench) -> None:
    """Both raced; one wrote first. Ids must not depend on which process one talks to."""
    store = Records(bench.said.append)
    first, second = record(race=laps(1.01)), record(race=laps(1.05))
    assert store.keep(first) == first
    assert store.keep(second) == first
    assert store.find("good", MAC) == first
    assert store.keep(second, replace=True) == second
    assert store.find("good", MAC) == second


def test_what_once_failed_to_agree_stays_out(bench: Bench) -> None:
    store = Records(bench.said.append)
    bad = record(outcome="disagreed", race=None)
    assert store.keep(record()) == record()
    assert store.keep(bad) == bad
    assert store.keep(record()) == bad


def test_a_race_completes_a_record(bench: Bench) -> None:
    store = Records(bench.said.append)
    store.keep(record(race=None))
    assert store.keep(record()) == record()


def test_the_file_does_not_grow_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST", 3)
    store = Records(bench.said.append)
    for number in range(5):
        store.keep(record(where=replace(MAC, mlx=str(number))))
    assert [store.find("good", replace(MAC, mlx=str(n))) is not None for n in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


WRITER = """
import sys
from localspec.kernels.place import Place
from localspec.kernels.records import Record, Records
store = Records(lambda line: sys.exit(line))
for number in range(20):
    store.keep(Record(f"k{number}", Place(sys.argv[1], "", "", "", ""), "agreed", "", None, ""))
"""


def test_processes_that_write_at_once_lose_nothing(bench: Bench) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, name], env=os.environ, stderr=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    for writer in writers:
        _, complaints = writer.communicate(timeout=120)
        assert (writer.returncode, complaints) == (0, "")
    store = Records(bench.said.append)
    assert all(store.find(f"k{n}", Place(name, "", "", "", "")) for name in ("a", "b") for n in range(20))
    assert sorted(os.listdir(bench.file.parent)) == [".kernels.json.lock", "kernels.json"]


def test_writing_without_the_lock_would_lose_records(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is what the test above is about: while one process holds it, another waits before it even reads."""
    store, other = Records(bench.said.append), Records(bench.said.append)
    read, order = store._read, []

    def slow_read() -> Any:
        order.append("first reads")
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()  # it waits
        return read()

    def write_other() -> None:
        other.keep(record("other"))
        order.append("second is done")

    thread = threading.Thread(target=write_other)
    monkeypatch.setattr(store, "_read", slow_read)
    store.keep(record())
    order.append("first is done")
    thread.join()
    assert order[0] == "first reads"
    assert all(other.find(name, MAC) for name in ("good", "other"))


# -- what records hold for --------------------------------------------------------------------------------------------


def test_the_digest_sees_every_change(tmp_path: Path) -> None:
    one, two = tmp_path / "a.metal", tmp_path / "b.py"
    one.write_text("x")
    two.write_text("y")
    before = place.digest([one, two])
    assert place.digest([two, one]) == before
    two.write_text("z")
    assert place.digest([one, two]) != before
    one.write_text("xb.pyz")  # what a digest of bare names and contents would not tell from the two
    folder = tmp_path / "split"
    folder.mkdir()
    (folder / "a.metal").write_text("x")
    (folder / "b.py").write_text("z")
    assert place.digest([one]) != place.digest(list(folder.iterdir()))


def test_every_registered_kernel_is_what_it_is_called() -> None:
    for name in registry.names():
        kernel = registry.kernel(name)
        assert kernel.name == name
        assert kernel.purpose
        assert "," not in name
        assert "=" not in name


def test_a_choice_for_all_kernels_does_not_ask_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_KERNELS", "bogus")
    assert choices("off").of("verify") == "off"
    with pytest.raises(SettingsError, match="LOCALSPEC_KERNELS: 'bogus'"):
        choices("verify=off")


@pytest.mark.parametrize(("text", "about"), [("on,off", "all kernels"), ("verify=on,verify=off", "verify")])
def test_a_choice_too_many_is_told(text: str, about: str) -> None:
    with pytest.raises(SettingsError, match=f"one choice too many for {about}"):
        choices(text)


def test_a_record_that_cannot_be_read_stays_where_it_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.kernels().uses("good")
    content = bench.file.read_bytes()

    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(type(bench.file), "read_text", refused)
        assert bench.kernels().outlook("good").status is Status.UNTRIED
    assert bench.file.read_bytes() == content
    assert any("cannot be read (Permission denied)" in line for line in bench.said)
