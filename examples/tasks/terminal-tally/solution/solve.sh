#!/bin/bash
set -e
cd /app
grep -c GET web.log > gets.txt
grep -c POST web.log > posts.txt
grep -c PUT web.log > puts.txt
