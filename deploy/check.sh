#!/usr/bin/env bash
# make check: lint, types, layers, and whether the generated protos are what the .proto files give.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=.venv/bin/python

echo "check: ruff"; .venv/bin/ruff check --quiet .
echo "check: pyright"; .venv/bin/pyright --warnings | tail -n 30; [ "${PIPESTATUS[0]}" = 0 ]
echo "check: import-linter"; .venv/bin/lint-imports --no-cache --no-logo | tail -n 40; [ "${PIPESTATUS[0]}" = 0 ]
echo "check: generated protos"
fresh=$(mktemp -d); trap 'rm -rf "$fresh"' EXIT
$PY -m grpc_tools.protoc -I . --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" proto/baton/v1/*.proto
for file in "$fresh"/proto/baton/v1/*; do
  cmp -s "$file" "proto/baton/v1/$(basename "$file")" \
    || { echo "check: proto/baton/v1/$(basename "$file") is not what its .proto gives; run: make proto" >&2; exit 1; }
done
echo "check: all good"
