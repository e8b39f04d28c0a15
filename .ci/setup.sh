#!/usr/bin/env bash
# Makes ready what this checkout needs and prints the path of its Python on stdout (progress goes to stderr):
#
#     python=$(bash .ci/setup.sh dev,examples)     # extras named in pyproject.toml, or nothing for the package alone
#
# 1. .venv in the checkout, made when missing, with the package installed editable; nothing is done when up to date.
# 2. A GPU adapter that wgpu can use: where there is none, Mesa's software Vulkan driver.
# As root on a system with apt-get, missing system packages are installed; elsewhere the message says what to install.
set -euo pipefail
exec </dev/null # nothing here may wait for a keyboard

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:-}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cd "$root"

say() { echo "setup: $*" >&2; }

die() {
    say "$1"
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

# quietly WHAT COMMAND...: says WHAT, hides the output unless the command fails.
quietly() {
    local what=$1
    shift
    say "$what"
    "$@" >"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        return 1
    }
}

may_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

apt_install() {
    may_apt || return 0 # whoever calls looks afterwards whether the thing is there
    local options=(-y -qq -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0)
    quietly "refreshing apt's package lists" apt-get "${options[@]}" update || say "some lists failed; going on"
    quietly "installing $*" env DEBIAN_FRONTEND=noninteractive \
        apt-get "${options[@]}" install --no-install-recommends "$@"
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

venv_python() {
    local path
    for path in "$root/.venv/bin/python" "$root/.venv/Scripts/python.exe"; do
        if "$path" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$path"
            return
        fi
    done
    return 1
}

make_venv() {
    local base version
    if ! base=$(find_python); then
        apt_install python3 python3-venv || true
        base=$(find_python) || die "Python 3.11 or newer is needed and was not found." \
            "Debian, Ubuntu:  sudo apt-get install python3 python3-venv" \
            "Elsewhere:       your package manager, or python.org"
    fi
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then # Debian keeps these two in a package of their own
        apt_install "python$version-venv" || true
        "$base" -c 'import ensurepip, venv' 2>/dev/null || die "$base cannot make virtual environments." \
            "Debian, Ubuntu:  sudo apt-get install python$version-venv"
    fi
    quietly "making .venv with Python $version" "$base" -m venv --clear "$root/.venv" || die "could not make .venv"
}

# Installs the package with the extras asked for and those that are there already, unless the stamp says it is done.
install_package() {
    local stamp="$root/.venv/.setup-stamp" fingerprint known="" have="" wanted
    fingerprint=$("$python" -c 'import hashlib, os, sys
facts = [open("pyproject.toml", "rb").read(), os.getcwd().encode(), sys.version.encode()]
print(hashlib.sha256(b"\0".join(facts)).hexdigest())')
    if [ -f "$stamp" ]; then { read -r known && read -r have; } <"$stamp" || true; fi
    wanted=$(printf '%s' "$extras,$have" | tr ',' '\n' | sed '/^ *$/d' | sort -u | paste -s -d , -)
    [ "$known" != "$fingerprint" ] || [ "$have" != "$wanted" ] || return 0
    quietly "installing meganeura_aot${wanted:+ [$wanted]} into .venv" "$python" -m pip install --quiet --no-input \
        --disable-pip-version-check --editable ".${wanted:+[$wanted]}" || die "pip failed (above)"
    printf '%s\n%s\n' "$fingerprint" "$wanted" >"$stamp"
}

# "native" (Vulkan, Metal, DX12), "OpenGL" only, or "none".
adapters() {
    "$python" -c 'import wgpu
kinds = {adapter.info["backend_type"] for adapter in wgpu.gpu.enumerate_adapters_sync()}
print("native" if kinds & {"Vulkan", "Metal", "D3D12"} else "OpenGL" if kinds else "none")' 2>"$log" || {
        tail -n 20 "$log" >&2
        die "wgpu does not work here (above)"
    }
}

ensure_adapter() {
    local found
    found=$(adapters)
    [ "$found" != native ] || return 0
    if may_apt; then
        say "no Vulkan adapter: bringing Mesa's software driver"
        apt_install mesa-vulkan-drivers libvulkan1 || true
        found=$(adapters)
    fi
    case $found in
    native) ;;
    OpenGL) say "only an OpenGL adapter was found; better a Vulkan driver (Debian: mesa-vulkan-drivers libvulkan1)" ;;
    *)
        die "wgpu finds no GPU adapter. Install the driver of your GPU, or Mesa's software Vulkan driver:" \
            "Debian, Ubuntu:  sudo apt-get install mesa-vulkan-drivers libvulkan1" \
            "Fedora:          sudo dnf install mesa-vulkan-drivers vulkan-loader" \
            "Arch:            sudo pacman -S vulkan-swrast vulkan-icd-loader" \
            "If one is installed, see whether VK_DRIVER_FILES or VK_ICD_FILENAMES hides it."
        ;;
    esac
}

if command -v flock >/dev/null; then # two commands at once take turns
    exec 9<"$root"
    flock 9
fi
if ! python=$(venv_python); then
    make_venv
    python=$(venv_python) || die "the new .venv does not work"
fi
install_package
ensure_adapter
echo "$python"
