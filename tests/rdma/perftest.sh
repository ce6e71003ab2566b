# SPDX-License-Identifier: Apache-2.0
# For the scripts beside it, in tools/rdma-vm's machine: a program of perftest between the two hosts.
#
# perftest AWK PROGRAM ARGUMENTS...: what AWK prints of the client's output, whose table begins with "#bytes". perftest measures
# the processor's clock first and reports 0 or inf when that went wrong: then it runs again.
perftest() {
  local value
  for try in 1 2 3 4 5; do
    host 0 timeout 40 taskset -c 0 "${@:2}" -d rxe0 -x 1 -F >/tmp/server 2>&1 &
    # The server says nothing when it is ready; the client is refused until then.
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
