# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder: `. "$(dirname "$(readlink -f "$0")")/lib.sh"`. Leaves the caller in the repository; `me`
# is the script, and `from` the folder where the user called it.
# Progress goes to the terminal when there is one, and nowhere else.
set -u
from=$PWD me=$(readlink -f "$0")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
root=$PWD
logs=$root/build/logs

# path_of OPTION VALUE: prints the path that a user gave, which is relative to the folder of the call; false without a value.
path_of() {
  case ${2-} in ''|-*) echo "$1 needs a value" >&2; return 2 ;; esac
  (cd "$from" && realpath -m -- "$2")
}

# may_replace FOLDER OWN: true where the folder is OWN, the script's own one, or absent, or empty, or was made by `made`, so that
# it may be emptied.
marker=.made-by-moeccl
made() { mkdir -p "$1" && : >"$1/$marker"; }
may_replace() {
  [ "$1" = "$2" ] || [ ! -e "$1" ] || [ -f "$1/$marker" ] || { [ -d "$1" ] && [ -z "$(ls -A "$1")" ]; } && return 0
  echo "$1 has files that $(basename "$me") did not write, and would be deleted: name an empty or a new folder" >&2
  return 1
}

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
