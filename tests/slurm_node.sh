#!/usr/bin/env bash
# A one-node Slurm on loopback for the tests, with a munge of its own: everything lives in FOLDER.
#     slurm_node.sh start FOLDER     prints nothing; FOLDER/slurm.conf is what SLURM_CONF names
#     slurm_node.sh stop FOLDER
# Needs root and Debian's slurm-wlm and munge.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
folder=$2
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

write_conf() {
  local host ctld_port d_port
  host=$(hostname -s)
  read -r ctld_port d_port < <(free_ports)
  # config_overrides: eight CPUs, whatever the machine has, so that ranks never queue for one.
  # cred_expire is also how long a requeued job waits: 120 s by default.
  cat > "$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$d_port
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
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  mkdir -p "$folder/state" "$folder/spool"
  chmod 755 "$folder"  # munged refuses a socket folder that others cannot enter
  head -c 1024 /dev/urandom > "$folder/munge.key"
  chmod 400 "$folder/munge.key"
  write_conf
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
    --seed-file="$folder/munged.seed"
  slurmctld
  slurmd
  for _ in $(seq 240); do
    if sinfo --noheader --format=%T 2>/dev/null | grep -q '^idle'; then return; fi
    sleep 0.5
  done
  echo "the node did not become idle within 120 s" >&2
  tail -n 20 "$folder"/*.log >&2
  return 1
}

stop() {
  local name pid
  timeout 10 scancel --user=root >/dev/null 2>&1 || true
  for _ in $(seq 40); do
    if [ -z "$(timeout 5 squeue --noheader 2>/dev/null)" ]; then break; fi
    sleep 0.5
  done
  for name in slurmd slurmctld munged; do
    if ! [ -f "$folder/$name.pid" ]; then continue; fi
    pid=$(cat "$folder/$name.pid")
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 40); do
      if ! kill -0 "$pid" 2>/dev/null; then continue 2; fi
      sleep 0.25
    done
    kill -9 "$pid" 2>/dev/null || true
  done
}

"$1"
