#!/bin/bash
# One third for each function that is right on all cases; each module runs in a process of its own.
python3 -I - <<'EOF'
import json
import subprocess
from pathlib import Path

CASES = [(2, 3), (7, 4), (0, 5), (-3, 6)]
EXPECTED = {
    "gap": lambda x, y: x - y,
    "way": lambda x, y: x * y,
    "sum": lambda x, y: x + y,
}
CALL = "import runpy, sys; f = runpy.run_path(sys.argv[1])[sys.argv[2]]; print([f(*case) for case in {cases}])"


def right(name, function):
    command = ["python3", "-I", "-S", "-c", CALL.format(cases=CASES), f"/app/{name}.py", name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0 and run.stdout == f"{[function(*case) for case in CASES]}\n"


partials = {name: float(right(name, function)) for name, function in EXPECTED.items()}
reward = round(sum(partials.values()) / len(partials), 4)
Path("/logs/verifier").mkdir(parents=True, exist_ok=True)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **partials}))
EOF
