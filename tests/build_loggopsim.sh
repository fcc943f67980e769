#!/bin/sh
# Builds LogGOPSim and txt2bin from source: build_loggopsim.sh DIRECTORY [SOURCES]
# Needs git, a C++ compiler, gengetopt, re2c and libgraphviz-dev. Then: LOGGOPSIM=DIRECTORY pytest tests/test_other_simulators.py
set -eu
mkdir -p "$1"
cd "$1"
[ -n "${2:-}" ] || git clone --depth 1 https://github.com/spcl/LogGOPSim sources
cd "${2:-sources}/src/LogGOPSim"
for name in loggopsim txt2bin; do
    gengetopt -i "${name}_cmdline.ggo" -F "${name}_cmdline"
done
re2c -o txt2bin.cpp txt2bin.re
g++ -O2 -w -fpermissive -I. -o "$1/LogGOPSim" LogGOPSim.cpp loggopsim_cmdline.c -lcgraph
g++ -O2 -w -fpermissive -I. -o "$1/txt2bin" txt2bin.cpp txt2bin_cmdline.c
