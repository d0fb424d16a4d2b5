#!/usr/bin/env bash
# healthcheck.sh livez|readyz: exit code 0 when this container's process answers so at BATON_METRICS_PORT.
# In bash alone: a Python process every few seconds would cost more than an idle router does.
set -uo pipefail
exec 3<>"/dev/tcp/127.0.0.1/${BATON_METRICS_PORT:-9400}" 2>/dev/null || { echo "nothing listens at port ${BATON_METRICS_PORT:-9400}"; exit 1; }
printf 'GET /%s HTTP/1.0\r\n\r\n' "$1" >&3
read -r -t 2 status <&3
echo "$status"
[[ $status == *" 200 "* ]]
