#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# slurm.sh [BUILD [CHECK...]]: runs MoECCL's programs by srun, sbatch and salloc on a small Slurm cluster that it makes on this machine,
# and by mpirun, and by hydra if HYDRA names an mpiexec.hydra, inside an allocation. Needs root and Debian's packages slurmctld, slurmd,
# slurm-client and munge; PYTHON with torch for those checks. Without arguments: build/ and all checks, about three minutes.
#
# slurm.sh BUILD -- COMMAND...: runs a command as the cluster's user on the login host.
. "$(dirname "$(readlink -f "$0")")/slurm_cluster.sh"
build=$(realpath "${1:-$(dirname "$(readlink -f "$0")")/../../build}") || exit
shift
enter_cluster "$0" "$build" "$@"
start_cluster || exit 1
as_user test -x "$build/perf/all_reduce_perf" || { echo "skipped: $build/perf/all_reduce_perf is not built, or other users may not run it"; exit 77; }
if [ "${1-}" = -- ]; then
  as_user "${@:2}"
  exit
fi

perf="$build/perf/all_reduce_perf -b 4 -e 64K -f 128 -n 3 -w 1 -T 20"
endless="$build/perf/all_reduce_perf -b 1M -e 1M -N 0 -T 20"
with_secret="env MOECCL_SECRET_FILE=$home/secret"
as_user sh -c 'umask 077; head -c 24 /dev/urandom | base64 >secret'

# runs N_RANKS NODES COMMAND...: it ends well within a minute, its ranks were one job on these nodes, and all results were right.
runs() {
  local n=$1 nodes=$2 said
  shift 2
  said=$(as_user timeout 60 "$@" 2>&1)
  local rc=$?
  if [ $rc = 0 ] && [ "$(grep -c "Out of bounds values : 0 OK" <<<"$said")" = 1 ] && [ "$(grep -c "Rank .* Pid" <<<"$said")" = "$n" ] &&
    [ "$(grep "Rank .* Pid" <<<"$said" | grep -o "node[0-9]" | sort -u | tr -d '\n')" = "$nodes" ]; then
    return
  fi
  echo "$said"
  echo "exit status $rc; expected one job of $n ranks on $nodes"
  return 1
}

# refuses TEXT COMMAND...: it fails within 10 s, and says the text.
refuses() {
  local text=$1 said rc=0
  shift
  said=$(as_user timeout 10 "$@" 2>&1) || rc=$?
  [ $rc != 0 ] && [ $rc != 124 ] && grep -qF -- "$text" <<<"$said" && return
  echo "$said"
  echo "exit status $rc; expected a failure with: $text"
  return 1
}

# await SECONDS COMMAND...: until it succeeds.
await() {
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $until ] || { echo "not in time: $*"; return 1; }
    sleep 0.1
  done
}

queue_empty() { [ -z "$(as_user squeue -h)" ]; }
no_ranks_on() { ! on "$1" pgrep -u $user_id -f all_reduce_perf >/dev/null; }

# Ranks leave no process, no shared memory, no socket and no file on any node.
nothing_left() {
  local node
  for node in ${1:-$nodes}; do
    await 10 no_ranks_on "$node" || { on "$node" ps -fu $user_id; return 1; }
    on "$node" sh -c "! ls /dev/shm /run/user/$user_id | grep moeccl && ! grep -e @moeccl -e moeccl-env /proc/net/unix && ! ss -Htlnp | grep all_reduce" ||
      { echo "left on $node"; return 1; }
  done
}

# running: an endless job runs on node1 and node2, and has begun its operations.
running() { await 30 grep -q "communicator perf of 4 ranks" "$work/endless" && sleep 2; }
start_endless() { as_user $with_secret MOECCL_DEBUG=INFO "$@" >"$work/endless" 2>&1 & }

check_one_node() {
  runs 4 node1 srun -w node1 -n4 $perf && runs 1 node1 srun -w node1 -n1 $perf && runs 4 node1 srun --mpi=pmi2 -w node1 -n4 $perf
}

# The ranks find the first node by its name, whatever Slurm's plugin for MPI sets.
check_two_nodes() {
  local mpi
  for mpi in none pmi2 pmix; do
    as_user srun --mpi=list 2>&1 | grep -qw $mpi || continue
    runs 4 node1node2 $with_secret srun --mpi=$mpi -w node1,node2 -n4 $perf || return
  done
}

