#!/bin/bash
# mini_cluster.sh start|stop FOLDER: a real SLURM cluster on this machine's loopback, for tests; needs root.
#
# Everything lies below FOLDER: state, logs, sockets, process ids. Each node is a slurmd in a UTS and mount namespace of
# its own, so that a job sees its node's name as the host's and other nodes by name. `stop` leaves no process behind.
# Variables: NODES, CPUS and GPUS of each node, PORT (of the controller; the nodes take the following ones), SELECT (what
# jobs share, for example CR_Core_Memory) and DEFAULT_MIB, the memory of a core whose job asks for none (0: the node's).
set -eu

action=$1
folder=$(realpath -m "$2")
nodes=${NODES:-4} cpus=${CPUS:-4} gpus=${GPUS:-2} port=${PORT:-17817}
select=${SELECT:-CR_Core} default_mib=${DEFAULT_MIB:-0}
host=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf

patiently() {
  for _ in $(seq 200); do
    if "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.1
  done
  echo "did not happen within 20 s: $*" >&2
  tail -n 5 "$folder"/log/* >&2 || true
  return 1
}

all_idle() { [ "$(sinfo --noheader --Node --partition=main --states=idle --format=%N | sort -u | wc -l)" = "$nodes" ]; }

write_files() {
  mkdir -p "$folder"/{log,run,state,spool}
  chmod 755 "$folder" "$folder/run"
  # cred_expire is also the time before a requeued job may start again, 120 s where it is not set.
  cat >"$folder/slurm.conf" <<CONF
ClusterName=mini
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/run/munge.sock,cred_expire=5
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdSpoolDir=$folder/spool/%n
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/log/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=$select
DefMemPerCPU=$default_mib
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=20
MinJobAge=300
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-$nodes] NodeAddr=127.0.1.[1-$nodes] Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=256000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
CONF
  local devices=(/dev/null /dev/zero /dev/full /dev/urandom)
  (IFS=, && echo "NodeName=n[1-$nodes] Name=gpu File=${devices[*]:0:gpus}") >"$folder/gres.conf"
  {
    echo "127.0.0.1 localhost $host"
    for node in $(seq "$nodes"); do echo "127.0.1.$node n$node"; done
  } >"$folder/hosts"
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
}

start() {
  write_files
  munged --key-file="$folder/munge.key" --socket="$folder/run/munge.sock" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/state/munged.seed" --num-threads=2 --force \
    2>"$folder/log/munged.err"
  patiently munge -n -S "$folder/run/munge.sock"
  slurmctld -i
  patiently scontrol ping
  for node in $(seq "$nodes"); do
    mkdir -p "$folder/spool/n$node"
    unshare --uts --mount sh -c 'hostname "$1" && mount --bind "$2" /etc/hosts && exec slurmd -N "$1"' _ \
      "n$node" "$folder/hosts"
  done
  patiently all_idle
}

# Step daemons and tasks of this cluster alone, which their environment names.
stragglers() {
  local file pid
  for file in /proc/[0-9]*/environ; do
    pid=${file#/proc/}
    pid=${pid%/environ}
    if [ "$pid" != $$ ] && grep -qsz "^SLURM_CONF=$SLURM_CONF\$" "$file" &&
      { grep -qsz '^SLURM_JOB_ID=' "$file" || grep -qs '^slurmstepd: ' "/proc/$pid/cmdline"; }; then
      echo "$pid"
    fi
  done
}

stop() {
  timeout 10 scancel --user=root 2>/dev/null || true
  local pids=() left file pid
  for file in "$folder"/run/slurmd-*.pid "$folder"/run/slurmctld.pid "$folder"/run/munged.pid; do
    [ ! -s "$file" ] || pids+=("$(cat "$file")")
  done
  for _ in $(seq 50); do
    [ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ] || break
    sleep 0.1
  done
  kill "${pids[@]}" 2>/dev/null || true
  for _ in $(seq 100); do
    left=()
    for pid in "${pids[@]}"; do ! kill -0 "$pid" 2>/dev/null || left+=("$pid"); done
    [ ${#left[@]} -gt 0 ] || break
    sleep 0.1
  done
  mapfile -t -O ${#left[@]} left < <(stragglers)
  [ ${#left[@]} = 0 ] || kill -KILL "${left[@]}" 2>/dev/null || true
}

"$action"
