# Sourced: makes or reuses a virtual environment with lumenbox in it, and puts it on the PATH.
#   LUMENBOX_VENV   the environment to use       default .venv in the checkout
#   EXTRAS          extras to install, "[dev]" for the tests
# torch comes first and by itself: a plain install of the project then adds none of its own (on Linux the package
# index's default build carries CUDA; an index or a wheel cache that has another build is respected).
venv=${LUMENBOX_VENV:-.venv}
python=$(command -v python3.11 || command -v python3)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
export PATH="$(cd "$venv" && pwd)/bin:$PATH"
python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || pip install --quiet torch==2.13.0
pip install --quiet --editable ".${EXTRAS:-}"
