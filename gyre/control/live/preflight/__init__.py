"""What can be known to fail before a process starts: one list of checks for `gyre train`, `gyre check` and Python.

    settings   the configuration alone: keys that contradict each other
    model      the files of `policy.model`, against `tensors` that its config.json asks for
    machine    sandboxes, devices, memory, ports and programs of this machine
    directory  the run directory, and whether a run can go on

`preflight` raises the first failure; `findings` runs every check and returns what each found.
"""

from gyre.control.live.preflight.checks import CHECKS, Finding, findings, preflight

__all__ = ["CHECKS", "Finding", "findings", "preflight"]
