#!/bin/bash
set -e
cd /app
echo alpha > conf/host
echo 80 > conf/port
echo fast > conf/mode
