# SPDX-License-Identifier: Apache-2.0
# Sourced after lib.sh by tools/test and its own test: runs suites with `meson test` and adds up what passed and failed.
passed=0 failed=0 skipped=0
finish() {
  [ "$skipped" -gt 0 ] && echo "$skipped skipped"
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
  exit
}

# count JUNIT_FILE [JUNIT_FILE_OF_A_SECOND_RUN]: adds its cases and names the failed ones.
count() {
  local line
  line=$(python3 "$root/tools/count_tests.py" "$@") || { failed=$((failed + 1)); echo "no results in $1"; return; }
  read -r p f s <<<"$(tail -n 1 <<<"$line")"
  sed '$d' <<<"$line"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# run BUILD_DIR NAME MESON_TEST_OPTIONS...
run() {
  local dir=$1 name=$2 started=$SECONDS log=$1/meson-logs/$2 before=$failed rc=0 again=()
  shift 2
  # Meson takes BUILD_DIR/PROGRAM.xml for the results of a gtest program, also when an earlier run wrote it.
  rm -f "$log".{junit.xml,json} "$log"-again.{junit.xml,json} "$dir"/*.xml
  quietly "test-$dir-$name" meson test -C "$dir" --no-rebuild --logbase "$name" --print-errorlogs "$@" || rc=$?
  # On a machine that others use, a time limit may be missed once. Up to three programs get a second run, alone, which
  # counts and is reported; a sanitizer's report counts at once.
  [ "$dir" = build ] && mapfile -t again < <(python3 "$root/tools/count_tests.py" --failed "$log.junit.xml" | grep .)
  if [ ${#again[@]} -ge 1 ] && [ ${#again[@]} -le 3 ]; then
    rm -f "$dir"/*.xml
    rc=0
    quietly "test-$dir-$name-again" meson test -C "$dir" --no-rebuild --logbase "$name-again" --print-errorlogs --num-processes 1 "${again[@]}" ||
      rc=$?
  fi
  [ -f "$log-again.junit.xml" ] && again=("$log-again.junit.xml") || again=()
  count "$log.junit.xml" ${again[@]+"${again[@]}"}
  # What Meson saw and no result tells, such as its own end.
  if [ "$rc" -ne 0 ] && [ "$failed" -eq "$before" ]; then
    failed=$((failed + 1))
    echo "FAILED: meson test of $dir $name, exit $rc"
  fi
  echo "  $dir $name: $((SECONDS - started)) s"
}

# suite BUILD_DIR SUITE [MESON_TEST_OPTIONS...]
suite() { run "$1" "$2" --suite "$2" "${@:3}"; }
