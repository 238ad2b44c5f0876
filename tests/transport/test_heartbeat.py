"""Signs of life of a process."""

import os
import signal
import subprocess
import sys
import textwrap

from gyre.core.running_time import Silence
from gyre.transport.heartbeat import Heartbeat, beating

PUBLISHER = textwrap.dedent("""
    import threading
    from gyre.transport.heartbeat import beating
    print(beating("127.0.0.1"), flush=True)
    threading.Event().wait()
""")


def heard(heartbeat: Heartbeat) -> None:
    while not heartbeat.heard():
        pass


def test_a_process_that_lives_is_heard_and_one_that_is_stopped_is_not() -> None:
    publisher = subprocess.Popen([sys.executable, "-c", PUBLISHER], stdout=subprocess.PIPE, text=True)
    assert publisher.stdout is not None
    try:
        with Heartbeat("127.0.0.1", int(publisher.stdout.readline()), 30.0) as heartbeat:
            heard(heartbeat)
            publisher.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, publisher.pid, os.WSTOPPED)
            while heartbeat.heard():
                pass  # what was under way
            assert not heartbeat.heard()
            publisher.send_signal(signal.SIGCONT)
            heard(heartbeat)
            publisher.kill()
            publisher.wait()
            while heartbeat.heard():
                pass
    finally:
        publisher.kill()
        publisher.wait()


def test_several_readers_hear_it_and_one_that_leaves_harms_nobody() -> None:
    port = beating("127.0.0.1")
    assert beating("127.0.0.1") == port
    with Heartbeat("127.0.0.1", port, 30.0) as stays:
        for _ in range(3):
            with Heartbeat("127.0.0.1", port, 30.0) as leaves:
                heard(leaves)
            heard(stays)


def test_nobody_at_the_port_is_never_heard() -> None:
    with Heartbeat("127.0.0.1", 1, 1.0) as heartbeat:
        assert not heartbeat.heard()


def test_silence_is_what_someone_looked_for() -> None:
    silence = Silence(0.0, most_s=0.2)
    assert silence.look(0.1, sign=False) == 0.1
    assert round(silence.look(100.0, sign=False), 6) == 0.3, "the reader itself had not run"
    assert silence.look(100.1, sign=True) == 0.0
