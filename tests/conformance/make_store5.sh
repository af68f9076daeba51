#!/bin/sh
# make_store5.sh STORES VERSION SCENARIO: makes STORES/VERSION/SCENARIO/ with a real broker (oracle/v5),
# once. A killed store also gets after/: the same store after the broker's own recovery, with its truth.
set -e
run=$(cd "$(dirname "$0")/../../oracle/v5" && pwd)/run
folder=$1/$2/$3
[ -e "$folder/done" ] && exit 0
mkdir -p "$folder"
cd "$folder"
RMQ=$2 ORACLE_JVM=-Doracle.live=true "$run" gen "$3" > gen.log 2>&1 || case $3 in kill*) ;; *) exit 1 ;; esac
case $3 in kill*)
    mkdir -p after
    cp -a --sparse=always store broker.conf after/
    (cd after && RMQ=$2 "$run" truth > truth.log 2>&1)
    ;;
esac
touch done
