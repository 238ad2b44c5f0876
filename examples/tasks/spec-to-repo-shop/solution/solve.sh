#!/bin/bash
set -e
cd /app
echo 'def total(a, b): return a + b' > total.py
echo 'def price(a, b): return a * b' > price.py
echo 'def change(a, b): return a - b' > change.py
