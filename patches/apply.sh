#!/bin/sh
# Apply the series to a vLLM source tree, or to the folder that holds an installed vLLM package:
#   patches/apply.sh VERSION FOLDER          e.g. patches/apply.sh 0.32.0 ../vllm
#   patches/apply.sh VERSION FOLDER --list   only say which files it would apply
# The folder vllm-0.32.0 has the whole series. A later version's folder has only the patches that
# differ there; the others are taken from vllm-0.32.0.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ]; then sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
version=$1 folder=$2 mode=${3:-}
[ -d "$here/vllm-$version" ] || { echo "no patches for vLLM $version in $here" >&2; exit 2; }
[ -f "$folder/vllm/__init__.py" ] || { echo "$folder holds no folder vllm" >&2; exit 2; }
for stock in "$here"/vllm-0.32.0/*.patch; do
    patch=$here/vllm-$version/$(basename "$stock")
    [ -f "$patch" ] || patch=$stock
    echo "${patch#"$here"/}"
    if [ "$mode" != --list ]; then
        # Without fuzz: a hunk whose surroundings have changed is refused. Outside of a repository's
        # view, so that it works in a checkout and in site-packages alike.
        (cd "$folder" && GIT_DIR=/dev/null git apply -p1 "$patch")
    fi
done
