# Sourced by the other scripts, with ROOT set to the repository: finds a Python and makes a virtual environment.
#
# Environment:
#   MOK_PYTHON  the interpreter to use (a path or a command); default: an installed 3.12, then 3.13, then 3.11
#   MOK_VENV    folder of the virtual environment; default: .venv in the repository
#   MOK_CUDA    0: build no kernels; default: 0 where there is no GPU, else what setup.py finds

end() { # end CODE TEXT
    echo "$(basename "$0"): ${*:2}" >&2
    exit "$1"
}

die() { end 2 "$@"; }  # something is wrong with what was asked for, or missing
fail() { end 3 "$@"; } # nothing is, and yet it did not work

python_version() { # prints "3.12" for an interpreter that runs; fails for one that does not (such as an idle pyenv shim)
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() { # find_python VERSION...: prints MOK_PYTHON if that is set, else the first installed of these versions
    local version candidate
    if [ -n "${MOK_PYTHON:-}" ]; then
        version=$(python_version "$MOK_PYTHON") || die "MOK_PYTHON is '$MOK_PYTHON', which does not run; it must be a Python interpreter"
        case " $* " in
        *" $version "*) echo "$MOK_PYTHON" ;;
        *) die "MOK_PYTHON is '$MOK_PYTHON', which is Python $version; it must be one of: $*" ;;
        esac
        return
    fi
    for version in "$@"; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python python3; do
            if [ "$(python_version "$candidate")" = "$version" ]; then
                echo "$candidate"
                return
            fi
        done
    done
    die "none of these Python versions found, neither on PATH nor in pyenv: $*; install one or name it with MOK_PYTHON"
}

run_python() { # sets python: MOK_PYTHON, else that of the repository's .venv, else python3
    python=${MOK_PYTHON:-python3}
    [ -n "${MOK_PYTHON:-}" ] || [ ! -x "$ROOT/.venv/bin/python" ] || python=$ROOT/.venv/bin/python
}

megatron_run() { # what a run of Megatron-LM's own script needs, told before anything starts: sets python, gpu_count, port, and ranks, its processes
    [ -n "${MEGATRON_LM:-}" ] || die "MEGATRON_LM is not set; it must name a checkout of Megatron-LM, tag core_v0.19.0"
    [ -f "$MEGATRON_LM/pretrain_gpt.py" ] ||
        die "MEGATRON_LM is '$MEGATRON_LM', where there is no pretrain_gpt.py; it must name a checkout of Megatron-LM, tag core_v0.19.0"
    port=${MASTER_PORT:-29500}
    [[ $port =~ ^[1-9][0-9]{0,4}$ ]] && [ "$port" -le 65535 ] || die "MASTER_PORT is '$port'; it must be a number from 1 to 65535"
    run_python
    local missing
    missing=$("$python" -c '
from importlib.util import find_spec
wanted = ("torch", "megatron.core", "transformer_engine", "mok_megatron")
print(*(name for name in wanted if not (find_spec(name.split(".")[0]) and find_spec(name))))
' 2>/dev/null) || die "'$python' does not run; MOK_PYTHON must be a Python interpreter"
    [ -z "$missing" ] || die "$python lacks: $missing; MOK_PYTHON must name an interpreter that has them"
    gpu_count=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    [ "$gpu_count" -ge 1 ] || die "needs a GPU, none found"
    ranks=$((gpu_count < 2 ? 1 : 2))
}

make_venv() { # make_venv EXTRA: sets VENV to an environment that has the repository, with that extra of pyproject.toml
    local extra=$1 python version found torch megatron
    VENV=${MOK_VENV:-$ROOT/.venv}
    python=$(find_python 3.12 3.13 3.11)
    version=$(python_version "$python")
    if [ -x "$VENV/bin/python" ]; then
        found=$(python_version "$VENV/bin/python" || echo "broken")
        [ "$found" = "$version" ] || die "$VENV has Python $found, wanted is $version; remove that folder or choose another with MOK_VENV"
    else
        echo "making $VENV with $python (Python $version)" >&2
        "$python" -m venv "$VENV"
    fi
    case "$version" in
    3.11) torch=2.13.0 megatron=0.16.1 ;; # later megatron-core releases need Python 3.12
    *) torch=2.11.0 megatron=0.19.2 ;;
    esac
    if [ -z "${MOK_CUDA:-}" ] && ! nvidia-smi -L >/dev/null 2>&1; then
        export MOK_CUDA=0
    fi
    echo "installing torch $torch and megatron-core $megatron" >&2
    # Megatron's checkpoint writer imports psutil, which its package does not ask for.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch" "megatron-core==$megatron" numpy psutil ||
        fail "torch $torch and megatron-core $megatron could not be installed into $VENV; pip says why above"
    echo "building and installing mok_megatron" >&2
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT[$extra]" ||
        fail "mok_megatron could not be built and installed into $VENV; pip says why above"
}
