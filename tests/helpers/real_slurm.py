"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, without cgroups.

Needs root and Debian's packages `slurm-wlm` and `munge`. The daemons use their own folder, key and
ports, and end by their process ids.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = ("node1", "node2")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
PriorityType=priority/basic
KillWait=2
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=DEFAULT CPUs=2 RealMemory=2000
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
"""


def missing() -> str:
    """The reason why no Slurm can be started here; empty if one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


@contextmanager
def real_slurm() -> Iterator[None]:
    """Run a Slurm while the block runs; commands of Slurm find it by the environment."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    started: list[subprocess.Popen[bytes]] = []
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    try:
        _configure(folder)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        os.environ["PATH"] = f"{before['PATH']}:/usr/sbin:/sbin"
        munge = folder / "munge"
        _start(started, folder, ["munged", "--foreground", "--force", f"--socket={munge}/socket",
                f"--key-file={munge}/key", f"--seed-file={munge}/seed", f"--pid-file={munge}/pid",
                f"--log-file={munge}/log"])  # fmt: skip
        _wait(folder, (munge / "socket").exists)
        _start(started, folder, ["slurmctld", "-D"])
        for node in NODES:
            _start(started, folder, ["slurmd", "-D", "-N", node])
        _wait(
            folder, lambda: command("sinfo", "-h", "-N", "-o", "%t", "-p", "main") == "idle\nidle"
        )
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def command(*words: object) -> str:
    """The output of a command of Slurm; an empty text if it fails."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _configure(folder: Path) -> None:
    for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    folder.chmod(0o755)  # clients reach the socket of munged
    (folder / "munge").chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in listening]
    for one in listening:
        one.close()
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # nothing uses it


def _start(started: list[subprocess.Popen[bytes]], folder: Path, words: Sequence[str]) -> None:
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    started.append(process)


def _wait(folder: Path, ready: object, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not ready():  # type: ignore[operator]
        if time.monotonic() > end:
            logs = [folder / "output.txt", *sorted(folder.glob("*.log"))]
            raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs if log.exists()))
        time.sleep(0.1)
