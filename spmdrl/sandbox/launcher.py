"""The process between us and a program: it builds the sandbox, starts, waits for and kills it.

    python -I -S -c "... import launcher; launcher.main(request_fd, status_fd, parent_pid)"

It writes lines to the status pipe: `failed WHY`, `started`, `ended CODE` (negative: a signal). At
the end of file, no process of the program is left. The signal _STOP ends the program and all that
it started.

    with namespaces:   launcher -> init (pid 1 in them) -> program
    without:           launcher -> program; the launcher is a subreaper and gets its orphans

It runs once per program, so it imports little. For example, it uses `_signal` because `signal`
imports `enum` (3 ms).
"""

from __future__ import annotations

import _signal
import ctypes
import errno
import marshal
import os
import resource
import select
import stat
import struct

_STOP = 40
_FIRST_UID = 2_000_000_000
_NOBODY = 65534
_INNER_UID = 1000
_NEW_USER = 0x10000000
_NEW_NET = 0x40000000
_NEW_OTHERS = 0x2E020000  # mounts, host name, IPC, processes, cgroup view
_RDONLY = 1
_NOSUID = 2
_NODEV = 4
_REMOUNT = 32
_BIND = 4096
_REC = 16384
_PRIVATE = 1 << 18
_LOCKED_FLAGS = 0xF | 0x400 | 0x800 | 0x200000  # flags that a user namespace may not clear
_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PDEATHSIG = 1
_SECCOMP = 22
_SUBREAPER = 36
_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_READ = 0b1101  # execute, read_file, read_dir
_ON_FILES = 0b1100000000000111  # the rights that apply to files

_libc = ctypes.CDLL(None, use_errno=True)


def main(request_fd: int, status_fd: int, parent_pid: int) -> None:
    """Run one program; see above.

    Args:
        request_fd: file with the marshalled result of `request.make_request`.
        status_fd: pipe for status lines.
        parent_pid: this process ends when the parent ends.
    """
    for fd in (request_fd, status_fd):
        os.set_inheritable(fd, False)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_STOP])
    try:
        with open(request_fd, "rb") as file:
            request = marshal.load(file)
        run = _run_in_namespaces if request["namespaces"] else _run_as_reaper
        run(request, status_fd, parent_pid)
    except Exception as error:
        where = error.__traceback__
        assert where is not None
        while where.tb_next:
            where = where.tb_next
        _report(
            status_fd, f"failed {where.tb_frame.f_code.co_name}: {type(error).__name__}: {error}"
        )
        os._exit(1)
    os._exit(0)


def _report(status_fd: int, line: str) -> None:
    os.write(status_fd, line.replace("\n", " ").encode("utf-8", "replace")[:2000] + b"\n")


