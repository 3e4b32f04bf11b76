#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Applies the patches of this folder to the distributions that the file `packages` names, as the command `python3` finds
# them. Needs coreutils, GNU patch and python3. Every check comes before the first change, and any difference ends it.
set -eu
export LC_ALL=C
CDPATH= cd -- "$(dirname -- "$0")"
here=$PWD

for tool in patch python3 sha256sum; do
    command -v "$tool" >/dev/null || { echo "$0: $tool is not in this image" >&2; exit 1; }
done

# Print the folder that the distribution $1 is installed in, provided it is version $2.
folder() {
    python3 -c '
import importlib.metadata, pathlib, sys
name, wanted = sys.argv[1:]
try:
    found = importlib.metadata.distribution(name)
except importlib.metadata.PackageNotFoundError:
    sys.exit(f"{name}: not installed for {sys.executable}")
if found.version != wanted:
    sys.exit(f"{name}: version {wanted} expected, {found.version} is installed")
print(pathlib.Path(str(found.locate_file(""))).resolve())
' "$1" "$2"
}

while read -r package distribution version; do
    site=$(folder "$distribution" "$version")
    echo "$distribution $version in $site, as published:"
    (cd "$site" && sha256sum --check --strict "$here/$package/published.sha256")
done <packages

while read -r package distribution version; do
    site=$(folder "$distribution" "$version")
    while read -r name; do
        echo "$package/$name:"
        patch --force --fuzz=0 --binary -p1 --directory="$site" --input="$here/$package/$name" </dev/null
    done <"$package/series"
    (cd "$site" && sha256sum --check --strict "$here/$package/patched.sha256")
    while read -r _ file; do
        rm -f "$site/${file%/*}/__pycache__/$(basename "$file" .py)".*.pyc
    done <"$package/patched.sha256"
done <packages
