"""Hostile programs in the sandbox. Each is bounded, so that a hole in it does not hurt."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from spmdrl.sandbox import LaunchError, protection, run_python, ways
from spmdrl.sandbox.limits import Limits, Way
from spmdrl.sandbox.seccomp import seccomp_filter
from spmdrl.sandbox.supervisor import launch
from tests.helpers.pool_runs import wait_until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not protection().is_enough, reason=protection().text),
]
needs_filter = pytest.mark.skipif(not ways.choose_way()[0].seccomp, reason="needs seccomp")
SLACK_S = 40.0  # the machine may be busy; a program that escapes would sleep for 60


# Inherited by all that a program starts, and seen from outside: whose process it is.
MARK_MB = 100 + os.getpid() % 100_000


def run(code, *, timeout_s=10.0, **options):
    """Run a program; check that nothing of it is left and that its time was kept."""
    began = time.monotonic()
    options = {"files_mb": MARK_MB} | options
    result = run_python(textwrap.dedent(code), timeout_s=timeout_s, **options)
    assert time.monotonic() - began < timeout_s + SLACK_S
    assert not children(), f"left: {children()}"
    return result


def children(of=None, *, only_programs=False):
    """Return the process ids of launchers of a process, this one by default, and of programs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            limits = (folder / "limits").read_text()
        except OSError:
            continue
        is_program = re.search(rf"Max file size +{MARK_MB << 20} ", limits)
        is_launcher = command[-2:-1] == [b"%d" % (of or os.getpid())] and any(
            b"launcher.main" in part for part in command
        )
        if is_program or (is_launcher and not only_programs):
            found.append(int(folder.name))
    return found


def launching(body):
    """Return the program of a process that runs a program."""
    return (
        f"import sys; sys.path[:] = {[str(Path(__file__).parents[2]), *sys.path]!r}\n"
        "from spmdrl.sandbox import run_python\n"
        f"print(run_python({body!r}, timeout_s=60, files_mb={MARK_MB}).status)"
    )


# --------------------------------------------------------------------------- plain programs


def test_a_program_gets_its_input_and_files_and_its_output_comes_back():
    got = run_python(
        "import sys, helper\nprint(input() + helper.WORD, open('data/x.bin').read())\n"
        "print('oops', file=sys.stderr)",
        stdin="héllo ",
        timeout_s=10,
        files={"helper.py": "WORD = 'wörld'", "data/x.bin": b"\x41"},
    )
    assert (got.status, got.exit_code) == ("ok", 0)
    assert (got.stdout, got.stderr) == ("héllo wörld A\n", "oops\n")
    assert 0 <= got.seconds < 10  # 0 where a busy machine sees beginning and end at once


@pytest.mark.parametrize(
    ("code", "status", "exit_code", "words"),
    [
        ("import sys; sys.exit(3)", "error", 3, ""),
        ("1 / 0", "error", 1, "ZeroDivisionError"),
        ("def f(:", "error", 1, "SyntaxError"),
        ("x = '\ud800'", "error", 1, "SyntaxError"),
        ("import os; os.abort()", "signal", -signal.SIGABRT, ""),
        ("import ctypes; ctypes.string_at(0)", "signal", -signal.SIGSEGV, ""),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f([n])\nf(0)", None, None, ""),
        ("def f(): f()\nf()", "error", 1, "RecursionError"),
    ],
)
def test_every_end_has_its_status(code, status, exit_code, words):
    got = run_python(code, timeout_s=20, memory_mb=100)
    if status is None:  # out of stack or out of memory: either way it ends
        assert got.status in ("signal", "error"), got
        return
    assert (got.status, got.exit_code) == (status, exit_code), got
    assert words in got.stderr


