#!/usr/bin/env bash
# Format, lint, types, import contract, tests. What CI runs, and all of it.
set -euo pipefail
cd "$(dirname "$0")/.."
EXTRAS="[dev]"
. demo/environment.sh
ruff format --check .
ruff check .
mypy
lint-imports
exec python -m pytest "$@"
