#!/bin/bash
set -e
cd /app
echo red > box/front
echo blue > box/back
echo green > box/side
