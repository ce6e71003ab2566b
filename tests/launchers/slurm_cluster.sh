# SPDX-License-Identifier: Apache-2.0
# A small Slurm cluster on this machine, for slurm.sh: three nodes, each with a network, a host name, processes and shared memory of its
# own, and the login host with the controller. Everything lives in namespaces of one process, and ends with it. The script that sources
# this calls `enter_cluster` first.
set -u

# Leaves with 77 and a reason unless this machine can have the cluster.
need_slurm() {
  [ "$(id -u)" = 0 ] || { echo "skipped: only root may make network namespaces"; exit 77; }
  local tool
  for tool in slurmctld slurmd srun sbatch munged mungekey ip nsenter setpriv; do
    command -v "$tool" >/dev/null && continue
    echo "skipped: no $tool (apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2)"
    exit 77
  done
}

# enter_cluster SCRIPT ARGUMENTS...: runs the script again, as the first process of namespaces of its own.
enter_cluster() {
  [ -n "${SLURM_TEST_WORK-}" ] && return
  need_slurm
  unshare --mount --net --uts --ipc --pid --fork true 2>/dev/null || { echo "skipped: this machine allows no namespaces"; exit 77; }
  local work cluster
  work=$(mktemp -d /tmp/moeccl-slurm.XXXXXX)
  chmod 755 "$work"
  env -i PATH="$PATH" HYDRA="${HYDRA-}" HYDRA_LIBRARIES="${HYDRA_LIBRARIES-}" PYTHON="${PYTHON-}" PYTHONPATH="${PYTHONPATH-}" \
    SLURM_TEST_WORK="$work" setsid unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc "$@" &
  cluster=$!
  trap 'kill -KILL $cluster 2>/dev/null; rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM
  wait $cluster
  exit
}

export SLURM_CONF=${SLURM_TEST_WORK-}/slurm.conf
nodes="node1 node2 node3"
user=slurmuser user_id=7077
home=${SLURM_TEST_WORK-}/home

# on HOST COMMAND...: runs it as root on a host of the cluster.
on() {
  local host=$1
  shift
  nsenter --target "$(cat "$SLURM_TEST_WORK/$host.pid")" --all -- "$@"
}

# as_user COMMAND...: runs it as the cluster's user, on the login host, in an environment of its own.
as_user() {
  (cd "$home" && exec setpriv --reuid $user_id --regid $user_id --clear-groups env -i PATH="$PATH" HOME="$home" USER=$user \
    LANG=C.UTF-8 TMPDIR="$SLURM_TEST_WORK/tmp" SLURM_CONF="$SLURM_CONF" "$@")
}

write_configuration() {
  local work=$SLURM_TEST_WORK node i=0
  { echo "127.0.0.1 localhost"; echo "10.78.0.100 login"
    for node in $nodes; do echo "10.78.0.$((++i)) $node"; done; } >"$work/hosts"
  { cat /etc/passwd; echo "$user:x:$user_id:$user_id::$home:/bin/bash"; } >"$work/passwd"
  { cat /etc/group; echo "$user:x:$user_id:"; } >"$work/group"
  mkdir -p "$home" "$work/munge" "$work/state" "$work/tmp"
  for node in $nodes; do install -d -m 1777 "$work/tmp/$node"; done
  chown $user_id:$user_id "$home"
  chmod 1777 "$work/tmp"
  cat >"$SLURM_CONF" <<END
ClusterName=moeccl
SlurmctldHost=login
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/%n.spool
TmpFS=$work/tmp/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/%n.slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,max_rpc_cnt=0
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=2
UnkillableStepTimeout=20
InactiveLimit=0
MpiParams=${SLURM_TEST_MPI_PARAMS-}
NodeName=node[1-3] CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
END
  sed -i '/=$/d' "$SLURM_CONF"
  echo "CgroupPlugin=cgroup/v1" >"$work/cgroup.conf"
}

# start_host NAME ADDRESS: namespaces that a first process holds, which reaps what the steps leave behind.
start_host() {
  local name=$1 address=$2 pid i
  unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc bash -c "
    hostname $name
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t tmpfs tmpfs /run
    install -d -m 700 -o $user_id -g $user_id /run/user/$user_id
    trap : TERM
    while :; do sleep 1; done" &
  for i in $(seq 100); do
    pid=$(pgrep -P $! 2>/dev/null) && break
    sleep 0.05
  done
  echo "$pid" >"$SLURM_TEST_WORK/$name.pid"
  ip link add "to_$name" type veth peer name eth0 netns "$pid"
  ip link set "to_$name" master cluster up
  on "$name" sh -c "ip link set lo up && ip addr add $address/24 dev eth0 && ip link set eth0 up"
}

start_slurmd() { on "$1" env SLURM_CONF="$SLURM_CONF" slurmd -D -N "$1" >>"$SLURM_TEST_WORK/$1.out" 2>&1 & }

start_cluster() {
  local work=$SLURM_TEST_WORK node i=0
  mount --make-rprivate /
  write_configuration
  hostname login
  mount --bind "$work/hosts" /etc/hosts
  mount --bind "$work/passwd" /etc/passwd
  mount --bind "$work/group" /etc/group
  ip link set lo up
  ip link add cluster type bridge
  ip addr add 10.78.0.100/24 dev cluster
  ip link set cluster up
  mungekey --create --keyfile "$work/munge/key"
  munged --force --key-file "$work/munge/key" --socket "$work/munge/socket" --pid-file "$work/munge/pid" \
    --log-file "$work/munge/log" --seed-file "$work/munge/seed" || return
  for node in $nodes; do start_host "$node" "10.78.0.$((++i))"; done
  slurmctld -D >>"$work/slurmctld.out" 2>&1 &
  for node in $nodes; do start_slurmd "$node"; done
  for i in $(seq 100); do
    [ "$(as_user sinfo -h -t idle -o %D 2>/dev/null)" = 3 ] && return
    sleep 0.2
  done
  echo "the cluster did not come up:"
  tail -n 5 "$work"/*.log "$work"/*.out
  return 1
}
