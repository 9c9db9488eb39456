#!/bin/sh
# What a container of spdist runs: spdist with these words, or the program that the first word names. Dask's operator for
# Kubernetes sends `dask-worker --name ...`, batch systems send `python ...`.
set -eu

# Any user, and a root that is read-only: kernels that came compiled are copied to where new ones can be kept.
cache=${XDG_CACHE_HOME:-/opt/spdist/cache}
writable=${TMPDIR:-/tmp}/spdist-cache-$(id -u)
if ! { [ -w "$cache" ] && [ -w "${NUMBA_CACHE_DIR:-$cache/numba}" ]; } && mkdir -p "$writable" 2>/dev/null; then
    [ -e "$writable/numba" ] || { cp -R "$cache/." "$writable/" && chmod -R u+w "$writable"; }
    export XDG_CACHE_HOME="$writable" NUMBA_CACHE_DIR="$writable/numba" CUPY_CACHE_DIR="$writable/cupy"
fi
[ -w "${HOME:-/}" ] || export HOME="${TMPDIR:-/tmp}"

case ${1-} in
    dask-worker | dask-scheduler)
        command=${1#dask-}
        shift
        exec dask "$command" "$@"
        ;;
    spdist | dask | python | python3 | sh | bash) exec "$@" ;;
    *) exec spdist "$@" ;;
esac