def test_threads_processes_and_big_recursion_of_honest_programs_work():
    got = run_python(
        textwrap.dedent("""
        import sys, threading, multiprocessing, subprocess, asyncio, tempfile
        sys.setrecursionlimit(100000)
        threading.stack_size(64 << 20)
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        found = []
        thread = threading.Thread(target=lambda: found.append(depth(20000)))
        thread.start(); thread.join()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            found += pool.map(abs, [-1, -2])
        found.append(asyncio.run(asyncio.sleep(0, 7)))
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        print(found)
    """),
        timeout_s=20,
    )
    assert got.stdout == "[20000, 1, 2, 7]\n", got


def test_packages_can_be_lent(tmp_path):
    numpy = pytest.importorskip("numpy")
    (tmp_path / "helper.py").write_text("WORD = 'lent'")
    tmp_path.chmod(0o755)
    got = run_python("import helper; print(helper.WORD)", timeout_s=20, packages=[str(tmp_path)])
    assert got.stdout == "lent\n", got
    code = "import numpy; print(numpy.arange(4).sum())"
    assert run_python(code, timeout_s=20).status == "error"
    lent = str(Path(numpy.__file__).parent.parent)
    got = run_python(code, timeout_s=20, packages=[lent])
    assert got.stdout == "6\n", got


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": 0}, "timeout_s: must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": 1, "memory_mb": 8}, "memory_mb: must be above 63, got 8"),
        ({"timeout_s": 1, "files": {"../x": ""}}, "relative path"),
        ({"timeout_s": 1, "files": {"/etc/x": ""}}, "relative path"),
        ({"timeout_s": 1, "files": {"main.py": ""}}, "main.py"),
        ({"timeout_s": 1, "packages": ["/no/such"]}, "not a folder"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        run_python("pass", **options)


# --------------------------------------------------------------------------- time and output


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal, time\nfor n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "time.sleep(60)",
        "import os, time; os.close(0); os.close(1); os.close(2); time.sleep(60)",
        "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=[60]).start()",
        "9**9**9",
    ],
)
def test_endless_programs_end_at_their_deadline(code):
    got = run(code, timeout_s=0.7)
    assert (got.status, got.exit_code) == ("timeout", -9)
    assert 0.7 <= got.seconds < 0.7 + SLACK_S


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_while_it_is_read(stream):
    code = f"import sys\nfor _ in range(4000): sys.{stream}.write('x' * 100_000)"  # 400 MB at most
    got = run(code, output_bytes=50_000)
    assert got.status == "output"
    assert len(getattr(got, stream)) == 50_000
    got = run_python("print('x' * 49_999)", timeout_s=10, output_bytes=50_000)
    assert (got.status, len(got.stdout)) == ("ok", 50_000)


def test_output_before_the_deadline_is_kept():
    got = run("print('early', flush=True)\nimport time; time.sleep(60)", timeout_s=5.0)
    assert (got.status, got.stdout) == ("timeout", "early\n")


# --------------------------------------------------------------------------- processes


def test_daemons_do_not_outlive_the_program():
    got = run("""
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.close(0); os.close(1); os.close(2)
                    time.sleep(60)
                os._exit(0)
        print("gone")
    """)
    assert (got.status, got.stdout) == ("ok", "gone\n")


