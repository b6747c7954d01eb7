#!/usr/bin/env bash
# Two nodes on one machine: each has a network, a host name, /etc/hosts and processes of its own.
#     nodes.sh run FOLDER COMMAND...    runs the command on both, and ends with the worse status
# FOLDER/node_N.out is what node N printed, FOLDER/node_N.status how it ended. `touch FOLDER/cut_N`
# takes node N's power away: its link goes down first, so that nobody hears it die. All of it is in
# namespaces that end with this process, whatever ends it. Needs iproute2 and util-linux, and either
# root or leave to make user namespaces.
#
# What is made hard, as real clusters have it: a node's own name is 127.0.1.1 to itself (Debian
# writes so), the interfaces have other names on each node, and each has one more of the same
# address that leads nowhere, as Docker's.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
apart=(--net --uts --mount --pid --fork --kill-child --mount-proc)

run() {
  if [ "$(id -u)" != 0 ]; then apart+=(--map-root-user); fi
  exec unshare "${apart[@]}" bash "$0" both "$@"
}

both() {
  local folder=$1 node status worst=0 pids=()
  mount -t tmpfs none /mnt  # for files of ours over those of /etc
  ip link add net0 type veth peer name net1
  for node in 0 1; do
    unshare "${apart[@]}" bash "$0" one $node "$@" > "$folder/node_$node.out" 2>&1 &
    pids+=($!)
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
    ip link set net$node netns $!
    cut_when_asked "$folder" $node $! &
  done
  for node in 0 1; do
    status=0
    wait "${pids[node]}" || status=$?
    echo $status > "$folder/node_$node.status"
    if [ $status != 0 ]; then worst=$status; fi
  done
  exit $worst
}

one() {
  local node=$1 other=$((1 - $1))
  shift 2
  hostname node-$node
  printf '%s\n' "127.0.0.1 localhost" "127.0.1.1 node-$node" "10.0.0.$((other + 1)) node-$other" \
    > /mnt/hosts_$node
  echo "nameserver 127.0.0.1" > /mnt/resolv_$node  # nobody: a name that is not above fails at once
  mount --bind /mnt/hosts_$node /etc/hosts
  mount --bind /mnt/resolv_$node /etc/resolv.conf
  until ip link show net$node > /dev/null 2>&1; do sleep 0.05; done
  ip link set lo up
  ip link add docker0 type veth peer name docker1
  ip address add 172.17.0.1/16 dev docker0
  ip link set docker0 up
  ip address add 10.0.0.$((node + 1))/24 dev net$node
  ip link set net$node up
  ip route add default dev net$node
  "$@"
}

cut_when_asked() {
  until [ -e "$1/cut_$2" ]; do sleep 0.1; done
  nsenter --target "$3" --net ip link set "net$2" down
  kill -9 "$3"
}

"$@"
