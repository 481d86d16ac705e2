#!/usr/bin/env bash
# Asks the registry for the digests of the base images' tags, and writes them into base_images.env and
# the Dockerfiles. To move to another release, change the tag in base_images.env first. Needs curl.
#
#   docker/image_digests.sh [FOLDER]       FOLDER: the one of this script
set -euo pipefail
cd "${1:-$(dirname "$0")}"

REGISTRY=${REGISTRY:-https://registry-1.docker.io}
AUTH=${AUTH:-https://auth.docker.io/token?service=registry.docker.io}
# The index of all platforms, or else the manifest of the only one.
TYPES=application/vnd.oci.image.index.v1+json,application/vnd.docker.distribution.manifest.list.v2+json
TYPES+=,application/vnd.oci.image.manifest.v1+json,application/vnd.docker.distribution.manifest.v2+json

digest_of() { # repository, tag
    local token
    token=$(curl -fsS "$AUTH&scope=repository:$1:pull" | sed -n 's/.*"token": *"\([^"]*\)".*/\1/p')
    curl -fsSI -H "Accept: $TYPES" -H @- "$REGISTRY/v2/$1/manifests/$2" \
        <<<"Authorization: Bearer $token" | tr -d '\r' | sed -n 's/^docker-content-digest: *//Ip'
}

grep -v '^#' base_images.env | while IFS='=' read -r argument image; do
    tagged=${image%%@*}
    name=${tagged#docker.io/}
    digest=$(digest_of "${name%%:*}" "${name##*:}")
    [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$tagged: the registry told no digest" >&2; exit 1; }
    sed -i "s|^\(ARG \)\?$argument=.*|\1$argument=$tagged@$digest|" base_images.env ./*.Dockerfile
    echo "$tagged@$digest"
done
