"""Sixty programs that try to get out, or to take what others need: each ends and leaves nothing."""

from __future__ import annotations

import os
import socket
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spmdrl.sandbox import LaunchError, protection, ways
from spmdrl.sandbox.limits import Limits
from spmdrl.sandbox.supervisor import launch
from tests.helpers.pool_runs import wait_until

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not protection().is_enough, reason=protection().text),
]
SLEEP = "86398"  # seconds: by it a process that was left is known
TIMEOUT_S = 3.0
# What each may come to besides ok: a program that prints ESCAPED has done what it must not.
PROGRAMS = {
    "loop": "while True: pass",
    "loop_in_c": "sum(range(10**15))",
    "power": "9 ** 9 ** 9",
    "regex": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "sleep": f"import time; time.sleep({SLEEP})",
    "input": "import sys; sys.stdin.read(); import time; time.sleep(9999)",
    "ignores_signals": """
        import signal, time
        for n in range(1, 65):
            try: signal.signal(n, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(9999)
    """,
    "stops_itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "blocks_signals": "import signal, time; signal.pthread_sigmask(0, range(1, 65)); time.sleep(9)",
    "fork_bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "fork_chain": "import os\nwhile True:\n  if os.fork(): os._exit(0)",
    "thread_bomb": """
        import threading, time
        while True: threading.Thread(target=time.sleep, args=(9999,)).start()
    """,
    "daemon": f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 64)
                time.sleep({SLEEP})
            os._exit(0)
    """,
    "stopped_daemons": f"""
        import os, signal, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep({SLEEP})
    """,
    "zombies": "import os, time\nfor _ in range(6):\n  if os.fork() == 0: os._exit(0)",
    "vfork_exec": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while 1: 1'])",
    "memory": "x = bytearray(10**11)",
    "memory_bit_by_bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory_mapped": "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(1000)]",
    "memory_strings": "x = 'a'\nwhile True: x += x",
    "memory_objects": "x = []\nwhile True: x = [x, x]; x.append(list(range(10**6)))",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "deep_literal": "eval('(' * 10**5 + ')' * 10**5)",
    "deep_repr": "x = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "deep_delete": "x = ()\nfor _ in range(10**6): x = (x,)\ndel x",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "illegal": "import os; os.kill(os.getpid(), 4)",
    "exit_code": "import os; os._exit(255)",
    "exit_in_thread": "import threading, os; threading.Thread(target=os._exit, args=(3,)).start()",
    "flood": "while True: print('x' * 10**6)",
    "flood_of_errors": "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "no_text": "import os; os.write(1, bytes(range(256)) * 100 + b'\\xed\\xa0\\x80')",
    "escapes": "print('\\x1b[2J\\x1b]0;title\\x07\\0' * 1000)",
    "closes_all": "import os; os.closerange(0, 1000)",
    "closes_output": "import os, time; os.close(1); os.close(2); time.sleep(999)",
    "passes_output_on": f"""
        import os, time
        if os.fork() == 0:
            os.setsid(); time.sleep({SLEEP})
    """,
    "writes_to_the_status": """
        import os
        for fd in range(3, 64):
            try: os.write(fd, b"started\\nended 0\\nfailed no\\n"); print("ESCAPED", fd)
            except OSError: pass
    """,
    "kills_parent": """
        import os, signal
        for pid in (os.getppid(), PARENT, 1):
            try:
                if pid != os.getpid() and pid > 0: os.kill(pid, 9)
            except OSError: pass
    """,
    "kills_all": "import os; os.kill(-1, 9)",
    "kills_group": "import os; os.killpg(0, 9)",
    "stop_signal": "import os\ntry: os.kill(os.getppid(), 40)\nexcept OSError: pass",
    "traces": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for pid in (os.getppid(), PARENT):
            if pid > 1 and libc.ptrace(16, pid, 0, 0) == 0: print("ESCAPED")
    """,
    "reads_memory": """
        for path in ("/proc/self/mem", "/proc/1/mem", f"/proc/{PARENT}/mem", "/dev/mem"):
            try:
                with open(path, "r+b") as file:
                    if "self" not in path: print("ESCAPED", path)
            except OSError: pass
    """,
    "reads_environment": """
        for path in ("/proc/1/environ", f"/proc/{PARENT}/environ", f"/proc/{PARENT}/cmdline"):
            try:
                if open(path, "rb").read(): print("ESCAPED", path)
            except OSError: pass
    """,
    "writes_to_proc": """
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_adj",
                     f"/proc/{PARENT}/oom_score_adj", "/sys/fs/cgroup/cgroup.procs"):
            try: open(path, "w").write("1"); print("ESCAPED", path)
            except OSError: pass
    """,
    "reads_secrets": """
        import glob, os
        for path in (SECRET, "/etc/shadow", "/etc/passwd", *glob.glob("/home/*/*")):
            try:
                if open(path, "rb").read(): print("ESCAPED", path)
            except OSError: pass
    """,
    "reads_through_links": """
        import os
        os.symlink(SECRET, "link"); os.symlink("/", "root")
        for path in ("link", "root" + SECRET, "/box/../" + SECRET, "/proc/self/cwd/link",
                     "/proc/self/root" + SECRET):
            try: open(path).read(); print("ESCAPED", path)
            except OSError: pass
    """,
    "hard_link": "import os\ntry: os.link(SECRET, 'x'); print('ESCAPED')\nexcept OSError: pass",
    "leaves_its_folder": """
        import os
        for path in ("/tmp/../escaped", "/etc/escaped", "/var/tmp/escaped", "/dev/escaped", PLACE):
            try: open(path + "/x" if path == PLACE else path, "w"); print("ESCAPED", path)
            except OSError: pass
    """,
    "chroot": "import os\ntry: os.chroot('/'); print('ESCAPED')\nexcept OSError: pass",
    "mounts": """
        import ctypes
        if ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, 0) == 0: print("ESCAPED")
    """,
    "becomes_root": """
        import os
        for act in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.chown("main.py", 0, 0)):
            try: act(); os.getuid() == 0 and UID and print("ESCAPED")
            except OSError: pass
        try: open("/etc/hosts", "a"); print("ESCAPED hosts")
        except OSError: pass
    """,
    "raises_its_limits": """
        import resource
        for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CPU"):
            try: resource.setrlimit(getattr(resource, name), (-1, -1)); print("ESCAPED", name)
            except (OSError, ValueError): pass
    """,
    "huge_file": "open('x', 'wb').write(b'x' * (1 << 30))",
    "sparse_file": "open('x', 'wb').truncate(1 << 40)",
    "many_files": "for i in range(30000): open(f'f{i}', 'w').close()",
    "deep_folders": "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')",
    "closed_folders": """
        import os
        os.makedirs("a/b"); open("a/b/c", "w").write("x" * 1000)
        for name in ("a/b/c", "a/b", "a", "."): os.chmod(name, 0)
    """,
    "odd_files": """
        import os
        os.mkfifo("fifo"); os.symlink("loop", "loop"); os.mkdir("x" * 255)
        os.open(b"\\xff\\n", os.O_CREAT); os.chmod("main.py", 0)
    """,
    "fifo": "import os; os.mkfifo('f'); open('f').read()",
    "network": """
        import socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 40):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                try:
                    with socket.socket(family, kind) as s: s.connect(SERVER); print("ESCAPED")
                except (OSError, TypeError): pass
    """,
    "names": """
        import socket
        try: socket.gethostbyname("example.org"); print("ESCAPED")
        except OSError: pass
    """,
    "shared_memory": """
        import ctypes
        libc = ctypes.CDLL(None)
        if libc.shmget(1, 1 << 20, 0o1666) >= 0: print("ESCAPED")
    """,
}


