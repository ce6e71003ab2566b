#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run by conda-build in a copy of the sources.
set -eu
meson setup build ${MESON_ARGS:-} --prefix="$PREFIX" --libdir=lib -Dbuildtype=release -Doptimization=2 \
  -Dtests=false -Dperf=false -Dgloo=disabled -Dmpi=disabled -Dcuda=disabled -Dpython=enabled -Dpython_dir="$SP_DIR"
meson compile -C build -j "${CPU_COUNT:-2}"
meson install -C build
