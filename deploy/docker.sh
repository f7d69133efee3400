#!/usr/bin/env bash
# Makes `docker compose build` and `up` work here: installs what is missing and starts a daemon unless one answers.
#   deploy/docker.sh FOLDER
# FOLDER is then a $DOCKER_CONFIG with the plugins that this system's packages lack. A daemon that was started has its number in
# FOLDER/dockerd.pid, for whoever is to end it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
rm -f "$folder/dockerd.pid" # of an earlier daemon
fail() { echo "error: $*" >&2; exit 1; }

if ! docker version >/dev/null 2>&1; then
  [ "$(id -u)" = 0 ] || fail "no Docker daemon answers, and only root can start one"
  bash "$here/install-packages.sh" dockerd:docker.io docker:docker.io iptables:iptables
  setsid dockerd >"$folder/dockerd.log" 2>&1 </dev/null &
  echo $! >"$folder/dockerd.pid"
  for _ in $(seq 60); do
    docker version >/dev/null 2>&1 && break
    kill -0 "$(cat "$folder/dockerd.pid")" 2>/dev/null || break
    sleep 0.5
  done
  docker version >/dev/null 2>&1 || fail "the Docker daemon does not start: $(tail -n 1 "$folder/dockerd.log")"
fi

export DOCKER_CONFIG=$folder
docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 && exit 0
# Debian has them from release 13 (trixie) on. They need nothing of it, so older releases take the two files from there.
command -v dpkg-deb >/dev/null || fail "install the Compose and Buildx plugins of Docker, then run this again"
echo "== Compose and Buildx"
apt=$folder/apt
mkdir -p "$apt"/{lists,cache}/partial "$folder/cli-plugins"
mirror=$(apt-cache policy | grep -oE 'https?://[^ ]+/debian/? ' | head -n 1 || true)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian } trixie main" >"$apt/trixie.list"
options=(-o "Dir::Etc::sourcelist=$apt/trixie.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
cd "$apt"
{ apt-get "${options[@]}" -qq update && apt-get "${options[@]}" -qq download docker-compose docker-buildx; } >"$apt/log" 2>&1 ||
  fail "Compose and Buildx cannot be had: $(tail -n 1 "$apt/log")"
for package in *.deb; do dpkg-deb --extract "$package" files; done
cp files/usr/libexec/docker/cli-plugins/* "$folder/cli-plugins/"
cd /
rm -r "$apt"
docker compose version >/dev/null && docker buildx version >/dev/null
