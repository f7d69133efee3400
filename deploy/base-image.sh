#!/usr/bin/env bash
# Makes a stand-in for python:3.x-slim out of this machine's own Python, for where no registry can be reached.
#   deploy/base-image.sh PYTHON IMAGE
# PYTHON has pip beside it, as in a virtual environment. The image holds that Python, a shell, a few small tools and this
# machine's CA certificates; it has no apt. It must not leave the machine: use the real image wherever that can be had.
set -euo pipefail
python=$1 image=$2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{usr/bin,usr/lib,usr/lib64,usr/local/bin,usr/local/lib,etc/ssl/certs,dev,proc,sys,run,root,tmp,var/tmp}
chmod 1777 "$root/tmp" "$root/var/tmp"
for folder in bin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done

# Python: program, library, pip.
read -r version program library headers packages < <("$python" - <<'PYTHON'
import os, sys, sysconfig
from importlib.util import find_spec
program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
packages = os.path.dirname(os.path.dirname(find_spec("pip").origin))
print("%d.%d" % sys.version_info[:2], program, sysconfig.get_path("stdlib"), sysconfig.get_path("include"), packages)
PYTHON
)
home=$root/usr/local/lib/python$version
mkdir -p "$home/site-packages"
tar -C "$library" --exclude=./site-packages --exclude=./dist-packages --exclude=./test --exclude=__pycache__ --exclude='*.a' -c . | tar -C "$home" -x
cp -a "$packages"/pip "$packages"/pip-*.dist-info "$home/site-packages/"
cp -L "$program" "$root/usr/local/bin/python$version"
for name in python3 python; do ln -s "python$version" "$root/usr/local/bin/$name"; done
printf '#!/bin/sh\nexec python3 -m pip "$@"\n' >"$root/usr/local/bin/pip"
chmod +x "$root/usr/local/bin/pip"

for tool in sh bash cat chmod cp env head id kill ln ls mkdir mv rm sed sleep touch uname ldconfig; do
  found=$(PATH=$PATH:/sbin:/usr/sbin command -v "$tool") && [ -f "$found" ] && cp -L "$found" "$root/usr/bin/" || cp -L "/bin/$tool" "$root/usr/bin/"
done

# All shared libraries that these need, and those that wheels expect everywhere.
{
  find "$root/usr/bin" "$root/usr/local" -type f \( -perm -100 -o -name '*.so*' \) -exec ldd {} + 2>/dev/null | grep -oE '/[^ ]+\.so[^ ]*' || true
  ldconfig -p | grep -oE '/[^ ]+/lib(c|dl|gcc_s|gomp|m|nss_dns|nss_files|pthread|resolv|rt|stdc\+\+|util)\.so\.[0-9.]+$'
} | sort -u | while read -r file; do
  case $file in "$root"*) continue ;; /lib*) target=$root/usr$file ;; *) target=$root$file ;; esac
  mkdir -p "${target%/*}"
  [ ! -f "$file" ] || cp -L "$file" "$target"
done
cp -L /etc/os-release /etc/nsswitch.conf "$root/etc/"
cp -rL /etc/ld.so.conf /etc/ld.so.conf.d "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
ldconfig -r "$root"

bundle=/etc/ssl/certs/ca-certificates.crt
tar -C "$root" -c . | docker import --change "ENV PATH=/usr/local/bin:/usr/bin:/bin PIP_CERT=$bundle SSL_CERT_FILE=$bundle PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore" --change 'CMD ["python3"]' - "$image" >/dev/null
echo "== $image: $(docker image inspect --format '{{.Size}}' "$image" | awk '{printf "%.0f MB", $1 / 1e6}')"
