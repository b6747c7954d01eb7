"""Run Python code that a model wrote, and that nobody has read.

    result = run_python("print(input())", stdin="4", timeout_s=2.0)

Such code is hostile: a policy that is rewarded for passing tests finds whatever passes them.

The boundary is the kernel. The program runs in namespaces of its own (processes, mounts, network,
IPC, users), as a user of its own where we are root, on a read-only root that holds the Python
installation and the system's libraries and nothing of home, data or /proc, with a seccomp filter
and resource limits. Where namespaces are forbidden (most containers), Landlock replaces the root
and seccomp the network namespace. `protection()` runs a program that tries what it should not be
able to do, and says what this machine prevents. Where files or network cannot be shut off,
`run_python` refuses, unless it gets `allow_unprotected=True`.

What is not a boundary:
- The kernel itself has bugs. Untrusted people, unlike models, need a virtual machine.
- Limits hold for each process: 8 processes of 512 MB may take 4 GB together, and the files of a
  program (in memory, where there are namespaces) another `files_mb`. To limit the whole, put the
  job into a cgroup; the programs ask the kernel to kill them first.
- Without namespaces, names and sizes of files outside can be probed, though not read; many small
  files can fill the disk of the working directory until the program ends; and if our own process
  is killed, processes that the program put into the background live on, within their limits.
- Code under test can make a test in its own process pass. Compare its output instead.
- Time: the program shares its processor, and a busy machine makes it late.
"""

from spmdrl.sandbox.run import NotProtected, check_protection, run_python
from spmdrl.sandbox.supervisor import LaunchError, ProgramResult
from spmdrl.sandbox.ways import Protection, protection