check_distributions() {
  local how
  for how in block cyclic plane=2; do runs 5 node1node2 $with_secret srun -w node1,node2 -n5 -m $how $perf || return; done
  runs 6 node1node2node3 $with_secret srun -N3 --ntasks-per-node=2 $perf &&
    runs 3 node2node3 $with_secret srun -w node3,node2 -n3 $perf &&
    runs 3 node2node3 $with_secret salloc -N3 --ntasks-per-node=2 srun -N2 -n3 -r1 $perf &&
    runs 18 node1node2 $with_secret srun -w node1,node2 -n18 --overcommit $perf
}

check_environments() {
  runs 4 node1 srun -w node1 -n4 --export=NONE $perf && runs 4 node1node2 $with_secret srun -w node1,node2 -n4 --export=MOECCL_SECRET_FILE $perf &&
    as_user $with_secret srun --label -w node1,node2 -n4 $perf | grep -q "^0: # Out of bounds values : 0 OK"
}

check_batch_script() {
  as_user sh -c "cat >job.sh" <<END
#!/bin/bash
#SBATCH -w node1,node2 --ntasks-per-node 2 -o job.out
export MOECCL_SECRET_FILE=$home/secret
export MASTER_ADDR=\$(scontrol show hostnames "\$SLURM_JOB_NODELIST" | head -1)
srun $perf
END
  as_user sbatch job.sh && await 30 queue_empty && runs 4 node1node2 cat job.out || return
  # In the script itself, the program is no rank of the job. Its threads are.
  as_user sbatch -w node1,node2 -n4 -o threads.out --wrap "$perf --ranks 3" && await 30 queue_empty && runs 3 node1 cat threads.out
}

# Slurm sorts the names of a heterogeneous step's nodes, so the user says where rank 0 is.
check_heterogeneous() {
  local parts="srun -w node2 -n1 $perf : -w node1 -n2 $perf"
  refuses "set MASTER_ADDR to the address of rank 0's host" $with_secret $parts && runs 3 node1node2 $with_secret MASTER_ADDR=node2 $parts &&
    runs 4 node1node2 $with_secret MASTER_ADDR=node2 salloc -w node2 -n2 : -w node1 -n2 srun --het-group=0,1 $perf
}

check_arbitrary() {
  printf "node2\nnode2\nnode1\n" >"$home/order"
  refuses "set MASTER_ADDR to the address of rank 0's host" $with_secret SLURM_HOSTFILE=order srun -m arbitrary -n3 $perf &&
    runs 3 node1node2 $with_secret SLURM_HOSTFILE=order MASTER_ADDR=node2 srun -m arbitrary -n3 $perf
}

check_refusals() {
  refuses "set MOECCL_SECRET to the same secret" srun -N2 -n2 $perf && refuses "set MOECCL_SECRET to the same secret" srun --mpi=pmi2 -N2 -n2 $perf &&
    refuses "is no address of node1, where rank 0 runs" $with_secret MASTER_ADDR=node2 MOECCL_INIT_TIMEOUT_MS=2000 srun -w node1,node2 -n2 $perf
}

# Four steps of one allocation at once, and one that waits for a late rank, which keeps none of the others waiting.
check_steps_at_once() {
  local i begun=$SECONDS
  as_user $with_secret salloc -w node1,node2 --ntasks-per-node=6 sh -c "
    srun --exact -N2 -n2 sh -c 'if [ \$SLURM_PROCID = 1 ]; then sleep 20; fi; exec $perf' >step0 2>&1 & late=\$!
    sleep 1
    for i in 1 2 3 4; do srun --exact -N2 -n2 $perf >step\$i 2>&1 & steps=\"\$steps \$!\"; done
    wait \$steps; touch early; wait \$late" &
  await 18 test -e "$home/early" && [ $((SECONDS - begun)) -lt 19 ] && wait $! || return
  for i in 0 1 2 3 4; do runs 2 node1node2 cat step$i || return; done
}

