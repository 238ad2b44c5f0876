"""The tests of this repository: python3 run_tests.py."""

import runpy

TESTS = [
    ("add", 5),
    ("sub", -1),
    ("mul", 6),
]

passed = 0
for name, want in TESTS:
    gave = runpy.run_path(name + ".py")[name](2, 3)
    if gave == want:
        passed += 1
    else:
        print(f"FAIL {name}(2, 3) gave {gave}, want {want}")
print(f"{passed} of {len(TESTS)} pass")
