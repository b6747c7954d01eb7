"""Run the command of an agent in a container, by docker or podman.

A container goes on when the program that started it is killed. So each has the name of its
episode's folder, by which the worker removes it when the episode ends. It also has two labels: that
of the process of the run, by which `Sweeper` removes what is left when this process ends, however
it ends; and that of the run's folder, by which the next start of the run removes the rest.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from spmdrl.agents import relay
from spmdrl.agents.messages import HOST
from spmdrl.config.generation import ContainerSettings
from spmdrl.errors import Refusal

FIELD = "rollout.agent_container"
SHARED = "/spmdrl"
"""The folder in a container that holds the files of its episode."""
_PROGRAMS = ("docker", "podman")
_PORT = 8317
"""Where a container without the machine's network finds the gateway."""
_SOCKET = "gateway.sock"
_RELAY = "relay.py"
_ANSWER_S = 30.0
_TRIAL_S = 120.0
_SWEEP_S = 30.0
_TAIL_CHARS = 500
_TRIAL = (
    "import socket, sys; "
    f"own = socket.create_connection(({HOST!r}, {_PORT}), 30); "
    "sys.exit(own.recv(1) != b'+')"
)
# The end of the pipe is the end of the process that holds it. Removing may take several tries: a
# program that was killed may have asked for a container that is not there yet.
_SWEEP = """
trap '' INT TERM HUP USR1
cat > /dev/null
for try in 1 2 3; do
    found=$("$1" ps --all --quiet --filter "label=$2")
    [ -z "$found" ] || "$1" rm --force $found
    sleep 0.5
done
"""


@dataclass(frozen=True)
class Labels:
    """The labels of a run's containers."""

    folder: str
    """Of the run's output_dir: the same in each attempt."""
    process: str
    """Of the process of the run that starts the workers."""


def make_labels(output_dir: str) -> Labels:
    """Return the labels of the containers that this process starts."""
    digest = hashlib.sha256(str(Path(output_dir).resolve()).encode()).hexdigest()
    return Labels(f"spmdrl.run={digest[:16]}", f"spmdrl.process={secrets.token_hex(8)}")


