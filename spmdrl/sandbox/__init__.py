"""Run Python code that a model wrote and nobody has read.

    result = run_python("print(input())", stdin="4", timeout_s=2.0)

Such code is hostile: a policy that is rewarded for passing tests may learn to attack the tests.

The kernel enforces the boundary. The program runs in its own namespaces (processes, mounts,
network, IPC, users), and as its own user if we are root. Its root file system is read-only and has
only the Python installation and the system's libraries: no home, data or /proc. It has a seccomp
filter and resource limits. Most containers forbid namespaces; there Landlock replaces the root file
system, and seccomp replaces the network namespace. `protection()` runs a program that tries what it
should not be able to do, and returns what this machine prevents. If a machine cannot block files or
network, `run_python` refuses, unless it gets `allow_unprotected=True`.

What the sandbox does not do:
- It does not protect from bugs of the kernel. Run code of untrusted people in a virtual machine.
- It limits each process, not their sum: 8 processes of 512 MB may take 4 GB together, and the files
  of a program (in memory, if there are namespaces) another `files_mb`. To limit the sum, put the
  job into a cgroup; the programs ask the kernel to kill them before other processes.
- Without namespaces, it does not hide the names and sizes of files outside, though they cannot be
  read. Many small files can fill the disk of the working directory until the program ends. If our
  own process is killed, background processes of the program live on, within their limits.
- It cannot make code under test honest about a test in its own process. Compare its output instead.
- It does not reserve a processor: on a busy machine, a program may be too slow for its deadline.
"""

from spmdrl.sandbox.run import NotProtected, check_protection, run_python
from spmdrl.sandbox.supervisor import LaunchError, ProgramResult
from spmdrl.sandbox.ways import Protection, protection