def _call(name: str, *args: object) -> int:
    ctypes.set_errno(0)
    result = getattr(_libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _die_with(parent_pid: int) -> None:
    _call("prctl", _PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before the call above


# --------------------------------------------------------------------------- two ways to contain


def _run_in_namespaces(request: dict, status_fd: int, parent_pid: int) -> None:
    outer_uid = os.geteuid()
    outer_gid = os.getegid()
    flags = _NEW_OTHERS | (_NEW_NET if request["new_net"] else 0)
    _call("unshare", flags | (_NEW_USER if request["new_user"] else 0))
    if request["new_user"]:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_INNER_UID} {outer_uid} 1"),
            ("gid_map", f"{_INNER_UID} {outer_gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _die_with(parent_pid)  # only now, because the change of user clears this setting
    uid = _inner_uid(request)
    _build_root(request, uid)
    alive_read, alive_write = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(alive_write)
        _call("prctl", _PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if select.select([alive_read], [], [], 0)[0]:
            os._exit(1)
        code = _wait_for(_start(request, status_fd, uid))
        _report(status_fd, f"ended {code}")
        os._exit(0)  # then the kernel ends all other processes in this namespace
    _signal.signal(_STOP, lambda *_: os.kill(init, _signal.SIGKILL))
    os.waitpid(init, 0)  # returns when no process is left inside


def _run_as_reaper(request: dict, status_fd: int, parent_pid: int) -> None:
    _die_with(parent_pid)
    _call("prctl", _SUBREAPER, 1, 0, 0, 0)
    uid = _inner_uid(request)
    os.chdir(request["workdir"])
    _write_files(request["files"], uid)
    program = _start(request, status_fd, uid)

    def end(*_: object) -> None:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                os.kill(pid, _signal.SIGKILL)

    _signal.signal(_STOP, end)
    _report(status_fd, f"ended {_wait_for(program)}")
    while True:  # when a child is killed, its children become ours
        end()
        try:
            os.wait()
        except ChildProcessError:
            return


def _wait_for(program: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == program:
            return os.waitstatus_to_exitcode(status)


def _inner_uid(request: dict) -> int | None:
    """Return the user id that the program gets; None for no change."""
    # The kernel counts processes per user, so each program gets its own user.
    if not request["drop_uid"]:
        return None
    uid = _FIRST_UID + os.getpid()
    with open("/proc/self/uid_map") as file:
        for line in file:
            first, _, count = map(int, line.split())
            if first <= uid < first + count:
                return uid
    return _NOBODY  # some containers have few users


# --------------------------------------------------------------------------- files


def _build_root(request: dict, uid: int | None) -> None:
    """Make a read-only root of the readable folders and an empty /box, and change to it."""
    _call("mount", None, b"/", None, _REC | _PRIVATE, None)
    sources = [(path, os.open(path, os.O_PATH)) for path in request["readable"]]
    base = request["base"]
    _mount_memory(base, mib=4, mode="755")
    for path, fd in sources:
        _bind(fd, base + path, is_device=path.startswith("/dev/"))
    for path, target in request["links"]:
        os.makedirs(os.path.dirname(base + path), exist_ok=True)
        os.symlink(target, base + path)
    for name in ("/tmp", "/dev/shm"):
        if not os.path.exists(base + name):  # a readable folder may lie there
            os.symlink("/box", base + name)
    os.mkdir(base + "/box")
    _mount_memory(base + "/box", mib=request["files_mb"], mode="700")
    os.chdir(base + "/box")
    _write_files(request["files"], uid)
    _call("mount", None, base.encode(), None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV, None)
    os.chdir(base)
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/box")


def _mount_memory(path: str, *, mib: int, mode: str) -> None:
    options = f"size={mib}m,nr_inodes=10000,mode={mode}"
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode())


def _bind(fd: int, target: str, *, is_device: bool) -> None:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    # Use the descriptor, because a mount may now cover the path.
    _call("mount", f"/proc/self/fd/{fd}".encode(), target.encode(), None, _BIND | _REC, None)
    os.close(fd)
    flags = _NOSUID | (0 if is_device else _NODEV)
    attributes = struct.pack("<QQQQ", _RDONLY | flags, 0, 0, 0)
    try:
        _call(
            "syscall",
            _MOUNT_SETATTR,
            _AT_FDCWD,
            target.encode(),
            _AT_RECURSIVE,
            attributes,
            len(attributes),
        )
    except OSError as error:
        if error.errno != errno.ENOSYS:  # before Linux 5.12
            raise
        locked = os.statvfs(target).f_flag & _LOCKED_FLAGS
        new_flags = _REMOUNT | _BIND | _RDONLY | flags | locked
        _call("mount", None, target.encode(), None, new_flags, None)


def _write_files(files: dict[str, bytes], uid: int | None) -> None:
    """Write files into the empty working directory, and make the program's user its owner."""
    for name, data in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(data)
    if uid is not None:
        for folder, _folders, names in os.walk("."):
            for path in (folder, *(os.path.join(folder, n) for n in names)):
                os.chown(path, uid, uid)


# --------------------------------------------------------------------------- the program


def _start(request: dict, status_fd: int, uid: int | None) -> int:
    """Fork the program and return its process id."""
    program = os.fork()
    if program:
        return program
    try:
        os.setsid()
        os.umask(0o022)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        _call("prctl", _PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if request["landlock"]:
            _restrict_files(request)
        for name, value in request["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        if request["seccomp"]:
            _filter_calls(request["seccomp"])
        _report(status_fd, "started")  # the pipe closes at exec
        os.execve(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        _report(status_fd, f"failed the last step before the program: {error}")
    os._exit(127)


def _filter_calls(code: bytes) -> None:
    lines = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(lines))
    _call("prctl", _SECCOMP, 2, program, 0, 0)


def _restrict_files(request: dict) -> None:
    """Allow reading the readable folders and writing the working directory, by Landlock."""
    version = _call("syscall", _LANDLOCK_CREATE, None, 0, 1)
    # By version: the bits of file access, of TCP (bind, connect), of scopes (sockets, signals).
    files = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
    rules = struct.pack("<Q", files)
    if version >= 4:
        rules += struct.pack("<Q", 3)
    if version >= 6:
        rules += struct.pack("<Q", 3)
    ruleset = _call("syscall", _LANDLOCK_CREATE, rules, len(rules), 0)
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    for path in (*request["readable"], "."):
        fd = os.open(path, os.O_PATH)
        allowed = files if path == "." else _READ
        if path.startswith("/dev/"):
            allowed = 0b110  # write_file, read_file
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            allowed &= _ON_FILES
        _call("syscall", _LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", allowed & files, fd), 0)
        os.close(fd)
    _call("syscall", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