class Container:
    """Containers of one image, for the episodes of an agent.

    Raises (on construction): Refusal if neither docker nor podman answers, the image is not there,
        or a container cannot reach the gateway.
    """

    def __init__(self, settings: ContainerSettings, labels: Labels):
        self._settings = settings
        self._labels = labels
        self._program = found_program(settings)
        image = settings.image
        if _said([self._program, "image", "inspect", image]) is None:
            raise Refusal(
                f"{FIELD}.image: {self._program} has no image {image!r}; pull or build it on each "
                "node that has an engine rank"
            )
        if not self._has_host_network:
            self._check()

    @property
    def _has_host_network(self) -> bool:
        return self._settings.network == "host"

    def share(self, folder: Path) -> Path:
        """Make the folder that a container shares with its episode; return it.

        Args:
            folder: of the episode; only this user can look into it.
        """
        shared = folder / "shared"
        shared.mkdir()
        shared.chmod(0o777)  # the image may have a user of its own
        if not self._has_host_network:
            shutil.copyfile(relay.__file__, shared / _RELAY)
            (shared / _RELAY).chmod(0o644)
        return shared

    def listen(self, shared: Path) -> socket.socket:
        """Return the socket by which a container calls from a shared folder."""
        listener = socket.socket(socket.AF_UNIX)
        path = shared / _SOCKET
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(128)
        return listener

    def connect(self, shared: Path, base_url: str) -> str:
        """Begin to pass on what a container asks, in threads of this process.

        Args:
            base_url: address of the gateway.
        Returns: the address at which the container finds it.
        """
        if self._has_host_network:
            return base_url
        address = urlsplit(base_url)
        place = (HOST, address.port or 0)
        ends = (self.listen(shared), lambda: socket.create_connection(place))
        threading.Thread(target=relay.relay, args=ends, daemon=True).start()
        return f"http://{HOST}:{_PORT}{address.path}"

    def command(
        self, command: Sequence[str], *, shared: Path, variables: Sequence[str]
    ) -> list[str]:
        """Return the command that runs an agent's command in a container.

        Args:
            shared: of `share`.
            variables: environment variables that the container gets from the program's own, since
                others on the machine can read the arguments of a program.
        """
        own = self._settings
        words = [self._program, "run", "--rm", "--init", "--pull", "never"]
        words += ["--name", shared.parent.name]
        words += ["--label", self._labels.folder, "--label", self._labels.process]
        words += ["--network", own.network, "--volume", f"{shared}:{SHARED}"]
        words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        if own.memory_gib:
            words += ["--memory", str(int(own.memory_gib * 2**30))]
        if own.cpus:
            words += ["--cpus", f"{own.cpus:g}"]
        if own.processes:
            words += ["--pids-limit", str(own.processes)]
        for name in variables:
            words += ["--env", name]
        words += [*own.options, own.image]
        if not self._has_host_network:
            words += ["python3", f"{SHARED}/{_RELAY}", f"{SHARED}/{_SOCKET}", str(_PORT)]
        return [*words, *command]

    def remove(self, folder: str) -> subprocess.Popen[bytes]:
        """Begin to remove the container of an episode, if there is one; return the program.

        Args:
            folder: of the episode.
        """
        words = [self._program, "rm", "--force", Path(folder).name]
        nothing = subprocess.DEVNULL
        return subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing)

    def _check(self) -> None:
        """Start a container that calls back. Raises: Refusal if it does not."""
        with tempfile.TemporaryDirectory(prefix="spmdrl-trial-") as folder:
            why = self._try_once(folder)
        if why:
            raise Refusal(
                f"{FIELD}.image: a container of {self._settings.image} by {self._program} cannot "
                f"call back: {why}; it needs python3, and the folder {tempfile.gettempdir()} of "
                f"this machine; or set {FIELD}.network=host"
            )

    def _try_once(self, folder: str) -> str:
        """Return why a container cannot call back; empty if it can."""
        shared = self.share(Path(folder))
        command = self.command(["python3", "-c", _TRIAL], shared=shared, variables=())
        with self.listen(shared) as listener:
            threading.Thread(target=_greet, args=(listener,), daemon=True).start()
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_S
                )
            except subprocess.TimeoutExpired:
                self.remove(folder).wait()
                return f"it did not end in {_TRIAL_S:g} s"
        if not done.returncode:
            return ""
        text = done.stderr.decode(errors="replace")[-_TAIL_CHARS:].strip()
        return text or f"exit code {done.returncode}"


def _greet(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"+")


def found_program(settings: ContainerSettings) -> str:
    """Return the program that runs containers. Raises: Refusal if none answers."""
    names = _PROGRAMS if settings.program == "auto" else (settings.program,)
    for name in names:
        if shutil.which(name) and _said([name, "ps", "--quiet"]) is not None:
            return name
    raise Refusal(
        f"{FIELD}.image: {settings.image} needs {' or '.join(names)}, and none answers on this "
        f"machine (`{names[0]} ps`); start its service, or run the command without a container"
    )


def _said(command: Sequence[str]) -> str | None:
    """Return the output of a program; None if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


class Sweeper:
    """Removes containers of a run: now those of an earlier attempt, and later those of this
    process, when it closes the sweeper or is killed.

    Raises (on construction): Refusal as `found_program`.
    """

    def __init__(self, settings: ContainerSettings, labels: Labels):
        program = found_program(settings)
        found = _said([program, "ps", "--all", "--quiet", "--filter", f"label={labels.folder}"])
        if found:
            _said([program, "rm", "--force", *found.split()])
        self._process = subprocess.Popen(
            ["sh", "-c", _SWEEP, "sh", program, labels.process],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Remove what is left, and wait until it is gone."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(_SWEEP_S)
