#!/bin/bash
# manager.sh DIR UNITDIR -- CMD... : run CMD beside a private `systemd --user` + journald (needs root; no PID 1, D-Bus or login).
# Own cgroup/mount/pid namespaces and a private /run: nothing outside is touched, nothing is left over. Journal -> DIR/journal.txt
set -eu
D=$(realpath -m "$1"); U=$(realpath "$2"); shift 3; mkdir -p "$D"
C=/sys/fs/cgroup; [ -d $C/unified ] && C=$C/unified
G=$C$(sed -n 's/^0:://p' /proc/self/cgroup)/usd.$$; mkdir "$G"
cat >"$D/inner.sh" <<IN
set -eu
mount -t cgroup2 none /sys/fs/cgroup
mount --make-rshared /                                    # LoadCredential= needs shared propagation
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/systemd/system /run/systemd/journald.conf.d # /run/systemd/system is what sd_booted() looks for
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\n' >/run/systemd/journald.conf.d/t.conf
/lib/systemd/systemd-journald 2>$D/journald.err & J=\$!
for i in \$(seq 100); do [ -S /run/systemd/journal/stdout ] && break; sleep 0.05; done
export HOME=$D XDG_RUNTIME_DIR=/run XDG_CONFIG_HOME=$D/.config XDG_STATE_HOME=/run/cfg SYSTEMD_COLORS=0 SYSTEMD_PAGER=cat
export SYSTEMD_UNIT_PATH=/run/systemd/transient:/run/dropin:$U:/usr/lib/systemd/user
unset NOTIFY_SOCKET DBUS_SESSION_BUS_ADDRESS
/lib/systemd/systemd --user --unit=basic.target --log-target=journal >$D/manager.err 2>&1 & M=\$!
for i in \$(seq 100); do systemctl --user is-system-running 2>/dev/null | grep -qE 'running|degraded' && break; sleep 0.05; done
rc=0; "\$@" || rc=\$?
systemctl --user exit >/dev/null 2>&1 || kill \$M; wait \$M || true
journalctl -D /run/log/journal --no-pager -o short-precise >$D/journal.txt 2>/dev/null || true
kill \$J; wait \$J || true
exit \$rc
IN
rc=0
( echo $BASHPID >"$G/cgroup.procs"; exec unshare --cgroup --mount --pid --fork --kill-child --mount-proc bash "$D/inner.sh" "$@" ) || rc=$?
find "$G" -depth -type d -exec rmdir {} + 2>/dev/null || true
exit $rc
