"""Runs steps as Slurm jobs: submitit submits them, `squeue` tells their states."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from layerswap.ground import system
from layerswap.ground.commit import write_json
from layerswap.ground.errors import StudyError, one_line
from layerswap.ground.lease import remove_lease
from layerswap.ground.types import Log
from layerswap.study import clusters
from layerswap.study.clusters import ClusterExecutor, Ending, Later, first_of_kinds, run_remotely
from layerswap.study.journal import StudyJournal
from layerswap.study.kinds import KINDS
from layerswap.study.steps import Step
from layerswap.study.submitit_inside import job_script
from layerswap.versions import install

JOB = "job.json"
"""File in a step's folder that names its job."""
LOOK = 5.0
"""Seconds between two calls of `squeue`."""
ANSWER = 120.0
"""Seconds after which a command of Slurm is given up."""
PATIENCE = 600.0
"""Seconds for which a refused submission is tried again, after the user's last job has ended."""
KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
"""Slurm client variables that jobs inherit; those of an allocation are removed."""
SHORTEST, LONGEST, SPARE = 60, 3 * 24 * 60, 3
"""Least and most minutes of a default time limit, and its ratio to the estimated time."""
LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "SUSPENDED",
        "REQUEUE_HOLD", "REQUEUE_FED", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT",
        "RESV_DEL_HOLD")  # fmt: skip
"""States of jobs that have not ended."""
LOST = ("TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED")
"""States after which a step runs again and resumes."""
WARNINGS = (10, 12)
"""SIGUSR1 and SIGUSR2 on Linux. Slurm sends one before it ends a job; a job that has no handler yet
dies of it, and its step runs again."""
QUEUED = ("None", "Priority", "Resources", "BeginTime", "Prolog", "Cleaning", "Licenses")
"""Reasons of waiting that pass by themselves."""
WITHOUT = {"mem": ("mem_per_cpu", "mem_per_gpu"), "cpus_per_task": ("cpus_per_gpu",),
           "gpus_per_node": ("gres", "gpus_per_task")}  # fmt: skip
"""Our parameters, and those of the study that replace them."""
LAST = 300
"""Most characters of a job's last line."""


@dataclass(frozen=True)
class JobState:
    """State of a Slurm job; `squeue` knows it until minutes after its end."""

    job: str
    state: str = "UNKNOWN"
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    node: str = ""
    log: str = ""

    def __str__(self) -> str:
        node = f" on {self.node}" if self.node else ""
        code = f", exit code {self.exit_code}" if self.exit_code else ""
        ended = f", signal {self.signal}" if self.signal else ""
        why = f" ({self.reason})" if self.reason not in ("", "None", self.state) else ""
        return f"job {self.job} {self.state}{node}{code}{ended}{why}"


class _Resumable:
    """Runs a step; before its time limit, or when preempted, submitit requeues its job.

    A training saves a checkpoint first.
    """

    def __call__(self, *call: Any) -> None:
        requeue = {number: signal.getsignal(number) for number in WARNINGS}
        system.interrupt_on(signal.SIGTERM, *WARNINGS)
        try:
            run_remotely(*call)
        except system.Terminated as end:
            if callable(hand := requeue.get(end.number)):
                hand(end.number, None)
            sys.exit(128 + end.number)

    def checkpoint(self, *call: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *call)


