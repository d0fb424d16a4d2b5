#!/usr/bin/env bash
# Creates .venv and installs what Baton needs. Run by `make`; safe to run again after a failure. deploy/Dockerfile runs it too, and names
# another VENV, other EXTRAS of pyproject.toml, TORCH_BACKEND (cpu, or one of PyTorch's own, e.g. cu130).
# torch comes first and by its exact version, so that nothing else can draw in another build.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH="torch==2.13.0"
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
EXTRAS="${EXTRAS-dev}"
TORCH_BACKEND="${TORCH_BACKEND:-cpu}"

fail() { echo "setup: $1" >&2; exit 1; }
step() { echo "setup: $1"; }

[ "$(uname -s)" = Linux ] || fail "Baton runs on Linux only (NIXL has no other builds); this is $(uname -s)"
command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3 ..."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || fail "$PYTHON is $("$PYTHON" -c 'import platform; print(platform.python_version())'), but Baton needs 3.11 or newer; name one: make PYTHON=/path/to/python3 ..."
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"
[ -w . ] || fail "$PWD cannot be written, but .venv is created here; work in a copy of the tree that can"
free_mb=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mb" -gt 5000 ] || fail "only $free_mb MB are free here, but 5000 MB are needed (about 3000 stay in use); free some space"

[ -x "$VENV/bin/python" ] || { step "creating $VENV with $("$PYTHON" --version)"; "$PYTHON" -m venv "$VENV"; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
install() {  # progress bars where somebody looks, nothing but warnings and errors elsewhere
  if [ -t 1 ]; then pip install --progress-bar on "$@"; else pip install -q --progress-bar off "$@"; fi
}
step "1/3 pip"
pip install -q --upgrade pip || fail "pip cannot reach a package index; check the network or pip's configuration"

uv_torch() { pip install -q uv && "$VENV/bin/python" -m uv pip install -q --python "$VENV/bin/python" --torch-backend="$TORCH_BACKEND" "$TORCH"; }
step "2/3 $TORCH for $TORCH_BACKEND (about 200 MB as a CPU build)"
if [ "$TORCH_BACKEND" != cpu ]; then
  uv_torch || fail "PyTorch has no build of $TORCH for $TORCH_BACKEND here; see the lines above"
elif ! "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '${TORCH#*==}')" 2>/dev/null; then
  plan=$(pip install --dry-run --quiet --report - "$TORCH" 2>/dev/null) || fail "pip finds no $TORCH for this Python and machine; Python 3.11 to 3.13 on x86-64 or aarch64 have it"
  if grep -q '"name": *"nvidia-' <<<"$plan"; then
    step "    pip would bring CUDA's libraries too (gigabytes); asking uv for the CPU build instead"
    uv_torch 2>/dev/null \
      || step "    no CPU build to be had here; installing the CUDA build"
  fi
  install "$TORCH" || fail "installing $TORCH failed; see the lines above"
fi

step "3/3 everything else (about 350 MB)"
"$VENV/bin/python" - $EXTRAS <<'EOF' > "$VENV/requirements.txt"
import sys
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + [item for extra in sys.argv[1:] for item in project["optional-dependencies"][extra]]
print("\n".join(item for item in wanted if not item.startswith("torch")))
EOF
install "$TORCH" -r "$VENV/requirements.txt" || fail "installing $VENV/requirements.txt failed; see the lines above"
"$VENV/bin/python" - <<'EOF' || fail "an installed package does not import; see the line above, then run: rm -rf $VENV && make setup"
import grpc, msgspec, nixl_cu13, numpy, safetensors, tokenizers, torch, zmq  # noqa: F401
EOF
touch "$VENV/.ready"
step "done"