def sleepers():
    """Return the processes of programs that live on, by what they sleep for."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            limits = (folder / "limits").read_text()
        except OSError:
            continue
        if f" {MARK_BYTES} " in limits:
            found.append(int(folder.name))
    return found


MARK_MB = 3  # of files; with the process's number a mark that all its children carry
MARK_BYTES = MARK_MB << 20


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.grid) for n in range(1, len(ways.ways())))]
)
def test_sixty_hostile_programs_are_contained_and_nothing_is_left(number, tmp_path, monkeypatch):
    """In the way that is chosen here; nightly in each."""
    assert len(PROGRAMS) >= 60
    name, way = ways.ways()[number] if number else ("chosen", ways.choose_way()[0])
    try:
        ways.probe_way(way, name=name)
    except LaunchError as error:
        pytest.skip(f"{name} is not permitted here: {error}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # folders of programs, where there are
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = (
            f"PARENT, SECRET, PLACE, UID = {os.getpid()}, {str(secret)!r}, {str(tmp_path)!r}, 1\n"
        )
        names += f"SERVER = {server.getsockname()!r}\n"

        def run(title, code):
            """Run one program."""
            began = time.monotonic()
            program = names + textwrap.dedent(code)
            compile(program, "main.py", "exec")
            # On a busy machine 3 s may be over before the memory is.
            timeout_s = TIMEOUT_S * (10 if "memory" in title else 1)
            limits = Limits(timeout_s, memory_mb=256, files_mb=MARK_MB)
            got = launch(program, way=way, limits=limits)
            assert "NameError" not in got.stderr, got
            return got, time.monotonic() - began

        with ThreadPoolExecutor(4) as threads:
            ends = dict(zip(PROGRAMS, threads.map(run, PROGRAMS, PROGRAMS.values())))
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    for name, (got, seconds) in ends.items():
        if name != "shared_memory" or way.seccomp:  # else the namespace alone keeps it in
            assert "ESCAPED" not in got.stdout, (name, got)
        assert seconds < TIMEOUT_S + 60, (name, seconds)  # its time, on a busy machine
        assert len(got.stdout) <= 1_000_000 and len(got.stderr) <= 1_000_000, name
    for name in ("loop", "sleep", "ignores_signals", "blocks_signals", "fork_bomb", "fifo"):
        assert ends[name][0].status == "timeout", (name, ends[name])
    for name in ("memory", "memory_bit_by_bit", "memory_strings", "huge_file", "sparse_file"):
        assert ends[name][0].status in ("error", "signal"), (name, ends[name])
    for name in ("flood", "flood_of_errors"):
        assert ends[name][0].status == "output", (name, ends[name])
    assert wait_until(lambda: not sleepers()), sleepers()
    assert os.listdir(tmp_path) == ["secret"]
