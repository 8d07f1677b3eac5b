#!/usr/bin/env bash
# Install specserve into a virtual environment of its own. The image is built with it, and a machine
# without containers is served by it just as well.
#
#   deploy/install.sh DIRECTORY          makes DIRECTORY/bin/specserve
#
#   PYTHON=python3.12                    another interpreter, 3.11 or newer
#   TORCH=torch==2.13.0                  another torch than the constraints name
#   PIP_TORCH_ARGS="--index-url ..."     where torch alone comes from, such as the CPU index of the
#                                        PyTorch project, or one of its CUDA indexes
#   PIP_ARGS="--no-index --find-links wheels"   air-gapped: from wheels fetched before (see below)
#   COMPILE=1                            write bytecode: for an image whose files cannot be written
#
# For a machine without a registry, on one with: `deploy/install.sh --download wheels` fills a folder
# with everything; carry it and the checkout over and set PIP_ARGS as above.
set -euo pipefail

if [ $# -lt 1 ] || [ "$1" = --help ] || [ "$1" = -h ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
torch="${TORCH:-$(grep '^torch==' "$root/constraints.txt")}"
read -r -a torch_args <<< "${PIP_TORCH_ARGS:-}"
read -r -a pip_args <<< "${PIP_ARGS:-}"
pip_args+=(--quiet --disable-pip-version-check --no-input)
compile=(--no-compile)
[ -z "${COMPILE:-}" ] || compile=(--compile)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "install.sh: $python is not Python 3.11 or newer; set PYTHON" >&2; exit 2; }

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# Under these, so that what is installed is what was tested; torch as it was asked for.
{ grep -v '^torch==' "$root/constraints.txt"; echo "$torch"; } > "$work/constraints.txt"
backend="$(sed -n 's/^requires = \["\(hatchling==[^"]*\)"\]/\1/p' "$root/pyproject.toml")"

if [ "$1" = --download ]; then
    folder="${2:?install.sh: --download needs a folder}"
    "$python" -m pip download "${pip_args[@]}" "${torch_args[@]}" -c "$work/constraints.txt" \
        -d "$folder" "$torch"
    "$python" -m pip download "${pip_args[@]}" -c "$work/constraints.txt" --find-links "$folder" \
        -d "$folder" "$backend" "$root"
    rm -f "$folder"/specserve-*  # it is built from the checkout, there as here
    exit 0
fi

"$python" -m venv "$1"
pip=("$1/bin/python" -m pip install "${compile[@]}" "${pip_args[@]}")
# Torch first and by itself, so that the index chosen for it serves nothing else.
"${pip[@]}" "${torch_args[@]}" -c "$work/constraints.txt" "$torch"
"${pip[@]}" -c "$work/constraints.txt" "$backend"
"${pip[@]}" --no-build-isolation -c "$work/constraints.txt" "$root"
"$1/bin/python" -m pip uninstall --quiet --yes hatchling
"$1/bin/specserve" --version
