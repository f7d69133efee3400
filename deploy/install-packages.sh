#!/usr/bin/env bash
# Installs Debian packages whose command is missing.
#   deploy/install-packages.sh COMMAND:PACKAGE [COMMAND:PACKAGE ...]; a PACKAGE alone is installed in any case
set -euo pipefail
fail() { echo "error: $*" >&2; exit 1; }

need=()
for each in "$@"; do
  if [ "$each" = "${each#*:}" ] || ! command -v "${each%%:*}" >/dev/null; then need+=("${each##*:}"); fi
done
[ ${#need[@]} -gt 0 ] || exit 0
command -v apt-get >/dev/null || fail "install ${need[*]} with this system's package manager, then run this again"
sudo=""
if [ "$(id -u)" != 0 ]; then sudo=$(command -v sudo) || fail "install as root, then run this again: ${need[*]}"; fi
# apt refuses to run twice at once. Daemons that packages start must not keep the lock.
exec 9<"$0"; flock 9
apt() { $sudo env DEBIAN_FRONTEND=noninteractive apt-get "$@" 9<&-; }
echo "== installing ${need[*]}"
apt update -qq || echo "apt-get update failed, perhaps offline; trying what is known"
apt install -y -qq "${need[@]}" >/dev/null || fail "apt-get cannot install ${need[*]}"
