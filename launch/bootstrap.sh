#!/bin/sh
# Sets up shardwise in .venv and runs one target; `help` lists them.
# The same as make, for machines without make. Needs Python 3.11 to 3.13 and, for DeepSpeed's operators, a C++ compiler.
#
#   SHARDWISE_PYTHON=/path/to/python   the interpreter to build .venv with
#   SHARDWISE_OUTCOME=1                test-long and oldest keep what they came to under benchmarks/results/
#   VERSION=5.24.0                     the release that the target transformers tries; without it the installed one
#
# Exit code 2: the target does not exist. 4: something is missing on the machine; the message names it and how to get it.
set -eu

cd "$(dirname "$0")/.."
venv=.venv
bin=$venv/bin
target=${1:-help}
outcome=${SHARDWISE_OUTCOME:+--outcome=benchmarks/results/$target-$(date -u +%Y-%m-%d).json}

say() { printf '%s\n' "$*" >&2; }
stop() { say "bootstrap: $1"; shift; for line in "$@"; do say "  $line"; done; exit 4; }

usage() {
    cat <<'TEXT'
install     set up .venv and the shardwise command
train       install, then train the quickstart example on this machine
test        everything that continuous integration runs; eleven minutes on two cores
test-quick  what computes little, and one small training; about three minutes
test-changed
            test files that a change since the main branch (or since the argument) can reach; mostly three minutes
test-long   full products and repeated kills, all that the seven targets below run; about four hours
test-long-documents, test-long-kills, test-long-starts, test-long-products, test-long-data, test-long-slurm, test-long-zoo
            the documents as they are printed; kills; kills of starts; every combination; large and damaged files; a real
            Slurm; every model type of transformers: an hour each
mutations   faults, each seeded into a copy of the code: do the tests nearest to it fail? about 25 minutes
check       ruff, mypy over the code, its tests and its benchmarks, import-linter, shellcheck
bench       benchmarks, as ratios measured side by side
bench-gpu   half an hour on a GPU: every engine, predictions, other trainers, FP8, small cards; a rehearsal without one
golden      runs every known dry run anew, writes tests/golden/dry_run.jsonl and the table of closed forms; an hour
newest      the canaries with the newest versions of all libraries, in .venv-newest: may an upper bound go up?
transformers
            signatures and test-long-zoo with transformers VERSION (make transformers VERSION=5.24.0), in .venv-transformers: what
            differs from the committed outcome? exit code 1 if a type that trained does not any more; an hour
oldest      what the libraries decide, with the lowest versions that pyproject.toml allows, in .venv-oldest; half an hour
uninstall   remove .venv, caches and compiled operators; runs remain
TEXT
}

fits() { # a Python that fits: right version, can make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    if [ -n "${SHARDWISE_PYTHON:-}" ]; then
        fits "$SHARDWISE_PYTHON" && { printf '%s\n' "$SHARDWISE_PYTHON"; return; }
        stop "SHARDWISE_PYTHON=$SHARDWISE_PYTHON is not a Python 3.11, 3.12 or 3.13 with the venv module"
    fi
    for name in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$name" >/dev/null 2>&1 && fits "$name"; then command -v "$name"; return; fi
    done
    stop "no Python 3.11, 3.12 or 3.13 with the venv module was found" \
        "Debian, Ubuntu:  sudo apt install python3 python3-venv python3-dev" \
        "Fedora:          sudo dnf install python3.12 python3.12-devel" \
        "any system:      install uv or pyenv, then: SHARDWISE_PYTHON=/path/to/python make install"
}

checksum() { cat "$@" | cksum | tr ' ' '-'; }

done_already() { [ -f "$venv/.$1" ] && [ "$(cat "$venv/.$1")" = "$2" ] && [ -x "$bin/python" ]; }

pip_install() { # on a terminal with pip's own bars, elsewhere a line for each download
    if [ -t 2 ]; then
        "$bin/python" -m pip install --disable-pip-version-check --no-compile "$@" >&2
        return
    fi
    status=$({
        {
            "$bin/python" -m pip install --disable-pip-version-check --no-compile --progress-bar off "$@" && code=0 || code=$?
            echo "$code" >&3
        } | sed -u -n -e 's/^ *Downloading \([^ ]*\) (\([0-9.]* MB\))$/  \1 (\2)/p' -e 's/^Installing collected packages.*/  unpacking .../p' >&2
    } 3>&1)
    return "$status"
}

