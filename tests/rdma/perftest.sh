# SPDX-License-Identifier: Apache-2.0
# For the scripts in this folder, in tools/rdma-vm's machine: runs a program of perftest between the two hosts.
#
# perftest AWK PROGRAM ARGUMENTS...: prints what AWK extracts from the client's output, whose table begins with
# "#bytes". perftest first measures the processor's clock, and reports 0 or inf when that goes wrong; the program then
# runs again.
perftest() {
  local value
  for try in 1 2 3 4 5; do
    host 0 timeout 40 taskset -c 0 "${@:2}" -d rxe0 -x 1 -F >/tmp/server 2>&1 &
    # The server does not announce that it is ready, and refuses the client until then.
    for i in $(seq 50); do
      host 1 timeout 30 taskset -c 1 "${@:2}" -d rxe1 -x 1 -F 10.77.0.1 >/tmp/client 2>&1 && break
      sleep 0.1
    done
    wait
    value=$(awk "$1" /tmp/client)
    case $value in ''|0|0.00|inf) ;; *) echo "$value"; return ;; esac
  done
  cat /tmp/client >&2
  return 1
}
