"""Starts a real Slurm of two nodes on this machine: loopback only, without cgroups.

Needs root, and Debian's packages slurm-wlm and munge, which it installs if apt can.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "scontrol")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
SlurmctldParameters=node_reg_mem_percent=1
SlurmdParameters=config_overrides
KillWait=2
MinJobAge=300
OverTimeLimit=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=8000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE
PartitionName=brief Nodes=n1,n2 MaxTime=1
"""


def missing() -> str:
    """Why a real Slurm cannot run here; empty if it can. Installs it as root on Debian."""
    if os.name != "posix" or os.getuid():
        return "a real Slurm is started by root only"
    if not shutil.which("apt-get"):
        return "a real Slurm is installed on Debian only"
    if not all(map(shutil.which, PROGRAMS)):
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "slurm-wlm", "munge"]
        for command in (["apt-get", "update", "-q"], install):
            subprocess.run(command, check=False, capture_output=True, timeout=300,
                           env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip
    return next((f"{name} is not installed" for name in PROGRAMS if not shutil.which(name)), "")


class Slurm:
    """A controller and two nodes, each a process that `stop` ends by its id."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.host = socket.gethostname().partition(".")[0]
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Slurm:
        """Start everything, and wait until both nodes are idle."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [opened.getsockname()[1] for opened in sockets]
        for opened in sockets:
            opened.close()
        text = CONFIGURATION.format(host=self.host, folder=self.folder, ports=ports)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"key-file": key, "socket": self.folder / "munge.socket",
                 "pid-file": self.folder / "munged.pid", "seed-file": self.folder / "munge.seed",
                 "log-file": self.folder / "munged.log"}  # fmt: skip
        self._run("munged", "--foreground", "--force",
                  *(f"--{name}={path}" for name, path in names.items()))  # fmt: skip
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._run("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._run("slurmd", "-D", "-N", node, name=node)
        self._wait(lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split()
                   == ["idle", "idle"], "two idle nodes")  # fmt: skip
        return self

    def ask(self, *command: str) -> str:
        """Run a program of Slurm; returns its output."""
        ended = subprocess.run(command, check=False, capture_output=True, text=True,
                               env=self.environment, timeout=60)  # fmt: skip
        return ended.stdout

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        self.ask("scancel", "--user", "root")
        time.sleep(1)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str, name: str = "") -> None:
        name = name or command[0]
        with (self.folder / f"{name}.out").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                command, stdout=output, stderr=output, env=self.environment
            )

    def _wait(self, ready, what: str) -> None:
        deadline = time.monotonic() + 60
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-500:] for p in self.folder.glob("*.out"))
                raise RuntimeError(f"no {what} after 60 s\n{logs}")
            time.sleep(0.2)
