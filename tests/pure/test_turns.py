"""Do live runs take turns in order, and does nothing outlive or outwait a failure?"""

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))  # scripts/ is a folder of programs, not a package
turns = importlib.import_module("turns")

PREAMBLE = f"""
import os, sys, time
sys.path.append({str(SCRIPTS)!r})
from turns import TurnTaker
taker = TurnTaker.from_environment()
"""

OBEDIENT = """
for iteration in range(1, {iterations} + 1):
    assert taker.wait() == iteration
    taker.report({{"square": iteration ** 2, "pid": os.getpid()}})
"""


def run(tmp_path, name, body, iterations=3):
    body = body.format(iterations=iterations)
    command = [sys.executable, "-c", PREAMBLE + body]
    return turns.Run(name=name, command=command, iterations=iterations, log=tmp_path / f"{name}.log")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


def test_runs_alternate_and_each_iteration_begins_with_another(tmp_path):
    runs = [run(tmp_path, "a", OBEDIENT), run(tmp_path, "b", OBEDIENT), run(tmp_path, "short", OBEDIENT, iterations=1)]
    with turns.Turns(runs) as live:
        taken = list(live.take())
    assert [(iteration, name) for iteration, name, _ in taken] == [
        (1, "a"),
        (1, "b"),
        (1, "short"),
        (2, "b"),
        (2, "a"),
        (3, "a"),
        (3, "b"),
    ]
    assert all(figures["square"] == iteration**2 for iteration, _, figures in taken)
    assert len({figures["pid"] for _, _, figures in taken}) == 3


def test_a_run_that_dies_is_named_with_its_last_lines_and_ends_the_others(tmp_path):
    dying = OBEDIENT + "\nprint('before'); sys.exit(7)\n"
    bad = run(tmp_path, "bad", dying, iterations=1)
    runs = [run(tmp_path, "good", OBEDIENT), turns.Run(name="bad", command=bad.command, iterations=3, log=bad.log)]
    pids = set()

    def take_all():
        with turns.Turns(runs) as live:
            pids.update(figures["pid"] for _, _, figures in live.take())

    with pytest.raises(turns.RunFailed, match=r"(?s)the bad run .*exit code 7.*before"):
        take_all()
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_a_run_that_dies_before_its_first_turn_is_noticed_at_once(tmp_path):
    started = time.monotonic()
    runs = [run(tmp_path, "bad", "raise ValueError('no such flag')"), run(tmp_path, "good", OBEDIENT)]
    with pytest.raises(turns.RunFailed, match=r"(?s)the bad run .*no such flag"), turns.Turns(runs) as live:
        list(live.take())
    assert time.monotonic() - started < 30


def test_a_run_that_fails_after_its_last_iteration_is_a_failure(tmp_path):
    with (
        pytest.raises(turns.RunFailed, match=r"after its last iteration .*exit code 3"),
        turns.Turns([run(tmp_path, "late", OBEDIENT + "\nsys.exit(3)\n")]) as live,
    ):
        list(live.take())


def test_a_run_that_hangs_is_given_up(tmp_path):
    hanging = run(tmp_path, "hung", "taker.wait()\ntime.sleep(600)\n", iterations=1)
    with (
        pytest.raises(turns.RunFailed, match=r"hung run did not finish iteration 1 within 1 s \(still running\)"),
        turns.Turns([hanging], turn_seconds=1.0) as live,
    ):
        list(live.take())


def test_leaving_early_ends_every_run(tmp_path):
    pids = []
    with turns.Turns([run(tmp_path, "a", OBEDIENT), run(tmp_path, "b", OBEDIENT)]) as live:
        for _, _, figures in live.take():
            pids.append(figures["pid"])
            if len(pids) == 2:
                break
    assert not any(is_alive(pid) for pid in pids)


def test_runs_end_when_the_parent_is_killed(tmp_path):
    parent = f"""
import os, sys
sys.path.append({str(SCRIPTS)!r})
import pathlib, turns
child = {PREAMBLE + OBEDIENT.format(iterations=99)!r}
log = pathlib.Path({str(tmp_path / "child.log")!r})
with turns.Turns([turns.Run(name="a", command=[sys.executable, "-c", child], iterations=99, log=log)]) as live:
    for _, _, figures in live.take():
        print(figures["pid"], flush=True)
        os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=60)
    assert wait_until_gone(int(done.stdout))
    assert "the parent is gone" in (tmp_path / "child.log").read_text()


def test_a_stranger_on_the_port_takes_no_turn(tmp_path):
    with turns.Turns([run(tmp_path, "a", "time.sleep(0.5)\n" + OBEDIENT)]) as live:
        stranger = socket.create_connection(live._listener.getsockname())
        stranger.sendall(b'{"run": "a", "key": "guessed"}\n')
        assert [name for _, name, _ in live.take()] == ["a"] * 3
        stranger.close()


def test_without_a_parent_there_is_no_taker(monkeypatch):
    for name in (turns.ADDRESS_VARIABLE, turns.NAME_VARIABLE, turns.KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert turns.TurnTaker.from_environment() is None


def test_last_lines_survive_what_is_no_text(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n\xff\xfe\nlast\n")
    assert turns.last_lines(log, 2).splitlines()[-1] == "last"
    assert "first" not in turns.last_lines(log, 2)
