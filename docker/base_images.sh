#!/usr/bin/env bash
# Makes the base images of the Dockerfiles from Debian packages, for machines that can reach a Debian
# mirror but no image registry. Build with them by `make images LOCAL_BASES=1`, which names the base
# images by tag instead of digest. Needs root, debootstrap and buildah.
#
#   docker/base_images.sh debian
#   docker/base_images.sh python /usr/local       (a prefix that contains a CPython 3.12)
#
# `debian` is the minimal system of bookworm. `python:3.12` is the same system with a copy of the given
# CPython, because Debian 12 has no Python 3.12.
set -euo pipefail

named() { sed -n "s/^$1=\([^@]*\)@.*/\1/p" "$(dirname "$0")/base_images.env"; }
DEBIAN=$(named DEBIAN)
PYTHON=$(named PYTHON)

make_base() { # name, packages to include, folder to copy to /usr/local
    local root container
    root=$(mktemp -d)
    debootstrap --variant=minbase ${2:+--include="$2"} bookworm "$root" >/dev/null
    chroot "$root" apt-get clean
    rm -rf "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/*
    echo 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin"; };' \
        >"$root/etc/apt/apt.conf.d/docker-clean"
    printf 'path-exclude /usr/share/%s/*\n' doc man locale info >"$root/etc/dpkg/dpkg.cfg.d/slim"
    if [ -n "$3" ]; then
        cp -a "$3/." "$root/usr/local/"
        chroot "$root" ldconfig
        chroot "$root" ln -sf python3.12 /usr/local/bin/python
        chroot "$root" /usr/local/bin/python3.12 -m ensurepip >/dev/null
        ln -sf pip3 "$root/usr/local/bin/pip"
        sed -i '1s|^#!.*|#!/usr/local/bin/python3.12|' "$root"/usr/local/bin/pip*
    fi
    container=$(buildah from scratch)
    buildah add -q "$container" "$root" / >/dev/null
    buildah config --cmd bash --env PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin "$container"
    buildah commit -q --rm "$container" "$1" >/dev/null
    rm -rf "$root"
    echo "$1"
}

case ${1:-} in
debian) make_base "$DEBIAN" "" "" ;;
python)
    make_base "$PYTHON" \
        "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g" \
        "${2:?python needs the prefix of a CPython 3.12}"
    ;;
*)
    echo "usage: $0 debian | python PREFIX" >&2
    exit 2
    ;;
esac
