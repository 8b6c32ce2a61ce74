# Functions of every job of a run. The first step that `supervise` is given ends the job; the others end with it. A step
# is a role, or one worker of it: learner, scorer_1.
#
#   USR1 (the time limit is near)      TERM to the steps, which save or drain; then the job is queued again
#   preemption with a grace time       SLURM sends TERM to the steps; when they have ended the job is queued again
#   scancel --signal=TERM JOB          the steps save or drain, the job ends
#   scancel JOB, scontrol requeue JOB  SLURM sends TERM to steps and script, and KILL after its KillWait

job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
leaving=
controller_s=300  # Longest wait for a controller that does not answer; it may be restarted.
declare -A pids began left

say() { printf '%s slurm job %s: %s\n' "$(date '+%F %T')" "$job" "$*" >&2; }

ask_to_leave() { scancel --signal=TERM "$job"; }

trap 'leaving=requeue; say "the time limit is near: asking to save"; ask_to_leave' USR1
trap 'leaving=${leaving:-stop}' TERM

# Runs one task of a step. The first task that does not end well leaves its exit code in a file, since srun's own exit
# code is that of a task which SLURM killed after it. 143 stands for a clean end that was asked for; it is no reason to
# kill the other tasks, which are saving.
task='
role=$1 code_file=$2 stopped=
shift 2
trap "stopped=1" TERM
"$@"
code=$?
if [ "$role" != learner ] && [ "$code" = 0 ] && [ -n "$stopped" ]; then code=143; fi
[ "$code" = 0 ] && exit 0
(set -C; echo "$code" >"$code_file") 2>/dev/null
[ "$code" = 143 ] || exit "$code"
'

code_file() { printf '%s/slurm/%s.%s.code' "$run" "$job" "$1"; }

# Becomes srun: step ROLE OPTION... -- COMMAND ARGUMENT...
step() {
  local role=$1 options=()
  shift
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  exec srun --job-name="$role" --kill-on-bad-exit=1 --input=none "${options[@]}" \
    bash -c "$task" "prefixrl-$role" "$role" "$(code_file "$role")" "$@"
}

start() {
  rm -f "$(code_file "$1")"
  began[$1]=$SECONDS
  "start_$1" &
  pids[$1]=$!
}

is_running() {
  local states
  # A controller that does not answer is no end of the job.
  states=$(squeue --noheader --jobs="$job" --format=%T) || return 0
  case $states in *RUNNING*) return 0 ;; *) return 1 ;; esac
}

# Sets `answer` to that of a command of SLURM, asked again while it fails; 2 if it still does at the end, or on a stop.
ask() {
  local end=$((SECONDS + controller_s)) said=
  until answer=$(timeout 60 "$@"); do
    if [ -n "$leaving" ] || [ "$SECONDS" -ge "$end" ]; then
      say "$1 gave no answer in $controller_s s, or until a stop"
      return 2
    fi
    [ -n "$said" ] || say "$1 failed: asking again for $controller_s s"
    said=1
    sleep 5 &
    wait $!
  done
}

is_preempted() { ask scontrol show job --oneliner "$job" && [[ $answer == *PreemptTime=[0-9]* ]]; }

# 1: there is none. 2: nobody knows.
learner_is_queued() {
  ask squeue --noheader --name="$learner_names" --format=%i || return 2
  [ -n "$answer" ]
}

# Never returns; SLURM ends the script once the job is queued again. A job that is being cancelled stays cancelled.
queue_again() {
  if is_running && say "$1: queueing the job again" && scontrol requeue "$job"; then
    sleep 300 &
    wait $!
  fi
  exit "$2"
}

# Asks what still runs to end, waits so many seconds for each role, and ends the script.
finish() {
  local role tick
  for role in "${!pids[@]}"; do
    for tick in $(seq "$2"); do
      kill -0 "${pids[$role]}" 2>/dev/null || break
      [ "$tick" != 1 ] || ask_to_leave
      sleep 1
    done
    rm -f "$(code_file "$role")"
  done
  exit "$1"
}

# The end of the role on which the job depends.
main_ended() {
  local role=$1 code=$2
  case $role,$code in
  *,0) finish 0 60 ;;
  *,[235]) say "$role ended with exit code $code, which a restart would not change"; finish "$code" 60 ;;
  esac
  if [ "$leaving" = requeue ]; then queue_again "asked to leave before the time limit" 143; fi
  if [ -z "$leaving" ] && is_preempted; then queue_again "preempted" 143; fi
  if [ "$code" = 143 ] || [ -n "$leaving" ]; then
    say "$role was asked to stop"
    # A worker that hands back its work and leaves has done all it was to do.
    if [ "$role" = learner ]; then finish 143 60; else finish 0 60; fi
  fi
  if [ "$role,$code" = learner,1 ]; then say "$role failed"; finish 1 60; fi
  if [ "$role" != learner ] && [ "$code" = 4 ]; then
    learner_is_queued
    case $? in
    0) queue_again "the learner is waiting for its turn" 4 ;;
    1) say "no learner of this run is queued" ;;
    *) say "whether a learner of this run is queued is not known: start this job again if there is one" ;;
    esac
    finish 4 60
  fi
}

ended() {
  local role=$1 code=$2 main=$3 noted
  noted=$(cat "$(code_file "$role")" 2>/dev/null)
  rm -f "$(code_file "$role")"
  code=${noted:-$code}
  unset "pids[$role]"
  if [ "$role" = "$main" ]; then main_ended "$role" "$code"; fi
  case $code in
  0 | 143) return ;;
  2 | 3) say "$role ended with exit code $code, which a restart would not change"; finish "$code" 120 ;;
  esac
  if [ -n "$leaving" ] || ! is_running; then return; fi
  if [ $((SECONDS - began[$role])) -ge 3600 ]; then left[$role]=$restarts; fi
  if [ "${left[$role]}" -le 0 ]; then
    say "$role ended with exit code $code, after $restarts restarts"
    finish "$code" 120
  fi
  left[$role]=$((left[$role] - 1))
  say "$role ended with exit code $code: starting it again (${left[$role]} left)"
  sleep 1
  start "$role"
}

supervise() {
  local main=$1 role
  for role in "$@"; do
    left[$role]=$restarts
    start "$role"
  done
  while [ -n "${pids[*]}" ]; do
    # `wait` returns early for a trapped signal.
    sleep 1 &
    wait $!
    for role in "${!pids[@]}"; do
      kill -0 "${pids[$role]}" 2>/dev/null && continue
      wait "${pids[$role]}"
      ended "$role" $? "$main"
    done
  done
  exit 1
}
