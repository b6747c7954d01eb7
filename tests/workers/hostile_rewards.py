"""Reward functions that harm: `score` does what the response names. Loaded by workers."""

import builtins
import contextlib
import ctypes
import gc
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time

SLEEP = "86399"  # seconds: by it a process that was left is known
KINDS = {}
PLACE = os.environ["HOSTILE_PLACE"]


def kind(function):
    KINDS[function.__name__] = function
    return function


def score(data_source, solution_str, ground_truth, extra_info=None):
    act = KINDS.get(solution_str)
    if act is None:
        time.sleep(0)
        assert os.environ["HOSTILE_PLACE"] == PLACE and "left" not in vars(builtins)
        open(os.path.join(os.getcwd(), "ORIGIN")).close()  # the folder is the one it was
        return float(solution_str)
    return act()


def raises(error):
    def act():
        raise error

    return act


class Hostile:
    def __float__(self):
        raise SystemExit(5)

    def __reduce__(self):
        return os.system, (f"touch {PLACE}/executed",)

    def __eq__(self, other):
        raise KeyboardInterrupt

    def __repr__(self):
        raise GeneratorExit

    def __getattr__(self, name):
        raise BaseException(name)

    __hash__ = None


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit(6)


class Text(str):
    def __getitem__(self, key):
        return Hostile()

    def __str__(self):
        return self


class Number(float):
    def __float__(self):
        return float("nan")

    def __abs__(self):
        return Hostile()


for name, error in {
    "raises_exit": SystemExit(3),
    "raises_interrupt": KeyboardInterrupt(),
    "raises_generator_exit": GeneratorExit(),
    "raises_base": BaseException("base"),
    "raises_group": BaseExceptionGroup("many", [SystemExit(1), ValueError("x")]),
    "raises_stop": StopIteration(1),
    "raises_unprintable": Unprintable(),
    "raises_recursion": RecursionError(),
    "raises_refusal": ValueError("x" * 10_000_000),
}.items():
    KINDS[name] = raises(error)

for name, value in {
    "returns_nan": float("nan"),
    "returns_infinity": -float("inf"),
    "returns_complex": 1j,
    "returns_huge_integer": 10**400,
    "returns_text": "1",
    "returns_none": None,
    "returns_type": float,
    "returns_hostile": Hostile(),
    "returns_empty": {},
    "returns_keys": {"score": 1.0, Text("a"): Text("b"), 7: 8, None: Number(1.0)},
    "returns_hostile_extra": {"score": 1.0, "x": Hostile()},
    "returns_surrogate": {"score": 1.0, "\ud800": "\udfff\0"},
}.items():
    KINDS[name] = lambda value=value: value


@kind
def returns_generator():
    return (i for i in range(3))


@kind
def returns_nested():
    inner = 1.0
    for _ in range(100_000):
        inner = [inner]
    return inner


@kind
def returns_a_flood():
    return {"score": 1.0} | {f"m{i}": float(i) for i in range(20_000)}


@kind
def recurses():
    sys.setrecursionlimit(10**6)

    def deeper(n):
        return deeper(n + 1) + 1

    return deeper(0)


@kind
def forks_and_both_return():
    os.fork()
    return 1.0


@kind
def forks_in_c_and_both_return():
    ctypes.CDLL(None).fork()
    return 1.0


@kind
def exits():
    os._exit(0)


@kind
def segfaults():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


@kind
def kills_its_group():
    os.killpg(0, signal.SIGKILL)
    time.sleep(60)


@kind
def kills_its_keeper():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


@kind
def aborts():
    os.abort()


@kind
def closes_descriptors():
    os.closerange(0, 1000)
    return 1.0


@kind
def prints_to_everything():
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.set_blocking(fd, False)
            os.write(fd, b"\0\1garbage" * 100)
    return 1.0


@kind
def writes_a_pickle_as_a_frame():
    data = pickle.dumps(Hostile())
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, struct.pack("<I", len(data)) + data)
    return 1.0


