#!/usr/bin/env bash
# Makes a virtual environment with the newest fitting Python, installing what a bare Debian or Ubuntu lacks.
#   deploy/make-venv.sh FOLDER
set -euo pipefail
folder=$1
[ -x "$folder/bin/pip" ] && exit 0

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() { for python in python3 python3.13 python3.12 python3.11 python3.14; do fits "$python" && { echo "$python"; return; }; done; }

install() {
  local sudo=""
  if [ "$(id -u)" != 0 ]; then sudo=$(command -v sudo) || { echo "error: install these packages as root: $*" >&2; exit 1; }; fi
  echo "== installing $*"
  $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

python=$(find_python)
if [ -z "$python" ]; then
  install python3 python3-venv python3-pip
  python=$(find_python)
  [ -n "$python" ] || { echo "error: Tandem needs Python 3.11 or newer; this system has $(python3 --version 2>&1)" >&2; exit 1; }
fi
echo "== virtual environment with $("$python" --version)"
"$python" -m venv "$folder" 2>/dev/null || {
  rm -rf "$folder"
  install "$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")')"
  "$python" -m venv "$folder"
}
