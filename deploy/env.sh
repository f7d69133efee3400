#!/usr/bin/env bash
# Writes .env for compose.yaml: .env.example with secrets of its own. Leaves a .env that is there alone.
#   deploy/env.sh [FILE]
set -euo pipefail
file=${1:-$(dirname "$0")/../.env}
[ ! -e "$file" ] || { echo "error: $file is there already; its keys are in use" >&2; exit 1; }
secret() { od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n'; }
umask 077
while IFS= read -r line; do
  case $line in
    TANDEM_CLUSTER_KEY= | REDIS_PASSWORD= | TANDEM_ADMIN_KEY= | TANDEM_API_KEYS=) line+=$(secret) ;;
  esac
  echo "$line"
done <"$(dirname "$0")/../.env.example" >"$file"
echo "wrote $file, with keys of its own; clients send TANDEM_API_KEYS"
