#!/bin/bash
# One third for each function that is right on all cases. Each module runs in a process of its own, and as another user
# when this one may change it: then it can neither read these tests, nor write the reward, nor end this process.
python3 -I - <<'EOF'
import json
import os
import pwd
import subprocess
from pathlib import Path

CASES = [(2, 3), (7, 4), (0, 5), (-3, 6)]
EXPECTED = {
    "area": lambda w, h: w * h,
    "edge": lambda w, h: w + h,
    "rise": lambda w, h: h - w,
}
CALL = "import runpy, sys; f = runpy.run_path(sys.argv[1])[sys.argv[2]]; print([f(*case) for case in {cases}])"


def other_user():
    if os.geteuid() != 0:
        return {}
    users = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = users.get("agent") or users["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def right(name, function):
    command = ["python3", "-I", "-S", "-c", CALL.format(cases=CASES), f"/app/{name}.py", name]
    try:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            env={"PATH": os.environ["PATH"]},
            cwd="/",
            **other_user(),
        )
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0 and run.stdout == f"{[function(*case) for case in CASES]}\n"


partials = {name: float(right(name, function)) for name, function in EXPECTED.items()}
reward = round(sum(partials.values()) / len(partials), 4)
Path("/logs/verifier").mkdir(parents=True, exist_ok=True)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **partials}))
EOF
