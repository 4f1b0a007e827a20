#!/bin/sh
# Runs one program of the bundled store. usage: run.sh server | replicated | sentinel | cluster | backup | restore
#
#   server      a Valkey alone
#   replicated  one of several: primary or replica, as a majority of the Sentinels says
#   sentinel    the Sentinel beside it
#   cluster     one of a cluster, which form.sh beside this script makes
#   backup      writes a snapshot of the primary (HOSTS, or FROM) to BACKUPS, and deletes all but the newest KEEP
#   restore     makes the volume of a server that has never run hold the snapshot RESTORE of BACKUPS; ends at once on any
#               other volume, and in a pod that is not the first
#
# Beside Sentinels, who is primary is known by the Sentinels and nobody else: they keep it on the volume, so that after a restart of
# everything the newest data stay primary. Only Sentinels that have never run begin with the first host.
#
# Environment: APPENDFSYNC, MAXMEMORY; SELF (this pod's host name), HOSTS (all of them, separated by blanks), SERVICE,
# DOWN_AFTER_MS and FAILOVER_TIMEOUT_MS where there are Sentinels; STORE_PASSWORD if there is one; DATA (default /data),
# CONFIG (/run/valkey), PORT (6379), SENTINEL_PORT (26379), BIND (every address), WAIT_S (120), and in mode replicated
# REPL_BACKLOG (64mb) and REPLICA_BUFFER_LIMIT (4gb 2gb 300): how far behind a replica may be before it has to copy
# everything again, and what is kept for it while it copies; in mode cluster these, and what form.sh asks for, and
# NODE_TIMEOUT_MS. BACKUPS is /backups by default. With Valkey's own (10mb, 256mb 64mb 60) a large store under
# load cuts a replica off during the copy, again and again. Give less where maxmemory leaves less memory free.
set -eu
umask 077
data=${DATA:-/data} config=${CONFIG:-/run/valkey} port=${PORT:-6379} sentinel_port=${SENTINEL_PORT:-26379}
password=${STORE_PASSWORD:-} backups=${BACKUPS:-/backups}

quorum() {
    # shellcheck disable=SC2086 # one word a host
    set -- $HOSTS
    echo $(($# / 2 + 1))
}

# Prints "epoch host port" of the primary that the Sentinel at a host knows; nothing if it does not answer.
ask_sentinel() {
    REDISCLI_AUTH=$password timeout 3 valkey-cli -h "$1" -p "$sentinel_port" --raw \
        sentinel master "$SERVICE" 2> /dev/null |
        awk '/^config-epoch$/ { getline; epoch = $0 } /^ip$/ { getline; ip = $0 } /^port$/ { getline; port = $0 }
            END { if (ip != "" && epoch != "") print epoch, ip, port }' || true
}

# Prints "host port" of the primary, by the newest word of a majority.
find_primary() {
    deadline=$(($(date +%s) + ${WAIT_S:-120}))
    while :; do
        answers=$(for host in $HOSTS; do ask_sentinel "$host"; done)
        count=$(printf '%s' "$answers" | grep -c . || true)
        if [ "$count" -ge "$(quorum)" ]; then
            printf '%s\n' "$answers" | sort -n | tail -n 1 | cut -d ' ' -f 2,3
            return
        fi
        if [ "$(date +%s)" -ge "$deadline" ]; then
            echo "store: waited ${WAIT_S:-120} s for $(quorum) Sentinels of: $HOSTS; $count answered" >&2
            return 1
        fi
        echo "store: waiting for $(quorum) Sentinels of: $HOSTS; $count answered" >&2
        sleep 1
    done
}

server_config() {
    cat << END
port $port
bind ${BIND:-* -::*}
dir $data
protected-mode no
save ""
appendonly yes
appendfsync $APPENDFSYNC
maxmemory $MAXMEMORY
maxmemory-policy noeviction
END
    [ -z "$password" ] || printf 'requirepass %s\nmasterauth %s\n' "$password" "$password"
}

replication_config() {
    echo "repl-backlog-size ${REPL_BACKLOG:-64mb}"
    echo "client-output-buffer-limit replica ${REPLICA_BUFFER_LIMIT:-4gb 2gb 300}"
}

# Prints a Sentinel's file as it has to be today. Of what it has learnt, who is primary and the epochs stay. The password
# goes wherever it stands (in `user default` too, which would win over requirepass), and so do servers and Sentinels that
# are none of HOSTS: those of a store that was made smaller would count for a majority for ever.
sentinel_config() {
    awk -v hosts="$HOSTS" -v quorum="$(quorum)" '
        BEGIN { count = split(hosts, list, " "); for (i = 1; i <= count; i++) known[list[i]] = 1 }
        { host = $4; gsub(/"/, "", host) }
        /^(requirepass|user default) / { next }
        /^sentinel (auth-pass|sentinel-pass|down-after-milliseconds|failover-timeout) / { next }
        /^sentinel known-(sentinel|replica|slave) / && !(host in known) { next }
        /^sentinel monitor / {
            $6 = quorum
            if (!(host in known)) print "store: the primary is " host ", which is none of: " hosts > "/dev/stderr"
        }
        { print }' "$1"
    echo "sentinel down-after-milliseconds $SERVICE $DOWN_AFTER_MS"
    echo "sentinel failover-timeout $SERVICE $FAILOVER_TIMEOUT_MS"
    [ -z "$password" ] || printf 'requirepass %s\nsentinel sentinel-pass %s\nsentinel auth-pass %s %s\n' \
        "$password" "$password" "$SERVICE" "$password"
}

case $1 in
server)
    server_config > "$config/server.conf"
    exec valkey-server "$config/server.conf"
    ;;
replicated)
    primary=$(find_primary)
    {
        server_config
        echo "replica-announce-ip $SELF"
        replication_config
        [ "$primary" = "$SELF $port" ] || echo "replicaof $primary"
    } > "$config/server.conf"
    echo "store: the primary is $primary" >&2
    exec valkey-server "$config/server.conf"
    ;;
cluster)
    {
        server_config
        replication_config
        cat << END
cluster-enabled yes
cluster-config-file nodes.conf
cluster-port ${BUS_PORT:-16379}
cluster-node-timeout $NODE_TIMEOUT_MS
cluster-require-full-coverage no
cluster-allow-replica-migration no
cluster-announce-ip $ADDRESS
cluster-announce-hostname $SELF
cluster-preferred-endpoint-type hostname
shutdown-on-sigterm failover
END
    } > "$config/server.conf"
    sh "$(dirname "$0")/form.sh" &
    exec valkey-server "$config/server.conf"
    ;;
sentinel)
    # Sentinels rewrite their file.
    file=$data/sentinel.conf
    if [ ! -s "$file" ]; then
        # shellcheck disable=SC2086 # one word a host
        set -- $HOSTS
        cat > "$file.new" << END
