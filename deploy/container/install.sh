#!/bin/sh
# Both images are made of these two steps:
#
#   install.sh packages SOURCE EXTRAS    what the system and the package index give
#   install.sh prefixrl SOURCE           this repository
set -eu
step=$1 source=$2 extras=${3:-}
environment=/opt/prefixrl

case $step in
packages)
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  # The compiler and Python's headers: Triton and DeepSpeed compile for the machine they run on.
  apt-get install --yes --no-install-recommends g++ ninja-build python3-dev python3-venv
  rm -rf /var/lib/apt/lists/*
  python3 -m venv "$environment"
  "$environment/bin/python" -c '
import sys, tomllib
with open(sys.argv[1] + "/pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [each for each in sys.argv[2].split(",") if each]
unknown = sorted(set(extras) - set(project["optional-dependencies"]))
if unknown:
    allowed = ", ".join(sorted(project["optional-dependencies"]))
    sys.exit(f"EXTRAS names {unknown}, which pyproject.toml lacks; allowed are {allowed}")
print("\n".join([*project["dependencies"], *(each for name in extras for each in project["optional-dependencies"][name])]))
' "$source" "$extras" >/tmp/packages.txt
  "$environment/bin/pip" install --no-cache-dir -r /tmp/packages.txt
  rm /tmp/packages.txt
  ;;
prefixrl)
  "$environment/bin/pip" install --no-cache-dir --no-deps "$source"
  "$environment/bin/prefixrl" --version
  ;;
*)
  echo "install.sh: step '$step' is unknown; allowed are packages and prefixrl" >&2
  exit 2
  ;;
esac
