"""What a grader's output tells of tools that it lacks: a zero because pytest is missing is no reward. Pure."""

import re
from collections.abc import Collection

# bash: "test.sh: line 3: uvx: command not found"; dash: "sh: 1: uvx: not found"; Python: "No module named 'pytest'".
MISSING = (
    re.compile(r"(?:^|: |\s)([\w.+-]+): (?:command )?not found\b", re.MULTILINE),
    re.compile(r"No module named ['\"]?([\w.+-]+)"),
)


def missing_tools(output: str, tools: Collection[str]) -> list[str]:
    """Of `tools`, those that the output says are not there, sorted."""
    return sorted({name for pattern in MISSING for name in pattern.findall(output) if name in tools})
