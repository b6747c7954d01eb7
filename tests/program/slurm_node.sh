#!/usr/bin/env bash
# A Slurm for the tests, of one node on loopback or of two, with a munge of its own: everything lives
# in FOLDER.
#     slurm_node.sh start FOLDER     prints nothing; FOLDER/slurm.conf is what SLURM_CONF names
#     slurm_node.sh stop FOLDER
#     slurm_node.sh both FOLDER COMMAND...     of two nodes that nodes.sh made, run on each of them;
#                                              the first then runs the command, and all of it ends
# Needs root and Debian's slurm-wlm and munge.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
folder=$2
# slurmd's sockets, FOLDER/spool/NODE/NODE_1.4294967291, end at 108 characters, and its job then waits
# for ever.
if [ ${#folder} -gt 60 ]; then
  echo "slurm_node.sh: FOLDER has ${#folder} characters, and Unix sockets in it allow 60: $folder" >&2
  exit 2
fi
export SLURM_CONF=$folder/slurm.conf

free_ports() {
  python3 - <<'PY'
import random, socket
# Below those that any connection may take at any time.
found = []
while len(found) < 2:
    one = socket.socket()
    try:
        one.bind(("127.0.0.1", random.randrange(12000, 16000)))
        found.append(one)
    except OSError:
        pass
print(*(one.getsockname()[1] for one in found))
PY
}

# write_conf CONTROLLER PORT PORT NODES NODE_ADDRESSES: ports of slurmctld and slurmd
write_conf() {
  # config_overrides: eight CPUs, whatever the machine has, so that ranks never queue for one.
  # cred_expire is also how long a requeued job waits: 120 s by default.
  cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$1
SlurmctldPort=$2
SlurmdPort=$3
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=$4 NodeAddr=$5 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=$4 Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  local host
  host=$(hostname -s)
  prepare
  write_conf "$host(127.0.0.1)" $(free_ports) "$host" 127.0.0.1
  start_controller
  slurmd
  wait_for_idle 1
}

both() {
  shift 2
  if [ "$(hostname)" = node-0 ]; then
    prepare
    write_conf "node-0(10.0.0.1)" 6817 6818 "node-[0-1]" "10.0.0.[1-2]"
    start_controller
    touch "$folder/is_up"
    slurmd
    wait_for_idle 2
    "$@" || { touch "$folder/is_over"; return 1; }
    touch "$folder/is_over"
  else
    until [ -e "$folder/is_up" ]; do sleep 0.1; done
    slurmd
    until [ -e "$folder/is_over" ]; do sleep 0.1; done
  fi
}

prepare() {
  mkdir -p "$folder/state" "$folder/spool"
  chmod 755 "$folder"  # munged refuses a socket folder that others cannot enter
  head -c 1024 /dev/urandom > "$folder/munge.key"
  chmod 400 "$folder/munge.key"
}

start_controller() {
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
    --seed-file="$folder/munged.seed"
  slurmctld
}

# wait_for_idle COUNT
wait_for_idle() {
  for _ in $(seq 240); do
    if [ "$(sinfo --noheader --Node --format=%T 2>/dev/null | grep -c '^idle')" = "$1" ]; then
      return
    fi
    sleep 0.5
  done
  echo "$1 nodes did not become idle within 120 s" >&2
  tail -n 20 "$folder"/*.log >&2
  return 1
}

stop() {
  local file pid
  timeout 10 scancel --user=root >/dev/null 2>&1 || true
  for _ in $(seq 40); do
    if [ -z "$(timeout 5 squeue --noheader 2>/dev/null)" ]; then break; fi
    sleep 0.5
  done
  for file in "$folder"/slurmd-*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do
    if ! [ -f "$file" ]; then continue; fi
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 40); do
      if ! kill -0 "$pid" 2>/dev/null; then continue 2; fi
      sleep 0.25
    done
    kill -9 "$pid" 2>/dev/null || true
  done
}

"$1" "$@"
