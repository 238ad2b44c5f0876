#!/bin/bash
# One third for each file that holds exactly its line; the files exist with other values before.
python3 -I - <<'EOF'
import json
from pathlib import Path

EXPECTED = {"box/front": "red", "box/back": "blue", "box/side": "green"}


def holds(name, value):
    path = Path("/app", name)
    return path.is_file() and path.read_text(errors="replace").strip() == value


partials = {name: float(holds(name, value)) for name, value in EXPECTED.items()}
reward = round(sum(partials.values()) / len(partials), 4)
Path("/logs/verifier").mkdir(parents=True, exist_ok=True)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **partials}))
EOF
