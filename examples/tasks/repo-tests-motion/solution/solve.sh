#!/bin/bash
set -e
cd /app
sed -i 's/+/-/' gap.py
sed -i 's/-/*/' way.py
sed -i 's/*/+/' sum.py