@kind
def writes_reports_for_others():
    for id in range(200):
        fields = {"id": id, "finished": 1.0, "seconds": 0.0, "failure": None, "message": ""}
        fields["retries"] = 0
        score = {"value": 99.0, "parts": {}, "metrics": {}, "extras": {}, "retries": 0}
        fields["result"] = ["RewardResult", score | {"seconds": 0, "failure": None, "message": ""}]
        text = json.dumps(["Done", fields]).encode()
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, struct.pack("<4sII", b"spmd", len(text), 0) + text)
    return 1.0


@kind
def prints():
    print("x" * 10_000)
    os.write(1, b"\xff\0" * 5000)
    sys.stdout.buffer.write(b"spmd" * 100)
    return 1.0


@kind
def patches_the_protocol():
    def harmful(*args, **kwargs):
        return pickle.Pickler.dumps(Hostile()) if args is None else b"harm"

    for module, name in ((pickle, "dumps"), (json, "dumps"), (os, "write"), (struct, "pack")):
        setattr(module, name, harmful)
    pickle.loads = json.loads = harmful
    time.monotonic = lambda: float("nan")
    os.getpid = lambda: 1
    return 1.0


@kind
def empties_modules():
    sys.modules.clear()
    return 1.0


@kind
def breaks_builtins():
    builtins.float = builtins.open = builtins.isinstance = None
    return 1.0


@kind
def leaves_a_thread_that_exits():
    def end():
        time.sleep(0.5)  # after its own result has left, also on a busy machine
        os._exit(9)

    threading.Thread(target=end, daemon=True).start()
    return 1.0


@kind
def leaves_threads():
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(float(SLEEP),), daemon=True).start()
    return 1.0


@kind
def leaves_a_thread_that_holds_up_the_end():
    threading.Thread(target=time.sleep, args=(float(SLEEP),), daemon=False).start()
    return 1.0


@kind
def sets_an_alarm():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    return 1.0


@kind
def sets_handlers():
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR2):
        signal.signal(number, lambda *_: os._exit(4))
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    return 1.0


@kind
def changes_the_process():
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()
    os.environ["HOSTILE_PLACE"] = "/nowhere"
    sys.stdout = sys.stderr = None
    sys.settrace(lambda *_: None)
    return 1.0


@kind
def takes_memory():
    held = [bytearray(1 << 27) for _ in range(1 << 14)]
    return float(len(held))


@kind
def takes_memory_in_children():
    for _ in range(4):
        if os.fork() == 0:
            held = bytearray(os.urandom(1 << 20)) * 300
            time.sleep(float(SLEEP) + len(held))
    time.sleep(50)
    return 1.0


@kind
def leaves_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                with contextlib.suppress(OSError):
                    os.close(fd)
            os.execve("/bin/sleep", ["sleep", SLEEP], {})
        os._exit(0)
    os.wait()
    return 1.0


@kind
def leaves_a_child():
    subprocess.Popen(["sleep", SLEEP], start_new_session=True, env={})
    return 1.0


@kind
def leaves_a_family():
    subprocess.Popen(
        ["sh", "-c", f"sleep {SLEEP} & (setsid sleep {SLEEP} &) ; sleep {SLEEP}"],
        start_new_session=True,
    )
    return 1.0


@kind
def deadlocks_at_exit():
    import atexit

    atexit.register(time.sleep, float(SLEEP))
    return 1.0


@kind
def spoils_collection():
    gc.disable()
    gc.set_threshold(1)
    gc.callbacks.append(raises(SystemExit(1)))
    return 1.0


@kind
def sleeps():
    time.sleep(float(SLEEP))


@kind
def spins():
    while True:
        pass


@kind
def reads_the_protocol():
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.read(fd, 1 << 20)
    time.sleep(float(SLEEP))


@kind
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(float(SLEEP))
