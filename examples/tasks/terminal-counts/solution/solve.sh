#!/bin/bash
set -e
cd /app
grep -c ERROR app.log > errors.txt
grep -c WARN app.log > warns.txt
grep -c INFO app.log > infos.txt
