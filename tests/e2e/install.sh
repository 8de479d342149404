#!/usr/bin/env bash
# Installs vla into a temporary prefix and builds the examples against it, by CMake and by pkg-config; runs one, twice. Every
# public header must compile alone, in C and in C++.
set -euo pipefail
build=$1
source=$(cd "$(dirname "$0")/../.." && pwd)
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT

ninja -C "$build" vla_program vla_shared >/dev/null
cmake --install "$build" --prefix "$prefix" >/dev/null
"$prefix/bin/vla" --version

for header in "$prefix"/include/vla/*.h; do
  echo "#include \"$header\"" >"$prefix/alone.c"
  cc -std=c17 -Wall -Wextra -Wstrict-prototypes -Werror -I"$prefix/include" -fsyntax-only "$prefix/alone.c"
  c++ -std=c++17 -Wall -Werror -I"$prefix/include" -fsyntax-only -x c++ "$prefix/alone.c"
done

cmake -S "$source/examples" -B "$prefix/examples" -DCMAKE_PREFIX_PATH="$prefix" >"$prefix/cmake.log" 2>&1 ||
  { cat "$prefix/cmake.log"; exit 1; }
cmake --build "$prefix/examples" >"$prefix/make.log" 2>&1 || { cat "$prefix/make.log"; exit 1; }

pc=$(find "$prefix" -name vla.pc)
sed -i "s|^prefix=.*|prefix=$prefix|" "$pc" # installed elsewhere than configured
export PKG_CONFIG_PATH=$(dirname "$pc")
# shellcheck disable=SC2046
cc -std=c17 -Wall -Wextra -Werror "$source/examples/custom_model.c" -o "$prefix/by_pkg_config" $(pkg-config --cflags --libs vla) \
  -Wl,-rpath,"$(pkg-config --variable=libdir vla)" -lm

"$prefix/examples/custom_model" "$prefix/run" | tee "$prefix/first.log"
grep -Eq "step 400/400  loss 0\.[01]" "$prefix/first.log"
"$prefix/by_pkg_config" "$prefix/run" | tee "$prefix/second.log"
grep -q "going on from step 400" "$prefix/second.log"
[ "$(tail -n 1 "$prefix/first.log")" = "$(tail -n 1 "$prefix/second.log")" ]
"$prefix/bin/vla" inspect checkpoint "$prefix/run" | grep -q "3_400: whole; step 400"
[ "$(nm -D --defined-only "$(pkg-config --variable=libdir vla)"/libvla.so | grep -c ' vlai_')" = 0 ] ||
  { echo "internal symbols are visible"; exit 1; }
