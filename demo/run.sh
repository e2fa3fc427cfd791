#!/usr/bin/env bash
# Two streams of evidence in about a minute: eight chats on four workers, undisturbed and with a worker killed in the
# middle of them. Exit 0 only if every stream is the same, token by token.
set -euo pipefail
cd "$(dirname "$0")/.."
. demo/environment.sh
exec python demo/demo.py "$@"