class OnSlurm(ClusterExecutor):
    """Submits each step as a Slurm job through submitit.

    Nodes share the study's folder. A job that Slurm lost or preempted, or whose
    time was over, runs again, and resumes.

    Args:
        logs: folder of the jobs' own files, one folder a step.
        parameters: of `submitit.SlurmExecutor`, whole and by kind of step.
        hours: estimated hours by step, for the default time limit.
    """

    def __init__(
        self, logs: Path, parameters: Mapping[str, Any], hours: Mapping[str, float]
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise StudyError(f"--on slurm needs submitit; {install('slurm')}") from None
        self._submitit, self._logs = submitit, logs
        kinds = set(map(_parameters_key, KINDS))
        self._given = {key: value for key, value in parameters.items() if key not in kinds}
        self._by_kind = {kind: parameters[kind] for kind in kinds & {*parameters}}
        self._hours = hours
        named = {f"slurm.{kind}": given for kind, given in self._by_kind.items()}
        try:
            for where, given in {"slurm": self._given, **named}.items():
                _check_names(where, given, self._executor("check"))
            self._states = queue()
        except (RuntimeError, OSError) as error:
            raise StudyError(f"Slurm cannot be reached ({one_line(error)})") from None
        self._looked, self._told, self._missed = time.monotonic(), set[str](), set[str]()
        self._accounts, self._refused_at = set[int](), dict[str, float]()

    def _executor(self, name: str) -> Any:
        return self._submitit.SlurmExecutor(folder=self._logs / file_name(name))

    def _log(self, name: str, job: str) -> Path:
        """The file of a job's output, which submitit names."""
        return self._logs / file_name(name) / f"{job}_0_log.out"

    def parameters(self, step: Step) -> dict[str, Any]:
        """The parameters of a step's job by submitit's names; the study's precede ours."""
        asked = step.resources
        ours: dict[str, Any] = {
            "job_name": file_name(step.name),
            "cpus_per_task": math.ceil(asked.cpus),
            "gpus_per_node": math.ceil(asked.gpus) or None,
            "mem": f"{math.ceil(asked.memory_gb * 1024)}MB",
            "time": default_time(self._hours.get(step.name)),
        }  # fmt: skip
        given = {**self._given, **self._by_kind.get(_parameters_key(step.kind), {})}
        ours = {key: value for key, value in ours.items()
                if not any(given.get(excluded) for excluded in WITHOUT.get(key, ()))}  # fmt: skip
        chosen = {key: value for key, value in {**ours, **given}.items() if value is not None}
        if "time" in chosen:
            chosen["time"] = minutes(chosen["time"])
        return chosen

    def check(self, steps: Sequence[Step], log: Log) -> None:
        """Ask Slurm to test one job of each kind of step, without running it."""
        for kind, step in first_of_kinds(steps).items():
            script = job_script(self._logs, self.parameters(step))
            tested = _run("sbatch", "--test-only", script=script)
            if tested.returncode == 0:
                continue
            why = _refusal(tested.stderr)
            if "node configuration" not in why:
                raise StudyError(self._refused(step, why))
            # It may be for now alone: Slurm says the same while fitting nodes are drained.
            log(f"note: Slurm has no node for {kind} steps now ({why}; {self._asked(step)})")

    def _asked(self, step: Step) -> str:
        shown = self.parameters(step)
        return ", ".join(f"{key}={value}" for key, value in shown.items() if key != "job_name")

    def _refused(self, step: Step, why: str) -> str:
        own = f"slurm.{_parameters_key(step.kind)}"
        keys = " or ".join(filter(None, [clusters.resources_key(step.kind), own]))
        return f"Slurm refuses {step.name}: {why} ({self._asked(step)}); change {keys} of the study"

    def adopt(self, journal: StudyJournal, step: Step) -> tuple[str, str] | None:
        """The job of another run, perhaps of another account, that still waits or runs."""
        folder = journal.folder(step.name)
        noted = job_of(folder)
        if noted is None:
            return None
        if noted["job"] not in self._states:
            self._accounts.add((folder / JOB).stat().st_uid)
            with suppress(RuntimeError):
                self._states = queue(self._accounts)
        state = self._states.get(noted["job"])
        if state is not None and state.state in LIVE:
            return noted["job"], noted["token"]
        if state is not None:
            remove_lease(folder, noted["token"])  # Slurm knows that it has ended
        return None

    def submit(self, step: Step, folder: Path, call: tuple[Any, ...]) -> str:
        """Start a step as a job."""
        executor = self._executor(step.name)
        executor.update_parameters(**self.parameters(step))
        try:
            # submitit repeats the error there
            with outside_allocation(), redirect_stderr(io.StringIO()):
                job = executor.submit(_Resumable(), *call)
        except self._submitit.core.utils.FailedJobError as error:
            kind = Later if self._may_pass(step.name) else StudyError
            raise kind(self._refused(step, _refusal(str(error)))) from None
        self._refused_at.pop(step.name, None)
        log = self._log(step.name, job.job_id)
        write_json(folder / JOB, {"job": job.job_id, "token": call[-1], "log": str(log)})
        return str(job.job_id)

    def _may_pass(self, name: str) -> bool:
        """True if a refusal may be a limit: on jobs, while some live, or on requests, for a time.

        The words of a refusal do not tell, as sites and versions have their own.
        """
        now = time.monotonic()
        since = self._refused_at.setdefault(name, now)
        if any(state.state in LIVE for state in self._states.values()):
            since = self._refused_at[name] = now
        return now - since < PATIENCE

    def wait(self, handles: Mapping[Any, str], log: Log) -> dict[Any, Ending]:
        """Look at the queue if the last look is `LOOK` seconds ago."""
        time.sleep(min(clusters.POLL, LOOK))
        if not (handles or self._refused_at) or time.monotonic() - self._looked < LOOK:
            return {}
        self._looked = time.monotonic()
        try:
            self._states = queue(self._accounts)
        except RuntimeError as error:  # the controller may come back
            self._tell(f"squeue: {one_line(error)}; trying again", log)
            return {}
        endings = {}
        for job, name in handles.items():
            if (state := self._states.get(job)) is None:
                if job in self._missed:
                    endings[job] = Ending(f"job {job} is unknown to Slurm")
                self._missed.add(job)
            elif state.state == "PENDING" and state.reason not in QUEUED:
                self._tell(f"{name}: {state}; see `scontrol show job {job}`", log)
            elif state.state not in LIVE:
                endings[job] = self._ending(state, name)
        return endings

    def _tell(self, line: str, log: Log) -> None:
        if line not in self._told:
            self._told.add(line)
            log(line)

    def _ending(self, state: JobState, name: str) -> Ending:
        if state.state == "COMPLETED":
            return Ending()
        log = self._log(name, state.job)
        last = last_lines(log, 1)
        if not log.exists() and state.node and state.state == "FAILED":
            last = [f"it wrote no {log}; check that {state.node} sees this folder"]
        signals = (*WARNINGS, signal.SIGTERM)
        warned = state.signal in signals or state.exit_code - 128 in signals
        again = state.state in LOST or (warned and state.state != "CANCELLED")
        return Ending(": ".join([str(state), *last]), again=again)

    def cancel(self, handles: Mapping[Any, str]) -> str:
        """Cancel jobs."""
        named = ", ".join(f"{job} ({name})" for job, name in handles.items())
        if _run("scancel", *handles).returncode == 0:
            return f"cancelled the Slurm jobs {named}"
        return f"these Slurm jobs run on: {named}; cancel them with: scancel {' '.join(handles)}"


def queue(accounts: Iterable[int] = ()) -> dict[str, JobState]:
    """The jobs of the user, and of other accounts, that wait, run or ended lately, by id.

    Raises:
        RuntimeError: `squeue` failed, or does not answer.
    """
    columns = "JobID:20,State:20,exit_code:12,Reason:80,NodeList:80"
    lines: list[str] = []
    for whose in ("--me", *(f"--user={account}" for account in accounts)):
        done = _run("squeue", "-h", "-t", "all", whose, "-O", columns)
        if done.returncode:
            raise RuntimeError(done.stderr)
        lines += done.stdout.splitlines()
    ends = accumulate(int(column.rpartition(":")[2]) for column in columns.split(","))
    places = [*pairwise([0, *ends])]
    jobs = {}
    for line in lines:
        job, state, status, why, node = (line[start:end].strip() for start, end in places)
        code = int(status) if status.isdigit() else 0  # a wait status
        jobs[job] = JobState(job, state, code >> 8, code & 127, why, node)
    return jobs


def jobs_of(journal: StudyJournal) -> dict[str, JobState]:
    """The last job of each step that had one, by step; without Slurm here, of unknown state."""
    noted = {step.name: job_of(journal.folder(step.name)) for step in journal.graph}
    if not any(noted.values()):
        return {}
    try:
        states = queue()
    except RuntimeError:
        states = {}
    return {
        name: replace(states.get(note["job"], JobState(note["job"])), log=note["log"])
        for name, note in noted.items()
        if note is not None
    }


def job_of(folder: Path) -> dict[str, str] | None:
    """The job, token and log that a step's folder names; None without them."""
    try:
        noted = json.loads((folder / JOB).read_bytes())
        return {key: str(noted[key]) for key in ("job", "token", "log")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parameters_key(kind: str) -> str:
    """Return the key of `slurm` in a study that has the parameters of a kind of step."""
    return KINDS[kind].resources or kind


def file_name(step: str) -> str:
    """The name of a step as a job and as a folder."""
    return step.replace("/", "-")


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a job's errors, or of its output if it wrote no errors.

    Lines of srun and submitit are left out, unless there are no others.
    """
    for path in (log.with_suffix(".err"), log):
        try:
            lines = path.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        written = [line for line in lines if line.strip()]
        ours = [line for line in written if not line.startswith(("srun: ", "submitit"))]
        if told := ours or written:
            return [one_line(line, LAST) for line in told[-count:]]
    return []


def default_time(hours: float | None) -> int:
    """The default time limit in minutes of a step that is estimated to take some hours."""
    return LONGEST if hours is None else min(LONGEST, max(SHORTEST, math.ceil(SPARE * 60 * hours)))


def minutes(time_limit: object) -> int:
    """A time limit in minutes: a number, or a text of Slurm such as `1-12:00:00` or `90:00`.

    Raises:
        StudyError: it is neither.
    """
    if isinstance(time_limit, int | float) and not isinstance(time_limit, bool):
        return math.ceil(time_limit)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time_limit))
    if match is None:
        raise StudyError(f"slurm: time {time_limit!r} is no number of minutes, nor D-HH:MM:SS")
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:
        return days * 1440 + first * 60 + second + (third > 0)
    return first + (second > 0)


def _check_names(where: str, given: object, executor: Any) -> None:
    if not isinstance(given, Mapping):
        raise StudyError(f"{where}: write a mapping of submitit's parameters; found {given!r:.60}")
    try:
        executor.update_parameters(**given)
    except (ValueError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise StudyError(f"{where}: {why}; others of sbatch go to additional_parameters") from None


def _refusal(stderr: str) -> str:
    """The facts in the messages of sbatch, on one line."""
    prefix = re.compile(
        r"^(sbatch: )?(error: |allocation failure: )*(Batch job submission failed: )?"
    )
    lines = [prefix.sub("", line).strip() for line in stderr.splitlines()]
    return one_line("; ".join(filter(None, dict.fromkeys(lines))))


@contextmanager
def outside_allocation() -> Iterator[None]:
    """Hide the variables of the allocation that this process is in.

    sbatch hands them to the new job, where `srun` would obey them and fail.
    """
    hidden = {name: value for name, value in os.environ.items()
              if name.startswith("SLURM_") and name not in KEPT
              and "SLURM_JOB_ID" in os.environ}  # fmt: skip
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _run(*words: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, input=script, capture_output=True, text=True, check=False, timeout=ANSWER
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))
