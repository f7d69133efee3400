#!/usr/bin/env bash
# Makes a virtual environment with the first Python that fits, installing what a bare Debian or Ubuntu lacks.
#   deploy/make-venv.sh FOLDER
set -euo pipefail
folder=$1
[ -x "$folder/bin/pip" ] && exit 0

fail() { echo "error: $*" >&2; exit 1; }

find_python() {
  for python in python3 python3.13 python3.12 python3.11 python3.14; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$python"; return; fi
  done
}

install() { bash "$(dirname "$0")/install-packages.sh" "$@"; }

python=$(find_python)
if [ -z "$python" ]; then
  install python3 python3-venv
  python=$(find_python)
  [ -n "$python" ] || fail "Tandem needs Python 3.11 or newer; this system has $(python3 --version 2>&1)"
fi
echo "== virtual environment with $("$python" --version)"
if ! "$python" -m venv "$folder" 2>/dev/null; then
  rm -rf "$folder"
  install "$("$python" -c 'import sys; print("python{}.{}-venv".format(*sys.version_info))')"
  "$python" -m venv "$folder"
fi
# The one that comes with Python 3.11 takes three times as long to find out what to install.
"$folder/bin/pip" install --quiet --upgrade pip || echo "== no newer pip here"
