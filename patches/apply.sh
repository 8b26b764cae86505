#!/bin/sh
# Apply the patches to a vLLM source tree, or to the folder that holds an installed vLLM package:
#   patches/apply.sh VERSION FOLDER          e.g. patches/apply.sh 0.32.0 ../vllm
#   patches/apply.sh VERSION FOLDER NUMBER   only this one, e.g. 0003
# VERSION is 0.32.0 or 0.33.0. Tests are left out where the folder has none.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ]; then sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
version=$1 folder=$2 number=${3:-}
[ -d "$here/vllm-$version" ] || { echo "no patches for vLLM $version in $here" >&2; exit 2; }
[ -f "$folder/vllm/__init__.py" ] || { echo "$folder holds no folder vllm" >&2; exit 2; }
without=
[ -d "$folder/tests/v1" ] || without='--exclude=tests/*'
for patch in "$here/vllm-$version/$number"*.patch; do
    [ -f "$patch" ] || { echo "no patch $number for vLLM $version" >&2; exit 2; }
    echo "${patch#"$here"/}"
    # Without fuzz: a hunk whose surroundings have changed is refused. Outside of a repository's
    # view, so that it works in a checkout and in site-packages alike.
    (cd "$folder" && GIT_DIR=/dev/null git apply -p1 $without "$patch")
done
