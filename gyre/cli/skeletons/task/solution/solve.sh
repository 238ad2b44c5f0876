#!/bin/bash
# A right answer, for the test of this task; the policy never sees it.
cd /app
awk '{ sum += $1 } END { print sum }' numbers.txt >sum.txt