port $sentinel_port
bind ${BIND:-* -::*}
dir $data
protected-mode no
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $SELF
sentinel monitor $SERVICE $1 $port $(quorum)
sentinel parallel-syncs $SERVICE 1
END
        mv "$file.new" "$file"
    fi
    sentinel_config "$file" > "$file.new"
    mv "$file.new" "$file"
    exec valkey-server "$file" --sentinel
    ;;
backup)
    host=${FROM:-}
    if [ -n "${HOSTS:-}" ]; then
        primary=$(find_primary)
        host=${primary% *} port=${primary#* }
    fi
    file=$backups/$(date -u +%Y%m%dT%H%M%SZ).rdb
    # One that was ended before its time leaves its part behind.
    rm -f "$backups"/*.rdb.part
    REDISCLI_AUTH=$password valkey-cli -h "$host" -p "$port" --rdb "$file.part" >&2
    mv "$file.part" "$file"
    echo "store: wrote $file, $(wc -c < "$file") bytes" >&2
    find "$backups" -maxdepth 1 -name '*.rdb' | sort -r | tail -n "+$((KEEP + 1))" | while read -r old; do
        rm -f "$old"
        echo "store: deleted $old" >&2
    done
    ;;
restore)
    case ${POD_NAME:-store-0} in *-0) ;; *) exit 0 ;; esac
    if [ -e "$data/appendonlydir" ]; then
        echo "store: the volume holds a store already; $RESTORE is not restored" >&2
        exit 0
    fi
    # What an attempt that was ended has left is no store yet.
    rm -rf "$data/restoring"
    mkdir "$data/restoring"
    cp "$backups/$RESTORE" "$data/restoring/dump.rdb"
    valkey-server --port 0 --unixsocket "$config/restore.sock" --dir "$data/restoring" --save "" --appendonly no &
    server=$!
    ask() { valkey-cli -s "$config/restore.sock" --raw "$@" 2> /dev/null || true; }
    until [ "$(ask ping)" = PONG ]; do
        kill -0 "$server" || exit 1
        sleep 0.2
    done
    echo "store: $RESTORE has $(ask dbsize) keys" >&2
    ask config set appendonly yes > /dev/null
    until ask info persistence | tr -d '\r' |
        awk -F: '/^aof_(enabled|rewrite_in_progress|rewrite_scheduled):/ { s = s $2 } END { exit s != "100" }'; do
        kill -0 "$server" || exit 1
        sleep 0.2
    done
    ask shutdown nosave
    wait "$server" || true
    mv "$data/restoring/appendonlydir" "$data/appendonlydir"
    rm -rf "$data/restoring"
    ;;
*)
    echo "usage: run.sh server | replicated | sentinel | cluster | backup | restore" >&2
    exit 2
    ;;
esac
