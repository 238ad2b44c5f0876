#!/bin/bash
# Grades /app, which the policy wrote: read it as data and run nothing of it here (docs/outcomes.md). The policy never
# sees this directory. The reward is "reward", from 0 to 1; the other numbers are shown beside it.
python3 -I - <<'EOF'
import json
from pathlib import Path

answer = Path("/app/sum.txt")
text = answer.read_text(errors="replace").strip() if answer.is_file() else ""
partials = {"written": float(bool(text)), "right": float(text == "32")}
reward = round(sum(partials.values()) / len(partials), 4)
Path("/logs/verifier").mkdir(parents=True, exist_ok=True)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **partials}))
EOF
