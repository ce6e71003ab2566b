# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder: `. "$(dirname "$(readlink -f "$0")")/lib.sh"`. Leaves the caller in the repository.
# Progress goes to the terminal when there is one, and nowhere else.
set -u
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
root=$PWD
logs=$root/build/logs

progress() { [ -t 2 ] && printf '\033[2m%s\033[0m\n' "$*" >&2; return 0; }

# quietly NAME COMMAND...: writes the output to build/logs/NAME.log, and shows its end only when the command fails.
quietly() {
  local name=$1 rc=0
  shift
  mkdir -p "$logs"
  progress "$name ..."
  "$@" >"$logs/$name.log" 2>&1 </dev/null || rc=$?
  if [ $rc -ne 0 ]; then
    tail -n 40 "$logs/$name.log" >&2
    echo "$name failed (exit $rc), all of it in $logs/$name.log" >&2
  fi
  return $rc
}
