#!/bin/sh
# Makes the servers of the bundled cluster one cluster, and ends. Beside every server, at each of its starts (run.sh).
#
# The server at place i of HOSTS is one of shard i modulo SHARDS; it begins as its primary where i is below SHARDS. Each
# server does its own part alone, as often as needed: it meets all others at their present addresses, and follows the
# primary of its shard, or takes the shard's slots if it is the first and nobody has ever had them. What a server has once
# become the cluster keeps on the volumes, and failovers change it: nothing here does.
#
# Environment: SELF (this pod's host name), ADDRESS (its IP address), HOSTS (all host names, separated by blanks), SHARDS;
# STORE_PASSWORD if there is one; PORT (6379) and BUS_PORT (16379).
set -eu
port=${PORT:-6379} bus=${BUS_PORT:-16379}
export REDISCLI_AUTH="${STORE_PASSWORD:-}"
last=""

say() {
    [ "$1" = "$last" ] || echo "shards: $1" >&2
    last=$1
}

ask() {
    at=$1
    shift
    timeout 3 valkey-cli -h "$at" -p "$port" --raw "$@" 2> /dev/null || true
}

# Prints "address", and lines of CLUSTER NODES, of the server with a name; nothing if it does not answer.
look() {
    ip=$(getent ahosts "$1" | awk 'NR == 1 { print $1 }')
    [ -n "$ip" ] || return 0
    # A name leads to a pod that is gone for some seconds, and its address to another cluster's: two would become one.
    [ "$(ask "$ip" config get cluster-announce-hostname | tail -n 1)" = "$1" ] || return 0
    echo "$ip"
    ask "$ip" cluster nodes
}

# True if somebody in $seen has one of the slots $1 to $2.
taken() {
    printf '%s\n' "$seen" | awk -v first="$1" -v last="$2" '
        { for (i = 9; i <= NF; i++) if ($i !~ /^\[/) {
            n = split($i, range, "-"); if (range[1] <= last + 0 && range[n] >= first + 0) found = 1 } }
        END { exit !found }'
}

# Tries everything that is left to do; true when nothing is.
formed() {
    mine=$(ask "$ADDRESS" cluster nodes)
    [ -n "$mine" ] || return 1
    seen="" away="" strangers="" primary="" place=0 own=0
    for host in $HOSTS; do
        [ "$host" != "$SELF" ] || own=$place
        place=$((place + 1))
    done
    place=0
    for host in $HOSTS; do
        said=$(look "$host")
        ip=${said%%"
"*}
        if [ "$said" = "$ip" ]; then
            away="$away $host"
        else
            seen="$seen
$said"
            self=$(printf '%s\n' "$said" | grep myself)
            if ! printf '%s\n' "$mine" | grep -F "${self%% *} $ip:$port@" | grep -qE 'myself| connected'; then
                strangers="$strangers $host"
                ask "$ADDRESS" cluster meet "$ip" "$port" "$bus" > /dev/null
            fi
            if [ $((place % SHARDS)) = $((own % SHARDS)) ] &&
                printf '%s\n' "$self" | awk '{ exit !($3 ~ /master/ && NF > 8) }'; then
                primary=${self%% *}
            fi
        fi
        place=$((place + 1))
    done
    role=$(printf '%s\n' "$mine" | awk '$3 ~ /myself/ { print ($3 ~ /slave/ ? "replica" : NF > 8 ? "primary" : "none") }')
    if [ "$role" != none ]; then
        [ -z "$away$strangers" ] && return 0
        say "waiting for:$away$strangers"
        return 1
    fi
    shard=$((own % SHARDS))
    from=$((16384 * shard / SHARDS)) to=$((16384 * (shard + 1) / SHARDS - 1))
    if [ -n "$primary" ]; then
        say "follows $primary in shard $shard"
        ask "$ADDRESS" cluster replicate "$primary" > /dev/null
    elif [ "$own" -ge "$SHARDS" ]; then
        say "waiting for the primary of shard $shard"
    elif [ -n "$away$strangers" ]; then
        say "waiting for:$away$strangers"
    elif taken "$from" "$to"; then
        # Who has them may be back with its data.
        say "slots of $from to $to are those of a server that is gone: they wait for it, or for CLUSTER FORGET everywhere"
    else
        say "begins as primary of shard $shard, slots $from to $to"
        ask "$ADDRESS" cluster addslotsrange "$from" "$to" > /dev/null
    fi
    return 1
}

until formed; do sleep 1; done
say "all servers know each other"
