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
