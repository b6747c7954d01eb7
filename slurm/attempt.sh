# Sourced by the sbatch files, from the repository root: what all of them do around srun.

PYTHON=${PYTHON:-.venv/bin/python}
if ! [ -f train.py ] || ! command -v "$PYTHON" >/dev/null; then
  echo "no train.py or no $PYTHON in $PWD: submit from the repository root, after an install" \
    "(docs/gpu.md; on machines without GPUs: make venv)" >&2
  exit 2
fi

# One folder per attempt: Slurm counts how often it started this job again.
LOGS=runs/slurm/${SLURM_JOB_NAME}-${SLURM_JOB_ID}/attempt_${SLURM_RESTART_COUNT:-0}
mkdir -p "$LOGS"
echo "$(date '+%F %T') attempt ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST}; logs in $LOGS"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# Since Slurm 22.05 srun no longer takes --cpus-per-task over from sbatch by itself.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# What ranks compile, each for itself: on a shared file system those of many nodes would wait for
# each other's locks, and read what another is still writing. Kept for the job's later attempts.
NODE_CACHE=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/spmdrl-cache-$(id -u)
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$NODE_CACHE/vllm}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$NODE_CACHE/triton}

# What only this job's processes know (docs/security.md), and a port of this node, where rank 0 is,
# that nobody listens at; both the same for all ranks of the attempt.
SPMDRL_SECRET=${SPMDRL_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
while [ -z "${MASTER_PORT:-}" ]; do
  MASTER_PORT=$((20000 + (RANDOM * 32768 + RANDOM) % 12000))
  if (exec 3<>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; then MASTER_PORT=; fi
done
# A run that refuses its settings says so there: another attempt would refuse them too.
SPMDRL_REFUSED=$LOGS/refused
export SPMDRL_SECRET MASTER_PORT SPMDRL_REFUSED

# end_attempt STATUS: what comes after srun. A failed attempt is queued again, at most
# SPMDRL_MAX_REQUEUES times in the job's life (0: never); one that is out of time, as often as it is.
end_attempt() {
  local failures=${LOGS%/*}/failures
  if [ "$1" -eq 0 ]; then
    requeue_if_out_of_time
    return 0
  fi
  echo "$(date '+%F %T') attempt ${SLURM_RESTART_COUNT:-0} failed with status $1" | tee -a "$failures"
  if [ "$1" -ne 2 ] && ! [ -e "$SPMDRL_REFUSED" ] &&
    [ "$(wc -l < "$failures")" -le "${SPMDRL_MAX_REQUEUES:-0}" ]; then
    echo "queueing job $SLURM_JOB_ID again (SPMDRL_MAX_REQUEUES=$SPMDRL_MAX_REQUEUES)"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$1"
}

# Queue this job again if its time, not its work, came to an end. train.py has saved and left
# with status 0 on USR1 (time limit) or TERM (pre-emption with a grace time); either leaves less
# than SPARE_S seconds: the 120 of --signal, 60 by which Slurm may be early, 60 for the clock.
# An attempt that finds everything done ends at once, with the whole limit still to go.
requeue_if_out_of_time() {
  local SPARE_S=240 end
  end=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*EndTime=\([^ ]*\).*/\1/p' | head -n 1)
  end=$(date -d "$end" +%s 2>/dev/null) || return 0  # "Unknown": a job without a limit
  if [ $((end - $(date +%s))) -lt "$SPARE_S" ]; then
    echo "$(date '+%F %T') out of time: queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
}