def test_a_daemon_that_is_alone_dies_at_the_deadline_too():
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        time.sleep(60)
    """
    got = run(code, timeout_s=1.0)
    assert got.status == "timeout"


@pytest.mark.skipif(not protection().process_limit, reason="processes are not limited here")
def test_a_flood_of_processes_stops_at_the_limit():
    got = run("""
        import os, time
        made = 0
        try:
            for _ in range(200):
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                made += 1
        except OSError as error:
            print(made, error.errno)
    """)
    made, errno = map(int, got.stdout.split())
    assert made <= 8 and errno == 11, got  # EAGAIN


def test_zombies_are_reaped():
    code = """
        import os, time
        def fork():
            while True:
                try:
                    return os.fork()
                except BlockingIOError:  # the reaper may be slow
                    time.sleep(0.01)
        for _ in range(150):
            pid = fork()
            if pid == 0:
                if fork() == 0:
                    os._exit(0)
                os._exit(0)
            os.waitpid(pid, 0)
        print("done")
    """
    got = run(code, processes=16, timeout_s=30)
    # Orphans that nobody reaps would reach the limit, and stay.
    assert (got.status, got.stdout) == ("ok", "done\n"), got


def test_neither_we_nor_other_processes_can_be_signalled():
    got = run(f"""
        import os, signal
        for pid in ({os.getpid()}, {os.getppid()}, os.getppid()):
            for number in (0, signal.SIGCONT):
                try:
                    if pid > 1:
                        os.kill(pid, number)
                        print("reached", pid)
                except OSError:
                    pass
        print("tried")
    """)
    assert got.stdout == "tried\n"


@pytest.mark.skipif(not ways.choose_way()[0].namespaces, reason="needs a pid namespace")
def test_killing_everyone_kills_only_itself():
    other = subprocess.Popen(["sleep", "60"])
    try:
        got = run("""
            import os, time
            if os.fork() == 0: time.sleep(60)
            os.kill(-1, 9)
            try: os.kill(1, 9)
            except PermissionError: pass
            print("alive", flush=True)
            os.kill(os.getpid(), 9)
        """)
        assert (got.status, got.exit_code, got.stdout) == ("signal", -9, "alive\n"), got
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_descriptors_cannot_be_made_to_signal_us():
    got = run(f"""
        import fcntl, os
        read, write = os.pipe()
        try:
            fcntl.fcntl(read, fcntl.F_SETOWN, {os.getpid()})
            fcntl.fcntl(read, fcntl.F_SETSIG, 18)
            fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
            print("set")
        except OSError as error:
            print(error.errno)
    """)
    assert got.stdout in ("1\n", "3\n"), got  # not permitted; no such process


def test_nothing_of_our_descriptors_is_inherited():
    secret, write = os.pipe()
    os.set_inheritable(secret, True)
    try:
        got = run("""
            import os
            def is_open(fd):
                try: os.fstat(fd); return True
                except OSError: return False
            print([fd for fd in range(1024) if is_open(fd)], flush=True)
            for fd in range(3, 64): os.dup2(0, fd)
            os.closerange(0, 64)
        """)
    finally:
        os.close(secret)
        os.close(write)
    assert got.stdout == "[0, 1, 2]\n", got


# --------------------------------------------------------------------------- memory and files


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(2 << 30)",
        "x = []\nfor _ in range(64): x.append(bytearray(32 << 20))",  # 2 GiB
        "import mmap; x = mmap.mmap(-1, 2 << 30)",
    ],
)
def test_memory_is_limited(code):
    got = run(code + "\nprint('had it')", memory_mb=256)
    assert got.status == "error" and "had it" not in got.stdout, got
    assert "Memory" in got.stderr or "Cannot allocate" in got.stderr


@needs_filter
def test_memory_that_no_limit_counts_is_refused():
    got = run(
        "import os\ntry:\n    os.memfd_create('x')\n    print('had it')\n"
        "except OSError as error: print(error.errno)"
    )
    assert got.stdout == "1\n"


def test_files_are_limited():
    code = """
        try:
            with open("big", "wb") as file:
                for _ in range(256): file.write(bytes(1 << 20))
        except OSError as error:
            print(error.errno)
    """
    got = run(code, files_mb=16)
    assert got.stdout in ("27\n", "28\n"), got  # file too large; no space


def test_files_of_the_user_are_out_of_sight(tmp_path, monkeypatch):
    secret = "word-" + secrets.token_hex(8)
    planted = tmp_path / "secret.txt"
    planted.write_text(secret)
    for path in (*planted.parents, planted):
        if os.stat(path).st_uid == os.geteuid() and path.is_relative_to("/tmp/"):
            os.chmod(path, 0o777 if path == planted else 0o755)
    monkeypatch.setenv("MY_SECRET", secret)
    got = run(f"""
        import os
        print(dict(os.environ))
        os.symlink({str(planted)!r}, "link")
        os.symlink("/", "root")
        for path in ({str(planted)!r}, "link", "root" + {str(planted)!r}, "/proc/1/environ",
                     "/proc/self/environ", "/proc/{os.getpid()}/environ", "/proc/1/root",
                     "/proc/{os.getpid()}/root" + {str(planted)!r}, {__file__!r}, "/etc/shadow",
                     "/etc/passwd", {os.path.expanduser("~/.bashrc")!r}, "/sys/kernel", "/dev/sda",
                     "/dev/mem", "/dev/kmsg", "/run", "/home"):
            try:
                with open(path, "rb") as file: print("GOT", path, file.read())
            except IsADirectoryError:
                try: print("LISTED", path, os.listdir(path))
                except OSError: pass
            except OSError: pass
        for number in range(3, 1024):
            try: os.fchdir(number); print("CHDIR", number)
            except OSError: pass
    """)
    assert got.status == "ok", got
    assert secret not in got.stdout and "GOT" not in got.stdout, got.stdout
    assert "LISTED" not in got.stdout and "CHDIR" not in got.stdout


def test_nothing_outside_its_folder_can_be_written():
    folders = (sys.prefix, Path(__file__).parent, "/", "/usr/lib", "/dev", "/etc", "/var/tmp", "~")
    outside = [str(Path(folder).expanduser() / "x") for folder in folders]
    outside += [str(Path(os.__file__).parent / "x.py"), os.__file__]
    got = run(f"""
        import os
        os.symlink("/usr/lib", "lib")
        for path in {outside!r} + ["lib/x", "../x"]:
            try:
                open(path, "a").close()
                print("WROTE", path)
            except OSError: pass
        for act in (lambda: os.chmod("/usr/lib", 0o777), lambda: os.rename("/usr", "/x"),
                    lambda: os.mkdir("/new"), lambda: os.link({os.__file__!r}, "hard"),
                    lambda: os.setuid(0), lambda: os.chroot("."), lambda: os.setgroups([0])):
            try:
                act()
                print("DID", act)
            except OSError: pass
        open("mine", "w").close()
        print("end")
    """)
    assert got.stdout == "end\n", got
    assert not any(Path(p).name.startswith("x") and Path(p).exists() for p in outside)


def test_no_connection_gets_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        got = run(f"""
            import socket, os
            port = {server.getsockname()[1]}
            for family, kind, to in (
                    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
                    (socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)),
                    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 53)),
                    (socket.AF_INET, socket.SOCK_RAW, ("127.0.0.1", 0)),
                    (socket.AF_UNIX, socket.SOCK_STREAM, "/run/docker.sock"),
                    (socket.AF_UNIX, socket.SOCK_STREAM, "\\0abstract")):
                try:
                    with socket.socket(family, kind) as one:
                        one.settimeout(1)
                        one.connect(to)
                        print("CONNECTED", to)
                except OSError: pass
            print("end")
        """)
        with pytest.raises(TimeoutError):
            server.accept()
    assert got.stdout == "end\n", got


@needs_filter
def test_new_namespaces_and_other_doors_of_the_kernel_are_shut():
    got = run("""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {"unshare": libc.unshare(0x10000000),
                 "mount": libc.mount(b"x", b"/tmp", b"tmpfs", 0, None),
                 "ptrace": libc.ptrace(0, 0, 0, 0), "io_uring": libc.syscall(425, 8, None),
                 "pidfd_signal": libc.syscall(424, 0, 9, None, 0)}
        print([name for name, result in calls.items() if result != -1])
        print(ctypes.get_errno())
    """)
    assert got.stdout == "[]\n1\n", got


# --------------------------------------------------------------------------- other ways, around it


@pytest.mark.parametrize(
    ("name", "way"),
    [*ways.ways(), ("Landlock", Way(landlock=True, seccomp=seccomp_filter(has_own_pids=False)))],
)
def test_each_way_that_works_here_keeps_what_it_says(name, way, tmp_path):
    """As root some cannot work: another user may have no right to read this Python."""
    try:
        found = ways.probe_way(way, name=name)
    except LaunchError as error:
        pytest.skip(f"{name} is not permitted here: {error}")
    assert found.is_enough, found
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        got = launch(
            textwrap.dedent(f"""
            import os, socket, time
            for act in (lambda: open({__file__!r}), lambda: os.listdir({str(tmp_path)!r}),
                        lambda: open("/proc/1/environ"),
                        lambda: open("/proc/{os.getpid()}/environ"),
                        lambda: open("/var/tmp/x", "w"), lambda: os.kill({os.getpid()}, 0),
                        lambda: os.kill(os.getppid(), 0) if os.getppid() > 1 else open("/none"),
                        lambda: socket.create_connection({server.getsockname()!r}, 1)):
                try: print("DID", act())
                except OSError: pass
            open("mine", "w").write("x")
            for _ in range(2):
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0: time.sleep(60)
                    os._exit(0)
            print(open("mine").read(), os.listdir("."), flush=True)
            time.sleep(60)
        """),
            way=way,
            limits=Limits(5.0, files_mb=MARK_MB),
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert (got.status, got.stdout) == ("timeout", "x ['main.py', 'mine']\n") or (
        got.stdout == "x ['mine', 'main.py']\n"
    ), got
    assert not children()


FORBIDDING = r"""
import os, struct, sys
sys.path[:] = {path!r}
from spmdrl.sandbox import NotProtected, launcher, protection, run_python
calls = {calls!r}  # refused from here on, to us and to our children
code = [(32, 0, 0, 0), *(part for n in calls for part in ((21, 0, 1, n), (6, 0, 0, 0x50001))),
        (6, 0, 0, 0x7FFF0000)]