is_pending() { [ "$(as_user squeue -h -j "$1" -o %t)" = PD ]; }
check_requeue() {
  as_user sh -c "cat >again.sh" <<END
#!/bin/bash
#SBATCH -w node1,node2 --ntasks-per-node 2 -o again.out --open-mode append --requeue
[ -n "\$SLURM_RESTART_COUNT" ] || { srun $endless; sleep 60; }  # a script that ends by itself may not be queued again
srun $perf >second.out 2>&1
END
  local job
  rm -f "$home/again.out" "$home/second.out"
  job=$(as_user $with_secret MOECCL_DEBUG=INFO sbatch --parsable again.sh)
  await 30 grep -qs "communicator perf of 4 ranks" "$home/again.out" && as_user scontrol requeue "$job" && nothing_left &&
    await 20 is_pending "$job" && sleep 3 && as_user scontrol update jobid="$job" StartTime=now || return  # it would wait for two minutes
  await 40 grep -qs "Out of bounds" "$home/second.out" || { as_user scontrol show job "$job"; cat "$home/again.out" "$home/second.out"; return 1; }
  runs 4 node1node2 cat second.out
}

check_cancel() {
  start_endless srun -w node1,node2 -n4 $endless
  running && as_user scancel -u $user || return
  wait $!
  nothing_left
}

# One rank is killed. Slurm ends the others with -K, and without it they end by what the library tells them.
check_killed_rank() {
  local ends_others
  for ends_others in --kill-on-bad-exit=1 --kill-on-bad-exit=0; do
    start_endless srun $ends_others -w node1,node2 -n4 $endless
    running && on node2 pkill -KILL -u $user_id -f all_reduce_perf && await 15 gone $! && nothing_left || return
  done
  grep -q "rank 3" "$work/endless"
}
gone() { ! kill -0 "$1" 2>/dev/null; }

check_mpirun() {
  command -v mpirun >/dev/null || return 77
  local mpirun="salloc -w node1,node2 --ntasks-per-node=2 mpirun"
  refuses "set MASTER_ADDR" $with_secret $mpirun $perf && runs 4 node1node2 $with_secret MASTER_ADDR=node1 $mpirun $perf &&
    runs 3 node1 srun -w node1 -n1 mpirun --mca plm isolated --mca ras ^slurm --mca ess ^pmi --host localhost:3 -n 3 $perf
}

check_hydra() {
  [ -x "${HYDRA-}" ] || return 77
  runs 4 node1node2 $with_secret MASTER_ADDR=node1 salloc -w node1,node2 --ntasks-per-node=2 env LD_LIBRARY_PATH="${HYDRA_LIBRARIES-}" "$HYDRA" -n 4 $perf &&
    runs 3 node1 salloc -w node1 -n3 env LD_LIBRARY_PATH="${HYDRA_LIBRARIES-}" "$HYDRA" -n 3 $perf
}

# A program that sets torch's variables from Slurm's, on two nodes, without a secret.
check_torch() {
  as_user sh -c "cat >group.py" <<END
import os, torch, torch.distributed as dist, moeccl.distributed
os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"])
dist.init_process_group("moeccl")
sum = torch.ones(1000)
dist.all_reduce(sum)
assert (sum == dist.get_world_size()).all(), sum
dist.destroy_process_group()
END
  local python="env LIBMOECCL=$build/libmoeccl.so PYTHONPATH=$build/bindings/python:${PYTHONPATH-} ${PYTHON:-python3}"
  as_user $python -c "import torch, moeccl" 2>/dev/null || return 77
  as_user timeout 100 $python -c "import moeccl.distributed" && as_user MASTER_ADDR=node1 MASTER_PORT=29500 srun -w node1,node2 -n4 $python group.py
}

# The daemon of a node is killed, whose ranks Slurm then cannot reach, and then the whole node. This comes last.
check_lost_node() {
  start_endless srun -w node1,node2 -n4 $endless
  running && on node2 pkill -KILL slurmd && as_user scancel -u $user && nothing_left || return
  start_endless srun -w node1,node3 --kill-on-bad-exit=0 -N2 -n4 $endless
  running && kill -KILL "$(cat "$work/node3.pid")" && await 20 no_ranks_on node1 && nothing_left node1
}

work=$SLURM_TEST_WORK failed=0
if [ $# = 0 ]; then set -- one_node two_nodes distributions environments batch_script heterogeneous arbitrary refusals steps_at_once \
  requeue cancel killed_rank mpirun hydra torch lost_node; fi
srun --version
for name; do
  begun=$SECONDS rc=0
  "check_$name" >"$work/$name.log" 2>&1 || rc=$?
  case $rc in
    0) echo "ok      $name ($((SECONDS - begun)) s)" ;;
    77) echo "skipped $name: it needs what this machine, or the variable for it, does not have" ;;
    *) echo "FAILED  $name"; sed 's/^/  /' "$work/$name.log" | tail -n 40; failed=1; as_user scancel -u $user ;;
  esac
done
exit $failed