announce() {
    # the torch that pip would take decides the size: a CPU build is 0.2 GB, a CUDA build brings its libraries
    build=$("$bin/python" -m pip install --disable-pip-version-check -q --dry-run --no-deps --report - torch==2.13.0 2>/dev/null |
        sed -n 's/.*"version": "\(2\.13\.0[^"]*\)".*/\1/p' | head -n 1) || build=
    check_cards "${build:-2.13.0}"
    count=$(grep -c '==' requirements.lock)
    case $build in
        *+cpu) say "Downloading about 0.5 GB (torch $build and $count packages) into $venv; 1.8 GB on disk." ;;
        *) say "Downloading about 3.5 GB (torch ${build:-2.13.0} with its CUDA libraries, and $count packages) into $venv; 8 GB on disk." ;;
    esac
}

check_cards() { # before gigabytes are downloaded: has this torch code for any card that is here?
    if command -v nvidia-smi >/dev/null 2>&1 && [ -n "${CUDA_VISIBLE_DEVICES-all}" ]; then
        nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null |
            PYTHONPATH=. "$bin/python" -m shardwise.launch.probe.installed "$1" || exit 4
    fi
}

compile() { # once and for all: with PYTHONDONTWRITEBYTECODE, usual in containers, every command would do it anew
    "$bin/python" -W ignore -m compileall -qq "$@" || : # some packages contain files that are no Python
}

compile_packages() { # pip would do it on one core
    compile -j 0 "$bin"/../lib/python3*/site-packages
}

install() {
    install_packages
    compile shardwise launch slurm trainer
}

install_packages() {
    wanted=$(checksum requirements.lock pyproject.toml)
    done_already installed "$wanted" && return
    if [ ! -x "$bin/python" ] || ! fits "$bin/python"; then
        python=$(find_python) || exit 4
        say "Making $venv with $python ($("$python" -V 2>&1))."
        rm -rf "$venv"
        "$python" -m venv "$venv" || stop "$python could not make $venv" "Debian, Ubuntu: sudo apt install python3-venv"
    fi
    announce
    pip_install -r requirements.lock || stop "the packages could not be installed; the lines above say which and why" \
        "behind a proxy: set https_proxy; offline: point PIP_FIND_LINKS at a folder of wheels"
    install_kernels
    pip_install --no-deps -e .
    compile_packages
    check_gpu
    printf '%s\n' "$wanted" >"$venv/.installed"
    say "Installed: $("$bin/shardwise" --version), $bin/shardwise"
}