launcher._call("prctl", 38, 1, 0, 0, 0)
launcher._filter_calls(b"".join(struct.pack("<HBBI", *line) for line in code))
try:
    run_python("print(1)", timeout_s=10)
    print("ran")
except NotProtected as error:
    print("refused:", error)
got = run_python("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(60)\nprint(2)",
                 timeout_s=10, allow_unprotected=True)
print(got.status, got.stdout.strip(), protection().is_enough)
"""


def test_a_machine_that_permits_no_isolation_is_refused_unless_told():
    unshare = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
    path = [str(Path(__file__).parents[2]), *sys.path]
    program = FORBIDDING.format(path=path, calls=[unshare, 444])  # and Landlock
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    first, last = done.stdout.strip().rsplit("\n", 1)
    assert first.startswith("refused: this machine permits no isolation"), done
    says = ("unshare: Operation not permitted", "max_user_namespaces", "SYS_ADMIN")
    assert all(words in first for words in (*says, "allow_unprotected=True")), first
    assert last == "ok 2 False"
    assert not children()


@pytest.mark.parametrize("body", ["while True: pass", "import os, time; os.fork(); time.sleep(60)"])
def test_programs_die_with_the_process_that_ran_them(body):
    parent = subprocess.Popen([sys.executable, "-c", launching(body)])
    try:
        assert wait_until(lambda: children(only_programs=True))
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not children(parent.pid)), children(parent.pid)


def test_signals_for_the_whole_job_do_not_end_a_program():
    parent = subprocess.Popen(
        [sys.executable, "-c", launching("import time; time.sleep(5)")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert wait_until(lambda: children(only_programs=True))
    launchers = set(children(parent.pid)) - set(children(only_programs=True))
    assert launchers
    for pid in launchers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert parent.communicate(timeout=200)[0] == "ok\n"
