#!/bin/sh
# Looks for published advisories about the lowest versions that the wheels admit, and about those of uv.lock. Fails if
# there is one, or if the index does not answer. Needs uv and a network.
#   sh scripts/advisories.sh
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:$PWD/.uv/bin"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

ours='--no-emit-package tinker-local --no-emit-package tinker-local-client --no-emit-package tinker-local-types'
# shellcheck disable=SC2086
uv pip compile --quiet --resolution lowest-direct --python-version 3.11 --no-annotate --no-header $ours \
    --extra age --extra ray --extra torch -o "$folder/lowest.txt" packages/*/pyproject.toml
uv export --quiet --frozen --no-hashes --no-annotate --no-header --no-emit-workspace --no-dev --all-packages --extra cpu \
    -o "$folder/locked.txt"
for versions in lowest locked; do
    echo "$versions: $(grep -c == "$folder/$versions.txt") packages"
    uv tool run --quiet pip-audit --strict --no-deps --disable-pip --requirement "$folder/$versions.txt"
done