install_kernels() { # Liger's need Triton, which a torch for CUDA brings; for the CPU it would be 0.7 GB for nothing
    "$bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' || return 0
    pip_install --no-deps "$(sed -n 's/^liger = \["\([^"]*\)"\].*/\1/p' pyproject.toml)" ||
        say "liger-kernel could not be installed: plans use torch's own kernels, which are slower"
}

install_dev() {
    install
    wanted=$(checksum requirements.lock requirements-dev.lock)
    done_already installed-dev "$wanted" && return
    pip_install -r requirements-dev.lock
    compile_packages
    printf '%s\n' "$wanted" >"$venv/.installed-dev"
}

check_gpu() { # a GPU that the installed torch cannot use is a fault to mend, not a reason to train on the CPU
    "$bin/python" -P -m shardwise.launch.probe.torch_fit || exit 4
}

uninstall() {
    cache=${SHARDWISE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/shardwise}
    for path in "$venv" "$venv-newest" "$venv-oldest" "$venv-transformers" "$cache"; do
        [ -e "$path" ] && { say "Removing $path"; rm -rf "$path"; }
    done
    say "Not removed: runs/, ${XDG_STATE_HOME:-$HOME/.local/state}/shardwise, ${XDG_CONFIG_HOME:-$HOME/.config}/shardwise"
}

check_shell() { # a system package, which continuous integration has
    if command -v shellcheck >/dev/null 2>&1; then shellcheck launch/bootstrap.sh .ci/run
    elif [ -n "${SHARDWISE_CI:-}" ]; then stop "shellcheck is missing" "Debian, Ubuntu: sudo apt install shellcheck"
    else say "Not checked: shell scripts (sudo apt install shellcheck)."; fi
}

on_workers() { # pytest by files, on one process more than there are cores, up to four: a tenth of a test is waiting
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    run_tests -n $((cores < 4 ? cores + 1 : 4)) --dist=loadfile --no-loadscope-reorder "$@"
}

run_tests() { # what the arguments name
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec "$bin/python" -m pytest -m "not long and not gpu" "$@"
}

try_newest() { # in an environment of its own
    bin=$venv-newest/bin
    [ -x "$bin/python" ] || "$venv/bin/python" -m venv "$venv-newest"
    sed -n 's/==.*//p' requirements.lock requirements-dev.lock >"$venv-newest/names"
    pip_install --upgrade -r "$venv-newest/names" || stop "the newest versions could not be installed together" \
        "the lines above say which of them exclude each other"
    pip_install --no-deps -e .
    compile_packages
    "$bin/python" -m pip list --outdated --format freeze >&2
    exec "$bin/python" -m pytest tests/distributed/test_workarounds.py "$@"
}

try_transformers() { # in an environment of its own, the other packages as locked but for what this release needs newer
    has=$("$bin/python" -c 'from importlib.metadata import version; print(version("transformers"))')
    version=${VERSION:-$has}
    if [ "$version" != "$has" ]; then
        bin=$venv-transformers/bin
        rm -rf "$venv-transformers"
        "$venv/bin/python" -m venv "$venv-transformers"
        sed -E -e '/^transformers==/d' -e 's/^(huggingface[-_]hub|hf-xet|tokenizers|safetensors|peft)==/\1>=/' \
            requirements.lock requirements-dev.lock >"$venv-transformers/names"
        pip_install -r "$venv-transformers/names" "transformers==$version" ||
            stop "transformers $version was not found, or does not go with the other packages; the lines above say which"
        pip_install --no-deps -e .
        compile_packages
    fi
    exec "$bin/python" tests/factories/new_transformers.py "$@"
}

try_oldest() { # likewise; warnings of older versions are no errors
    bin=$venv-oldest/bin
    [ -x "$bin/python" ] || "$venv/bin/python" -m venv "$venv-oldest"
    "$venv/bin/python" tests/factories/lowest_versions.py >"$venv-oldest/constraints"
    pip_install -c "$venv-oldest/constraints" -e '.[train,dev]' || stop "the lowest versions could not be installed together" \
        "the lines above say which of them exclude each other"
    compile_packages
    [ $# -eq 0 ] || run_tests -W default ${outcome:+"$outcome"} "$@"
    on_workers -W default ${outcome:+"$outcome"} tests/signatures tests/runtime tests/simulation \
        tests/distributed/test_engines.py tests/distributed/test_workarounds.py tests/end_to_end/test_train.py
}

case $target in
    help | -h | --help) usage ;;
    install) install ;;
    train) install; shift; exec "$bin/shardwise" train examples/quickstart.yaml "$@" ;;
    test)
        install_dev
        shift
        [ $# -gt 0 ] || "$bin/python" tests/factories/operator_cache.py || : # minutes, once; tests that need one say why not
        [ $# -eq 0 ] || run_tests "$@"
        on_workers --budget test
        ;;
    test-quick) install_dev; shift; on_workers --quick --budget test-quick "$@" ;;
    test-changed) install_dev; on_workers --changed="${2:-}" ;;
    mutations) install_dev; shift; exec "$bin/python" tests/mutations/run.py "$@" ;;
    test-long | test-long-documents | test-long-kills | test-long-starts | test-long-products | test-long-data | test-long-slurm | test-long-zoo)
        group=${target#test-long}
        marks="long${group:+ and ${group#-}}"
        [ "$group" != -zoo ] || marks=zoo # with the types of make test
        install_dev
        shift
        exec "$bin/python" -m pytest -m "$marks" -n auto --maxprocesses=2 ${outcome:+"$outcome"} "$@"
        ;;
    check)
        install_dev
        "$bin/ruff" format --check .
        "$bin/ruff" check .
        "$bin/mypy"
        "$bin/lint-imports"
        check_shell
        ;;
    bench) install_dev; shift; exec "$bin/python" benchmarks/run.py "$@" ;;
    bench-gpu) install_dev; shift; exec "$bin/python" benchmarks/gpu.py "$@" ;;
    golden)
        install_dev
        shift
        "$bin/python" tests/factories/dry_run_factory.py tests/golden/dry_run.jsonl --all "$@"
        exec "$bin/python" tests/factories/closed_forms.py
        ;;
    newest)
        install_dev
        shift
        try_newest "$@"
        ;;
    transformers) install_dev; shift; try_transformers "$@" ;;
    oldest) install_dev; shift; try_oldest "$@" ;;
    uninstall) uninstall ;;
    *) say "bootstrap: unknown target '$target'"; usage >&2; exit 2 ;;
esac
