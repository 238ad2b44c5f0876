#!/bin/bash
set -e
cd /app
sed -i 's/-/+/' add.py
sed -i 's/*/-/' sub.py
sed -i 's/+/*/' mul.py
