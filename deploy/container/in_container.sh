#!/bin/sh
# Runs the command whose name this script is called by inside PREFIXRL_IMAGE, an Apptainer image. A folder with links to
# it named prefixrl, prefixrl-learner, prefixrl-rollout and prefixrl-scorer stands in for an installation.
: "${PREFIXRL_IMAGE:?names no image: export PREFIXRL_IMAGE=/path/to/prefixrl.sif}"
exec apptainer exec --nv ${PREFIXRL_BIND:+--bind "$PREFIXRL_BIND"} "$PREFIXRL_IMAGE" "$(basename "$0")" "$@"
